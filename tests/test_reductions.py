"""`max` and `min`: statements and gradients against the loop nest, on every route; ties, NaN, what is missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import problem
from reference import LoopNest, dense, positions
from statements import DEVICE, FORMATS, IS_INTERPRETED, Case, examples, random_values, statements
from tolerances import DTYPES, assert_matches, assert_within, bound
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.autograd.operators import call_with_winners
from insum_ops.compiler.codegen import Config, Flags
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import strategies
from insum_ops.compiler.reference.lower import lower, placeholders
from insum_ops.compiler.runtime import ranges
from insum_ops.compiler.tuning.problem import Candidate
from insum_ops.formats import BlockCOO, BlockGroupCOO, GroupCOO

EXTREMES = ("max", "min")
SMALL = {1: 4, 2: 3, 3: 3, 4: 2, 5: 2}
SPMM = "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])"

needs_kernels = pytest.mark.kernels


def tensor(*values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def index(*values: object) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def winners(expr: str, size: tuple[int, ...] | None = None, **tensors: Tensor) -> list[int]:
    """The positions of the winners, flattened."""
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    _, won = call_with_winners(expr, ",".join(tensors), size, list(tensors.values()), "", [])
    assert won.dtype == torch.int32
    found: list[int] = won.flatten().tolist()
    return found


# against the loop nest


@pytest.mark.every_route
@settings(max_examples=examples(400, 150))
@given(statements(reductions=EXTREMES), st.sampled_from((math.nan, math.inf)))
def test_random_statements_equal_the_loop_nest(case: Case, poison: float) -> None:
    nest = LoopNest(case.expr, case.tensors, case.size)
    expected = nest.result()
    actual = insum(case.expr, size=case.size, **case.poisoned(nest.touched, poison).tensors)
    assert actual.dtype == expected.dtype
    limit = bound(expected.dtype, expected.magnitude, expected.terms, expected.factors)
    assert_within(actual, expected.value, limit)


@pytest.mark.every_route
@settings(max_examples=examples(300, 60))
@given(
    statements((torch.float64,), reductions=EXTREMES, is_whole=True, largest=SMALL),
    st.sampled_from((math.nan, math.inf)),
)
def test_random_gradients_go_to_the_first_winner(case: Case, poison: float) -> None:
    """Whole numbers: products are exact and many are equal, and still there is one right answer."""
    nest = LoopNest(case.expr, case.tensors, case.size)
    upstream = random_values(nest.shape, nest.dtype, torch.Generator().manual_seed(6)).to(DEVICE)
    expected = nest.gradients(upstream)
    is_reached = torch.zeros(nest.shape, dtype=torch.bool)
    for output in nest.winners():
        is_reached[output] = True
    upstream = torch.where(is_reached.to(DEVICE), upstream, poison)
    poisoned = case.poisoned(nest.touched, poison)
    tensors = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in poisoned.tensors.items()
    }

    result = insum(case.expr, size=case.size, **tensors)
    names = [name for name in tensors if name in expected]
    actual = torch.autograd.grad(result, [tensors[name] for name in names], upstream, allow_unused=True)

    assert_matches(result, nest.result().value)
    for name, grad in zip(names, actual, strict=True):
        own = expected[name]
        if grad is None:
            assert name == nest.sentence.output.name
            continue
        assert_within(grad, own.value, bound(torch.float64, own.magnitude, own.terms, own.factors))


@needs_kernels
@settings(max_examples=examples(100, 40))
@given(
    statements((torch.float64,), reductions=EXTREMES, is_whole=True, largest=SMALL),
    st.booleans(),
    st.sampled_from(((4, 2), (1, 2), (2, 1))),
)
def test_every_schedule_gives_the_same_winners(case: Case, lazy: bool, blocks: tuple[int, int]) -> None:
    """Rivals in one lane, in several, and in loops that do not run in the order of their positions."""
    nest = LoopNest(case.expr, case.tensors, case.size)
    own = problem(case.expr, case.tensors, case.size, flags=Flags(interpreted=IS_INTERPRETED, lazy=lazy))
    assume(not own.bound.is_empty and strategies(own.bound))
    expected = nest.result()
    extents = [nest.extents[name] for name in own.bound.statement.reduced]
    places = torch.full(nest.shape, -1, dtype=torch.int32)
    points = [point for point in nest._points() if nest._locate(nest.sentence.output, point) is not None]
    points = [at for at in points if all(nest._locate(read, at) is not None for read in nest.reads)]
    for output, number in nest.winners().items():
        place = 0
        for name, extent in zip(own.bound.statement.reduced, extents, strict=True):
            place = place * extent + points[number][name]
        places[output] = place
    for way in schedules(own.bound, own.strides, "store"):
        config = Config(tuple(zip(way.axes, blocks)), 1, 1)
        plain = own.launcher(Candidate(way, config))(list(case.tensors.values()))
        assert_matches(plain, expected.value)
        flags = replace(own.flags, wants_winners=True)
        value, won = replace(own, flags=flags).launcher(Candidate(way, config))(list(case.tensors.values()))
        assert_matches(value, expected.value)
        torch.testing.assert_close(won.cpu(), places)


@pytest.mark.sampled
@needs_kernels
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("blocks", [(1, 4), (4, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("reduction", EXTREMES)
def test_programs_that_own_rows_find_the_winners_of_the_graph(
    reduction: str, blocks: tuple[int, int], lazy: bool
) -> None:
    """Rows side by side, one row at a time with several entries at once, empty rows, padding, NaN and ties."""
    generator = torch.Generator().manual_seed(2)
    A = (3 * random_values((6, 17), torch.float32, generator)).round()
    A[3], A[1, 4] = 0, math.nan
    sparse = GroupCOO.from_dense(A.to(DEVICE), group_size=8)
    B = (2 * random_values((17, 3), torch.float32, generator)).round().to(DEVICE)
    tensors = {"AM": sparse.AM, "AK": sparse.AK, "AV": sparse.AV, "B": B}
    flags = Flags(interpreted=IS_INTERPRETED, lazy=lazy, wants_winners=True)
    fact = sparse.facts.owned("AM")
    own = problem(SPMM.replace("max", reduction), tensors, (6, 3), fact, flags)
    graph = lower(own.bound, wants_winners=True)
    expected = graph(*(tensors[name] for name in placeholders(own.bound)))
    found = schedules(own.bound, own.strides, "owner", own.fact)
    assert {way.names("step") for way in found} == {(), ("q",)}
    for way in found:
        candidate = Candidate(way, Config(tuple(zip(way.axes, blocks)), 1, 1))
        for actual, other in zip(own.launcher(candidate)(list(tensors.values()), fact), expected, strict=True):
            torch.testing.assert_close(actual, other, rtol=0, atol=0, equal_nan=True)
        plain = replace(own, flags=replace(flags, wants_winners=False)).launcher(candidate)
        torch.testing.assert_close(plain(list(tensors.values()), fact), expected[0], rtol=0, atol=0, equal_nan=True)


# against plain torch


@pytest.mark.every_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", EXTREMES)
def test_a_dense_product_equals_torch(reduction: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    A, B = random_values((4, 6), dtype, generator), random_values((6, 5), dtype, generator)
    A, B = A.to(DEVICE).requires_grad_(), B.to(DEVICE).requires_grad_()
    upstream = random_values((4, 5), dtype, generator).to(DEVICE)
    C = insum(f"C[m,n] = {reduction}(A[m,k] * B[k,n])", A=A, B=B)
    actual = (C, *torch.autograd.grad(C, (A, B), upstream))

    a, b = (leaf.detach().cpu().double().requires_grad_() for leaf in (A, B))
    expected = getattr(torch, f"a{reduction}")(a[:, :, None] * b[None], 1)
    for own, other in zip(
        actual, (expected, *torch.autograd.grad(expected, (a, b), upstream.cpu().double())), strict=True
    ):
        assert_matches(own, other.detach())


def stored_extremum(sparse: object, B: Tensor, reduction: str, values: Tensor) -> Tensor:
    """max over k of A[m,k] * B[k,n] over what the format stores, in plain torch; 0 where nothing is."""
    worst = -math.inf if reduction == "max" else math.inf
    place = positions(sparse)
    is_stored = torch.zeros(sparse.shape, dtype=torch.bool)  # type: ignore[attr-defined]
    is_stored.view(-1)[place[place >= 0]] = True
    A = torch.zeros(is_stored.numel(), dtype=torch.float64).index_put((place[place >= 0],), values[place >= 0])
    products = torch.where(is_stored[:, :, None], A.view(is_stored.shape)[:, :, None] * B[None], worst)
    best = getattr(torch, f"a{reduction}")(products, 1)
    return torch.where(is_stored.any(1)[:, None], best, 0)


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.parametrize("reduction", EXTREMES)
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_equal_torch_over_what_they_store(name: str, group_dim: int, reduction: str) -> None:
    generator = torch.Generator().manual_seed(9)
    A = random_values((8, 10), torch.float64, generator)
    A[torch.rand(A.shape, generator=generator) < 0.6] = 0
    A[2:4] = 0
    sparse = FORMATS[name](A.to(DEVICE), group_dim)
    values = sparse.values.detach().clone().requires_grad_()
    B = random_values((10, 3), torch.float64, generator).to(DEVICE).requires_grad_()
    upstream = random_values((8, 3), torch.float64, generator)
    C = insum(f"C[m,n] = {reduction}(A[m,k] * B[k,n])", A=sparse.with_values(values), B=B)
    dvalues, dB = torch.autograd.grad(C, (values, B), upstream.to(DEVICE))

    wide = [leaf.detach().cpu().requires_grad_() for leaf in (values, B)]
    expected = stored_extremum(sparse, wide[1], reduction, wide[0])
    grads = torch.autograd.grad(expected, wide, upstream)
    assert_matches(C, expected.detach())
    assert (C[2:4] == 0).all()
    if "Block" not in name:  # a block stores zeros, whose products are all equal
        assert_matches(dvalues, grads[0])
        assert_matches(dB, grads[1])
    assert (dvalues.cpu()[positions(sparse) < 0] == 0).all()
    with torch.no_grad():
        assert torch.equal(insum(f"C[m,n] = {reduction}(A[m,k] * B[k,n])", A=sparse, B=B), C)


@pytest.mark.every_route
def test_a_format_alone_hides_its_padding() -> None:
    A = GroupCOO.from_dense(tensor([-1, 0, -2], [0, 0, 0], [-3, -4, -5]), group_size=2)
    assert insum("C[m] = max(A[m,k])", A=A).tolist() == [-1, 0, -3]
    assert insum("C[k] = max(A[m,k])", A=A).tolist() == [-1, -4, -2]
    assert insum("C[()] = max(A[m,k])", A=A).tolist() == -1


@pytest.mark.every_route
def test_a_graph_takes_the_largest_neighbour() -> None:
    """The layer of many a graph network: edges in any order, no format."""
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randint(0, 6, (20,), generator=generator) for _ in range(2))
    target[target == 4] = 5
    X, upstream = (random_values((6, 3), torch.float64, generator) for _ in range(2))
    leaf = X.clone().requires_grad_()
    rows = [leaf[source[target == node]] for node in range(6)]
    expected = torch.stack([row.amax(0) if len(row) else torch.zeros_like(X[0]) for row in rows])
    own = X.to(DEVICE).requires_grad_()
    Y = insum("Y[T[e],c] = max(X[S[e],c])", T=target.to(DEVICE), S=source.to(DEVICE), X=own, size=(6, 3))
    assert torch.equal(Y.cpu(), expected)
    assert (Y[4] == 0).all()
    (grad,) = torch.autograd.grad(Y, own, upstream.to(DEVICE))
    first = torch.zeros_like(X)  # amax shares a gradient among equal entries, here an edge that stands twice
    for node, row in enumerate(rows):
        for column in range(3 if len(row) else 0):
            edge = int(X[source[target == node], column].argmax())
            first[source[target == node][edge], column] += upstream[node, column]
    assert_matches(grad, first)


@pytest.mark.every_route
@pytest.mark.parametrize(
    ("expr", "size"),
    [
        ("C[m,n] = max(A[m,k] * B[k,n])", None),
        ("C[m] = min(-0.5 * A[m,k] * B[k,m] * A[k,m])", None),
        ("C[E[m],n] = max(A[m,k] * B[k,n])", (4, 3)),
        ("C[E[m],E[k]] = min(A[m,k] * B[F[m,k],k])", (4, 4)),
        ("C[()] = max(A[m,k])", None),
        ("C[m,E[m]] = max(A[m,k])", (3, 4)),
        ("C[E[p]] = max(A[0,1])", (4,)),
    ],
)
def test_gradients_of_any_order(expr: str, size: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(4)
    leaves = {name: random_values((3, 3), torch.float64, generator).to(DEVICE) for name in "AB" if f"{name}[" in expr}
    others = {"E": index(1, -1, 1), "F": index([0, 1, -1], [2, 1, 0], [-1, 1, 0])}
    others = {name: tensor for name, tensor in others.items() if f"{name}[" in expr}

    def call(*values: Tensor) -> Tensor:
        return insum(expr, size=size, **dict(zip(leaves, values, strict=True)), **others)

    inputs = [leaf.requires_grad_() for leaf in leaves.values()]
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


# what wins


@pytest.mark.every_route
def test_the_first_of_equal_products_wins() -> None:
    A = tensor([1, 2, 2], [3, 3, 3], [0, 0, 0])
    assert winners("C[i] = max(A[i,k])", A=A) == [1, 0, 0]
    assert winners("C[i] = min(A[i,k])", A=A) == [0, 0, 0]
    assert winners("C[()] = max(A[i,k])", A=A) == [3]
    assert winners("C[()] = max(A[k,i])", A=A) == [3]
    assert winners("C[()] = max(A[k,i])", A=A.T) == [1]
    assert winners("C[E[k]] = max(A[i,k])", (2,), A=A, E=index(1, 0, 1)) == [1 * 3 + 1, 1]
    assert winners("C[i] = max(A[i,j] * A[k,j])", A=A) == [4, 1, 0]


@pytest.mark.every_route
def test_ties_get_one_gradient_and_the_same_one_every_time() -> None:
    A = tensor([2, 2, 2], [-1, 5, 5]).requires_grad_()
    for _ in range(2):
        (grad,) = torch.autograd.grad(insum("C[i] = max(A[i,k])", A=A).sum(), A)
        assert grad.tolist() == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.every_route
@pytest.mark.parametrize("reduction", EXTREMES)
@pytest.mark.parametrize("expr", ["C[i] = {}(A[i,k])", "C[E[i]] = {}(A[i,k])"])
def test_a_nan_wins_and_takes_the_gradient(expr: str, reduction: str) -> None:
    A = tensor([1, math.nan, 3, math.nan], [math.inf, -math.inf, 0, 0]).requires_grad_()
    E = {"E": index(0, 1)} if "E[" in expr else {}
    C = insum(expr.format(reduction), A=A, **E, size=(2,))
    assert C[0].isnan()
    assert C[1] == (math.inf if reduction == "max" else -math.inf)
    (grad,) = torch.autograd.grad(C.sum(), A)
    assert grad.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0] if reduction == "max" else [0, 1, 0, 0]]


@pytest.mark.every_route
def test_the_worst_product_there_is_still_wins_alone() -> None:
    """Not to be taken for an element that no product reaches."""
    A = tensor([-math.inf, -math.inf], [math.inf, 1]).requires_grad_()
    E = index([-1, 0], [1, -1])
    assert insum("C[i] = max(A[i,k])", A=A).tolist() == [-math.inf, math.inf]
    assert winners("C[i] = max(A[0,E[i,k]])", A=A, E=E) == [1, 0]
    C = insum("C[i] = max(A[0,E[i,k]])", A=A, E=E)
    assert C.tolist() == [-math.inf, -math.inf]
    assert torch.autograd.grad(C.sum(), A)[0].tolist() == [[1, 1], [0, 0]]
    assert winners("C[E[i,k]] = max(A[i,0])", (3,), A=A, E=E) == [1, 2, -1]


@pytest.mark.every_route
def test_what_no_product_reaches_is_zero_and_gets_nothing() -> None:
    A, E = tensor(-3, -4, math.nan).requires_grad_(), index([0, -1], [-1, -1], [1, 0])
    C = insum("C[i] = max(A[E[i,k]])", A=A, E=E)
    assert C.tolist() == [-3, 0, -3]
    (grad,) = torch.autograd.grad(C, A, tensor(1, math.nan, 10))
    assert grad.tolist() == [11, 0, 0]
    assert winners("C[i] = max(A[E[i,k]])", A=A.detach(), E=E) == [0, -1, 1]


@pytest.mark.every_route
def test_a_negative_number_turns_the_order_round() -> None:
    A = tensor([1, 5, 3])
    assert insum("C[i] = max(-2 * A[i,k])", A=A).tolist() == [-2]
    assert insum("C[i] = min(A[i,k] * -1)", A=A).tolist() == [-5]
    assert insum("C[i] = max(0 * A[i,k])", A=A).tolist() == [0]


@pytest.mark.every_route
def test_nothing_to_reduce_is_a_product() -> None:
    A, E = tensor(1, -2, 3).requires_grad_(), index(2, -1, 0)
    C = insum("C[i] = max(-1 * A[i] * A[E[i]])", A=A, E=E)
    assert C.tolist() == [-3, 0, -3]
    assert torch.autograd.grad(C.sum(), A)[0].tolist() == [-6, 0, -2]


@pytest.mark.every_route
def test_numbers_alone_compete_too() -> None:
    C = torch.zeros(3, device=DEVICE)
    assert insum("C[E[p]] = max(-2)", C=C, E=index(0, 0, -1, 2)).tolist() == [-2, 0, -2]
    assert insum("C[i] = min(2 * 3)", C=C).tolist() == [6, 6, 6]


@pytest.mark.every_route
def test_an_output_that_is_given_is_not_a_rival() -> None:
    C, A = tensor(9, 9), tensor([1, 2], [3, 4])
    assert insum("C[i] = max(A[i,k])", C=C, A=A).tolist() == [2, 4]
    assert insum("C[i] = max(C[k])", C=tensor(1, 7)).tolist() == [7, 7]


@pytest.mark.every_route
def test_empty_ranges_have_no_winner() -> None:
    A = torch.ones(2, 0, device=DEVICE, requires_grad=True)
    C = insum("C[i] = max(A[i,k])", A=A)
    assert C.tolist() == [0, 0]
    assert torch.autograd.grad(C.sum(), A)[0].shape == (2, 0)
    E = torch.ones(0, dtype=torch.int64, device=DEVICE)
    X = torch.ones(0, 3, device=DEVICE, requires_grad=True)
    Y = insum("Y[E[p],c] = min(X[p,c])", E=E, X=X, size=(2, 3))
    assert torch.equal(Y, torch.zeros(2, 3, device=DEVICE))
    assert torch.autograd.grad(Y.sum(), X)[0].shape == (0, 3)


@pytest.mark.every_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_compared_before_it_is_rounded(dtype: torch.dtype) -> None:
    """(1 + 2 eps) (1 - eps) is a little less than 1 + eps, to which it rounds."""
    eps = torch.finfo(dtype).eps
    A = torch.tensor([[1 + 2 * eps, 1]], dtype=dtype, device=DEVICE)
    B = torch.tensor([1 - eps, 1 + eps], dtype=dtype, device=DEVICE)
    assert (A * B).unique().tolist() == [1 + eps]
    assert winners("C[i] = max(A[i,k] * B[k])", A=A, B=B) == [1]
    assert winners("C[i] = min(A[i,k] * B[k])", A=A, B=B) == [0]
    assert insum("C[i] = max(A[i,k] * B[k])", A=A, B=B).tolist() == [1 + eps]


@pytest.mark.every_route
def test_tensors_may_be_called_max_and_min() -> None:
    one = tensor([1, 2], [4, 3])
    assert insum("max[i] = max(min[i,max])", min=one).tolist() == [2, 4]
    assert insum("C[i] = max[i,min] * min[min]", max=one, min=tensor(1, 1)).tolist() == [3, 7]


@pytest.mark.every_route
def test_deterministic_mode_changes_nothing() -> None:
    tensors = {"E": index(0, 1, 1, -1), "A": tensor([1, 2], [3, 4], [5, 0], [9, 9])}
    torch.use_deterministic_algorithms(True)
    try:
        result = insum("C[E[p],n] = max(A[p,n])", **tensors, size=(3, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.tolist() == [[1, 2], [5, 4], [0, 0]]


def test_backward_reads_no_winner_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where positions lie is known without asking, which would wait for the device."""
    sparse = GroupCOO.from_dense(tensor([1, 0, 2], [0, 0, 3]), group_size=2)
    B = tensor([1, 2], [3, 4], [5, 6]).requires_grad_()
    C = insum("C[m,n] = max(A[m,k] * B[k,n])", A=sparse, B=B)
    asked = []
    monkeypatch.setattr(ranges, "read_ranges", lambda indices, _: asked.extend(indices) or [(-1, 9) for _ in indices])
    (grad,) = torch.autograd.grad(C.sum(), B)
    assert grad.tolist() == [[0, 0], [0, 0], [5, 5]]
    assert asked == []


# what is refused


@pytest.mark.parametrize("kind", [BlockCOO, BlockGroupCOO])
def test_a_last_block_that_is_not_full_can_not_be_reduced(kind: type) -> None:
    """Its filling is 0, which may be larger than every product."""
    A = kind.from_dense(-torch.ones(4, 5, device=DEVICE), block_size=(2, 2))
    B = torch.ones(5, 3, device=DEVICE)
    with pytest.raises(UnsupportedError) as caught:
        insum("C[m,n] = max(A[m,k] * B[k,n])", A=A, B=B)
    assert str(caught.value) == (
        "max runs over k, but the last block of A dimension 1 is not full; choose a block_size that divides the shape\n"
        "    C[m,n] = max(A[m,k] * B[k,n])\n"
        "                     ^"
    )
    rows = kind.from_dense(-torch.ones(5, 4, device=DEVICE), block_size=(2, 2))
    assert (insum("C[m,n] = max(A[m,k] * B[k,n])", A=rows, B=B[:4]) == -1).all()


@pytest.mark.every_route
def test_dense_and_sparse_agree_where_everything_is_stored() -> None:
    A = random_values((4, 6), torch.float64, torch.Generator().manual_seed(5)).to(DEVICE)
    B = random_values((6, 3), torch.float64, torch.Generator().manual_seed(6)).to(DEVICE)
    expected = (A.cpu()[:, :, None] * B.cpu()[None]).amin(1)
    for name in FORMATS:
        sparse = FORMATS[name](A, 0)
        assert_matches(dense(sparse), A.cpu())
        assert_matches(insum("C[m,n] = min(A[m,k] * B[k,n])", A=sparse, B=B), expected)
