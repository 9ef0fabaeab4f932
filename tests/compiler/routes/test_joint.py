"""Several statements in one kernel: the same results as by kernels of their own, whatever the config."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from joint_kernels import outputs, share_kernels
from pretended_clock import pretended_clock
from process_caches import forget
from statements import DEVICE
from tolerances import TOLERANCE, assert_matches
from torch import Tensor

from insum_ops import insum
from insum_ops.compiler.language import terms
from insum_ops.compiler.pipeline import run
from insum_ops.compiler.routes import joint
from insum_ops.compiler.routes.joint import JointCall, run_jointly
from insum_ops.compiler.routes.prepared import prepare
from insum_ops.compiler.tuning import joint_problem, search

pytestmark = pytest.mark.kernels

NODES, EDGES = 6, 11


@dataclass(frozen=True)
class Case:
    """A statement, its operands, and what it means in torch."""

    expr: str
    shapes: dict[str, tuple[int, ...]]
    size: tuple[int, ...]
    meaning: Callable[..., Tensor]
    joint: tuple[str, ...]  # the tensors whose gradients share a kernel

    def operands(self, dtype: torch.dtype = torch.float32, edges: int = EDGES, low: int = 0) -> dict[str, Tensor]:
        values = {
            name: torch.randn([edges if length == EDGES else length for length in shape]).to(DEVICE, dtype)
            for name, shape in self.shapes.items()
        }
        indices = {name: torch.randint(low, NODES, (edges,)).to(DEVICE) for name in "TU" if f"{name}[" in self.expr}
        return {**values, **indices}


def rows(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows at an index, zero where it is -1."""
    is_there = (index >= 0).view(-1, *[1] * (tensor.dim() - 1))
    return torch.where(is_there, tensor[index.clamp(min=0)], 0)


def added(values: Tensor, index: Tensor) -> Tensor:
    """The sums of rows by an index; a row at -1 is left out."""
    total = values.new_zeros(NODES + 1, *values.shape[1:])
    return total.index_add(0, torch.where(index < 0, NODES, index), values)[:NODES]


def weighted_sum(T, A, X, U):
    return added(torch.where((U >= 0)[:, None, None], A[..., None], 0) * rows(X, U), T)


CASES = {
    "weighted sum": Case(
        "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]",
        {"A": (EDGES, 3), "X": (NODES, 3, 5)},
        (NODES, 3, 5),
        weighted_sum,
        ("A", "X"),
    ),
    "scores": Case(
        "S[e,h] += Q[T[e],h,d] * K[U[e],h,d]",
        {"Q": (NODES, 2, 7), "K": (NODES, 2, 7)},
        (EDGES, 2),
        lambda T, Q, K, U: (rows(Q, T) * rows(K, U)).sum(2),
        ("Q", "K"),
    ),
    "filtered": Case(
        "Y[T[e],c] += 0.5 * F[e,c] * X[U[e],c]",
        {"F": (EDGES, 37), "X": (NODES, 37)},
        (NODES, 37),
        lambda T, F, X, U: added(0.5 * torch.where((U >= 0)[:, None], F, 0) * rows(X, U), T),
        ("F", "X"),
    ),
    "with a sum over edges": Case(
        "Y[T[e],h,d] += A[e,h] * X[U[e],h,d] * C[h,d]",
        {"A": (EDGES, 3), "X": (NODES, 3, 4), "C": (3, 4)},
        (NODES, 3, 4),
        lambda T, A, X, U, C: weighted_sum(T, A, X, U) * C,
        ("A", "X", "C"),
    ),
    "outer products": Case(
        "Y[e,c] = A[e] * B[c]",
        {"A": (EDGES,), "B": (300,)},
        (EDGES, 300),
        lambda A, B: A[:, None] * B,
        ("A", "B"),
    ),
    "both sides weighted": Case(
        "Y[e,c] = D[e] * X[e,c] * W[c]",
        {"D": (EDGES,), "X": (EDGES, 37), "W": (37,)},
        (EDGES, 37),
        lambda D, X, W: D[:, None] * X * W,
        ("D", "X", "W"),
    ),
    "a matrix to each": Case(
        "Y[e,o] += X[e,i] * W[e,i,o]",
        {"X": (EDGES, 3), "W": (EDGES, 3, 4)},
        (EDGES, 4),
        lambda X, W: torch.einsum("ei,eio->eo", X, W),
        ("X", "W"),
    ),
    "a diagonal": Case(
        "Y[e] += A[e,i,i] * B[e,i]",
        {"A": (EDGES, 3, 3), "B": (EDGES, 3)},
        (EDGES,),
        lambda A, B: (A.diagonal(dim1=1, dim2=2) * B).sum(1),
        ("A", "B"),
    ),
    "a sum that one gradient spreads": Case(
        "Y[e] += A[e] * X[e,c]", {"A": (EDGES,), "X": (EDGES, 4)}, (EDGES,), lambda A, X: A * X.sum(1), ("A", "X")
    ),
    "one over a part of a tile": Case(
        "Y[e] += A[e] * X[e,c] * W[e,d]",
        {"A": (EDGES,), "X": (EDGES, 3), "W": (EDGES, 4)},
        (EDGES,),
        lambda A, X, W: A * X.sum(1) * W.sum(1),
        ("A", "X", "W"),
    ),
    "a row longer than a tile": Case(
        "Y[e,c] += D[e] * X[e,c]",
        {"D": (EDGES,), "X": (EDGES, 4500)},
        (EDGES, 4500),
        lambda D, X: D[:, None] * X,
        ("D", "X"),
    ),
}


@pytest.fixture(params=[0, -1], ids=["first config", "last"])
def together(request):
    """Has one config of the joint kernel run wherever there is one."""
    with share_kernels(request.param) as contests:
        yield contests


def check(case: Case, operands: dict[str, Tensor], learning: tuple[str, ...] | None = None) -> None:
    """Compare the gradients with those of float64."""
    names = learning or tuple(case.shapes)
    leaves = {name: tensor.detach().requires_grad_(name in names) for name, tensor in operands.items()}
    doubles = {name: t.detach().double() if t.is_floating_point() else t for name, t in operands.items()}
    for name in names:
        doubles[name].requires_grad_()
    expected = case.meaning(**doubles)
    size = tuple(expected.shape)
    result = insum(case.expr, size=size, **leaves)
    upstream = torch.randn(size).round().to(DEVICE, result.dtype)
    got = torch.autograd.grad(result, [leaves[name] for name in names], upstream)
    wanted = torch.autograd.grad(expected, [doubles[name] for name in names], upstream.double())
    for one, reference in zip(got, wanted, strict=True):
        assert_matches(one, reference)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_together_equal_those_of_float64(together, name, dtype):
    case = CASES[name]
    torch.manual_seed(0)
    operands = case.operands(dtype)
    if dtype.itemsize == 2:  # whole numbers, whose products and sums are exact in half precision
        operands = {key: t.round() if t.is_floating_point() else t for key, t in operands.items()}
    check(case, operands)
    assert outputs(together) == [tuple(f"d{key}" for key in case.joint)]


@pytest.mark.parametrize("name", ["weighted sum", "scores", "filtered", "with a sum over edges"])
def test_an_absent_entry_adds_nothing_though_others_are_no_numbers(together, name):
    case = CASES[name]
    operands = case.operands(low=-1)
    operands["U"][0] = operands["T"][1] = -1
    check(case, operands)
    for key in case.shapes:
        if case.shapes[key][0] == EDGES:
            operands[key][0] = float("nan")  # beside an index of -1
    names = tuple(key for key in case.joint if case.shapes[key][0] != EDGES)
    leaves = {key: t.requires_grad_(key in case.joint) for key, t in operands.items()}
    result = insum(case.expr, size=case.size, **leaves)
    grads = torch.autograd.grad(result, [leaves[key] for key in case.joint], torch.ones_like(result))
    for key, grad in zip(case.joint, grads):
        assert key not in names or grad.isfinite().all()


def test_only_the_gradients_that_are_wanted_share_a_kernel(together):
    case = CASES["with a sum over edges"]
    check(case, case.operands(), ("A",))
    assert not together
    for wanted in (("A", "C"), ("X", "A")):
        check(case, case.operands(), wanted)
        assert {*outputs(together)[-1]} == {f"d{name}" for name in wanted}
    assert len(together) == 2


def test_calls_of_other_lengths_replayed_or_not(together):
    case = CASES["weighted sum"]
    for edges in (11, 11, 11, 64, 64, 130, 130, 130, 1):
        check(case, case.operands(edges=edges))


def test_an_index_that_becomes_padded_is_noticed(together):
    case = CASES["weighted sum"]
    for low in (0, 0, 0, -1, -1, -1, 0):
        operands = case.operands(low=low)
        if low < 0:
            operands["U"][0] = operands["T"][1] = -1
        check(case, operands)


def test_no_edges_at_all(together):
    case = CASES["weighted sum"]
    check(case, case.operands(edges=0))
    assert not together


def test_second_derivatives(together):
    case = CASES["weighted sum"]
    operands = case.operands(torch.float64)
    leaves = [operands["A"].requires_grad_(), operands["X"].requires_grad_()]
    seconds = []
    for result in (insum(case.expr, size=case.size, **operands), case.meaning(**operands)):
        grads = torch.autograd.grad(result.square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))
    for one, reference in zip(*seconds, strict=True):
        assert_matches(one, reference)


def test_deterministic_sums_that_are_scattered_stay_apart(together):
    case, stored = CASES["weighted sum"], CASES["a matrix to each"]
    torch.use_deterministic_algorithms(True)
    try:
        check(case, case.operands())
        assert not together
        check(stored, stored.operands())
        assert outputs(together) == [("dX", "dW")]
    finally:
        torch.use_deterministic_algorithms(False)


def test_strides_of_any_order(together):
    case = CASES["weighted sum"]
    operands = case.operands()
    operands["X"] = operands["X"].transpose(1, 2).contiguous().transpose(1, 2)
    operands["A"] = operands["A"].t().contiguous().t()
    check(case, operands)


def calls_of(case: Case, operands: dict[str, Tensor]) -> list[JointCall]:
    upstream, calls = torch.randn(case.size).to(DEVICE), []
    for name in case.joint:
        ((derived, grad_name, others),) = terms(case.expr, name)
        tensors = [upstream, *[operands[other] for other in others]]
        calls.append(JointCall(derived, ",".join([grad_name, *others]), tuple(operands[name].shape), tensors))
    return calls


def problem_of(calls: list[JointCall]):
    return joint_problem([prepare(*call.statement).problem(call.tensors, call.fact) for call in calls])


def test_each_tensor_is_loaded_once():
    own = problem_of(calls_of(CASES["weighted sum"], CASES["weighted sum"].operands()))
    assert own is not None
    for config in own.configs:
        source = own.kernel(config).source
        assert sorted(re.findall(r"tl\.load\((\w+)_ptr", source)) == ["A", "T", "U", "X", "dY"]
        assert source.count("tl.store") == source.count("tl.atomic_add") == 1


def test_results_are_stored_by_several_elements_at_once():
    case = Case("Y[e,c] += F[e,c] * X[U[e],c]", {"F": (EDGES, 36), "X": (NODES, 36)}, (EDGES, 36), max, ("F", "X"))
    own = problem_of(calls_of(case, case.operands()))
    assert own is not None
    source = own.kernel(own.configs[0]).source
    assert all(f"(stride_{output}_0 // 4 * 4)" in source for output in (0, 1))


def test_a_name_for_two_tensors_keeps_statements_apart(together):
    calls = calls_of(CASES["weighted sum"], CASES["weighted sum"].operands())
    first, second = calls
    other = second._replace(tensors=[second.tensors[0].clone(), *second.tensors[1:]])
    results = run_jointly([first, other], run)
    assert not together
    for result, call in zip(results, calls):
        torch.testing.assert_close(result, run(*call.statement, False), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_way_is_kept(is_faster):
    """The first config, or a kernel for each statement."""
    case = CASES["weighted sum"]
    with pretended_clock(joint) as contests:
        contests.winner = lambda _, ways: ways[0] if is_faster else joint.APART
        for edges in (67, 71, 103):
            calls = calls_of(case, case.operands(edges=edges))
            results = run_jointly(calls, run)
            for result, call in zip(results, calls):
                torch.testing.assert_close(result, run(*call.statement, False), **TOLERANCE[torch.float32])
        assert outputs(contests) == [("dA", "dX")]
        assert (joint._choice(calls, run).launcher is not None) == is_faster


@pytest.mark.parametrize("is_faster", [True, False])
def test_results_are_written_to_their_places(is_faster):
    """By a shared kernel; or by the caller's own way, where it has one."""
    case, asked = CASES["weighted sum"], list[int]()

    def alone(at: int, value: Tensor) -> Tensor:
        asked.append(at)
        return value

    for edges in (67, 103):
        calls = calls_of(case, case.operands(edges=edges))
        expected = [run(*call.statement, False) for call in calls]
        memory = [torch.full((len(value), value[0].numel() + 5), 7.0, device=DEVICE) for value in expected]
        places = [own[:, 3:-2].unflatten(1, value.shape[1:]) for own, value in zip(memory, expected)]
        placed = [
            call._replace(place=place, alone=partial(alone, at, value))
            for at, (call, place, value) in enumerate(zip(calls, places, expected))
        ]
        with pretended_clock(joint) as contests:
            contests.winner = lambda _, ways: ways[0] if is_faster else joint.APART
            contests.runs = 0
            results = run_jointly(placed, run)
        for result, place, own, value in zip(results, places, memory, expected, strict=True):
            assert result is place
            torch.testing.assert_close(result, value, **TOLERANCE[torch.float32])
            assert (own[:, :3] == 7).all()
            assert (own[:, -2:] == 7).all()
    assert asked == ([] if is_faster else [0, 1] * 2)


def test_statements_that_store_may_share_a_kernel_without_those_that_scatter():
    """Where the last of the joint kernels takes the least."""
    sizes = {"A": (EDGES, 3), "B": (EDGES, 5), "X": (NODES, 3, 5)}
    case = Case("Y[T[e],h,d] += A[e,h] * B[e,d] * X[U[e],h,d]", sizes, (NODES, 3, 5), weighted_sum, ("A", "B", "X"))
    with pretended_clock(joint) as contests:
        contests.runs, contests.winner = 0, lambda _, ways: ways[-2]
        for edges in (67, 71):
            calls = calls_of(case, case.operands(edges=edges))
            for result, call in zip(run_jointly(calls, run), calls):
                torch.testing.assert_close(result, run(*call.statement, False), **TOLERANCE[torch.float32])
        choice = joint._choice(calls, run)
    assert [calls[at].expr.split("[")[0] for at in choice.places] == ["dA", "dB"]


def test_a_scatter_by_a_sorted_index_may_have_a_kernel_of_its_own():
    case = CASES["scores"]
    operands = case.operands()
    by_itself, together = {(0, 1, 2): (0,), (1, 2): ()}, {(0, 1, 2): (0, 1)}
    for sorted_ones, groups in (("", {(0, 1, 2): ()}), ("T", by_itself), ("TU", together)):
        given = {name: t.sort().values if name in sorted_ones else t for name, t in operands.items()}
        calls = [*calls_of(case, given), *calls_of(CASES["weighted sum"], CASES["weighted sum"].operands())[:1]]
        assert joint._groups([prepare(*call.statement).problem(call.tensors, call.fact) for call in calls]) == groups


@pytest.mark.parametrize(
    ("expr", "size", "is_told"), [("Y[T[e],c] += X[e,c]", (NODES, 5), True), ("Y[e,c] += X[T[e],c]", (EDGES, 5), False)]
)
def test_what_was_tuned_for_an_index_that_ascends_is_not_taken_for_another(expr, size, is_told):
    """A gather costs the same in any order, but for what caches hold."""
    X = torch.randn(EDGES, 5).to(DEVICE)
    indices = [torch.tensor([*range(4), *[4] * (EDGES - 5), last]).to(DEVICE) for last in (5, 0)]
    statement = prepare(expr, "T,X", size, [indices[0], X], None)
    variants = [statement.variant([index, X]) for index in indices]
    keys = [statement.problem([index, X], None).key for index in indices]
    signatures = [statement.problem([index, X], None).signature for index in indices]
    for first, second in (variants, keys, signatures, [statement.kernel_key(own, None) for own in variants]):
        assert (first != second) == is_told


@pytest.mark.parametrize("cores", [2, 16])
def test_few_joint_kernels_are_built_and_none_for_each_statement_where_they_win(monkeypatch, cores):
    """Timing is pretended: joint kernels take about as long, by the prediction less than a kernel for each or more."""
    started, alone = list[str](), 0.0

    def fastest(key, ways, first, start, others):
        times, names = {}, [*first]
        while names:
            for name in names:
                started.append(name)
                times[name] = 3.0 + 0.01 * len(times)
            names = [*others(min(times, key=times.__getitem__), times)]
        return min(times, key=times.__getitem__)

    monkeypatch.setenv("INSUM_TUNE", "default")
    monkeypatch.setattr(search, "_cores", lambda: cores)
    monkeypatch.setattr(joint, "fastest", fastest)
    monkeypatch.setattr(joint, "may_be_timed", lambda device: True)
    monkeypatch.setattr(joint, "_predicted", lambda joints, problems, ways: [*[1.0 for _ in ways], alone])
    for alone in (1.5, 0.9):
        forget()
        started.clear()
        joint._choice(calls_of(CASES["weighted sum"], CASES["weighted sum"].operands(edges=67)), run)
        assert 0 < len(started) <= 8
        assert (joint.APART in started) == (alone < 1)


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="nothing is timed")
def test_gradients_are_timed_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "default")
    forget()
    case = CASES["weighted sum"]
    for _ in range(4):
        check(case, case.operands(torch.float64, edges=3001))  # hundreds of summands, which float32 rounds
    assert len(joint._choices) == 1


def test_statements_over_other_names_or_with_little_in_common_share_no_kernel():
    """Long sums do where several read a tensor with all names: not of a product of matrices, nor with a vector."""
    shared = calls_of(CASES["outer products"], CASES["outer products"].operands())
    assert problem_of(shared) is not None
    scores = calls_of(CASES["scores"], CASES["scores"].operands())
    assert problem_of([*scores, *shared]) is None
    a, b, out = draw("A", 30, 20), draw("B", 20, 40), draw("dY", 30, 40)
    product = [("dA[i,k] += dY[i,j] * B[k,j]", {**out, **b}), ("dB[k,j] += dY[i,j] * A[i,k]", {**out, **a})]
    vector = [
        ("dA[i,k] += dy[i] * x[k]", draw("dy", 30) | draw("x", 20)),
        ("dx[k] += dy[i] * A[i,k]", draw("dy", 30) | a),
    ]
    for statements, sizes in ((product, [(30, 20), (20, 40)]), (vector, [(30, 20), (20,)])):
        calls = [
            JointCall(text, ",".join(tensors), size, [*tensors.values()])
            for (text, tensors), size in zip(statements, sizes)
        ]
        assert problem_of(calls) is None


def draw(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape, device=DEVICE)}


def test_an_infinite_factor_is_not_multiplied_with_the_zeros_beyond_the_last_summand(together):
    """The last tiles of rows and of columns are not full."""
    P, Q, B = (torch.rand(length, device=DEVICE) + 0.1 for length in (EDGES, EDGES, 37))
    P[3] = torch.inf
    leaves = {name: tensor.requires_grad_() for name, tensor in zip("PQB", (P, Q, B))}
    upstream = torch.rand(EDGES, 37, device=DEVICE) + 0.1
    got = torch.autograd.grad(insum("Y[e,c] = P[e] * Q[e] * B[c]", **leaves), list(leaves.values()), upstream)
    p, q, b = (tensor.detach().double() for tensor in (P, Q, B))
    weighted, rows_of = upstream.double() @ b, (p * q) @ upstream.double()
    assert outputs(together) == [("dP", "dQ", "dB")]
    for one, reference in zip(got, (weighted * q, weighted * p, rows_of)):
        assert torch.equal(one.isinf(), reference.isinf())
        assert_matches(one.where(one.isfinite(), 0), reference.where(reference.isfinite(), 0))


def test_parts_of_sums_are_added_in_no_order():
    """So they share no kernel where results are to be the same each time, as those do that a program holds."""
    torch.use_deterministic_algorithms(True)
    try:
        shares = {name: problem_of(calls_of(CASES[name], CASES[name].operands())) is not None for name in CASES}
        assert [name for name in ("a matrix to each", "a diagonal", "both sides weighted") if shares[name]] == [
            "a matrix to each",
            "a diagonal",
        ]
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_no_kernel_runs_leaves_the_others_together(together):
    """In deterministic mode there is none that scatters by an index whose order is not known."""
    A, B, X = (torch.randn(n, 5, device=DEVICE).requires_grad_() for n in (EDGES, EDGES, NODES))
    U = torch.randint(0, NODES, (EDGES,), device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        got = torch.autograd.grad(insum("Y[e,c] += A[e,c] * B[e,c] * X[U[e],c]", A=A, B=B, X=X, U=U).sum(), (A, B, X))
    finally:
        torch.use_deterministic_algorithms(False)
    assert outputs(together) == [("dA", "dB")]
    a, b, x = (tensor.detach().double() for tensor in (A, B, X))
    for one, reference in zip(got, (b * x[U], a * x[U], added(a * b, U))):
        assert_matches(one, reference)
