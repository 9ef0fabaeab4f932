"""What a compiled graph calls for a statement with a format in it: few operators, which replay launch plans."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from tolerances import TOLERANCE
from torch._dynamo.backends.common import aot_autograd

from insum_ops import insum, nn, sparse_conv3d, spmm
from insum_ops.compiler import InsumError
from insum_ops.compiler.autograd import format_operators, operators, run_gradients
from insum_ops.conv import operator_calls
from insum_ops.formats import ELL, BlockCOO, GroupCOO, kernel_map
from insum_ops.formats.parts import FormatParts, parts_of

EXPR = "C[m,n] += A[m,k] * B[k,n]"
CLOSE = TOLERANCE[torch.float64]


def matrix():
    dense = torch.randn(5, 7, dtype=torch.float64) * (torch.rand(5, 7) < 0.5)
    dense[0, 0] = 2.0
    return GroupCOO.from_dense(dense, group_size=2)


def arguments(A, B, values=None):
    parts = parts_of(A)
    values = parts.values if values is None else values
    return EXPR, "B", None, [B], "A", parts.text, list(parts.shape), values, parts.coords


def test_torch_finds_nothing_wrong_with_the_operators_of_formats():
    A, B = matrix(), torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    given = arguments(A, B, A.values.clone().requires_grad_())
    torch.library.opcheck(torch.ops.insum_ops.format_value.default, given)
    for wanted in ([True, True], [False, True]):
        upstream = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(torch.ops.insum_ops.format_gradients.default, (*given, upstream, wanted))


def test_the_operator_of_a_format_has_gradients_of_gradients():
    A, B = matrix(), torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    values = A.values.clone().requires_grad_()

    def second(value):
        first = torch.autograd.grad(value.sin().sum(), [values, B], create_graph=True)
        return *first, *torch.autograd.grad(sum([grad.square().sum() for grad in first]), [values, B])

    operator = second(torch.ops.insum_ops.format_value.default(*arguments(A, B, values)))
    expected = second(A.with_values(values).to_dense() @ B)
    for actual, reference in zip(operator, expected):
        torch.testing.assert_close(actual, reference, **CLOSE)


SUM = "C[AM[p],n] += AV[p,n] * B[AK[p],n]"


def factors():
    AM, AK = torch.tensor([3, 0, 0, -1, 1]), torch.tensor([2, 1, 5, 0, -1])
    AV, B = torch.randn(5, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    return {"AM": AM, "AV": AV.requires_grad_(), "AK": AK, "B": B.requires_grad_()}


def by_torch(AM, AV, AK, B):
    kept = (AM >= 0) & (AK >= 0)
    return torch.zeros(4, 3, dtype=torch.float64).index_add(0, AM[kept], AV[kept] * B[AK[kept]])


def test_torch_finds_nothing_wrong_with_the_operator_of_several_gradients():
    given = factors()
    upstream = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    arguments = SUM, ",".join(given), "AV,B", [upstream, *given.values()]
    torch.library.opcheck(torch.ops.insum_ops.run_gradients.default, arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_gradients_of_a_statement_are_one_operator_and_one_alone_reads_less():
    given = factors()
    run, graphs = compiled(lambda AV, B: insum(SUM, **{**given, "AV": AV, "B": B}, size=(4, 3)).square().sum())
    for leaves in ([given["AV"], given["B"]], [given["AV"].detach(), given["B"]]):
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        actual = torch.autograd.grad(run(*leaves), learning)
        expected = torch.autograd.grad(
            by_torch(given["AM"], leaves[0], given["AK"], leaves[1]).square().sum(), learning
        )
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other, **CLOSE)
    assert [calls(graph) for graph in graphs[1::2]] == [
        ["insum_ops.run_gradients.default"],
        ["insum_ops.run.default"],
    ]


def test_the_operator_of_several_gradients_has_gradients():
    given = factors()
    leaves = [given["AV"], given["B"], torch.randn(4, 3, dtype=torch.float64, requires_grad=True)]
    gradients = torch.ops.insum_ops.run_gradients.default
    operator = gradients(SUM, ",".join(given), "AV,B", [leaves[2], *given.values()])
    expected = torch.autograd.grad(by_torch(**given), leaves[:2], leaves[2], create_graph=True)
    second = [torch.autograd.grad(sum([grad.sin().sum() for grad in grads]), leaves) for grads in (operator, expected)]
    for one, other in zip([*operator, *second[0]], [*expected, *second[1]]):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_warm_compiled_product_over_edges_follows_an_edge_index_that_changes_in_place():
    edges, weight = torch.tensor([[0, 3, 2, 2], [1, 1, 0, 2]]), torch.randn(4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    run, _ = compiled(lambda x, weight, edges: spmm((edges, weight, (4, 3)), x).square().sum())
    for step in range(10):
        if step == 5:
            edges.copy_(torch.tensor([[1, 1, 0, 3], [2, 0, 0, 0]]))
        dense = torch.zeros(3, 4, dtype=torch.float64).index_put((edges[1], edges[0]), weight, accumulate=True)
        expected = torch.autograd.grad((dense @ x).square().sum(), [x, weight])
        for one, other in zip(torch.autograd.grad(run(x, weight, edges), [x, weight]), expected):
            torch.testing.assert_close(one, other, **CLOSE)


def test_a_warm_operator_follows_coordinates_that_change_in_place():
    A, B = matrix(), torch.randn(7, 3, dtype=torch.float64)
    call = torch.ops.insum_ops.format_value.default
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(call(*arguments(A, B)), A.to_dense() @ B, **CLOSE)
        A.AK.copy_(torch.where(A.AK < 0, A.AK, 6 - A.AK))
        for _ in range(5):
            dense = torch.zeros(5, 7, dtype=torch.float64)
            rows = A.AM[:, None].expand(A.AK.shape)[A.AK >= 0].long()
            dense.index_put_((rows, A.AK[A.AK >= 0].long()), A.values[A.AK >= 0], accumulate=True)
            torch.testing.assert_close(call(*arguments(A, B)), dense @ B, **CLOSE)


class Operator:
    """One of torch, in a version that calls what it dispatches to by some name."""

    tags = ()

    def __init__(self, name):
        self.name = name
        setattr(self, name, lambda *arguments, **named: ("dispatched", *arguments))

    def __call__(self, *arguments, **named):
        return getattr(self, self.name)(*arguments, **named)


def test_a_plan_answers_first_where_nothing_is_recorded_and_a_torch_that_dispatches_otherwise_stays_as_it_is():
    known, unknown = Operator("_op"), Operator("_other")
    for operator in (known, unknown):
        operators.replay_first(operator, lambda number: number or None)
    assert known(1) == unknown(1) == ("dispatched", 1)  # gradients are recorded here
    with torch.no_grad():
        assert (known(1), unknown(1)) == (1, ("dispatched", 1))
        assert known(0) == known(0, named=1) == ("dispatched", 0)


def test_the_operators_of_gradients_replay_the_plans_of_ordinary_calls(monkeypatch):
    A, B = matrix(), torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    A = A.with_values(A.values.clone().requires_grad_())
    upstream = torch.randn(5, 3, dtype=torch.float64)
    for _ in range(4):
        expected = torch.autograd.grad(insum(EXPR, A=A, B=B), [A.values, B], upstream)
    monkeypatch.setattr(format_operators, "from_parts", None)  # no other road is taken
    with torch.no_grad():
        grads = torch.ops.insum_ops.format_gradients.default(*arguments(A, B), upstream, [True, True])
    for actual, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, reference, **CLOSE)
    torch.testing.assert_close(grads[1], A.to_dense().detach().T @ upstream, **CLOSE)


@pytest.mark.parametrize("kind", ["GroupCOO", "BlockCOO", "edges"])
def test_coordinates_that_a_capture_brings_are_taken_as_they_are(kind, monkeypatch):
    """As in `mode="reduce-overhead"`: nothing can be read, and a replay may find others in their place."""
    B, upstream = torch.randn(8, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    dense = torch.randn(6, 8, dtype=torch.float64) * (torch.rand(6, 8) < 0.4)
    dense[0, 0] = 1.0
    if kind == "edges":
        rows, columns = dense.nonzero().T
        parts = FormatParts("Edges;0;;*", (6, 8), dense[rows, columns], [torch.stack([columns, rows])])
    elif kind == "GroupCOO":
        parts = parts_of(GroupCOO.from_dense(dense, group_size=2))
    else:
        parts = parts_of(BlockCOO.from_dense(dense, block_size=(2, 2)))
    captured = [coord.clone() for coord in parts.coords]  # no format has these
    given = EXPR, "B", None, [B], "A", parts.text, list(parts.shape), parts.values, captured
    monkeypatch.setattr(format_operators, "is_captured", lambda device: True)
    monkeypatch.setattr(format_operators, "from_parts", None)
    with torch.no_grad():
        value = torch.ops.insum_ops.format_value.default(*given)
        d_values, d_B = torch.ops.insum_ops.format_gradients.default(*given, upstream, [True, True])
    torch.testing.assert_close(value, dense @ B, **CLOSE)
    torch.testing.assert_close(d_B, dense.T @ upstream, **CLOSE)
    expected = (parts.values * d_values).sum()  # of the values that are stored
    torch.testing.assert_close(expected, (dense * (upstream @ B.T)).sum(), **CLOSE)


def compiled(function):
    """Return the compiled function, and its graphs: forward, then backward."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)), graphs


def calls(graph):
    return [str(node.target) for node in graph.graph.nodes if "insum_ops" in str(node.target)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_gradients_of_a_layer_are_one_operator_which_reads_no_bias():
    layer = nn.BlockSparseLinear(16, 16, block_size=8, density=0.5)
    run, graphs = compiled(lambda x: layer(x).square().sum())
    run(torch.randn(3, 16, requires_grad=True)).backward()
    forward, backward = graphs
    assert calls(forward) == ["insum_ops.format_value.default"]
    assert calls(backward) == ["insum_ops.format_gradients.default"]
    (node,) = [node for node in backward.graph.nodes if "format_gradients" in str(node.target)]
    assert (node.args[1], len(node.args[3])) == ("X", 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_of_a_sum_with_a_format_read_its_index_tensors():
    A, S, D = matrix(), torch.tensor([2, 0, 0]), torch.tensor([1, 3, 1])
    X, Y = (torch.randn(3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given, size = {"A": A, "S": S, "D": D}, (4, 5)
    run, _ = compiled(lambda X, Y: insum("Z[D[b],i] += A[i,j] * X[S[b],j] * Y[b,j]", **given, X=X, Y=Y, size=size))
    actual, expected = run(X, Y), torch.zeros(size, dtype=torch.float64).index_add(0, D, (X[S] * Y) @ A.to_dense().T)
    torch.testing.assert_close(actual, expected, **CLOSE)
    grads, expected = (torch.autograd.grad(value.square().sum(), [X, Y]) for value in (actual, expected))
    for one, other in zip(grads, expected):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_gradient_of_a_product_with_a_constant_matrix_keeps_nothing_of_what_it_multiplied():
    layer, last = nn.SpMM(torch.eye(4).to_sparse()), torch.nn.Linear(3, 3)
    run, graphs = compiled(lambda x: layer(last(x)).sum())
    run(torch.randn(4, 3)).backward()
    saved = next(iter(reversed(graphs[0].graph.nodes))).args[0]
    assert not [node for node in saved if node.op == "call_function" and "addmm" in str(node.target)]
    assert calls(graphs[1]) == ["insum_ops.format_value.default"]


def _layers():
    voxels = nn.SparseConvTensor(torch.randn(2, 4), torch.tensor([[0, 0], [0, 1]]), [3], batch_size=1)
    down = nn.SparseSequential(nn.SparseConv1d(4, 4, 2, 2), nn.SubMConv1d(4, 4, 3))
    trained = copy.deepcopy(nn.SpMM(torch.eye(4).to_sparse(), trainable=True))
    features = lambda layer: lambda x: layer(voxels.replace_feature(x)).features
    index, edges = torch.tensor([2, 0, 0, 1, 3]), torch.tensor([[0, 1, 1], [2, 0, 3]])
    edge_weight, scales = torch.nn.ParameterList([torch.randn(3)]), torch.nn.ParameterList([torch.randn(5, 3)])
    gathered = lambda x: insum("C[p,n] += V[p,n] * X[K[p],n]", V=scales[0], X=x, K=index)
    irreps = nn.FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o")
    return {
        "a statement": (scales, gathered, torch.randn(4, 3)),
        "edges": (edge_weight, lambda x: spmm((edges, edge_weight[0], (4, 4)), x), torch.randn(4, 3)),
        "FullyConnectedTensorProduct": (irreps, lambda x: irreps(x, x[:, :4]), torch.randn(5, 8)),
        "SpMM": (trained, trained, torch.randn(4, 3)),
        "BlockSparseLinear": (layer := nn.BlockSparseLinear(16, 16, 8, 0.5), layer, torch.randn(3, 16)),
        "SubMConv1d": (layer := nn.SubMConv1d(4, 4, 3), features(layer), torch.randn(2, 4)),
        "SparseConv1d": (down, features(down), torch.randn(2, 4)),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["SpMM", "BlockSparseLinear", "SubMConv1d", "SparseConv1d", "a statement", "edges", "FullyConnectedTensorProduct"],
)
def test_a_warm_compiled_step_replays_launch_plans_alone(name, monkeypatch):
    layer, function, x = _layers()[name]
    x.requires_grad_()
    run, _ = compiled(lambda x: function(x).square().sum())
    results, steps = [], 44 if "Conv" in name else 8  # a map is used 32 times before its form is settled
    for step in range(steps):
        if step == steps - 1:
            for module, road in (
                (operators, "refuse_transforms"),
                (run_gradients, "refuse_transforms"),
                (format_operators, "refuse_transforms"),
                (operator_calls, "refuse_transforms"),
            ):
                monkeypatch.setattr(module, road, None)  # no other road is taken
        if step == 1:
            layer.load_state_dict(copy.deepcopy(layer.state_dict()))  # which writes to coordinates too
        layer.zero_grad()
        x.grad = None
        run(x).backward()
        results.append([x.grad.clone(), *[weight.grad.clone() for weight in layer.parameters()]])
    for first, last in zip(results[0], results[-1]):
        torch.testing.assert_close(last, first, **TOLERANCE[torch.float32])


def test_a_compiled_statement_over_tensors_asks_few_functions_of_ours_whether_they_are_the_same():
    def statement(AM, AV, AK, B):
        return insum(SUM, AM=AM, AV=AV, AK=AK, B=B, size=(4, 3))

    given = factors()
    compiled = torch.compile(statement, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given), by_torch(**given), **CLOSE)
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(statement.__code__)
    count = str(entry.guard_manager).count("GuardManager: source=G['__import_insum")
    assert 0 < count <= 40  # each is asked at every call; the way of formats has about a hundred


@pytest.mark.parametrize(("name", "most"), [("SpMM", 75), ("BlockSparseLinear", 55), ("SubMConv1d", 125)])
def test_a_compiled_layer_is_one_operator_to_dynamo_which_asks_few_guards(name, most):
    _, layer, x = _layers()[name]

    def call(x):
        return layer(x)

    torch._dynamo.reset()
    result = torch.compile(call, backend="eager", fullgraph=True)(x)  # by which the operator runs as it is
    torch.testing.assert_close(result, call(x), **TOLERANCE[torch.float32])
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(call.__code__)
    assert 0 < str(entry.guard_manager).count("GuardManager: source=") <= most


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_product_asks_few_guards_and_has_no_table_among_its_inputs():
    layer = nn.FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o")

    def product(x, y):
        return layer(x, y).square().sum()

    graphs, given = [], [torch.randn(5, 8, requires_grad=True), torch.randn(5, 4)]
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(len(inputs)) or make_boxed_func(graph))
    torch._dynamo.reset()
    run, learning = torch.compile(product, fullgraph=True, backend=backend), [given[0], layer.weight]
    for one, other in zip(*[torch.autograd.grad(function(*given), learning) for function in (run, product)]):
        torch.testing.assert_close(one, other, **TOLERANCE[torch.float32])
    assert graphs[0] == 3  # x, y and the weights
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(product.__code__)
    assert 0 < str(entry.guard_manager).count("GuardManager: source=") <= 90  # of all that is read there were 400


def test_formats_of_several_block_sizes_are_passed_to_one_compiled_function():
    dense, B = torch.randn(12, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    torch._dynamo.reset()
    product = torch.compile(spmm, backend="eager", fullgraph=True)
    for size in (2, 3, 4, 6):  # which the tracer takes for symbols, from the second on
        torch.testing.assert_close(product(BlockCOO.from_dense(dense, block_size=(size, 2)), B), dense @ B, **CLOSE)


def test_a_tracer_that_takes_every_number_for_a_symbol_takes_formats():
    dense, B = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    torch._dynamo.reset()
    product = torch.compile(spmm, backend="eager", fullgraph=True, dynamic=True)
    for A in (GroupCOO.from_dense(dense), GroupCOO.from_dense(dense, group_dim=1), ELL.from_dense(dense)):
        torch.testing.assert_close(product(A, B), dense @ B, **CLOSE)


def _refused():
    layers, voxels = _layers(), torch.tensor([[0, 4], [0, 5], [0, 0]])
    line, weight = kernel_map(voxels, [6], batch_size=1, kernel_size=3), torch.randn(4, 3, 4)
    product = layers["FullyConnectedTensorProduct"][0]
    return {
        "a statement": (lambda x: insum("C[i,k] += A[i,j] * B[j,k]", A=x, B=x), torch.randn(3, 4), True),
        "SpMM": (layers["SpMM"][1], torch.randn(5, 3), True),
        "BlockSparseLinear": (layers["BlockSparseLinear"][1], torch.randn(3, 15), True),
        "a convolution": (lambda x: sparse_conv3d(x, weight, line), torch.randn(4, 4), True),
        "read by Dynamo": (lambda x: sparse_conv3d(x, weight, "line"), torch.randn(3, 4), False),
        "FullyConnectedTensorProduct": (lambda x: product(x, x[:, :3]), torch.randn(5, 8), False),
    }


# torch 2.11 fails an assertion of its own where a broken graph goes on with `raise`
NOT_RAISED = pytest.mark.xfail(torch.__version__ < (2, 12), reason="an older torch", raises=AssertionError, strict=True)
RAISED = ("BlockSparseLinear", "FullyConnectedTensorProduct")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[NOT_RAISED] * (name in RAISED)) for name in _refused()])
def test_what_a_compiled_call_refuses_is_raised_as_by_any_other_call(name):
    call, x, is_operator = _refused()[name]
    with pytest.raises(InsumError) as ordinary:
        call(x)
    torch._dynamo.reset()
    with pytest.raises(type(ordinary.value)) as compiled:
        torch.compile(call, backend="eager")(x)
    assert str(compiled.value) == str(ordinary.value)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as whole:  # there is no such graph
        torch.compile(call, backend="eager", fullgraph=True)(x)
    words = str(ordinary.value).splitlines()[0]
    assert str(whole.value).startswith(words) if is_operator else f"Message: {words}" in str(whole.value)


def test_a_compiled_statement_follows_autocast_inside_of_what_is_compiled():
    def statement(A, B):
        with torch.autocast(A.device.type, dtype=torch.bfloat16):
            cast = insum("C[i,j] += A[i,k] * B[k,j]", A=A, B=B)
        return cast, insum("C[i,j] += A[i,k] * B[k,j]", A=A, B=B)

    A, B = torch.randn(3, 4), torch.randn(4, 2)
    cast, plain = torch.compile(statement, backend="eager", fullgraph=True)(A, B)
    assert (cast.dtype, plain.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(plain.double(), A.double() @ B.double(), **TOLERANCE[torch.float32])
    expected = A.bfloat16().double() @ B.bfloat16().double()
    torch.testing.assert_close(cast.double(), expected, **TOLERANCE[torch.bfloat16])
