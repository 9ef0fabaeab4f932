"""`Bound` -> `Schedule`s: the rules by which schedules are worth trying, and in which order.

Rules rank and propose; tuning decides among what they propose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product

import torch

from ...formats.facts import ConstantTables, Fact, Tables
from ..binding import Bound, power_of_two
from ..language import Access, Var, walk
from .constant_tables import line_of_access
from .contraction import SHORT, Dot, Node, Sum, contract, dots, multiply
from .device import device_of, line_of
from .movement import Tiling, contiguity, run_name, tilings, widened
from .scatter import OneHot, Start, is_in_set, is_varying, owned_by
from .schedule import Schedule, Strides
from .stretches import is_crowded, reads_stretches, stretch

__all__ = [
    "LARGEST_TILE",
    "MOST_ENTRIES",
    "other_schedules",
    "schedules",
    "unrolled_schedule",
]

LEAST_OUTER = 4  # results of a tile that share what is loaded of a factor; not measured
DEEP_EXTENT = 8  # a loop this long is worth taking several summands at once
# A sum is shared by several programs where tiles of this size would leave multiprocessors without one. Sharing is tried
# where the longest loop has one turn at least for each of two programs, of the deepest tiles that are tried, and comes
# first where it has four; estimated. Nine sums of 29 x 47 results over 583 rows of float16 took an H200 0.0084 ms as
# they are and 0.0047 in 16 parts, 139 x 77 results over 571 rows 0.0086 and 0.0046.
SHARED_TILE = 64
MOST_DOTS = 4  # choices of a dot's tiles in a full search, which loads more elements with each of them
DEEPEST_TILE = 128
SHORT_SHARED_LOOP, SHARED_LOOP = 2 * DEEPEST_TILE, 2 * 4 * DEEPEST_TILE
# Results side by side along memory: of the narrowest tile whose loads fill a line, of 4 bytes each, and of one whose
# loads are long stretches: 8,064 by 5,544 numbers of float32, summed by columns, took an H200 0.052 ms in tiles of 16
# and 0.047 if programs share sums of 64 (`bench/cases/test_statements.py --seed 2027`).
LINE, STRETCH = 32, 256
# of known tables: each is a product in the source, whose compilation takes seconds with a few hundred of them
MOST_ENTRIES = 512
# Elements of tiles over known tables, and along an axis that is not summed: 16 registers of each thread of a program
# with as many warps as are tried, 8 of 32 threads; every result of a table has such a tile, a thread 255 registers.
LARGEST_TILE, LEAST_TILE = 4096, 16


def schedules(
    bound: Bound,
    strides: Strides,
    strategy: str,
    fact: Fact | None = None,
    deterministic: bool = False,
    use_dot: bool | None = None,
) -> tuple[Schedule, ...]:
    """Return the schedules of a statement that are worth trying with one scatter strategy, the most promising first.

    `use_dot` allows one kind of product only if it is True or False; if it is None, extents decide.
    """
    start = Start.of(bound, strategy, fact)
    candidates: list[Schedule] = []
    may_dot = use_dot is not False and bound.statement.is_sum
    dotted = _dot_schedule(start, strides) if may_dot else None
    if dotted is not None and (use_dot or _is_worth_a_dot(dotted)):
        merged = _merged_schedules(start, dotted)
        candidates = merged if any(way.holds_set for way in merged) else [*merged, dotted]
    if not candidates:
        candidates = [_tiled(start, tiling) for tiling in tilings(start, strides)]
    if not candidates:
        candidates = _without_dot(start, strides)
    if strategy == "on-chip" and owned_by(bound.statement.output.indirections[0], fact) is not None:
        # a program that has one row of the output is better off with the entries of that row, as its owner
        candidates = [way for way in candidates if not way.has_one_row]
        if not candidates:
            return ()
    if _is_worth_sharing(candidates[0], STRETCH, SHORT_SHARED_LOOP):
        shared = _shared(candidates[0], deterministic)
        is_first = _is_worth_sharing(candidates[0], LINE, SHARED_LOOP)
        candidates = [*shared, *candidates] if is_first else [*candidates, *shared]
    if is_crowded(start, device_of(bound.device)):
        crowded = [way.in_copies() for way in candidates]
        candidates = [*(way for way in crowded if way is not None), *candidates]
    tables = fact.numbers if isinstance(fact, ConstantTables) else {}
    unrolled = unrolled_schedule(start, strides, tables) if use_dot is None else None
    if unrolled is None:
        return tuple(candidates)
    if len(unrolled.axes) > 1:
        return (unrolled,)  # beside whole tiles others take far longer
    has_runs = unrolled.roles.get(run_name(start)) == "grid" and not unrolled.names("step")
    return (unrolled, *([replace(unrolled, form="runs")] if has_runs else []), *candidates)


def other_schedules(
    bound: Bound, strides: Strides, strategy: str, fact: Fact | None, deterministic: bool
) -> tuple[Schedule, ...]:
    """Return the schedules with one scatter strategy that `schedules` leaves out, for a search that has the time.

    They are dots however short their sides, with other tiles and with neighbours however wide; multiply-adds with
    several summands at once however few there are; and sums that are shared by programs.
    """
    start, preferred = Start.of(bound, strategy, fact), schedules(bound, strides, strategy, fact, deterministic)
    candidates = list(preferred)
    for schedule in _dot_schedules(start, strides)[:MOST_DOTS]:
        candidates += [schedule, *_merged_schedules(start, schedule, full=True)]
    candidates += _without_dot(start, strides, 2)
    candidates += [way for schedule in candidates if schedule.may_be_shared for way in _shared(schedule, deterministic)]
    kinds = [_kind(schedule) for schedule in candidates]
    others = [schedule for at, schedule in enumerate(candidates) if kinds[at] not in kinds[:at]]
    return tuple(others[len(preferred) :])


def _kind(schedule: Schedule) -> object:
    """Return what tells a schedule from others of its statement: all of it but the name of a merged axis."""
    merged = schedule.merged
    if merged is None:
        return schedule
    return merged.outer, merged.inner, schedule.is_shared, {*schedule.names("step")}, {*schedule.names("grid")}


def unrolled_schedule(start: Start, strides: Strides, tables: Tables, is_one_of: bool = False) -> Schedule | None:
    """Return a schedule with constant tables as numbers in the source, over one or two axes of tiles.

    None if the tables are not all read by index names, have too many entries, or tiles would be too large: of one of
    several statements programs may have a part of what it sums over.
    """
    if not tables or start.strategy not in ("store", "store-once", "atomic") or not start.bound.statement.is_sum:
        return None
    roots = [start.output, *start.accesses]
    reads = [access for root in roots for access in walk(root) if access.name in tables]
    if {access.name for access in reads} != {*tables}:
        return None
    if start.strategy != "store-once" and any(access in reads for access in walk(start.output)):
        return None
    if not all(isinstance(index, Var) or index in reads for access in reads for index in access.indices):
        return None
    # each number of a table that is a factor is an entry; along other names positions may lie on a line
    numbers = [access for access in reads if access in start.factors] or reads
    entries = dict.fromkeys(name for access in numbers for name in access.names)
    others = [name for name in (*start.free, *start.summed) if name not in entries]
    axes = _unrolled_axes(start, strides, others)
    unrolled = dict.fromkeys([*entries, *(name for access in reads for name in access.names if name not in axes)])
    inside = [access for root in roots for outer in root.indirections for access in walk(outer) if access not in reads]
    if any(name in unrolled for access in inside for name in access.names):
        return None
    summed = [name for name in others if name in start.summed]
    # tiles are powers of two, and hold a summed name whole
    sizes = [power_of_two(start.extents[name]) for name in axes]
    least = math.prod(size if name in summed else min(size, LEAST_TILE) for name, size in zip(axes, sizes))
    if not axes or any(name not in axes for name in summed) or (least > LARGEST_TILE and not is_one_of):
        return None
    if not 0 < _entries(reads, start.extents, list(unrolled), tables) <= MOST_ENTRIES:
        return None
    roles = {name: "grid" for name in others if name not in axes and name not in unrolled}
    roles.update({name: "step" if name in summed else "tile" for name in axes})
    roles.update(dict.fromkeys(unrolled, "unrolled"))
    return Schedule.from_start(start, roles=roles, tree=None, tables=tables)


def _unrolled_axes(start: Start, strides: Strides, names: list[str]) -> list[str]:
    """Return the tile axes: the name along memory, and before it one more of fixed length, such as channels."""
    contiguous, fixed = contiguity(start, strides), [name for name in names if not is_varying(start.bound, name)]
    rank = lambda name: (contiguous.get(name, 0), name in fixed, start.extents[name])
    by_memory = sorted(names, key=rank, reverse=True)
    if not by_memory or by_memory[0] not in fixed:
        return by_memory[:1]
    return [name for name in by_memory if name in fixed][1::-1]


def _entries(reads: list[Access], extents: Mapping[str, int], names: list[str], tables: Tables) -> int:
    """Count the products, of which there is none where a position is -1; 0 if some table is no line along an axis."""
    count = 0
    for place in product(*[range(extents[name]) for name in names]):
        at = dict(zip(names, place))
        starts = []
        for access in reads:
            line = line_of_access(access, tables, at)
            if line is None:
                return 0
            starts.append(line[0])
        count += all(number >= 0 or isinstance(number, float) for number in starts)
    return count


def _finish(
    start: Start,
    tiles: tuple[str, ...],
    steps: tuple[str, ...],
    tree: Node | None,
    along: str = "",
    form: str = "",
) -> Schedule:
    """Return a schedule in which other names of the output are grid positions, and other summed names are loops."""
    roles: dict[str, str] = {}
    together = [part for flat in start.flats for part in flat.parts]
    together += [start.merged.outer, start.merged.inner] if start.merged is not None else []
    for name in start.free:
        if name not in tiles:
            roles[name] = "merged" if name in together else "grid"
    roles.update(dict.fromkeys(tiles, "tile"))
    if start.segment is not None:
        roles[start.segment] = "segment"
    for name in start.summed:
        if name not in roles and name not in steps:
            roles[name] = "merged" if name in together else "loop"
    roles.update(dict.fromkeys(steps, "step"))
    return Schedule.from_start(start, roles=roles, tree=tree, along=along, form=form)


def _tree(start: Start, tiles: tuple[str, ...], steps: tuple[str, ...], use_dot: bool) -> Node | None:
    """Return the contraction of the factors over these tile axes, or None if there is none."""
    axes = {*tiles, *steps}
    if not start.bound.statement.is_sum:
        return multiply(_leaves(start, axes))
    sizes = {axis: min(start.extents[axis], 128) for axis in axes}
    return contract(_leaves(start, axes), frozenset(tiles), sizes, use_dot)


def _leaves(start: Start, axes: set[str]) -> list[frozenset[str]]:
    """Return for each factor which of the axes it varies over."""
    return [frozenset(axes.intersection(start.varies_over(factor))) for factor in start.factors]


def _dot_schedule(start: Start, strides: Strides) -> Schedule | None:
    """Return the best choice of rows, columns and summed axes such that every product of tiles is a dot."""
    return next(iter(_dot_schedules(start, strides)), None)


def _dot_schedules(start: Start, strides: Strides) -> list[Schedule]:
    """Return all choices of rows, columns and summed axes with a dot, those first that load the fewest elements.

    There is none of halves that are added to float64, which Triton 3.7 fails to build.
    """
    kinds = {start.bound.dtypes[factor.name].itemsize for factor in start.accesses}
    if start.bound.dtype == torch.float64 and min(kinds, default=8) < torch.float32.itemsize:
        return []
    row = {start.owner.row} if start.owner is not None else set()
    names = [name for name in start.free if name not in row]
    rows: list[tuple[str, ...]] = [(name,) for name in names]
    rows += [group for name in names if len(group := stretch(start, strides, name)) > 1]
    rows.sort(key=lambda group: start.free.index(group[0]))
    sums = [name for name in start.summed if name != start.segment]
    choices = [(wide, steps) for wide, deep in ((2, 1), (2, 2), (1, 3)) for steps in combinations(sums, deep)]
    choices += _table_choices(start, sums)
    choices_by_cost: list[tuple[float, bool, Schedule]] = []
    for wide, steps in choices:
        for groups in combinations(rows, wide):
            if len({*chain(*groups)}) < sum(map(len, groups)):
                continue
            joined, tiles = start.with_axes(groups)
            tree = _tree(joined, tiles, steps, use_dot=True)
            if tree is None or not dots(tree) or len(tree.axes | set(tiles)) > 2:
                continue
            schedule = _finish(joined, tiles, steps, tree)
            others = set(steps) - {dot.over for dot in dots(tree)}  # summed without a dot: a table's own axes alone
            if (
                wide == 2
                and others
                and not (schedule.has_table and all(start.extents[name] <= SHORT for name in others))
            ):
                continue
            cost, is_loss = _moved_elements(start, [*groups, *zip(steps)], strides), not _is_worth_a_dot(schedule)
            choices_by_cost.append((cost, is_loss, schedule))
    return [schedule for *_, schedule in sorted(choices_by_cost, key=lambda choice: choice[:2])]


def _table_choices(start: Start, sums: list[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Return choices for a factor that is a table over several short names: all of them are axes, without a loop."""
    names = [name for name in (*sums, *start.free) if not is_varying(start.bound, name)]
    short = {name for name in names if start.extents[name] <= SHORT}
    if not any(len(short.intersection(factor.names)) > 2 for factor in start.factors):
        return []
    summed = tuple(name for name in sums if name in short)
    others = [name for name in sums if name not in short]
    return [(wide, (*summed, *rest)) for wide, deep in ((2, 0), (2, 1), (1, 2)) for rest in combinations(others, deep)]


def _merged_schedules(start: Start, narrow: Schedule, full: bool = False) -> list[Schedule]:
    """Return a narrow dot with its neighbours along a grid position in one tile, which loads the other side once.

    Rows of a set share their loads however wide the other side is. The result has at most one schedule, or if `full`
    one for every grid position, of dots of any width.
    """
    merged: list[Schedule] = []
    tiles, steps = narrow.names("tile"), narrow.names("step")
    if len(tiles) != 2 or narrow.flats:
        return merged
    is_narrow = full or max(start.extents[name] for name in tiles) <= line_of(start.bound.dtype.itemsize)
    for inner, other in (tiles, tiles[::-1]):
        for outer in narrow.names("grid"):
            is_meant = is_narrow or is_in_set(start.owner, start.output, outer)
            if not is_meant or not _may_merge(start, outer, inner, other):
                continue
            # each has an axis of another name, by which tuned configs distinguish them
            wide = start.side_by_side(outer, inner, f"{outer}_{inner}" if full else "c")
            assert wide.merged is not None
            axes = tuple(wide.merged.name if name == inner else name for name in tiles)
            tree = _tree(wide, axes, steps, use_dot=True)
            if isinstance(tree, Dot) and {dot.over for dot in dots(tree)} == set(steps):
                merged.append(_finish(wide, axes, steps, tree))
    return merged if full else merged[:1]


def _may_merge(start: Start, outer: str, inner: str, other: str) -> bool:
    """Whether tiles along `inner`, a fixed power of two, change with `outer` while those along `other` do not."""
    width, names = start.extents[inner], start.bound.statement.free
    if outer not in names or inner not in names or start.extents[outer] < 2 or width & (width - 1):
        return False
    if is_varying(start.bound, outer) or is_varying(start.bound, inner):
        return False
    moved = [start.varies_over(factor) for factor in start.factors if outer in start.varies_over(factor)]
    return bool(moved) and all(other not in names for names in moved)


def _moved_elements(start: Start, axes: Sequence[tuple[str, ...]], strides: Strides) -> float:
    """Return the elements that all programs load and store together with tiles of at most 128 along each of `axes`.

    An axis is one name, or several of which the last is the fastest. An element that is loaded or stored alone counts
    as many as its sector has of float32.
    """
    alone = device_of(start.bound.device).sector_bytes // torch.float32.itemsize
    blocks = dict.fromkeys(start.extents, 1.0)
    for axis in axes:
        left = 128.0
        for name in reversed(axis):
            blocks[name] = min(start.extents[name], left)
            left /= blocks[name]
    programs = math.prod(start.extents[name] / blocks[name] for name in start.free)
    total = 0.0
    for access in (start.output, *start.accesses):
        own = [name for name in access.names if name in start.free]
        tile = math.prod(blocks[name] for name in own)
        steps = math.prod(start.extents[name] for name in access.names if name not in own)
        strided = zip(access.indices, strides["" if access is start.output else access.name])
        unit = {index.name for index, stride in strided if isinstance(index, Var) and stride == 1}
        total += programs * tile * steps * (alone if unit and not unit & {*chain(*axes)} else 1)
    return total


def _is_worth_a_dot(schedule: Schedule) -> bool:
    """Whether dots are long enough for Tensor Cores.

    They take 16 x 16 x 16; one padded side may be as short as 4, but not two of the three. The dots of a table's short
    axes do not count: beside a long dot they cost next to nothing.
    """
    sides = [sorted(schedule.extents[name] for name in (*dot.axes, dot.over)) for dot in dots(schedule.tree)]
    if schedule.has_table:
        sides = [extents for extents in sides if extents[1] > SHORT]
    return bool(sides) and all(extents[0] >= 4 and extents[1] >= 12 for extents in sides)


def _is_worth_sharing(schedule: Schedule, width: int, least: int) -> bool:
    """Whether results are too few to keep a GPU busy and each is a sum of `least` products, as in gradients of weights.

    Of a sum that reads stretches of memory `width` results of a tile lie along it; of the others it has one.
    """
    if not schedule.may_be_shared:
        return False
    summed = math.prod(schedule.extents[name] for name in schedule.names("loop", "step"))
    loops = [schedule.extents[name] * DEEPEST_TILE for name in schedule.names("loop")]  # of one at a time
    longest = max([*loops, *[schedule.extents[name] for name in schedule.names("step")]])
    along = schedule.along
    programs = math.prod(
        -(-schedule.extents[name] // (SHARED_TILE if not along else width if name == along else 1))
        if role == "tile"
        else schedule.extents[name]
        for name, role in schedule.roles.items()
        if role in ("grid", "tile")
    )
    return min(summed, longest) >= least and programs < device_of(schedule.bound.device).wave


def _shared(schedule: Schedule, deterministic: bool) -> list[Schedule]:
    """Return a schedule with its sum shared by programs: with parts added atomically, or in copies of the output.

    Copies are added up in a fixed order.
    """
    way = schedule.in_copies()
    copies = [] if way is None or (schedule.uses_dot and not way.is_shared) else [way]
    atomic = [schedule.shared()] if schedule.is_sum and not deterministic else []
    return [*atomic, *copies]


def _without_dot(start: Start, strides: Strides, least: int = DEEP_EXTENT) -> list[Schedule]:
    """Return the schedules without a dot; a sum that reads stretches of memory first has several summands at once."""
    plain = _plain_schedule(start, strides)
    outer = _outer_schedule(start, plain)
    if outer is not None:
        return [outer, plain]
    deep = _deep_schedule(start, strides, plain, least)
    if deep is None:
        return [plain]
    if not deep.along:
        return [plain, deep]
    # a long loop over single summands would have too few loads in flight
    return [deep] if deep.extents[deep.names("step")[0]] >= SHARED_LOOP else [deep, plain]


def _outer_schedule(start: Start, plain: Schedule) -> Schedule | None:
    """Return a schedule of outer products that the owner of a row adds up, over two axes that no factor has both of.

    What is loaded of one factor is then multiplied with all that is loaded of another, where rows side by side would
    share nothing. None if there is no such axis beside the one along memory.
    """
    owner, column = start.owner, plain.names("tile")[-1:]
    if owner is None or owner.is_packed or not start.bound.statement.is_sum or not {*column} <= {*start.free}:
        return None
    read = [start.varies_over(factor) for factor in start.factors]
    others = [
        name
        for name in start.free
        if name not in (owner.row, *column)
        and start.extents[name] >= LEAST_OUTER
        and any(name in names for names in read)
        and not any({name, *column} <= {*names} for names in read)
    ]
    if not column or not others or not any(column[0] in names for names in read):
        return None
    tiles = (max(others, key=lambda name: start.extents[name]), *column)
    return _finish(start, tiles, (), _tree(start, tiles, (), use_dot=False))


def _deep_schedule(start: Start, strides: Strides, plain: Schedule, least: int) -> Schedule | None:
    """Return a schedule with several summands side by side instead of results: many loads are then in flight.

    None if no loop has `least` summands, or if summands are side by side already. The entries of a row count as many.
    """
    sums = [name for name in plain.names("loop") if start.extents[name] >= least]
    is_packed = start.owner is not None and start.owner.is_packed  # entries side by side may be of several rows
    if not (sums or plain.walks_rows) or plain.names("step") or not plain.names("tile") or is_packed:
        return None
    tiles = plain.names("tile")[-1:]
    start = replace(start, extents=plain.extents, flats=plain.flats)  # of which its tile may be one
    if not sums:
        steps = plain.names("segment")
        return _finish(start, tiles, steps, _tree(start, tiles, steps, use_dot=False))
    start, step = _joined(start, strides, max(sums, key=lambda name: start.extents[name]))
    along = tiles[0] if reads_stretches(start) and start.owner is None else ""
    return _finish(start, tiles, (step,), _tree(start, tiles, (step,), use_dot=False), along)


def _joined(start: Start, strides: Strides, name: str) -> tuple[Start, str]:
    """Return the statement with one axis for a summed name and those that go on with it in memory, and the axis."""
    start, (axis,) = start.with_axes([stretch(start, strides, name)])
    return start, axis


def _tiled(start: Start, tiling: Tiling) -> Schedule:
    """Return the schedule of a statement that moves data, with these tiles."""
    start, tiles = start.with_axes(tiling.tiles)
    product = multiply(_leaves(start, {*tiles, *tiling.steps})) if len(tiles) + len(tiling.steps) > 2 else None
    tree = Sum(product, *tiling.steps) if product else _tree(start, tiles, tiling.steps, use_dot=False)
    return _finish(start, tiles, tiling.steps, tree, form=tiling.form)


def _plain_schedule(start: Start, strides: Strides) -> Schedule:
    """Return the schedule without a dot: one axis along memory, one more over results, everything else serial."""
    contiguous = contiguity(start, strides)
    row = start.owner.row if start.owner is not None else None
    candidates = [name for name in (*start.free, *start.summed) if name not in (row, start.segment)]
    vector = max(candidates, key=lambda name: (contiguous.get(name, 0), start.extents[name]), default=None)
    others = [name for name in start.free if name != vector]
    other = row or max(others, key=lambda name: start.extents[name], default=None)
    scatter = start.factors[-1] if start.factors else None
    if isinstance(scatter, OneHot) and vector != scatter.name:
        other = scatter.name
    tiles = tuple(name for name in (other, vector) if name is not None and name in start.free)
    if vector is None or vector in start.free:
        if start.owner is not None and vector in tiles and start.bound.statement.is_sum:
            start, tiles = start.with_axes(((start.owner.row,), widened(start, str(vector))))
        return _finish(start, tiles, (), _tree(start, tiles, (), use_dot=False))
    start, step = _joined(start, strides, vector)
    along = step if reads_stretches(start) and start.owner is None else ""
    return _finish(start, tiles, (step,), _tree(start, tiles, (step,), use_dot=False), along)
