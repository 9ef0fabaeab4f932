"""`insum_ops::run` as torch's tools see it: one opaque operator, traced, faked, compiled and exported."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from insum_ops import insum, nn, sddmm
from insum_ops.compiler.autograd.operators import call, call_with_winners
from insum_ops.formats import GroupCOO
from insum_ops.formats.parts import parts_of

SPMM = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"
MAX = "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"


def tensors(groups=5, dtype=torch.float64):
    return {
        "AM": torch.randint(4, (groups,)),
        "AK": torch.randint(-1, 6, (groups, 2)),
        "AV": torch.randn(groups, 2, dtype=dtype),
        "B": torch.randn(6, 3, dtype=dtype),
    }


def spmm(AM, AK, AV, B):
    return insum(SPMM, AM=AM, AK=AK, AV=AV, B=B, size=(4, 3))


def test_the_operator_passes_torchs_own_checks():
    given = tensors()
    torch.library.opcheck(call, (SPMM, ",".join(given), (4, 3), list(given.values()), "", []))


def maximum(AM, AK, AV, B):
    return insum(MAX, AM=AM, AK=AK, AV=AV, B=B, size=(4, 3))


def test_the_operator_with_winners_passes_torchs_own_checks():
    given = tensors()
    torch.library.opcheck(call_with_winners, (MAX, ",".join(given), (4, 3), list(given.values()), "", []))


def test_winners_are_as_wide_as_their_positions_need():
    with FakeTensorMode():
        for rows, dtype in ((2**15, torch.int32), (2**16, torch.int64)):
            A, B = torch.empty(rows), torch.empty(rows)
            value, won = call_with_winners("C[()] = max(A[i] * B[j])", "A,B", None, [A, B], "", [])
            assert (value.shape, won.shape, won.dtype) == ((), (), dtype)


def test_fake_tensors_get_a_shape_and_a_dtype():
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in tensors(dtype=torch.float16).items()}
        result = spmm(**fake)
    assert result.shape == (4, 3)
    assert result.dtype == torch.float16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", [spmm, maximum])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break_it_has_the_same_value_and_gradients(backend, function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    given = tensors()
    results = []
    for either in (function, compiled):
        leaves = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
        result = either(**leaves)
        result.square().sum().backward()
        results.append((result.detach(), leaves["AV"].grad, leaves["B"].grad))
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_new_lengths_do_not_compile_again_and_again():
    torch._dynamo.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(spmm, fullgraph=True, backend=count)
    for groups in (5, 7, 9, 11, 13):
        given = tensors(groups)
        torch.testing.assert_close(compiled(**given), spmm(**given))
    assert len(graphs) <= 2


@pytest.mark.cpu
def test_exported_on_a_cpu_it_needs_nothing_of_ours():
    class Layer(torch.nn.Module):
        def forward(self, AM, AK, AV, B):
            return spmm(AM, AK, AV, B)

    given = tensors()
    program = torch.export.export(Layer(), tuple(given.values()))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert not [target for target in targets if "insum_ops" in str(target)]
    torch.testing.assert_close(program.module()(*given.values()), spmm(**given))


class Sampled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.X = torch.nn.Parameter(torch.randn(3, 2))
        self.pattern = GroupCOO.from_dense(torch.eye(3, 4))

    def forward(self, Y):
        return sddmm(self.pattern, self.X, Y).values


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["sddmm", "tensor product"])
def test_an_exported_program_is_trained(kind, strict):
    if kind == "sddmm":
        module, given = Sampled(), (torch.randn(4, 2),)
    else:
        module = nn.FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o")
        given = torch.randn(5, 8), torch.randn(5, 4)
    program = torch.export.export(module, given, strict=strict).module()
    for function in (program, module):
        function(*given).square().sum().backward()
    for one, other in zip(program.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.cpu
@pytest.mark.parametrize("strict", [False, True])
def test_a_size_of_an_exported_statement_has_no_bound(strict):
    class Scattered(torch.nn.Module):
        def forward(self, x, index):
            return insum("Y[index[e],c] += x[e,c]", x=x, index=index, size=x.shape)

    lengths = ({0: torch.export.Dim("n", min=2)},) * 2
    given = torch.randn(3, 2), torch.tensor([2, 0, 2])
    program = torch.export.export(Scattered(), given, dynamic_shapes=lengths, strict=strict)
    x, index = torch.randn(5, 2), torch.tensor([4, 0, 4, 1, 1])
    torch.testing.assert_close(program.module()(x, index), torch.zeros(5, 2).index_add(0, index, x))


@pytest.mark.cpu
@pytest.mark.parametrize("is_sparse", [False, True])
def test_autocast_casts_as_for_a_matrix_product(is_sparse):
    A, B = torch.randn(5, 7), torch.randn(7, 3, requires_grad=True)
    given = GroupCOO.from_dense(A) if is_sparse else A
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = insum("C[m,n] += A[m,k] * B[k,n]", A=given, B=B)
    assert result.dtype == torch.bfloat16
    expected = A.bfloat16().double() @ B.detach().bfloat16().double()
    torch.testing.assert_close(result.detach().double(), expected, rtol=2**-8, atol=1e-6)
    result.sum().backward()
    assert B.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("expr", ["C[m,n] += A[m,k] * B[k,n]", "C[m,n] = max(A[m,k] * B[k,n])"])
def test_a_format_that_has_been_used_compiles_without_a_graph_break(expr):
    torch._dynamo.reset()
    A = GroupCOO.from_dense(torch.randn(5, 7) * (torch.rand(5, 7) < 0.5), group_size=2)
    layer = lambda values, B: insum(expr, A=A.with_values(values), B=B).square().sum()
    results = []
    leaves = [A.values.clone(), torch.randn(7, 3)]
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        results.append(torch.autograd.grad(function(*own), own))
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected)


def test_flops_of_a_format_are_counted_as_an_operator_and_in_ordinary_calls():
    A, B = GroupCOO.from_dense(torch.eye(6, dtype=torch.float64), group_size=1), torch.randn(6, 3, dtype=torch.float64)
    parts, expr = parts_of(A), "C[m,n] += A[m,k] * B[k,n]"
    with FlopCounterMode(display=False) as counter:
        values, B = parts.values.clone().requires_grad_(), B.requires_grad_()
        operator = torch.ops.insum_ops.format_value
        operator(expr, "B", None, [B], "A", parts.text, list(parts.shape), values, parts.coords).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 3  # of the value and of two gradients
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        insum(expr, A=A, B=B)
    assert counter.get_total_flops() == 2 * 6 * 3


def _layers():
    voxels = nn.SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0], [0, 1]]), [3], batch_size=1)
    return {
        "SpMM": (nn.SpMM(torch.eye(4).to_sparse()), (torch.ones(4, 3),)),
        "BlockSparseLinear": (nn.BlockSparseLinear(16, 16, block_size=8, density=0.5), (torch.ones(3, 16),)),
        "SubMConv1d": (nn.SubMConv1d(4, 4, 3), (voxels,)),
        "SparseConv1d": (nn.SparseConv1d(4, 4, 2, 2), (voxels,)),
        "FullyConnectedTensorProduct": (
            nn.FullyConnectedTensorProduct("4x0e", "1x0e", "4x0e"),
            (torch.ones(3, 4), torch.ones(3, 1)),
        ),
    }


@pytest.mark.parametrize(
    "name", ["SpMM", "BlockSparseLinear", "SubMConv1d", "SparseConv1d", "FullyConnectedTensorProduct"]
)
def test_flops_of_every_layer_are_counted(name):
    layer, inputs = _layers()[name]
    for _ in range(2):  # by a launch plan as well, where there would be one
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(*inputs)
        assert counter.get_total_flops() > 0
