"""On a CPU the clock chooses among the programs of a statement, and between torch's gradients and statements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_clock import Contests, drawn_programs
from process_caches import forget
from reference import LoopNest
from tolerances import TOLERANCE, assert_within, bound
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.autograd import torch_gradients
from insum_ops.compiler.routes import choice

pytestmark = pytest.mark.cpu

SCORES = "S[e,h] += Q[T[e],h,d] * K[U[e],h,d]"
SUMS = "Y[T[e],c] += V[e] * X[U[e],c]"


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of choices that are timed, of which there are none at first."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("INSUM_TUNE", "default")
    forget()
    yield tmp_path / "tuning"
    forget()


@pytest.fixture
def contests() -> Iterator[Contests]:
    with drawn_programs() as made:
        yield made


@pytest.fixture(params=[torch_gradients.BY_TORCH, torch_gradients.AS_STATEMENTS])
def chosen(request: pytest.FixtureRequest, contests: Contests) -> str:
    """Who makes gradients."""
    contests.winner = request.param
    return str(request.param)


def choices(folder: Path) -> list[str]:
    return sorted(json.loads(path.read_bytes())["key"]["statement"] for path in folder.glob("*.json"))


def sums(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], Tensor]:
    T, U = torch.tensor([2, 0, 3, 0, 1, 2, 2]), torch.tensor([1, 1, 0, 4, 3, 2, 0])
    V, X = torch.randn(7, dtype=dtype), torch.randn(5, 9, dtype=dtype)
    expected = torch.zeros(4, 9, dtype=torch.float64).index_add(0, T, V.double()[:, None] * X.double()[U])
    return {"V": V, "X": X, "T": T, "U": U}, expected


def scores() -> dict[str, Tensor]:
    T, U = torch.tensor([2, 0, 3, 0, 1, 2, 2]), torch.tensor([1, 1, 0, 2, 3, 2, 0])
    Q, K = (torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return {"Q": Q, "K": K, "T": T, "U": U}


def expected_scores(Q: Tensor, K: Tensor, T: Tensor, U: Tensor) -> Tensor:
    return (Q[T] * K[U]).sum(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_the_fastest_program_is_found_once_and_remembered(clock: Path, dtype: torch.dtype) -> None:
    tensors, expected = sums(dtype)
    for _ in range(4):
        result = insum(SUMS, **tensors, size=(4, 9))
        torch.testing.assert_close(result.double(), expected, **TOLERANCE[dtype])
    assert choices(clock) == [f"program of {SUMS}"]


def test_a_call_whose_program_is_not_chosen_yet_leaves_no_plan(
    contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [True] * 6 + [False]
    monkeypatch.setattr(choice, "is_put_off", lambda key: asked.pop(0))
    tensors, expected = sums()
    for count in range(9):
        assert len(contests) == (count > 6)
        torch.testing.assert_close(insum(SUMS, **tensors, size=(4, 9)), expected)
    monkeypatch.setattr(pipeline, "runner_of", lambda *_: pytest.fail("worked out anew"))
    torch.testing.assert_close(insum(SUMS, **tensors, size=(4, 9)), expected)
    assert len(contests) == 1


def test_nothing_is_timed_if_tuning_is_off(clock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_TUNE", "off")
    tensors, expected = sums()
    torch.testing.assert_close(insum(SUMS, **tensors, size=(4, 9)), expected)
    insum(SCORES, **scores()).sum().backward()
    assert not clock.exists()


def test_nothing_is_timed_if_algorithms_are_deterministic_or_one_program_is_all_there_is(contests: Contests) -> None:
    assert insum("Y[i,k] += A[i,j] * B[j,k]", A=torch.ones(2, 3), B=torch.ones(3, 2)).tolist() == [[3, 3], [3, 3]]
    tensors, expected = sums()
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(insum(SUMS, **tensors, size=(4, 9)), expected)
        insum(SCORES, **scores())
    finally:
        torch.use_deterministic_algorithms(False)
    assert not contests


# expression, shapes of values, shapes of index tensors and what they point into, size
STATEMENTS: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, tuple[tuple[int, ...], int]], Any]] = {
    "gather": ("Y[p,c] = X[I[p],c]", {"X": (4, 3)}, {"I": ((6,), 4)}, None),
    "scatter": ("Y[I[p],c] += X[p,c]", {"X": (6, 9)}, {"I": ((6,), 4)}, (4, 9)),
    "histogram": ("Y[I[p]] += X[p]", {"X": (6,)}, {"I": ((6,), 4)}, (4,)),
    "index of an index": ("Y[()] += X[J[I[i]]]", {"X": (5,)}, {"J": ((4,), 5), "I": ((6,), 4)}, None),
    "scatter by an index of an index": (
        "Y[J[I[p]],c] += X[p,c]",
        {"X": (6, 2)},
        {"J": ((4,), 5), "I": ((6,), 4)},
        (5, 2),
    ),
    "edges": (
        "Y[T[e],h,d] += A[e,h] * X[U[e],h,d]",
        {"A": (7, 2), "X": (5, 2, 3)},
        {"T": ((7,), 4), "U": ((7,), 5)},
        (4, 2, 3),
    ),
    "sums that broadcast": ("Y[I[p]] += X[p,c]", {"X": (6, 3)}, {"I": ((6,), 4)}, (4,)),
    "into a seed": ("Y[I[p],c] += 2 * X[p,c]", {"X": (6, 2), "Y": (4, 2)}, {"I": ((6,), 4)}, None),
    "experts": ("Y[p,m] += X[p,c] * W[E[p],c,m]", {"X": (6, 3), "W": (2, 3, 4)}, {"E": ((6,), 2)}, None),
    "two dimensions": ("Y[p] += X[I[p],J[p]] * V[p]", {"X": (4, 5), "V": (6,)}, {"I": ((6,), 4), "J": ((6,), 5)}, None),
    "twice": ("Y[p] += X[I[p],c] * X[J[p],c]", {"X": (4, 3)}, {"I": ((6,), 4), "J": ((6,), 4)}, None),
    "cells": ("Y[I[p],J[p]] += V[p]", {"V": (6,)}, {"I": ((6,), 4), "J": ((6,), 3)}, (4, 3)),
    "diagonal": ("Y[i,c] += X[i,i] * W[I[i],c]", {"X": (4, 4), "W": (3, 2)}, {"I": ((4,), 3)}, None),
}


def drawn_case(name: str, dtype: torch.dtype, index_dtype: torch.dtype) -> tuple[str, dict[str, Tensor], Any]:
    """A statement of the table with tensors, of which those with values lie transposed."""
    expr, values, indices, size = STATEMENTS[name]
    tensors = {
        key: torch.randn(shape[::-1]).to(dtype).permute(*range(len(shape))[::-1]) for key, shape in values.items()
    }
    tensors = {key: tensor.requires_grad_() for key, tensor in tensors.items()}
    indexes = {key: torch.randint(high, shape).to(index_dtype) for key, (shape, high) in indices.items()}
    return expr, {**tensors, **indexes}, size


@pytest.mark.sampled("name", "chosen")
@pytest.mark.parametrize("chosen", [torch_gradients.BY_TORCH, torch_gradients.AS_STATEMENTS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_have_the_gradients_of_the_loop_nest_in_every_way(
    name: str, dtype: torch.dtype, chosen: str, contests: Contests
) -> None:
    contests.runs = 1
    for at in range(3):  # of programs, one after the other
        contests.winner = lambda _, ways, at=at: chosen if chosen in ways else ways[at % len(ways)]
        forget()
        expr, tensors, size = drawn_case(name, dtype, torch.int32 if at else torch.int64)
        nest = LoopNest(expr, {key: tensor.detach() for key, tensor in tensors.items()}, size)
        expected, upstream = nest.result(), torch.randn(nest.shape).to(dtype)
        wanted = nest.gradients(upstream)
        names = [key for key, tensor in tensors.items() if tensor.requires_grad]
        for _ in range(4):
            result = insum(expr, size=size, **tensors)
            assert_within(result, expected.value, bound(dtype, expected.magnitude, expected.terms, expected.factors))
            assert (result.grad_fn.name() == "_SumBackward") == (chosen == torch_gradients.AS_STATEMENTS)
            grads = torch.autograd.grad(result, [tensors[key] for key in names], upstream)
            for key, grad in zip(names, grads, strict=True):
                own = wanted[key]
                assert grad.is_contiguous() or chosen == torch_gradients.BY_TORCH  # as torch lays them out
                rounding = bound(dtype, own.magnitude, 0, 1)
                assert_within(grad, own.value, rounding + bound(dtype, own.magnitude, own.terms, own.factors))


@pytest.mark.usefixtures("chosen")
def test_a_graph_is_kept_as_long_as_torch_keeps_its_own() -> None:
    tensors = scores()
    leaves = tensors["Q"], tensors["K"]
    for _ in range(4):
        result = insum(SCORES, **tensors)
        first = torch.autograd.grad(result.sum(), leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), first)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(result.sum(), leaves)


def test_gradients_of_gradients_leave_the_graph_of_a_statement_as_it_is(contests: Contests) -> None:
    contests.winner = torch_gradients.AS_STATEMENTS
    tensors = scores()
    leaves = tensors["Q"], tensors["K"]
    for _ in range(4):
        result = insum(SCORES, **tensors)
        first = torch.autograd.grad(result.sum(), leaves, create_graph=True)
        second = torch.autograd.grad((first[0] * first[1]).sum(), leaves)
        again = torch.autograd.grad(result.sum(), leaves)
        torch.testing.assert_close(again, first)
        wanted = torch.autograd.grad(expected_scores(**tensors).sum(), leaves, create_graph=True)
        torch.testing.assert_close(second, torch.autograd.grad((wanted[0] * wanted[1]).sum(), leaves))


def test_a_value_may_be_changed_in_place_and_what_is_saved_may_not(chosen: str) -> None:
    tensors = scores()
    leaves = tensors["Q"], tensors["K"]
    wanted = torch.autograd.grad(3 * expected_scores(**tensors).sum(), leaves)
    for _ in range(4):
        result = insum(SCORES, **tensors)
        result *= 3
        torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), wanted)
        result = insum(SCORES, **tensors)
        with torch.no_grad():
            tensors["Q"].add_(0)
            tensors["T"].add_(0)  # which torch saves in the place of Q
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(result.sum(), leaves)


@pytest.mark.usefixtures("chosen")
def test_what_is_timed_leaves_plans_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = scores()
    step = lambda: torch.autograd.grad(insum(SCORES, **tensors).sum(), (tensors["Q"], tensors["K"]))
    for _ in range(4):
        wanted = step()
    monkeypatch.setattr(pipeline, "runner_of", lambda *_: pytest.fail("worked out anew"))
    torch.testing.assert_close(step(), wanted)


@pytest.mark.parametrize("expr", ["Y[i,c] = max(X[N[i,k],c])", "Y[N[i,k],c] = min(X[i,c])"])
def test_a_max_that_learns_is_replayed(expr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (9, 4) if "min" in expr else None
    cases = [(torch.randn(6, 4, requires_grad=True), torch.randint(6, (6, 3))) for _ in range(6)]
    for at, (X, N) in enumerate(cases):  # the last calls by plans alone, over an index that is new
        if at == 4:
            monkeypatch.setattr(pipeline, "runner_of", lambda *_: pytest.fail("worked out anew"))
        nest = LoopNest(expr, {"X": X.detach(), "N": N}, size)
        expected, upstream = nest.result(), torch.randn(nest.shape)
        result = insum(expr, X=X, N=N, size=size)
        (grad,) = torch.autograd.grad(result, X, upstream)
        torch.testing.assert_close(result.double(), expected.value.double())
        torch.testing.assert_close(grad.double(), nest.gradients(upstream)["X"].value.double())


@pytest.mark.usefixtures("chosen")
def test_hooks_of_tensors_are_called_once() -> None:
    tensors = scores()
    calls = []
    tensors["Q"].register_hook(lambda grad: calls.append("Q"))
    for _ in range(4):
        calls.clear()
        result = insum(SCORES, **tensors)
        result.register_hook(lambda grad: calls.append("S"))
        result.sum().backward()
        assert calls == ["S", "Q"]


def test_hooks_on_what_is_saved_see_the_operands_of_statements_alone(contests: Contests) -> None:
    contests.winner = torch_gradients.AS_STATEMENTS
    tensors = scores()
    for _ in range(4):
        insum(SCORES, **tensors).sum().backward()
    seen = []
    pack = lambda tensor: (seen.append(tensor), tensor)[1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        insum(SCORES, **tensors).sum().backward()
    assert {tensor.data_ptr() for tensor in seen} == {tensor.data_ptr() for tensor in tensors.values()}


@pytest.mark.usefixtures("chosen")
def test_gradients_of_any_order_are_right() -> None:
    tensors = scores()
    Q, K, T, U = tensors.values()
    for _ in range(4):
        result, expected = insum(SCORES, **tensors), expected_scores(**tensors)
        torch.testing.assert_close(result, expected)
        upstream = torch.randn_like(expected)
        found, wanted = (torch.autograd.grad(value, (Q, K), upstream) for value in (result, expected))
        torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradgradcheck(lambda Q, K: insum(SCORES, Q=Q, K=K, T=T, U=U), (Q, K))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("chosen")
def test_gradients_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    upstream = torch.cat([torch.tensor([2048.0]), torch.full((4096,), 0.5)]).to(dtype)[:, None]  # 2048 + 0.5 is 2048
    X, index = torch.ones(2, 1, dtype=dtype, requires_grad=True), torch.zeros(4097, dtype=torch.int64)
    for expr in ("Y[p,c] = X[I[p],c]", "Y[p,c] += V[p] * X[I[p],c]"):
        V = {"V": torch.ones(4097, dtype=dtype)} if "V" in expr else {}
        for _ in range(4):
            result = insum(expr, X=X, I=index, **V)
            assert torch.autograd.grad(result, X, upstream)[0].tolist() == [[4096.0], [0.0]]


def test_an_index_that_is_padded_later_has_gradients_as_statements(contests: Contests) -> None:
    contests.winner = torch_gradients.BY_TORCH
    tensors = scores()
    for _ in range(3):
        insum(SCORES, **tensors).sum().backward()
    tensors["T"] = torch.tensor([2, -1, 3, 3, 1, 2, 2])
    tensors["Q"].data[0] = torch.nan
    dQ, dK = torch.autograd.grad(insum(SCORES, **tensors).sum(), (tensors["Q"], tensors["K"]))
    assert dQ[0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert torch.isfinite(dK).all()


@pytest.mark.parametrize(
    ("expr", "places"),
    [
        ("Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]", "R"),
        ("Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],S[e],c,o]", "RS"),
    ],
)
def test_what_no_position_chooses_reaches_no_gradient(expr: str, places: str, contests: Contests) -> None:
    """Of factors that are multiplied at all positions first, whose product torch differentiates."""
    ways = (torch_gradients.BY_TORCH, "as a rule, multiplies_first")
    contests.winner = lambda _, named: next((way for way in ways if way in named), named[0])
    index = {"D": torch.randint(6, (60,)), "S": torch.randint(5, (60,)).int(), "R": torch.randint(2, (60,))}
    lengths = [{"R": 3, "S": 6}[name] for name in places]
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ((60,), (6, 4), (*lengths, 4, 5))]
    V, X, W = leaves
    X[5], W[2] = torch.nan, torch.inf
    if places == "RS":
        index["S"][index["R"] == 0] = 1
        W[0, 0] = torch.nan  # of which each position is chosen, but not both at once
    for leaf in leaves:
        leaf.requires_grad_()
    message = V[:, None] * torch.einsum("ec,eco->eo", X[index["S"]], W[tuple(index[name] for name in places)])
    expected = torch.zeros(6, 5, dtype=torch.float64).index_add(0, index["D"], message)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    for _ in range(2):
        result = insum(expr, V=V, X=X, W=W, **index, size=(6, 5))
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.square().sum(), leaves), wanted)
    assert any("as a rule, multiplies_first" in names for _, names in contests)


@pytest.mark.parametrize("most", [10, 1000])
def test_what_holds_a_lot_on_its_way_has_gradients_as_statements(
    most: int, contests: Contests, monkeypatch: pytest.MonkeyPatch
) -> None:
    contests.winner = torch_gradients.BY_TORCH
    monkeypatch.setattr(torch_gradients, "HELD", most)
    insum(SCORES, **scores()).sum().backward()
    assert any(key.statement == f"gradients of {SCORES}" for key, _ in contests) == (most > 10)


@pytest.mark.usefixtures("clock")
def test_a_padded_index_has_gradients_as_statements() -> None:
    tensors = scores()
    tensors["T"] = torch.tensor([2, -1, 3, 0, 1, 2, 2])
    tensors["Q"].data[0] = torch.nan
    Q, K = tensors["Q"], tensors["K"]
    tensors["U"] = torch.tensor([1, 1, 0, -1, 3, 2, 0])
    for _ in range(3):
        dQ, dK = torch.autograd.grad(insum(SCORES, **tensors).sum(), (Q, K))
        assert dQ[0].tolist() == [[0, 0, 0], [0, 0, 0]]
        assert torch.isfinite(dK).all()


@pytest.mark.usefixtures("clock")
def test_checkpoints_find_the_same_saved_tensors_twice() -> None:
    tensors = scores()
    Q, K, T, U = tensors.values()
    run = lambda Q, K: insum(SCORES, Q=Q, K=K, T=T, U=U).relu()
    for _ in range(3):
        found = torch.autograd.grad(checkpoint(run, Q, K, use_reentrant=False).sum(), (Q, K))
        wanted = torch.autograd.grad(run(Q, K).sum(), (Q, K))
        torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("chosen")
def test_a_checkpoint_saves_what_a_call_outside_of_one_does() -> None:
    tensors = scores()
    Q, K, T, U = tensors.values()
    run = lambda Q, K: insum(SCORES, Q=Q, K=K, T=T, U=U).relu()
    for _ in range(4):  # the first call that is made of a kind is inside of a checkpoint, and the next is not
        found = torch.autograd.grad((checkpoint(run, Q, K, use_reentrant=False) + run(Q, K)).sum(), (Q, K))
        wanted = torch.autograd.grad(2 * expected_scores(Q, K, T, U).relu().sum(), (Q, K))
        torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("clock")
def test_wrong_calls_are_refused_as_ever() -> None:
    tensors = scores()
    tensors["T"] = torch.tensor([2, 0, 4, 0, 1, 2, 2])
    with pytest.raises(IndexError, match="T"):
        insum(SCORES, **tensors)
    with pytest.raises(ValueError, match="d"):
        insum(SCORES, **{**scores(), "K": torch.randn(4, 2, 5, dtype=torch.float64)})


@pytest.mark.usefixtures("clock")
def test_an_empty_result_leads_to_its_tensors() -> None:
    tensors = {name: each.requires_grad_(each.is_floating_point()) for name, each in sums()[0].items()}
    tensors["T"] = torch.full((7,), -1)
    result = insum(SUMS, **tensors, size=(0, 9))
    dV, dX = torch.autograd.grad(result.sum(), (tensors["V"], tensors["X"]))
    assert not dV.any()
    assert not dX.any()


@pytest.mark.usefixtures("clock")
def test_what_is_timed_lies_with_the_operands() -> None:
    tensors, given = scores(), sums()
    expected = expected_scores(**tensors)
    wanted = torch.autograd.grad(expected.sum(), (tensors["Q"], tensors["K"]))
    torch.set_default_device("meta")
    try:
        torch.testing.assert_close(insum(SUMS, **given[0], size=(4, 9)), given[1])
        result = insum(SCORES, **tensors)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), (tensors["Q"], tensors["K"])), wanted)
        assert choice.grad_like((2, 3), torch.float32).is_cpu
    finally:
        torch.set_default_device(None)
