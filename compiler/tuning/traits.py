"""What a schedule is like, as far as its tiles go: the properties by which measured points are found."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..binding import power_of_two
from ..planning import SHORT, VECTOR_BYTES, WARP_ROW, Device, Schedule, block_along, dots, is_varying

__all__ = ["LONG_TILE", "TENSOR_CORE_SIDE", "Traits", "fitting", "gathers_rows", "slices", "table_axes", "traits_of"]

FEW_COLUMNS = 16  # fill a warp with several rows
RESULTS_OF_A_THREAD = 32  # from which on they are too many for one warp
TENSOR_CORE_SIDE = 16  # the shortest side of a dot
LONG_TILE = 128  # along a side, from which on a longer one gains little
SLICES = (512, 256)  # bytes of parts of rows that are gathered


@dataclass(frozen=True)
class Traits:
    """The properties of a schedule by which measured points are found; no name, no size of one application."""

    # alone, set, neighbours, table, plain, walk, outer, crowd, rows, runs, flat, turned, looped, deep, scalar,
    # unrolled, unrolled runs, unrolled tile
    form: str
    narrow: int = 0  # 16, 32, 64, 128: the class of its narrow side
    is_narrow_first: bool = True  # the narrow side is the rows of the output
    widest: int = 0  # elements, of a side that has no other limit
    used: int = 0  # of those, all but what no thread has; or of gathered rows what a warp loads at once
    is_walk: bool = False  # a program goes through rows of the output, or pieces of them
    is_even: bool = True  # those that it has side by side are about as long
    widest_aligned: int = 0  # of rows that begin up to a warp's row earlier; 0: where they begin is good as it is
    few_warps: int = 1  # for a tile that one warp, or two, hold in registers
    is_long_by_narrow: bool = False  # the wide side goes on while the narrow one is no longer than a tile
    is_streamed: bool = False  # some factor is read once, as wide as the tile
    is_fallback: bool = False  # beside another strategy that is tried in full
    slices: tuple[int, ...] = ()  # elements: parts of gathered rows that may be taken for all results before the next


def traits_of(schedule: Schedule, device: Device) -> Traits:
    """Return the properties of a schedule by which measured points are found."""
    extents = schedule.extents
    if schedule.tables:
        return _of_tables(schedule)
    if not schedule.uses_dot:
        return _without_dot(schedule, device)
    tiles, merged = schedule.names("tile"), schedule.merged
    if merged is not None and schedule.holds_set:
        return Traits("set", is_narrow_first=merged.name == tiles[0])
    if merged is not None:
        (other,) = [name for name in tiles if name != merged.name]
        widest = min(power_of_two(extents[merged.name]), 4 * 128 // schedule.bound.dtype.itemsize)
        return Traits("neighbours", extents[other], other == tiles[0], widest)
    if schedule.has_table:
        most = RESULTS_OF_A_THREAD * device.warp_width
        few = 1 if prod(fitting(schedule, name, 64) for name in tiles) < most else 2
        # a strategy that adds is there beside another: gradients have many statements to tune
        return Traits("table", few_warps=few, is_fallback=schedule.strategy == "atomic")
    rows, *others = tiles
    columns = extents[others[0]] if len(others) == 1 else LONG_TILE + 1
    if len({dot.over for dot in dots(schedule.tree)}) > 1:
        return Traits("alone", 16)
    narrow = min(power_of_two(max(extents[rows], 16)), LONG_TILE)
    if narrow < LONG_TILE:
        return Traits("alone", narrow)
    narrow = power_of_two(max(columns, 32))
    if narrow < LONG_TILE:
        return Traits("alone", narrow, is_narrow_first=False)
    is_long = extents[rows] > LONG_TILE
    return Traits("alone", LONG_TILE, not is_long, is_long_by_narrow=is_long and columns <= LONG_TILE)


def _of_tables(schedule: Schedule) -> Traits:
    """Return the traits of a schedule over constant tables."""
    extents = schedule.extents
    if len(schedule.axes) == 2 and all(extents[name] > 1 for name in schedule.axes):
        is_streamed = any({*schedule.axes} <= {*factor.names} for factor in schedule.factors)
        return Traits("unrolled tile", is_streamed=is_streamed)
    if schedule.run:
        return Traits("unrolled runs")
    return Traits("unrolled", widest=256)


def _without_dot(schedule: Schedule, device: Device) -> Traits:
    """Return the traits of a schedule without a dot."""
    axes = schedule.axes
    if not axes:
        return Traits("scalar")
    if schedule.has_copies and not schedule.is_shared:
        return Traits("crowd", widest=min(power_of_two(schedule.extents[axes[-1]]), 256 if len(axes) > 1 else 1024))
    if schedule.run:
        lengths = [power_of_two(schedule.extents[axis]) for axis in axes]
        return Traits("runs", widest=lengths[-1], used=prod(lengths))
    if schedule.form == "rows":
        return _of_moved_rows(schedule)
    if schedule.form:
        return Traits(schedule.form)
    if schedule.adds_outer_products:
        return Traits("outer")
    wide = min(power_of_two(schedule.extents[axes[-1]]), 256 if len(axes) > 1 else 1024)
    if schedule.walks_rows and schedule.names("step"):
        return Traits("walk", widest=wide, slices=slices(schedule))
    if schedule.names("step") and axes[:-1] == schedule.names("step"):
        return Traits("deep", widest=wide)
    has_rows = schedule.owner is not None or schedule.strategy == "store-or-atomic"
    used = device.warp_width * VECTOR_BYTES // schedule.bound.dtype.itemsize
    return Traits(
        "plain",
        FEW_COLUMNS if wide <= FEW_COLUMNS else 0,
        widest=wide,
        used=used if has_rows and gathers_rows(schedule) else 0,
        is_walk=schedule.owner is not None,
        is_even=schedule.owner is None or schedule.owner.is_cut,
        slices=slices(schedule),
    )


def _of_moved_rows(schedule: Schedule) -> Traits:
    """Return the traits of a statement that moves rows."""
    name = schedule.axes[-1]
    extent = schedule.extents[name]
    if schedule.names("step"):
        beside = prod(power_of_two(schedule.extents[axis]) for axis in schedule.axes[1:-1])
        return Traits("rows", widest=power_of_two(extent), used=beside * power_of_two(extent))
    wide, is_fixed = block_along(extent), not is_varying(schedule.bound, name)
    used = min(wide, -(-extent // WARP_ROW) * WARP_ROW) if is_fixed else wide
    # a block with room for a row wherever it begins needs no second look at any column
    longer = block_along(extent + WARP_ROW - 1) if is_fixed and wide >= extent else wide
    return Traits("rows", widest=wide, used=used, widest_aligned=longer if schedule.may_be_aligned else 0)


def slices(schedule: Schedule) -> tuple[int, ...]:
    """Return parts of the columns, of rows that are gathered: one may be taken for all results, then the next.

    Whole rows of the output side by side wait for the longest of them, and gain nothing.
    """
    name, owner = schedule.axes[-1], schedule.owner
    is_side_by_side = owner is not None and schedule.roles[owner.row] == "tile" and not owner.is_cut
    if is_side_by_side or not gathers_rows(schedule) or not schedule.names("segment", "loop", "step"):
        return ()
    itemsize = schedule.bound.dtype.itemsize
    return tuple(size // itemsize for size in SLICES if size // itemsize < schedule.extents[name])


def gathers_rows(schedule: Schedule) -> bool:
    """Whether parts of rows lie along the columns of a tile, and an index says which rows."""
    if len(schedule.axes) < 2:
        return False
    name = schedule.axes[-1]
    names = {*schedule.parts_of(name)}
    return any(names & {*factor.names} for factor in schedule.accesses if factor.is_indirect)


def fitting(schedule: Schedule, name: str, size: int) -> int:
    """Return the block of an axis: its extent, at most `size`, and in a dot at least a tensor core's side."""
    extent = power_of_two(schedule.extents[name])
    if schedule.tables:
        return extent if schedule.roles[name] == "step" else min(extent, size)
    if not schedule.uses_dot:
        return min(extent, size)
    least = 2 if name in table_axes(schedule) else TENSOR_CORE_SIDE
    return max(least, min(extent, size))


def table_axes(schedule: Schedule) -> frozenset[str]:
    """Return the short axes of a table, but for those that a dot of long axes sums over; they are not padded."""
    if not schedule.has_table:
        return frozenset()
    short = {name for name in schedule.axes if schedule.extents[name] <= SHORT}
    return frozenset(short - {dot.over for dot in dots(schedule.tree) if not short & dot.axes})
