"""torch.func and forward mode: every transform of a statement against dense torch, loops and numerical derivatives."""

from __future__ import annotations

import copy
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED, Case, examples, statements
from tolerances import assert_matches
from torch import Tensor
from torch._dynamo.variables.builder import VariableBuilder
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from insum_ops import insum, nn, sddmm, sparse_conv3d, spmm
from insum_ops.compiler.autograd.operators import call, call_with_winners
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.runtime import PLAIN_CALLS
from insum_ops.compiler.runtime.tracing import followed
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, kernel_map
from insum_ops.formats.torch_state import uncompiled

# torch's own, when forward mode is first used
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    SPARSE_WARNINGS,
]

IS_FOLLOWED = torch.__version__ >= (2, 11)  # an older tracer leaves gradients of statements uncompiled
FAILS_IN_THE_TRACER = pytest.mark.xfail(
    not IS_FOLLOWED, strict=True, reason="torch 2.10 fails inside its tracer of vjp and of layers"
)
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
TINY = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1}
DOUBLE = (torch.float64,)
SPMM = "C[m,n] += A[m,k] * B[k,n]"


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def sparse_matrix() -> Tensor:
    return random(5, 6) * (torch.rand(5, 6) < 0.6).to(DEVICE)


FORMATS = [
    lambda dense: COO.from_dense(dense),
    lambda dense: ELL.from_dense(dense),
    lambda dense: GroupCOO.from_dense(dense, group_size=2),
    lambda dense: GroupCOO.from_dense(dense, group_dim=1),
    lambda dense: BlockCOO.from_dense(dense, block_size=(2, 3)),
    lambda dense: BlockGroupCOO.from_dense(dense, block_size=(3, 4), group_size=2),
]
FORMAT_NAMES = ["COO", "ELL", "GroupCOO", "GroupCOO by columns", "BlockCOO", "BlockGroupCOO"]


def on_bases(case: Case, *bases: Tensor) -> Tensor:
    return insum(case.expr, size=case.size, **case.with_bases(dict(zip(case.value_names, bases, strict=True))).tensors)


def bases_of(case: Case) -> tuple[Tensor, ...]:
    return tuple(case.operands[name].base.clone() for name in case.value_names)


@pytest.mark.every_program
@settings(max_examples=examples(40, 4))
@given(statements(DOUBLE, largest=TINY))
def test_tangents_are_right(case: Case) -> None:
    leaves = tuple(base.requires_grad_() for base in bases_of(case))
    function = lambda *bases: on_bases(case, *bases)
    assert gradcheck(function, leaves, fast_mode=True, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.every_program
@settings(max_examples=examples(40, 4))
@given(statements(DOUBLE, largest=TINY))
def test_jacobians_are_those_of_one_backward_pass_for_each_row(case: Case) -> None:
    bases = bases_of(case)
    function, which = (lambda *bases: on_bases(case, *bases)), tuple(range(len(bases)))
    expected = torch.autograd.functional.jacobian(function, bases) if bases else ()
    for transform in (jacrev, jacfwd):
        for ours, own in zip(transform(function, which)(*bases) if bases else (), expected, strict=True):
            assert_matches(ours, own)


@pytest.mark.every_program
@settings(max_examples=examples(60, 6))
@given(statements(DOUBLE, largest=TINY), st.data())
def test_a_batch_is_each_of_its_examples(case: Case, data: st.DataObject) -> None:
    bases = bases_of(case)
    dims = [data.draw(st.sampled_from((None, 0, -1))) for _ in bases]
    if all(dim is None for dim in dims):
        dims = [0 for _ in bases]
    if not bases:
        return
    many = [
        base if dim is None else torch.stack([base, -base, 2 * base], dim)
        for base, dim in zip(bases, dims, strict=True)
    ]
    actual = vmap(lambda *given: on_bases(case, *given), tuple(dims))(*many)
    for at in range(3):
        own = [base if dim is None else base.select(dim, at) for base, dim in zip(many, dims, strict=True)]
        assert_matches(actual[at], on_bases(case, *own))


def _products(AM: Tensor, AK: Tensor, AV: Tensor, B: Tensor) -> list[Tensor]:
    """The products that meet in each of three rows."""
    products = AV.unsqueeze(1) * B[AK]
    return [products[torch.eq(AM, row)] for row in range(3)]


@pytest.mark.parametrize(
    ("expr", "best"),
    [
        ("C[AM[p],n] += AV[p] * B[AK[p],n]", lambda rows: rows.sum(0)),
        ("C[AM[p],n] = max(AV[p] * B[AK[p],n])", lambda rows: rows.amax(0)),
    ],
    ids=["sum", "max"],
)
@pytest.mark.parametrize("name", ["AV", "B"])
def test_what_vjp_returns_is_called_after_it(expr, best, name):
    AM, AK = torch.tensor([2, 0, 1, 2], device=DEVICE), torch.tensor([3, 0, 1, 1], device=DEVICE)
    others, upstream = {"AV": random(4), "B": random(4, 5)}, random(3, 5)
    chosen = others.pop(name)
    ours = lambda x: insum(expr, AM=AM, AK=AK * 1, **others, **{name: x}, size=(3, 5))  # AK: made inside
    dense = lambda x: torch.stack([best(rows) for rows in _products(AM, AK, **others, **{name: x})])
    expected = vjp(dense, chosen)[1](upstream)[0]
    pull = vjp(ours, chosen)[1]
    assert_matches(pull(upstream)[0], expected)
    assert_matches(pull(upstream)[0], expected)
    assert_matches(vjp(lambda x: vjp(ours, x)[0], chosen)[1](upstream)[0], expected)  # after two of them
    pulled = lambda function: lambda x: vjp(function, x)[1](upstream)[0].square()
    twice = [vjp(pulled(function), chosen)[1](torch.ones_like(chosen))[0] for function in (ours, dense)]
    assert_matches(*twice)


@pytest.mark.parametrize("make", FORMATS, ids=FORMAT_NAMES)
def test_what_vjp_returns_is_called_after_it_for_a_format(make):
    dense, B, upstream = sparse_matrix(), random(6, 4), random(5, 4)
    A = make(dense)
    values, columns = (lambda v: spmm(A.with_values(v), B)), (lambda b: spmm(A, b))
    expected = A.with_values(torch.ones_like(A.values)).to_dense() * (upstream @ B.T)
    assert_matches(A.with_values(vjp(values, A.values)[1](upstream)[0]).to_dense(), expected)
    assert_matches(vjp(columns, B)[1](upstream)[0], dense.T @ upstream)
    assert_matches(vjp(lambda b: vjp(columns, b)[0], B)[1](upstream)[0], dense.T @ upstream)


@pytest.mark.parametrize("argument", [0, 1])
def test_every_transform_of_a_product_is_that_of_the_dense_one(argument: int) -> None:
    A, B, tangent = random(3, 4), random(4, 5), random(3, 5)
    ours, dense = (lambda A, B: insum(SPMM, A=A, B=B)), torch.matmul
    loss = lambda function: lambda A, B: function(A, B).sin().sum()
    for transform in (grad, hessian):
        assert_matches(transform(loss(ours), argument)(A, B), transform(loss(dense), argument)(A, B))
    for transform in (jacrev, jacfwd):
        assert_matches(transform(ours, argument)(A, B), transform(dense, argument)(A, B))
    assert_matches(vjp(ours, A, B)[1](tangent)[argument], vjp(dense, A, B)[1](tangent)[argument])
    moved = [(torch.ones_like(A), B), (A, torch.zeros_like(B))][argument]
    assert_matches(jvp(ours, (A, B), moved)[1], jvp(dense, (A, B), moved)[1])
    third = lambda function: grad(lambda x: grad(lambda y: grad(lambda z: function(z).pow(3).sum())(y).sum())(x).sum())
    x = random(3, 3)
    assert_matches(third(lambda x: insum("C[i,j] += x[i,k] * x[k,j]", x=x))(x), third(lambda x: x @ x)(x))


@pytest.mark.parametrize("make", FORMATS, ids=FORMAT_NAMES)
def test_every_transform_of_a_format_is_that_of_the_dense_matrix(make) -> None:
    A, B = make(sparse_matrix()), random(6, 3)
    ours = lambda values, B: insum(SPMM, A=A.with_values(values), B=B).sin().sum()
    dense = lambda values, B: (A.with_values(values).to_dense() @ B).sin().sum()
    for argument in (0, 1):
        for transform in (grad, hessian):
            assert_matches(transform(ours, argument)(A.values, B), transform(dense, argument)(A.values, B))
    values, batch = torch.stack([A.values, 2 * A.values]), torch.stack([B, 3 * B], 1)
    for argument in (0, 1):
        for dims in ((None, 1), (0, None), (0, 1)):
            given = (A.values if dims[0] is None else values, B if dims[1] is None else batch)
            actual = vmap(grad(ours, argument), dims)(*given)
            for at in range(2):
                own = [x if d is None else x.select(d, at) for x, d in zip(given, dims, strict=True)]
                assert_matches(actual[at], grad(dense, argument)(*own))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("argument", [0, 1])
def test_every_transform_of_an_extremum_is_that_of_the_dense_one(kind: str, argument: int) -> None:
    A, B = random(3, 4), random(4, 5)
    ours = lambda A, B: insum(f"C[m,n] = {kind}(A[m,k] * B[k,n])", A=A, B=B).sin().sum()
    dense = lambda A, B: getattr(torch, f"a{kind}")(A[:, :, None] * B, 1).sin().sum()
    for transform in (grad, hessian):
        assert_matches(transform(ours, argument)(A, B), transform(dense, argument)(A, B))
    many = torch.stack([B, -B])
    assert_matches(vmap(grad(ours, argument), (None, 0))(A, many), vmap(grad(dense, argument), (None, 0))(A, many))


@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_scattered_extremum_has_tangents_and_batches(kind: str) -> None:
    A = GroupCOO.from_dense(sparse_matrix(), group_size=2)
    B = random(6, 3).requires_grad_()
    values = A.values.clone().requires_grad_()
    call = lambda values, B: insum(f"C[m,n] = {kind}(A[m,k] * B[k,n])", A=A.with_values(values), B=B)
    assert gradcheck(call, (values, B), check_forward_ad=True, fast_mode=IS_INTERPRETED)
    many = torch.stack([B, -B]).detach()
    assert_matches(vmap(call, (None, 0))(values.detach(), many), torch.stack([call(values, b) for b in many]))


def test_index_tensors_may_be_batched() -> None:
    at, X = torch.tensor([[0, 2, -1], [1, 1, 0]], device=DEVICE), random(3, 4)
    scatter = lambda at, X: insum("C[I[p],n] += X[p,n]", I=at, X=X, size=(3, 4))
    gather = lambda at, X: insum("Y[p,n] = X[I[p],n]", I=at, X=X)
    for function in (scatter, gather):
        assert_matches(vmap(function, (0, None))(at, X), torch.stack([function(one, X) for one in at]))
        loss = lambda at, X, function=function: function(at, X).square().sum()
        assert_matches(vmap(grad(loss, 1), (0, None))(at, X), torch.stack([grad(loss, 1)(one, X) for one in at]))


def test_an_output_that_sums_start_from_may_be_batched_or_shared() -> None:
    C, A, B = random(2, 3, 5), random(3, 4), random(2, 4, 5)
    start = lambda C, B: insum(SPMM, C=C, A=A, B=B)
    assert_matches(vmap(start)(C, B), C + A @ B)
    assert_matches(vmap(start, (None, 0))(C[0], B), C[0] + A @ B)
    assert_matches(vmap(start, (0, None))(C, B[0]), C + A @ B[0])
    assert_matches(vmap(vmap(start, (None, 0)), (0, None))(C, B), C[:, None] + A @ B)
    assert_matches(jvp(start, (C[0], B[0]), (C[1], B[1]))[1], C[1] + A @ B[1])
    assigned = lambda C: insum("C[m,n] = A[m,k] * B[k,n]", C=C, A=A, B=B[0])
    assert_matches(jvp(assigned, (C[0],), (C[1],))[1], torch.zeros(3, 5, dtype=torch.float64))


def test_the_operators_themselves_are_batched() -> None:
    A, B = random(3, 4), random(2, 4, 5)
    many = vmap(lambda B: call(SPMM, "A,B", None, [A, B], "", []))(B)
    assert_matches(many, A @ B)
    won = vmap(lambda B: call_with_winners("C[m,n] = max(A[m,k] * B[k,n])", "A,B", None, [A, B], "", []))(B)
    expected = (A[:, :, None] * B[:, None]).max(2)
    assert_matches(won[0], expected.values)
    assert torch.equal(won[1].long(), expected.indices)


def test_forward_mode_carries_tangents_after_calls_without_any() -> None:
    A, B, tangent = random(3, 4), random(4, 5), random(3, 4)
    form = GroupCOO.from_dense(sparse_matrix())
    D, moved = random(6, 2), random(6, 2)
    for _ in range(2):  # the second time the calls are remembered
        insum(SPMM, A=A, B=B)
        insum(SPMM, A=form, B=D)
        with forward_ad.dual_level():
            product = insum(SPMM, A=forward_ad.make_dual(A, tangent), B=B)
            assert_matches(forward_ad.unpack_dual(product).tangent, tangent @ B)
            product = insum(SPMM, A=form, B=forward_ad.make_dual(D, moved))
            assert_matches(forward_ad.unpack_dual(product).tangent, form.to_dense() @ moved)


def test_what_is_kept_inside_a_transform_is_good_outside() -> None:
    """Patterns, maps and conversions are worked out once; a transform that came first must not own them."""
    dense, B = sparse_matrix(), random(6, 3)
    edges = torch.tensor([[0, 1, 2], [2, 2, 0]], device=DEVICE)
    weights, nodes = random(3), random(3, 2)
    listed, by_rows, by_columns = dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()
    coo = GroupCOO.from_dense(dense, group_dim=1)
    calls = [
        (lambda B: insum(SPMM, A=coo, B=B), B),
        (lambda B: spmm(listed, B), B),
        (lambda B: spmm(by_rows, B), B),
        (lambda B: spmm(by_columns, B, reduce="mean"), B),
        (lambda B: spmm((edges, weights), B), nodes),
        (lambda B: spmm((edges, None), B, reduce="max"), nodes),
        (lambda B: sddmm((edges, None), B, B), nodes),
    ]
    for function, x in calls:
        first = grad(lambda x, function=function: function(x).square().sum())(x)
        own = x.clone().requires_grad_()
        function(own).square().sum().backward()
        assert_matches(own.grad, first)
        assert_matches(vmap(function)(torch.stack([x, 2 * x]))[0], function(x))


def test_gradients_of_each_example_of_a_linear_layer() -> None:
    layer = nn.BlockSparseLinear(8, 6, block_size=2, density=0.5).double().to(DEVICE)
    x, own = random(3, 8), dict(layer.named_parameters())
    loss = lambda parameters, x: functional_call(layer, parameters, (x,)).square().sum()
    actual = vmap(grad(loss), (None, 0))(own, x)
    for at in range(3):
        layer.zero_grad()
        layer(x[at]).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_matches(actual[name][at], parameter.grad)


def test_an_ensemble_shares_its_pattern() -> None:
    """Parameters may be batched; a pattern is one for all, and a batch of them is refused in words."""
    dense, x, B = sparse_matrix(), random(3, 8), random(6, 3)
    linear, product = nn.BlockSparseLinear(8, 6, 2, 0.5).double().to(DEVICE), nn.SpMM(dense.to_sparse(), trainable=True)
    for layer, operand, words in (
        (
            linear,
            x,
            "coords is batched by torch.func.vmap, but a pattern is one for all calls; "
            "pass parameters alone, as in torch.func.functional_call(layer, parameters, (x,))",
        ),
        (
            product,
            B,
            "AM and AK are batched by torch.func.vmap, but a pattern is one for all calls; "
            "pass values alone, as in torch.func.functional_call(layer, {'AV': values}, (B,))",
        ),
    ):
        models = [copy.deepcopy(layer) for _ in range(2)]
        for parameter in models[1].parameters():
            parameter.data.mul_(2)
        parameters, buffers = stack_module_state(models)
        run = lambda own, layer=layer, operand=operand: functional_call(layer, own, (operand,))
        actual = vmap(run)(parameters)
        for at, model in enumerate(models):
            assert_matches(actual[at], model(operand))
        with pytest.raises(UnsupportedError, match=f"^{re.escape(words)}$"):
            vmap(run)({**parameters, **buffers})
        assert_matches(layer(operand), models[0](operand))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_each_example_of_a_convolution(groups: int) -> None:
    indices = (torch.rand(2, 4, 4) < 0.5).nonzero().int().to(DEVICE)
    x = nn.SparseConvTensor(random(len(indices), 4), indices, [4, 4], 2)
    model = nn.SparseSequential(
        nn.SubMConv2d(4, 4, 3, groups=groups), nn.SparseMaxPool2d(2), nn.SubMConv2d(4, 4, 3, bias=False)
    )
    model = model.double().to(DEVICE)
    features = torch.stack([x.features, random(*x.features.shape)])
    run = lambda parameters, f: functional_call(model, parameters, (x.replace_feature(f),)).features.square().sum()
    own = dict(model.named_parameters())
    actual = vmap(grad(run), (None, 0))(own, features)
    twin = copy.deepcopy(model)
    for at in range(2):
        twin.zero_grad()
        twin(x.replace_feature(features[at])).features.square().sum().backward()
        for name, parameter in twin.named_parameters():
            assert_matches(actual[name][at], parameter.grad)
    assert_matches(hessian(lambda f: run(own, f))(x.features[:, :]).sum(), _second(model, x).sum())


def _second(model, x) -> Tensor:
    """The Hessian of the same loss by two backward passes, a row at a time."""
    features = x.features.clone().requires_grad_()
    loss = model(x.replace_feature(features)).features.square().sum()
    (first,) = torch.autograd.grad(loss, features, create_graph=True)
    rows = [torch.autograd.grad(value, features, retain_graph=True)[0] for value in first.flatten()]
    return torch.stack(rows)


def loss_of_statement(A, B) -> Tensor:
    return insum("C[i,j] += A[i,k] * B[k,j]", A=A, B=B).square().sum()


def loss_of_dense(A, B) -> Tensor:
    return (A @ B).square().sum()


@pytest.mark.sampled
@pytest.mark.parametrize("reduced", ["+= {}", "= max({})"])
@pytest.mark.parametrize("depth", [1, 2])
@COMPILED
def test_a_compiled_batch_learns(depth, reduced):
    torch._dynamo.reset()
    index, X, W = torch.tensor([[0, 2], [1, 1]], device=DEVICE), random(*[2] * depth, 3, 4), random(3)
    leaves = [X.requires_grad_(), W.requires_grad_()]
    batched = lambda X: insum(f"Y[i,c] {reduced.format('X[I[i,k],c] * W[I[i,k]]')}", X=X, I=index, W=W)
    for _ in range(depth):
        batched = vmap(batched)
    traced = torch.compile(batched, backend="aot_eager", fullgraph=IS_FOLLOWED)(X)
    products = (X * W[:, None])[..., index, :]
    expected = products.sum(-2) if "+=" in reduced else products.amax(-2)
    torch.testing.assert_close(traced, expected)
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (traced, expected))):
        torch.testing.assert_close(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made inside"])
@pytest.mark.parametrize(
    "transform",
    [
        grad,
        pytest.param(lambda loss: lambda A, B: vjp(loss, A, B)[1](torch.ones_like(A[0, 0])), marks=FAILS_IN_THE_TRACER),
    ],
)
@COMPILED
def test_a_compiled_gradient_reaches_every_input(transform, is_made):
    torch._dynamo.reset()
    A, B = random(3, 3), random(3, 3)
    inside = lambda loss: lambda A, B: loss(A * 2 if is_made else A, B)  # what a tracer made itself it knows more of
    both = lambda loss: grad(inside(loss), (0, 1)) if transform is grad else transform(inside(loss))
    traced = torch.compile(both(loss_of_statement), backend="aot_eager", fullgraph=IS_FOLLOWED)(A, B)
    for one, other in zip(traced, both(loss_of_dense)(A, B)):
        torch.testing.assert_close(one, other)


@COMPILED
def test_a_compiled_gradient_reads_no_plans_of_other_calls(monkeypatch):
    """A tracer that reads one of them reads all: after some hundred calls it took ten times as long."""
    torch._dynamo.reset()
    read = []
    wrap = VariableBuilder._wrap
    monkeypatch.setattr(VariableBuilder, "_wrap", lambda self, value: read.append(id(value)) or wrap(self, value))
    A, B = random(3, 3), random(3, 3)
    traced = torch.compile(grad(loss_of_statement), backend="aot_eager", fullgraph=IS_FOLLOWED)(A, B)
    torch.testing.assert_close(traced, grad(loss_of_dense)(A, B))
    assert read
    assert id(PLAIN_CALLS) not in read


@FAILS_IN_THE_TRACER
@COMPILED
def test_a_compiled_gradient_reaches_every_parameter_of_a_layer():
    torch._dynamo.reset()
    layer, x = nn.BlockSparseLinear(8, 8, block_size=4, density=0.5, dtype=torch.float64, device=DEVICE), random(3, 8)
    layer(x)
    loss = lambda parameters: functional_call(layer, parameters, (x,)).square().sum()
    parameters = {name: own.detach() for name, own in layer.named_parameters()}
    traced = torch.compile(grad(loss), backend="aot_eager", fullgraph=IS_FOLLOWED)(parameters)
    expected = torch.autograd.grad(loss(dict(layer.named_parameters())), list(layer.parameters()))
    for (name, _), other in zip(layer.named_parameters(), expected):
        torch.testing.assert_close(traced[name], other)


@COMPILED
def test_a_compiled_gradient_reaches_every_factor_of_entries_and_of_a_convolution():
    torch._dynamo.reset()
    X, Y, pattern = random(4, 3), random(5, 3), GroupCOO.from_dense(random(4, 5))
    entries = lambda X, Y: sddmm(pattern, X * 2, Y).values.square().sum()
    features, weight, bias = random(3, 2), random(4, 3, 2), random(4)
    line = kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]], device=DEVICE), [6], batch_size=1, kernel_size=3)
    convolved = lambda features, weight, bias: sparse_conv3d(features * 2, weight, line, bias).square().sum()
    follows_functions = torch.__version__ >= (2, 12)  # of autograd inside a transform; an older tracer fails at them
    others = [(convolved, (features, weight, bias))] if follows_functions else []
    for loss, operands in [(entries, (X, Y)), *others]:
        leaves = [tensor.clone().requires_grad_() for tensor in operands]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        traced = torch.compile(grad(loss, tuple(range(len(operands)))), backend="aot_eager", fullgraph=IS_FOLLOWED)(
            *operands
        )
        for one, other in zip(traced, expected):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: lambda A, B: jvp(loss, (A, B), (B, A))[1],
        lambda loss: grad(lambda A, B: grad(loss, 1)(A, B).sum()),
    ],
    ids=["jvp", "grad of grad"],
)
def test_what_a_tracer_can_not_follow_runs_outside_of_the_graph_rather_than_give_zeros(transform):
    torch._dynamo.reset()
    A, B = random(3, 3), random(3, 3)
    expected = transform(loss_of_dense)(A, B)
    torch.testing.assert_close(torch.compile(transform(loss_of_statement), backend="aot_eager")(A, B), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="raise UnsupportedError"):
        torch.compile(transform(loss_of_statement), backend="aot_eager", fullgraph=True)(A, B)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_tangent_is_refused_rather_than_lost(fullgraph):
    torch._dynamo.reset()
    A, B = random(3, 3), random(3, 3)

    def tangent(A, B):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(loss_of_statement(forward_ad.make_dual(A, B), B)).tangent

    assert tangent(A, B) is not None
    with pytest.raises(
        (UnsupportedError, torch._dynamo.exc.Unsupported), match=r"differentiated as|raise Unsup|Jvp is inside"
    ):
        torch.compile(tangent, backend="aot_eager", fullgraph=fullgraph)(A, B)


def test_what_a_tracer_can_not_follow_is_refused_in_words():
    with forward_ad.dual_level(), pytest.raises(UnsupportedError) as caught:
        followed(random(3))
    assert str(caught.value) == (
        "Jvp is inside torch.compile, which can follow a single Grad of torch.func; "
        "leave out torch.compile, or compile what is inside the transform"
    )
    A = random(3, 3)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError) as caught:
        call("C[i] += A[i,k]", "A", None, [forward_ad.make_dual(A, A)], "", [])
    assert str(caught.value) == (
        "'C[i] += A[i,k]' is to be differentiated as an operator, which torch.func inside torch.compile does, and "
        "forward mode; compile what is inside the transform"
    )


def test_the_operator_itself_has_gradients():
    A = random(3, 3).requires_grad_()
    call("C[i] += A[i,k] * A[i,k]", "A", None, [A], "", []).sum().backward()
    torch.testing.assert_close(A.grad, 2 * A.detach())


def test_a_transform_of_what_is_compiled_is_as_ever():
    A = torch.randn(3, 3)
    statement = lambda A: insum("C[i,j] += A[i,k] * A[k,j]", A=A).sum()
    inside = torch.compile(statement, backend="aot_eager")
    torch.testing.assert_close(torch.func.grad(inside)(A), torch.func.grad(statement)(A))


EDGES = torch.tensor([[0, 4, 2, 4], [1, 1, 3, 0]])
REDUCED = "sum", "mean"


def _learned_by(layer):
    """Return a loss of a layer's parameters and its input, and the parameters."""
    parameters = {name: each.detach() for name, each in layer.named_parameters()}
    return lambda pair: functional_call(layer, pair[0], (pair[1],)).square().sum(), parameters


def _first_calls():
    linear = nn.BlockSparseLinear(8, 8, 4, 0.5).to(DEVICE, torch.float64)
    spmm_layer = nn.SpMM(GroupCOO.from_dense(random(5, 6)), trainable=True)
    held = GroupCOO.from_dense(random(5, 6), group_size=2)
    graph = EDGES.to(DEVICE), random(4)
    loss, parameters = _learned_by(linear)
    losses = {"nn.BlockSparseLinear": (loss, (parameters, random(3, 8)))}
    loss, parameters = _learned_by(spmm_layer)
    losses["nn.SpMM"] = loss, (parameters, random(6, 2))
    losses["GroupCOO"] = lambda B: insum(SPMM, A=held, B=B).square().sum(), random(6, 2)
    for reduce in REDUCED:
        losses[f"edges, {reduce}"] = lambda B, reduce=reduce: spmm(graph, B, reduce).square().sum(), random(5, 2)
    losses["sddmm of edges"] = lambda X: sddmm((graph[0], None), X, X).square().sum(), random(5, 2)
    return losses


@COMPILED
@pytest.mark.skipif(not IS_FOLLOWED, reason="an older tracer leaves gradients uncompiled")
@pytest.mark.parametrize(
    "name", ["nn.BlockSparseLinear", "nn.SpMM", "GroupCOO", *[f"edges, {how}" for how in REDUCED], "sddmm of edges"]
)
def test_a_gradient_by_a_transform_is_compiled_at_the_first_call(name):
    torch._dynamo.reset()
    loss, given = _first_calls()[name]
    found = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")(given)
    torch.testing.assert_close(found, grad(loss)(given))


@COMPILED
def test_a_gradient_through_a_sparse_tensor_leaves_the_graph_and_no_part_of_it_is_compiled():
    torch._dynamo.reset()
    A, B = sparse_matrix(), random(6, 2)
    csr = A.to_sparse_csr()
    loss = lambda B: spmm(csr, B).square().sum()
    assert_matches(torch.compile(grad(loss), backend="aot_eager")(B), 2 * A.T @ A @ B)


def test_what_leaves_graphs_waits_for_no_tracer_to_be_imported(monkeypatch):
    """Forward mode comes there in programs that compile nothing."""
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert uncompiled(lambda number: number + 1)(2) == 3
    assert "torch._dynamo" not in sys.modules


@pytest.mark.every_route
@pytest.mark.parametrize("text", ["C[i,j] += A[i,k] * B[j,k]", "C[P[i],j] = max(A[i,k] * B[j,k])"])
def test_a_tangent_has_tangents(text: str) -> None:
    """`jvp` in `jvp`: torch turns forward mode off in the rules of autograd functions."""
    A, t, u, places = random(3, 2), random(3, 2), random(3, 2), torch.tensor([2, 0, 1], device=DEVICE)
    index = {"P": places, "size": (3, 3)} if "P" in text else {}
    function = lambda A: insum(text, A=A, B=A.sin(), **index).sum()
    products = lambda A: A[:, None] * A.sin()  # [i, j, k]
    dense = lambda A: (products(A).sum(2) if "+=" in text else products(A).amax(2)).sum()
    twice = lambda f: jvp(lambda A: jvp(f, (A,), (t,))[1], (A,), (u,))[1]
    assert_matches(twice(function), twice(dense))
    assert_matches(jacfwd(jacfwd(function))(A), hessian(dense)(A))
    assert_matches(jvp(lambda A: jacfwd(jacfwd(function))(A), (A,), (t,))[1], jvp(hessian(dense), (A,), (t,))[1])


@pytest.mark.every_route
def test_a_tangent_over_a_format_has_tangents() -> None:
    dense, B, t = sparse_matrix(), random(6, 2), random(6, 2)
    form = GroupCOO.from_dense(dense)
    function = lambda values, B: insum(SPMM, A=form.with_values(values), B=B).sum()
    inner = lambda values: jvp(lambda B: function(values, B), (B,), (t,))[1]
    changes = torch.randn_like(form.values)
    expected = (form.with_values(changes).to_dense() @ t).sum()
    assert_matches(jvp(inner, (form.values,), (changes,))[1], expected)
