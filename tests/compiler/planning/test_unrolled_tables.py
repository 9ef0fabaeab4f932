"""Tables whose numbers the source of a kernel holds: when they are, and with which axes."""

from __future__ import annotations

import pytest
import torch
from problems import positions, problem, values
from scheduling import scheduled

from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.schedule import Schedule
from insum_ops.formats.facts import ConstantTables

pytestmark = pytest.mark.cpu


def over_tables(
    expr: str, fixed: dict[str, torch.Tensor], size: tuple[int, ...], strategy: str = "store", **moving: torch.Tensor
) -> tuple[Schedule, ...]:
    meta = {name: values(*t.shape) if t.is_floating_point() else positions(*t.shape) for name, t in fixed.items()}
    own = problem(expr, {**moving, **meta}, size, ConstantTables.of(fixed))
    return schedules(own.bound, own.strides, strategy, own.fact)


TABLES = {"T": torch.tensor([[0.5, -2.0], [1.5, 1.0]]), "I": torch.tensor([[1, 0], [2, 1]])}


@pytest.mark.parametrize(
    ("indices", "shape", "axes"),
    [
        ("b,{},a", (1000, 3, 64), ("a",)),
        ("b,{},a,c", (1000, 3, 64, 8), ("a", "c")),
        ("b,{},a,c,d", (1000, 3, 64, 16, 8), ("a", "d")),
        ("b,{},c,a", (1000, 3, 8, 64), ("c", "a")),
    ],
)
def test_tables_have_axes_along_memory(indices: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    expr = f"Z[{indices.format('i')}] += T[i,r] * X[{indices.format('I[i,r]')}]"
    size = (shape[0], 2, *shape[2:])
    way, *others = over_tables(expr, TABLES, size, X=values(*shape))
    assert way.tables
    assert way.axes == axes
    assert bool(others) == (len(axes) == 1)
    grid = [name for name in "bacd" if name in indices and name not in axes]
    assert dict(way.roles) == {
        **dict.fromkeys(grid, "grid"),
        **dict.fromkeys(axes, "tile"),
        "i": "unrolled",
        "r": "unrolled",
    }


def test_an_axis_that_varies_is_alone() -> None:
    """The length along memory changes from call to call, since it is also that of Y."""
    expr = "Z[i,a,b] += T[i,r] * X[I[i,r],a,b] * Y[b]"
    way, *_ = over_tables(expr, TABLES, (2, 5, 64), X=values(3, 5, 64), Y=values(64))
    assert way.axes == ("b",)
    assert dict(way.roles) == {"a": "grid", "b": "tile", "i": "unrolled", "r": "unrolled"}
    way, *_ = over_tables("Z[i,b] += T[i,r] * X[I[i,r],b] * Y[b]", TABLES, (2, 64), X=values(3, 64), Y=values(64))
    assert way.axes == ("b",)


def test_results_over_tables_may_be_added_in_memory() -> None:
    expr = "Z[DST[b],i,u] += T[i,r] * X[SRC[b],I[i,r],u]"
    moving = {"X": values(1000, 3, 64), "SRC": positions(1000), "DST": positions(1000)}
    way, *_ = over_tables(expr, TABLES, (700, 2, 64), "atomic", **moving)
    assert way.tables
    assert dict(way.roles) == {"b": "grid", "u": "tile", "i": "unrolled", "r": "unrolled"}
    assert way.in_copies() is None


def test_positions_that_a_table_would_choose_are_not_in_the_source() -> None:
    expr = "Z[b,i,u] += T[i,r] * X[J[b,i],I[i,r],u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64), X=values(50, 3, 64), J=positions(1000, 2))
    assert way.tables == {}


@pytest.mark.parametrize(("channels", "is_held"), [(4096, True), (4097, False)])
def test_what_is_summed_over_tables_fits_one_tile(channels: int, is_held: bool) -> None:
    expr = "dY[b,i] += T[i,r] * X[b,I[i,r],u] * W[b,u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2), X=values(1000, 3, channels), W=values(1000, channels))
    assert bool(way.tables) == is_held


@pytest.mark.parametrize(("channels", "is_held"), [(256, True), (257, False)])
def test_beside_what_is_summed_a_tile_has_16_columns(channels: int, is_held: bool) -> None:
    """Which are as few as there may be, however many there are: 256 x 16 fits a tile."""
    expr = "Z[b,i,a] += T[i,r] * X[b,I[i,r],u,a] * W[b,u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64), X=values(1000, 3, channels, 64), W=values(1000, channels))
    assert bool(way.tables) == is_held


def test_the_last_axis_over_tables_is_the_one_along_memory() -> None:
    """More is read along a than is written along c."""
    expr, X = "Z[b,i,a,c] += T[i,r] * X[b,I[i,r],a,c]", values(1000, 3, 8, 64).transpose(2, 3)
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64, 8), X=X)
    assert way.axes == ("c", "a")


@pytest.mark.parametrize(("entries", "is_held"), [(512, True), (513, False)])
def test_a_source_holds_so_many_numbers(entries: int, is_held: bool) -> None:
    fixed = {"T": torch.ones(entries), "I": torch.arange(entries) % 3}
    way, *_ = over_tables("Z[b,i,u] += T[i] * X[b,I[i],u]", fixed, (1000, entries, 64), X=values(1000, 3, 64))
    assert bool(way.tables) == is_held


def test_a_table_may_have_a_single_entry() -> None:
    fixed = {"T": torch.tensor([[0.5]]), "I": torch.tensor([[2]])}
    way, *_ = over_tables("Z[b,i,u] += T[i,r] * X[b,I[i,r],u]", fixed, (1000, 1, 64), X=values(1000, 3, 64))
    assert way.tables


def test_asked_for_a_kind_of_product_tables_are_read() -> None:
    meta = {"T": values(2, 2), "I": positions(2, 2), "X": values(1000, 3, 64)}
    own = problem("Z[b,i,u] += T[i,r] * X[b,I[i,r],u]", meta, (1000, 2, 64), ConstantTables.of(TABLES))
    for use_dot in (True, False):
        assert not scheduled(own, "store", use_dot).tables
