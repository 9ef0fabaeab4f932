"""The place of a program in the grid: the values of the grid's indices that it takes, by its program id."""

from __future__ import annotations

import math

from ..binding import SHORT_LENGTH, bucket, known_divisor
from ..language import Access, Var
from ..planning import VECTOR_BYTES, WARP_ROW, is_of_one_length
from .kernel import ALIGNED
from .loads import load_row, offset_of_rows
from .scope import Scope
from .spec import KernelSpec

__all__ = ["bound_index", "may_end_early", "place_program", "split_merged", "wide_extent"]


def place_program(scope: Scope) -> tuple[tuple[str, int], ...]:
    """Write the grid positions and tiles that a program takes, by its program id.

    Return the grid: each index name with how many of its values a program takes, the fastest varying first.
    """
    spec, schedule = scope.spec, scope.spec.schedule
    order = [*schedule.names("grid"), *schedule.names("tile")]
    order = order if spec.config.reverse else order[::-1]
    grid = tuple((name, _share(spec, name)) for name in order)
    # an index of which one program takes all values is no part of the program id
    varying = [(name, block) for name, block in grid if schedule.extents[name] > block or _is_piece(spec, name)]
    if spec.config.copies > 1:
        _choose_copy(scope)
    _divide_program_id(scope, varying)
    for name, block in grid:
        if (name, block) not in varying:
            _place(scope, name, block, "")
    for name, block in grid:
        if not (_is_in_turn(spec, name) or _is_clamped(spec, name, block) or _is_turned(spec, name)):
            bound_index(scope, name, block)
    if schedule.owner is not None and schedule.owner.is_cut:
        _find_rows(scope)
    elif schedule.owner is not None and spec.config.longest_first:
        _sort_rows(scope)
    if schedule.merged is not None:
        split_merged(scope)
    _split_flats(scope)
    if spec.config.is_aligned:
        _align_rows(scope)
    return grid


def _choose_copy(scope: Scope) -> None:
    """Write the choice of the program's copy of the output; programs that share a sum have one each."""
    output, copies = scope.parameter("output"), scope.spec.config.copies
    scope.line(f"{output} += tl.program_id(0) % {copies} * {scope.parameter('copy')}")


def _divide_program_id(scope: Scope, varying: list[tuple[str, int]]) -> None:
    """Write the division of the program id among the indices that it varies over."""
    parts = scope.spec.config.parts
    if varying or parts > 1:
        scope.line("pid = tl.program_id(0)")
    if parts > 1:
        scope.line(f"part = pid % {parts}")
        scope.line(f"pid = pid // {parts}")
    for name, block in varying[:-1]:
        count = f"tl.cdiv({wide_extent(scope, name, block)}, {block})" if block > 1 else scope.extent(name)
        _place(scope, name, block, f"pid % {count}")
        scope.line(f"pid = pid // {count}")
    for name, block in varying[-1:]:
        _place(scope, name, block, "pid")


def _is_in_turn(spec: KernelSpec, name: str) -> bool:
    """Whether a program has several values of this index and takes one after another."""
    return name == spec.turn or (spec.config.rows > 1 and name == spec.owner.row)


def _share(spec: KernelSpec, name: str) -> int:
    """Return how many values of an index of the grid one program takes."""
    if _is_in_turn(spec, name):
        return spec.config.run if name == spec.turn else spec.config.rows
    return spec.block(name) if spec.schedule.roles[name] == "tile" else 1


def _place(scope: Scope, name: str, block: int, place: str) -> None:
    """Write the values of an index that a program takes, of which `place` is the number of its block.

    If `place` is "", the program takes all values. Those in turn are from `first_row` to `past_row` - 1.
    """
    if _is_in_turn(scope.spec, name):
        hidden = f"{_hidden_zero(scope, name)} + " if name == scope.spec.turn else ""
        scope.line(f"first_row = {hidden}{f'({place}) * {block}' if place else 0}")
        scope.line(f"past_row = tl.minimum(first_row + {block}, {scope.extent(name)})")
    elif block == 1:
        scope.define(name, place or "0")
    else:
        start = f"tl.cast({place}, tl.int64)" if _is_long(scope.spec, name, block) else f"({place})"
        start = f"{start} * {block}" if place else ""
        if place and _is_divided_once(scope.spec, name, block):
            scope.starts[name] = scope.let(start, (), "start")
            start = scope.starts[name].text
        start = f"{start} + " if start else ""
        if _is_clamped(scope.spec, name, block):
            text = f"tl.minimum({start}{scope.spec.tile.arange(name)}, {scope.extent(name)} - 1)"
        else:
            text = f"{start}{_unaligned(scope, name)}{scope.spec.tile.arange(name)}"
        scope.define(name, text, (name,))


def _is_clamped(spec: KernelSpec, name: str, block: int) -> bool:
    """Whether the last block ends with its last value again and again instead of under a mask.

    What moves data stores such a value several times, the same each time. A mask over two axes is a few instructions
    for every element, more than its load and its store take.
    """
    schedule = spec.schedule
    may_repeat = schedule.strategy == "store" and not spec.bound.is_seeded and schedule.form not in ("", "turned")
    return (
        may_repeat
        and name == schedule.names("tile")[0]
        and not _is_aligned(spec, name)
        and may_end_early(spec, name, block)
    )


def _is_aligned(spec: KernelSpec, name: str) -> bool:
    """Whether threads may store several neighbours of a flattened axis at once, as far as its length goes."""
    divisor = _divisor(spec, name)
    is_along = name == spec.axes[-1] if spec.axes else False
    return is_along and (divisor & -divisor) * spec.bound.dtype.itemsize >= VECTOR_BYTES


def _unaligned(scope: Scope, name: str) -> str:
    """Return a zero that keeps Triton from taking a flattened axis for aligned, "" if it may.

    A thread would get neighbouring elements for one wide store, which the mask of an odd length then cuts into single
    ones, far apart from those of the next thread. The compiler can't tell that no extent is below 0.
    """
    spec = scope.spec
    if all(flat.name != name for flat in spec.schedule.flats):
        return ""
    if spec.schedule.run or _is_aligned(spec, name):  # of a run nothing is known of where its rows begin
        return ""
    divisor = _divisor(spec, name)
    zero, aligned = _hidden_zero(scope, name), divisor & -divisor
    return f"{zero}{f' * {aligned}' if aligned > 1 else ''} + "


def _hidden_zero(scope: Scope, name: str) -> str:
    """Return a zero that the compiler can't tell from other numbers: what it is added to is no multiple of anything.

    Every eighth row of a run would count as aligned, and a thread get neighbouring columns for a wide load, which the
    mask of an odd length cuts into single ones; sums would change their layout, through shared memory, to be added.
    """
    return f"tl.minimum({scope.extent(name)}, 0)"


def _is_turned(spec: KernelSpec, name: str) -> bool:
    """Whether each row of a tile begins at another value of this index, see `_align_rows`."""
    return spec.config.is_aligned and name == spec.axes[-1]


def _align_rows(scope: Scope) -> None:
    """Write the columns of each row of a tile, so that a warp stores whole sectors wherever the row begins.

    A row begins up to `WARP_ROW` - 1 elements before its first column. If its last ones then have no room in the blocks
    of the row, those before the first take their place.
    """
    spec, name = scope.spec, scope.spec.axes[-1]
    axes, columns, rows = spec.axes, scope.indices[name], offset_of_rows(scope, name)
    extent, block = _fixed_extent(spec, name), spec.block(name)
    begin = scope.let(f"-(({rows.text}) & {WARP_ROW - 1})", rows.axes, "begin")
    turned = scope.let(f"{spec.tile.spread(begin, axes)} + {spec.tile.spread(columns, axes)}", axes, "turned")
    if extent and int(extent) + WARP_ROW - 1 <= block:
        scope.sums[name] = begin, columns
        inside = f"{turned.text}.to(tl.uint32, bitcast=True) < {extent}"
    else:
        end = f"tl.cdiv({scope.extent(name)}, {block}) * {block}"
        # Threads of a warp lie along the columns, which Triton 3.6 must be told where columns go round; no vectors are
        # made of them, since no multiple is known of where a row begins.
        around = f"tl.where({turned.text} < 0, {turned.text} + {end}, {turned.text})"
        turned = scope.let(f"tl.max_contiguous({around}, (1, {WARP_ROW}))", axes, "turned")
        inside = f"{turned.text} < {extent or scope.extent(name)}"
    scope.indices[name] = turned
    scope.bounds[name] = scope.let(inside, axes, f"in_{scope.identifier(name)}")


def _sort_rows(scope: Scope) -> None:
    """Write the load of the program's row, by its place among rows that are sorted by length."""
    owner = scope.spec.owner
    row, order = scope.indices[owner.row], scope.parameter("order", owner.index)
    assert not row.axes
    scope.line(f"{row.text} = tl.load({order} + {row.text})")


def _is_piece(spec: KernelSpec, name: str) -> bool:
    """Whether an index counts pieces of rows: no class of shapes tells how many there are, see `piece_count`."""
    owner = spec.schedule.owner
    return owner is not None and owner.is_cut and name == owner.row


def _find_rows(scope: Scope) -> None:
    """Write the row of each piece that the program has: that of its first entry; the last pieces may have none.

    If a piece has several rows, that is the row whose sums are held, see `begin_row`.
    """
    owner = scope.spec.owner
    piece, pieces = scope.indices[owner.row], scope.parameter("pieces", owner.index)
    mask = f", mask={scope.bounds[owner.row].text}, other=0" if owner.row in scope.bounds else ""
    first = scope.let(f"tl.load({pieces} + {piece.text} + {piece.text}{mask})", piece.axes, "first")
    last = scope.let(f"tl.load({pieces} + {piece.text} + {piece.text} + 1{mask})", piece.axes, "last")
    scope.bounds[owner.row] = has_entry = scope.let(f"{first.text} < {last.text}", piece.axes, "has_entry")
    scope.piece, scope.segment = piece, (first, last)
    row = load_row(scope, Access(owner.index, (Var(owner.segment),)), first, has_entry)
    scope.indices[owner.row] = scope.let(row.text, row.axes, "held") if owner.is_packed else row


def split_merged(scope: Scope) -> None:
    """Write the values of the two index names that one axis holds.

    Loads through the outer name read one position for all values of the inner name.
    """
    merged = scope.spec.merged
    both = scope.indices[merged.name]
    for name, operator in ((merged.outer, "//"), (merged.inner, "%")):
        scope.define(name, f"{both.text} {operator} {merged.width}", both.axes)
        if merged.name in scope.bounds:
            scope.bounds[name] = scope.bounds[merged.name]


def _split_flats(scope: Scope) -> None:
    """Write the values of the index names that flattened axes hold; those of fixed length are divided by a number."""
    for flat in scope.spec.schedule.flats:
        if flat.name not in scope.indices:  # a loop runs over it
            continue
        values, start = scope.indices[flat.name], scope.starts.get(flat.name)
        for name in flat.parts[:0:-1]:
            size = str(scope.spec.schedule.extents[name]) if _is_number(scope.spec, name) else scope.extent(name)
            if start is None:
                scope.define(name, f"{values.text} % {size}", values.axes)
                values = scope.let(f"{values.text} // {size}", values.axes, "rest")
                continue
            start = scope.let(f"{start.text} // {size}", (), "start")
            inside = scope.let(f"{values.text} - {start.text} * {size}", values.axes, "inside").text
            is_next = scope.let(f"{inside} >= {size}", values.axes, "is_next").text
            scope.define(name, f"tl.where({is_next}, {inside} - {size}, {inside})", values.axes)
            values = scope.let(f"{start.text} + {is_next}.to(tl.int32)", values.axes, "rest")
        scope.indices[flat.parts[0]] = values
        if flat.name in scope.bounds:
            scope.bounds |= dict.fromkeys(flat.parts, scope.bounds[flat.name])


def _is_number(spec: KernelSpec, name: str) -> bool:
    """Whether a source may hold the length of an index: all that it serves have it, see `shape_class`."""
    return not spec.is_varying(name) or spec.schedule.extents[name] <= SHORT_LENGTH


def _is_divided_once(spec: KernelSpec, name: str, block: int) -> bool:
    """Whether a block of a flattened axis has at most two values of what comes before its fastest name.

    Then the first value alone is divided. An argument as a divisor takes two dozen instructions, a number a few: 89 by
    71 by 99 numbers, reversed, are 481 instructions of a warp and not 751.
    """
    *others, fastest = spec.schedule.parts_of(name)
    if not others or _is_number(spec, fastest) or fastest in spec.bound.dynamic:
        return False
    return block <= bucket(spec.schedule.extents[fastest]) // 2 + 1  # no length of its class is shorter


def bound_index(scope: Scope, name: str, block: int) -> None:
    """Write where the values of an index are inside its extent, unless blocks divide the extent."""
    if may_end_early(scope.spec, name, block):
        value = scope.indices[name]
        text = f"{value.text} < {_fixed_extent(scope.spec, name) or _extent_with_divisor(scope, name)}"
        scope.bounds[name] = scope.let(text, value.axes, f"in_{scope.identifier(name)}")


def may_end_early(spec: KernelSpec, name: str, block: int) -> bool:
    """Whether the last block of an index may have values outside its extent."""
    return block > 1 and bool(_divisor(spec, name) % block)


def _fixed_extent(spec: KernelSpec, name: str) -> str:
    """Return the extent of an axis as a number, "" if it varies from call to call or the statement does more than move.

    The compiler then sees which elements of a thread are inside whatever the thread, and which are outside: of 137
    columns in a block of 256 a warp has four elements without a mask, one with it and three that are not there.
    """
    parts = spec.schedule.parts_of(name)
    is_fixed = all(part in spec.bound.extents and not spec.is_varying(part) for part in parts)
    if not (spec.schedule.form or spec.schedule.walks_rows) or not is_fixed:
        return ""
    return str(spec.schedule.extents[name])


def _extent_with_divisor(scope: Scope, name: str) -> str:
    """Return an extent written as a multiple of the power of two that divides it.

    A mask then holds for as many neighbours at once, and Triton loads and stores them together. It is not told about
    extents as it is about strides: a kernel serves other lengths too.
    """
    divisor = math.gcd(_divisor(scope.spec, name), ALIGNED)
    extent = scope.extent(name)
    return f"{extent} // {divisor} * {divisor}" if divisor > 1 else extent


def _divisor(spec: KernelSpec, name: str) -> int:
    """Return a divisor of an extent on which the source may rely, though it serves other lengths too."""
    extents, owner = spec.schedule.extents, spec.schedule.owner
    if _is_piece(spec, name):
        return 1
    is_row = owner is not None and name == owner.row
    divisors = []
    for part in spec.schedule.parts_of(name):
        divisor = known_divisor(extents[part]) if is_row or spec.is_varying(part) else extents[part]
        if not is_row and is_of_one_length(spec.bound, part):
            divisor = math.lcm(divisor, math.gcd(extents[part], ALIGNED))
        divisors.append(divisor)
    return math.prod(divisors)


def wide_extent(scope: Scope, name: str, block: int) -> str:
    """Return an extent in a type to which a block can be added without overflow."""
    extent = scope.extent(name)
    return f"tl.cast({extent}, tl.int64)" if _is_long(scope.spec, name, block) else extent


def _is_long(spec: KernelSpec, name: str, block: int) -> bool:
    """Whether the last tile may end beyond 32 bits; such lengths have a source of their own."""
    return spec.flags.is_wide or spec.schedule.extents[name] + block > 2**31
