"""Blocks that stand side by side in one tile, since they share what one of them moves."""

from __future__ import annotations

import pytest
import torch
from problems import positions, problem, values
from scheduling import block_gradient, others, scheduled

from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import Flat, Merged
from insum_ops.compiler.planning.schedule import Schedule
from insum_ops.compiler.tuning.problem import Problem
from insum_ops.compiler.tuning.space import configs
from insum_ops.formats.facts import OwnedRows

pytestmark = pytest.mark.cpu


def test_narrow_blocks_that_share_a_side_stand_side_by_side() -> None:
    own = block_gradient()
    wide, narrow = schedules(own.bound, own.strides, "store")
    assert wide.merged == Merged("c", outer="q", inner="i", width=32)
    assert wide.extents["c"] == 256
    assert wide.axes == ("o", "t", "c")
    assert narrow.merged is None
    assert narrow.axes == ("o", "t", "i")
    assert (
        str(wide)
        == """\
scatter: store, product: tl.dot
index         extent  role
p                300  grid
q                  8  merged
i                 32  merged
o                 32  tile
c                256  tile
t                512  step"""
    )


def test_blocks_of_64_in_half_precision_do_too() -> None:
    own = block_gradient(o=64, i=64)
    wide, _ = schedules(own.bound, own.strides, "store")
    assert wide.merged == Merged("c", outer="q", inner="i", width=64)


def test_either_side_may_be_the_one_with_neighbours() -> None:
    own = block_gradient(expr="dW[p,q,i,o] += X[t,AK[p,q],i] * dY[t,AM[p],o]")
    wide, _ = schedules(own.bound, own.strides, "store")
    assert wide.axes == ("c", "t", "o")


@pytest.mark.parametrize(
    "own",
    [
        block_gradient(o=128),
        block_gradient(i=128),
        block_gradient(o=64, dtype=torch.float32),
        block_gradient(o=65, i=64),
        block_gradient(o=33, dtype=torch.float32),
        block_gradient(o=33, dtype=torch.float64),
        block_gradient(i=24),
        block_gradient(Q=1),
        problem("C[q,i,j] += A[i,k] * B[q,k,j]", {"A": values(32, 64), "B": values(8, 64, 32)}),
        problem("C[p,q,i,j] += A[p,q,i,k] * B[p,q,k,j]", {"A": values(9, 8, 32, 64), "B": values(9, 8, 64, 32)}),
        problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(32, 64), "B": values(64, 32)}),
    ],
    ids=[
        "wide rows",
        "wide columns",
        "wide numbers",
        "just too wide",
        "just too wide in single precision",
        "just too wide in double precision",
        "no power of two",
        "alone",
        "varying",
        "nothing shared",
        "no neighbour",
    ],
)
def test_other_dots_stay_alone(own: Problem) -> None:
    assert [way.merged for way in schedules(own.bound, own.strides, "store")] == [None]


def test_a_merged_axis_keeps_clear_of_names_in_use() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(512, 50, 32)}
    own = problem("dW[c,q,o,i] += dY[t,AM[c],o] * X[t,AK[c,q],i]", tensors)
    assert scheduled(own, "store").axes == ("o", "t", "c_")


def in_sets(rows: int = 32) -> Schedule:
    """Blocks in sets of two rows."""
    indices = {"AM": positions(64, 2), "AT": positions(700), "AS": positions(700, 2), "AK": positions(700)}
    tensors = {**indices, "AV": values(900, rows, 32), "B": values(128, 32, 1024)}
    expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
    return scheduled(problem(expr, tensors, (128, rows, 1024), OwnedRows("AM", "AT")), "owner")


def test_rows_of_a_set_are_side_by_side() -> None:
    made = in_sets()
    assert made.merged == Merged("c", "q", "i", 32)
    assert made.covers_output
    assert [str(factor) for factor in made.factors] == ["AV[AS[p,q],i,j]", "B[AK[p],j,n]"]
    assert all(dict(config.blocks)["c"] == 64 for config in configs(made, has_order=True))


def test_rows_of_no_power_of_two_are_not() -> None:
    assert in_sets(rows=24).merged is None


def test_what_is_kept_is_summed_nowhere() -> None:
    own = block_gradient()
    wide, narrow = schedules(own.bound, own.strides, "store")
    assert [name for name in ("p", "q", "o", "i", "t", "c") if wide.is_kept(name)] == ["p", "q", "o", "i", "c"]
    assert [name for name in ("p", "q", "o", "i", "t", "c") if narrow.is_kept(name)] == ["p", "q", "o", "i"]


def test_neighbours_that_are_no_set_are_not_taken_in_turn() -> None:
    indices = {"WO": positions(32), "WT": positions(200), "WI": positions(200)}
    tensors = {**indices, "W": values(200, 8, 32, 32), "X": values(32, 32, 64)}
    own = problem("Y[WO[WT[p]],q,o,n] += W[p,q,o,i] * X[WI[p],i,n]", tensors, (32, 8, 32, 64), OwnedRows("WO", "WT"))
    wide = scheduled(own, "owner")
    assert wide.flats == (Flat("q_o", ("q", "o")),)
    assert not wide.has_rows_in_turn


@pytest.mark.parametrize(
    "own",
    [
        problem("C[p,q,i,j] += A[p,i,k] * B[p,k,j]", {"A": values(9, 32, 64), "B": values(9, 64, 32)}, (9, 8, 32, 32)),
        problem(
            "dW[p,q,o,i] += dY[t,AM[p],o] * X[i,AK[p,q],t]",
            {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(32, 50, 512)},
        ),
        problem(
            "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i] * D[o,i]",
            {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(512, 50, 32)}
            | {"D": values(32, 32)},
        ),
    ],
    ids=["nothing moved", "varying columns", "a factor over both sides"],
)
def test_neighbours_share_what_one_of_them_moves(own: Problem) -> None:
    assert [way.merged for way in schedules(own.bound, own.strides, "store")] == [None]


def test_owned_rows_are_no_neighbours() -> None:
    """Though they would share X: each has as many groups as it happens to have."""
    tensors = {"WT": positions(200), "W": values(200, 32, 32), "X": values(32, 64)}
    own = problem("Y[WT[p],o,n] += W[p,o,i] * X[i,n]", tensors, (32, 32, 64), OwnedRows("WT"))
    (way,) = schedules(own.bound, own.strides, "owner", own.fact)
    assert way.merged is None
    assert dict(way.roles) == {"r": "grid", "o": "tile", "n": "tile", "p": "segment", "i": "step"}


@pytest.mark.parametrize(
    ("expr", "tensors", "preferred", "others_of_rules"),
    [
        (
            "dW[p,q,s,o,i] += dY[t,s,AM[p],o] * X[t,AK[p,q],i]",
            {"dY": values(512, 4, 40, 32), "X": values(512, 50, 32)},
            "so pq t",
            ["qi ps t", "iq ps t", "so pi t", "os pq t", "qi po t", "iq po t", "os pi t"],
        ),
        (
            "dW[p,q,o,i] += dY[t,u,AM[p],o] * X[t,u,AK[p,q],i]",
            {"dY": values(512, 64, 40, 32), "X": values(512, 64, 50, 32)},
            "qi p t",
            ["qi p u", "iq p t", "iq p u"],
        ),
    ],
    ids=["several sides", "several sums"],
)
def test_a_full_search_has_all_neighbours_once(
    expr: str, tensors: dict[str, torch.Tensor], preferred: str, others_of_rules: list[str]
) -> None:
    """Two names side by side, what is left of the grid, and the sum; rules prefer one of them."""

    def neighbours(ways: tuple[Schedule, ...], is_shared: bool) -> list[str]:
        held = [(way.merged, way) for way in ways if way.is_shared == is_shared]
        return [
            f"{merged.outer}{merged.inner} {''.join(way.names('grid'))} {''.join(way.names('step'))}"
            for merged, way in held
            if merged is not None
        ]

    own = problem(expr, {"AM": positions(300), "AK": positions(300, 8), **tensors})
    assert neighbours(schedules(own.bound, own.strides, "store"), is_shared=False) == [preferred]
    rest = others(own, "store")
    assert neighbours(rest, is_shared=False) == others_of_rules
    assert neighbours(rest, is_shared=True) == [preferred, *others_of_rules]
