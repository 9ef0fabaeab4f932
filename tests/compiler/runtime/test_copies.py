"""Sums in copies of the output: parts of a long sum or max in a fixed order, scatters into few places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import problem
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler.codegen import Config, Flags
from insum_ops.compiler.planning import schedules, strategies
from insum_ops.compiler.tuning.problem import Candidate, candidates, resize

pytestmark = pytest.mark.kernels
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def positions(extent, *shape):
    return torch.randint(0, extent, shape, device=DEVICE)


def in_copies(expr, tensors, size=None, strategy="store", copies=4):
    """The launcher of a statement's sum in copies of its output, and its tensors in a list."""
    own = problem(expr, tensors, size)
    assert strategy in strategies(own.bound)
    listed = schedules(own.bound, own.strides, strategy, use_dot=False)
    way = next(way for way in listed if not way.is_shared and not way.has_copies).in_copies()
    sizes = tuple((axis, 8) for axis in way.axes)
    config = Config(sizes, 1, 1, parts=copies if strategy == "store" else 1, copies=copies)
    return own.launcher(Candidate(way, config)), list(tensors.values())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", [2, 7, 64])
def test_parts_of_a_sum(copies, dtype):
    X, Y = values(50, 3, 13, dtype=dtype), values(13, dtype=dtype)
    launcher, tensors = in_copies("Y[k] += X[i,j,k]", {"X": X}, copies=copies)
    assert_matches(launcher(tensors), X.double().sum((0, 1)))
    assert copies < 8 or launcher.total.schedule.names("step")  # many copies are read at once, not one by one
    launcher, tensors = in_copies("Y[k] += X[i,j,k]", {"X": X, "Y": Y}, copies=copies)
    assert_matches(launcher(tensors), (Y.double() + X.double().sum((0, 1))))
    launcher, tensors = in_copies("Y[()] += 3 * X[i,j,k]", {"X": X}, copies=copies)
    assert_matches(launcher(tensors), 3 * X.double().sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_scatters(dtype):
    X, G, Y = values(90, 5, dtype=dtype), positions(6, 90), values(5, 6, dtype=dtype)
    G[::7] = -1
    kept = torch.zeros(7, 5, dtype=torch.float64, device=DEVICE).index_add_(0, torch.where(G < 0, 6, G), X.double())[:6]
    launcher, tensors = in_copies("Y[G[p],c] += X[p,c]", {"X": X, "G": G}, (6, 5), "atomic")
    assert_matches(launcher(tensors), kept)
    launcher, tensors = in_copies("Y[c,G[p]] += X[p,c]", {"X": X, "G": G, "Y": Y.t().t()}, (5, 6), "atomic")
    assert_matches(launcher(tensors), (Y.double() + kept.t()))


def test_a_seed_may_lie_in_any_way():
    X, Y = values(40, 6, 4), values(4, 6).t()
    launcher, tensors = in_copies("Y[j,k] += X[i,j,k]", {"X": X, "Y": Y})
    assert_matches(launcher(tensors), (Y.double() + X.double().sum(0)))


def test_a_nan_stays_where_it_belongs():
    X, G = values(300), positions(3, 300)
    X[5], G[5] = float("nan"), 1
    launcher, tensors = in_copies("Y[G[p]] += X[p]", {"X": X, "G": G}, (3,), "atomic")
    assert launcher(tensors).isnan().tolist() == [False, True, False]


def test_other_lengths_share_both_kernels():
    runners = set()
    for length in (100, 101, 112):
        X, G = values(9 * length, 3), positions(length, 9 * length)
        launcher, _ = in_copies("Y[G[p],c] += X[p,c]", {"X": X, "G": G}, (length, 3), "atomic")
        other = {"X": values(640, 3), "G": positions(length + 1, 640)}
        resized = resize(launcher, problem("Y[G[p],c] += X[p,c]", other, (length + 1, 3)).bound, None)
        expected = torch.zeros(length + 1, 3, dtype=torch.float64, device=DEVICE)
        assert_matches(resized(list(other.values())), expected.index_add_(0, other["G"], other["X"].double()))
        runners.add(id(launcher.total.runners))
    assert len(runners) == 1


@pytest.mark.parametrize("length", [700, 701, 704])
def test_calls_of_ever_other_lengths(length):
    for p in (length, length + 1, length + 3, length + 40):
        X, G = values(p), positions(5, p)
        expected = torch.zeros(5, dtype=torch.float64, device=DEVICE).index_add_(0, G, X.double())
        assert_matches(insum("Y[G[p]] += X[p]", size=(5,), X=X, G=G), expected)
        assert_matches(insum("Y[()] += X[p] * X[p]", X=X), (X.double() ** 2).sum())


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (2050, 3), (41, 53)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_of_every_shape(shape, dtype):
    X = values(*shape, dtype=dtype)
    wide = X.double()
    assert_matches(insum("Y[()] += X[i,j] * X[i,j]", X=X), (wide * wide).sum())
    assert_matches(insum("Y[j] += X[i,j]", X=X), wide.sum(0))
    assert_matches(insum("Y[i] += X[i,j]", X=X), wide.sum(1))
    assert_matches(insum("Y[()] = max(X[i,j])", X=X), wide.amax())
    assert_matches(insum("Y[i] = max(X[i,j])", X=X), wide.amax(1))


def test_gradients_of_a_sum_in_copies():
    X = values(3000).requires_grad_()
    G = positions(4, 3000)
    (insum("Y[G[p]] += X[p] * X[p]", size=(4,), X=X, G=G) * torch.arange(4, device=DEVICE)).sum().backward()
    assert_matches(X.grad, (2 * X * G).double())


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs one program after another")
def test_parts_are_added_up_in_a_fixed_order():
    X = values(3001, 977)
    torch.use_deterministic_algorithms(True)
    try:
        sums = [insum("Y[()] += X[i,j] * X[i,j]", X=X) for _ in range(8)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(sums[0], other) for other in sums)


def test_what_can_not_be_in_copies():
    X, G = values(40, 6), positions(3, 40)
    largest = problem("Y[j] = max(X[i,j] * W[G[i]])", {"X": X, "G": G, "W": values(3)})
    assert schedules(largest.bound, largest.strides, "store")[0].in_copies() is None  # a part may have no product
    own = problem("Y[G[i],j] += X[i,j]", {"X": X, "G": G}, (3, 6))
    way = schedules(own.bound, own.strides, "atomic")[0]
    assert replace(way, has_copies=True).in_copies() is None


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf"), -float("inf")])
def test_the_largest_of_many_is_found_in_parts(bad, reduction):
    X = values(9, 700, dtype=torch.float16)
    X[3, 500] = bad
    launcher, tensors = in_copies(f"Y[i] = {reduction}(-2 * X[i,j])", {"X": X}, copies=64)
    expected = getattr(-2 * X, f"a{reduction}")(1)  # one rounding, as the kernel's
    torch.testing.assert_close(launcher(tensors), expected, rtol=0, atol=0, equal_nan=True)
    own = problem(f"Y[()] = {reduction}(X[i,j])", {"X": values(900, 70)})
    assert candidates(own)[0].schedule.has_copies
    winners = problem(f"Y[()] = {reduction}(X[i,j])", {"X": values(900, 70)}, flags=Flags(wants_winners=True))
    assert not any(way.schedule.has_copies for way in candidates(winners))
