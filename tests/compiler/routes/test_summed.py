"""Several statements whose results are added up: one kernel for all of them gives what one after the other gives."""

from __future__ import annotations

import pytest
import torch
from joint_kernels import share_kernels
from pretended_clock import pretended_clock
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor

from insum_ops.compiler import JointCall, run_plain, run_several, run_summed
from insum_ops.compiler.routes import joint
from insum_ops.compiler.tuning import joint as tuning_jointly
from insum_ops.formats.facts import ConstantTables

pytestmark = pytest.mark.kernels

MIXED = "Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,u,w]"
ROWS, COLUMNS, SECOND = 3, 13, 2  # i, w and the components of Y
CHANNELS = (5, 16, 5, 1)  # u, of each statement
CONFIGS = (0, 1, -1)


def tables(seed: int) -> dict[str, Tensor]:
    """Coefficients with a row that has no entry; each statement has its own."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: torch.randint(0, high, (ROWS, 2), generator=generator)
    J, K, V = draw(2), draw(SECOND), draw(3).double() + 1
    J[seed % ROWS] = K[seed % ROWS] = -1
    V[seed % ROWS] = 0
    return {"CGV": V, "CGJ": J.int(), "CGK": K.int()}


def parts(rows: int, dtype: torch.dtype = torch.float32) -> tuple[list[JointCall], Tensor]:
    """Statements that share Y, and their sum in float64."""
    Y, calls, total = torch.randn(rows, SECOND).round().to(DEVICE, dtype), [], 0.0
    for seed, channels in enumerate(CHANNELS):
        X, W = (torch.randn(rows, *rest).round().to(DEVICE, dtype) for rest in ((2, channels), (channels, COLUMNS)))
        known = tables(seed)
        J, K, V = (known[name].to(DEVICE) for name in ("CGJ", "CGK", "CGV"))
        picked = X.double()[:, J.long().clamp(min=0)], Y.double()[:, K.long().clamp(min=0)]
        total = total + torch.einsum("ir,biru,bir,buw->biw", V, *picked, W.double())
        given = {"X": X, "Y": Y, "W": W, "CGV": V.to(dtype), "CGJ": J, "CGK": K}
        names, size = ",".join(given), (rows, ROWS, COLUMNS)
        calls.append(JointCall(MIXED, names, size, [*given.values()], ConstantTables.of(known)))
    return calls, total


def summed(calls: list[JointCall]) -> Tensor:
    """The sum, by one kernel or by torch's addition of what each statement gives."""
    return run_summed(calls, lambda: sum(run_plain(*call.statement) for call in calls))


def by_kernel(config: int, calls: list[JointCall]) -> Tensor:
    with share_kernels(config) as contests:
        result = summed(calls)
        assert len(contests) == 1
        assert joint.APART in contests[0][1]
    return result


@pytest.mark.sampled
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_equal_those_of_float64(dtype, config):
    torch.manual_seed(0)
    calls, expected = parts(7, dtype)
    assert_matches(by_kernel(config, calls), expected)


def test_the_other_way_is_taken_where_it_is_faster_or_nothing_may_be_timed():
    torch.manual_seed(1)
    calls, expected = parts(4)
    other = summed(calls)
    assert_matches(other, expected)
    assert run_summed(calls, lambda: other) is other
    with pretended_clock(joint) as contests:
        contests.winner = joint.APART
        assert run_summed(calls, lambda: other) is other
        assert len(contests) == 1


def test_one_kernel_serves_other_lengths():
    torch.manual_seed(2)
    with share_kernels(0) as contests:
        for rows in (66, 67, 100, 80, 1, 2, 66):
            calls, expected = parts(rows)
            assert_matches(summed(calls), expected)
        assert len(contests) < 5  # those of one class are one choice


def test_several_statements_may_read_one_tensor():
    torch.manual_seed(3)
    calls, _ = parts(4)
    first = calls[0]
    with share_kernels(0):
        assert_matches(summed([first, first]), 2 * summed([first]).double())


class Named(Tensor):
    """A tensor of a class of its own: no kernel reads it."""


@pytest.mark.parametrize("run", [summed, lambda calls: run_several(calls)[0]])
def test_results_over_tensors_of_other_classes_are_written_to_their_places(run):
    torch.manual_seed(8)
    calls, _ = parts(4)
    expected = run_plain(*calls[0].statement)
    X, *others = calls[0].tensors
    place = torch.empty(4, ROWS, COLUMNS, device=DEVICE)
    found = run([calls[0]._replace(tensors=[X.as_subclass(Named), *others], place=place)])
    assert found.data_ptr() == place.data_ptr()
    assert_matches(place, expected.double())


@pytest.mark.parametrize("by_one_kernel", [True, False])
def test_a_sum_is_written_to_its_place_in_a_larger_tensor(by_one_kernel):
    torch.manual_seed(7)
    for rows in (4, 9):
        calls, expected = parts(rows)
        memory = torch.full((rows, 2 + ROWS * COLUMNS + 3), 5.0, device=DEVICE)
        place = memory[:, 2:-3].unflatten(1, (ROWS, COLUMNS))
        with share_kernels(0) as contests:
            contests.winner = contests.winner if by_one_kernel else joint.APART
            found = summed([call._replace(place=place) for call in calls])
        assert found.data_ptr() == place.data_ptr()
        assert_matches(memory[:, 2:-3].reshape(place.shape), expected)
        assert (memory[:, :2] == 5).all()
        assert (memory[:, -3:] == 5).all()


def test_an_infinite_factor_stays_in_its_row():
    torch.manual_seed(4)
    calls, expected = parts(4)
    calls[1].tensors[0][2] = float("inf")
    for config in CONFIGS:
        found = by_kernel(config, calls)
        assert_matches(found[[0, 1, 3]], expected[[0, 1, 3]])
        assert_matches(found[2, 1], expected[2, 1])  # where that statement has no entry
        assert not found[2, 0].isfinite().any()


def test_a_source_that_would_be_long_is_not_written(monkeypatch):
    """60 statements of 4 entries have more products than so many, however many blocks of channels they walk."""
    torch.manual_seed(6)
    calls, _ = parts(2)
    wide = calls[0]._replace(tensors=[torch.randn(2, 2, 112, device=DEVICE), *calls[0].tensors[1:]])
    wide.tensors[2] = torch.randn(2, 112, COLUMNS, device=DEVICE)
    monkeypatch.setattr(tuning_jointly, "MOST_PRODUCTS", 239)
    with pretended_clock(joint) as contests:
        found = summed([wide] * 60)
        assert not contests
    assert_matches(found / 60, summed([wide]).double())
    monkeypatch.setattr(tuning_jointly, "MOST_PRODUCTS", 240)
    with pretended_clock(joint) as contests:
        assert_matches(summed([wide] * 60) / 60, found.double() / 60)
        assert contests


def test_statements_that_no_kernel_adds_up_come_one_after_the_other():
    torch.manual_seed(5)
    calls, expected = parts(4)
    plain = JointCall("Z[b,i,w] += A[b,i,w]", "A", (4, ROWS, COLUMNS), [torch.ones(4, ROWS, COLUMNS, device=DEVICE)])
    scaled = calls[0]._replace(expr=f"{MIXED} * 2")
    with pretended_clock(joint) as contests:
        assert_matches(summed([*calls, plain]), expected + 1)
        assert_matches(summed([*calls[1:], scaled]), expected + summed(calls[:1]).double())
        assert not contests
