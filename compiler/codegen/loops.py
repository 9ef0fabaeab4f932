"""Serial loops over summed indices: single values, blocks, and the groups of the row that a program owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..binding import power_of_two
from ..planning import KNOWN_DIVISOR
from .broadcast import Value
from .grid import bound_index, may_end_early, wide_extent
from .loads import load_ahead, load_available, load_next, take_loaded
from .scope import Scope
from .spec import KernelSpec
from .stores import begin_row

__all__ = [
    "MEASURED_ENTRIES",
    "MeasuredEntries",
    "define_single_steps",
    "define_step",
    "entries_at_once",
    "inner_turns",
    "innermost",
    "open_blocks",
    "open_loops",
    "row_segment",
]

BAKED_LOOP = 256  # a serial loop up to this long has its bound in the source; longer ones take it as an argument
# an innermost loop of max or min up to this long is unrolled: ptxas for sm_90 left it rolled with winners
UNROLLED = 16


class MeasuredEntries(NamedTuple):
    """Milliseconds of a product over the entries of rows, by how many entries a program loads at once."""

    columns: int
    itemsize: int
    is_one_piece: bool  # whether a program takes one packed piece, of several short rows
    by_count: Mapping[int, float]


# One H200 (torch 2.11, triton 3.6): 715,119, 341,303 and 584,984 entries, then REDDIT-BINARY and DD.
MEASURED_ENTRIES = (
    MeasuredEntries(43, 4, False, {8: 0.050, 4: 0.056}),
    MeasuredEntries(125, 4, False, {8: 0.042, 4: 0.033}),
    MeasuredEntries(104, 2, False, {8: 0.047, 4: 0.053}),
    MeasuredEntries(256, 4, True, {8: 0.453, 4: 0.502, 2: 0.505}),
    MeasuredEntries(256, 4, True, {8: 0.219, 4: 0.226, 2: 0.229}),
)
# Bytes of each factor that a thread has on their way, and entries that these are of at most; fitted to the above. The
# few entries of a packed piece would otherwise take several turns.
LOADED_BYTES, LOADED_BYTES_OF_A_PIECE, MOST_AT_ONCE = 64, 256, 8

Segment = Callable[[Scope], tuple[Value, Value]]  # writes where the groups to be summed begin and end


def define_single_steps(scope: Scope) -> None:
    """Write the values of summed indices that one tile holds whole, outside all loops."""
    for name in scope.spec.schedule.names("step"):
        if scope.spec.is_one_step(name):
            define_step(scope, name)


def row_segment(scope: Scope) -> tuple[Value, Value]:
    """Write the loads of where the groups of the row in scope, or of each row of a tile, begin and end."""
    if scope.segment is not None:
        return scope.segment
    owner = scope.spec.owner
    row, pointers = scope.indices[owner.row], scope.parameter("pointers", owner.index)
    mask = f", mask={scope.bounds[owner.row].text}, other=0" if owner.row in scope.bounds else ""
    first = scope.let(f"tl.load({pointers} + {row.text}{mask})", row.axes, "first")
    last = scope.let(f"tl.load({pointers} + {row.text} + 1{mask})", row.axes, "last")
    return first, last


def open_loops(scope: Scope, segment: Segment = row_segment) -> Scope:
    """Write the heads of all loops and the loads in them; return the innermost scope, this one without any loop."""
    loops = scope.spec.loops
    if scope.spec.schedule.are_fused(loops):
        return _open_fused_loop(scope, loops, segment)
    for name in loops:
        scope = _open_loop(scope, name, segment)
        load_available(scope)
    return scope


def innermost(scope: Scope) -> Iterator[Scope]:
    """Write all loops and yield the innermost scope, or several in turn.

    There are two where blocks along memory are whole, which need no mask and are read by as many bytes at once as there
    are, and others are not. Of entries of a row that are loaded together each has one. The caller writes to each scope
    what belongs into it before it asks for the next.
    """
    loops = scope.spec.loops
    if _entries_at_once(scope.spec) > 1:
        yield from _open_entries(scope)
        return
    if not loops or not _has_whole_blocks(scope.spec, loops[-1]):
        yield open_loops(scope)
        return
    for name in loops[:-1]:
        scope = _open_loop(scope, name, row_segment)
        load_available(scope)
    name, block = loops[-1], scope.spec.block(loops[-1])
    first, end = _range_of_blocks(scope, name)
    if _takes_entries(scope.spec, name):
        whole = rest = scope.let(f"{first} + ({end} - {first}) // {block} * {block}", (), "whole").text
    else:
        end = scope.let(end, (), "end").text
        whole = scope.let(f"{end} // {block} * {block}", (), "whole").text
        rest = f"tl.maximum({first}, {whole})"
    for place, is_whole in ((f"{first}, {whole}", True), (f"{rest}, {end}", False)):
        body = _open_range(scope, name, place, is_whole)
        if _takes_entries(scope.spec, name) and not is_whole:
            value = body.indices[name]
            body.bounds[name] = body.let(f"{value.text} < {end}", value.axes, f"in_{body.identifier(name)}")
        load_available(body)
        yield body


def _has_whole_blocks(spec: KernelSpec, name: str) -> bool:
    """Whether a mask alone keeps a sum from reading several elements at once: all rows of its factors are aligned.

    Blocks of a row's entries are whole but for the last.
    """
    schedule = spec.schedule
    if _takes_entries(spec, name):
        return True
    if name != schedule.along or schedule.roles[name] != "step" or not may_end_early(spec, name, spec.block(name)):
        return False
    parts = schedule.parts_of(name)
    return all(
        stride % KNOWN_DIVISOR == 0
        for factor in schedule.accesses
        for index, stride in zip(factor.indices, spec.strides[factor.name])
        if str(index) not in parts
    )


def _takes_entries(spec: KernelSpec, name: str) -> bool:
    """Whether a loop takes a block of the entries of the row that a program owns at a time."""
    owner = spec.schedule.owner
    return owner is not None and name == owner.segment and spec.schedule.roles[name] == "step"


def _open_loop(scope: Scope, name: str, segment: Segment) -> Scope:
    role = scope.spec.schedule.roles[name]
    if role == "segment":
        return _open_segment(scope, name, segment)
    return _open_single_values(scope, name) if role == "loop" else open_blocks(scope, name)


def _open_segment(scope: Scope, name: str, segment: Segment) -> Scope:
    """Open the loop over the groups of one row, or of the rows of a tile side by side."""
    variable = scope.index(name)
    first, last = segment(scope)
    if not first.axes:
        scope.line(f"for {variable} in range({first.text}, {last.text}):")
        body = scope.child()
        body.indices[name] = Value(variable)
        return _with_row(body)
    length = scope.let(f"tl.max({last.text} - {first.text})", (), "length")
    scope.line(f"for turn in range(0, {length.text}):")
    body = scope.child()
    body.define(name, f"{first.text} + turn", first.axes)
    body.bounds[name] = body.let(f"{variable} < {last.text}", first.axes, f"in_{body.identifier(name)}")
    return _with_row(body)


def _with_row(scope: Scope) -> Scope:
    """Write the begin of another row, if the entry in scope may be the first of one."""
    owner = scope.spec.schedule.owner
    if owner is not None and owner.is_packed:
        load_available(scope)
        begin_row(scope, Value("acc", scope.spec.result_axes))
    return scope


def _entries_at_once(spec: KernelSpec) -> int:
    """Return how many entries of a row are loaded at once, whose sums are added one after another."""
    schedule = spec.schedule
    if not schedule.walks_rows or spec.loops != schedule.names("segment"):
        return 1
    elements = math.prod(spec.block(axis) for axis in spec.result_axes)
    each = max(1, elements // spec.threads) * spec.bound.dtype.itemsize
    return entries_at_once(each, spec.owner.is_packed and spec.block(spec.owner.row) == 1)


def entries_at_once(each: int, is_one_piece: bool) -> int:
    """Return how many entries of a row are loaded at once, of each of which a thread takes so many bytes.

    >>> entries_at_once(16, is_one_piece=False), entries_at_once(16, is_one_piece=True)
    (4, 8)
    """
    return max(1, min(MOST_AT_ONCE, (LOADED_BYTES_OF_A_PIECE if is_one_piece else LOADED_BYTES) // each))


def _open_entries(scope: Scope) -> Iterator[Scope]:
    """Open the loop over the entries of one row, or of rows side by side, several in a turn; yield a scope for each.

    All of their loads are written here: with one entry in a turn, each would wait for the one before. Positions may be
    loaded a turn ahead, since what they point to can't be loaded before they are there.
    """
    spec, (name,) = scope.spec, scope.spec.schedule.names("segment")
    count, (first, last) = _entries_at_once(spec), row_segment(scope)
    is_ahead = spec.config.is_ahead
    if first.axes:
        length = scope.let(f"tl.max({last.text} - {first.text})", (), "length")
        begin, start, turns = first.text, f"{first.text} + turn", f"for turn in range(0, {length.text}, {count}):"
    else:
        begin, start, turns = first.text, "start", f"for start in range({first.text}, {last.text}, {count}):"

    def entry(scope: Scope, begin: str, at: int, may_be_last: bool) -> Scope:
        """Write the place of an entry, and whether the row has it."""
        place = scope.indices[name] = scope.let(f"{begin} + {at}", first.axes, scope.index(name))
        if may_be_last:
            scope.bounds[name] = scope.let(f"{place.text} < {last.text}", first.axes, f"in_{scope.identifier(name)}")
        return scope

    ahead = [entry(scope.child(indent=0), begin, at, True) for at in range(count)] if is_ahead else []
    for own in ahead:
        load_ahead(own)
    scope.line(turns)
    bodies = [scope.child() for _ in range(count)]
    for at, body in enumerate(bodies):
        if is_ahead:
            take_loaded(body, ahead[at])
        load_available(entry(body, start, at, bool(at or first.axes)))
    for at, own in enumerate(ahead):
        load_next(entry(scope.child(), start, count + at, True), own)
    yield from map(_with_row, bodies)


def _open_single_values(scope: Scope, name: str) -> Scope:
    """Open a loop that takes one value of an index at a time."""
    spec, variable, extent = scope.spec, scope.index(name), scope.spec.schedule.extents[name]
    is_baked = extent <= BAKED_LOOP and not spec.is_varying(name)
    is_unrolled = is_baked and extent <= UNROLLED and name == spec.loops[-1] and not spec.schedule.is_sum
    turns = str(extent if is_baked else scope.extent(name))
    if name == _shared_loop(spec):
        turns = ", ".join(_part_of(scope, turns))
    scope.line(f"for {variable} in {'tl.static_range' if is_unrolled else 'range'}({turns}):")
    body = scope.child()
    body.indices[name] = Value(variable)
    return body


def open_blocks(scope: Scope, name: str) -> Scope:
    """Open a loop that takes a block of an index at a time."""
    return _open_range(scope, name, ", ".join(_range_of_blocks(scope, name)))


def _range_of_blocks(scope: Scope, name: str) -> tuple[str, str]:
    """Write the first value of an index that the program takes and the one after its last, those of its part."""
    block = scope.spec.block(name)
    if _takes_entries(scope.spec, name):
        first, last = row_segment(scope)
        return first.text, last.text
    end = wide_extent(scope, name, block)
    if name != _shared_loop(scope.spec):
        return "0", end
    parts = scope.spec.config.parts
    share = scope.let(f"tl.cdiv({end}, {block * parts}) * {block}", (), "share").text
    return f"part * {share}", f"tl.minimum((part + 1) * {share}, {end})"


def _open_range(scope: Scope, name: str, place: str, is_whole: bool = False) -> Scope:
    """Open the loop over the blocks of an index in a range; all of their values are inside if they are whole."""
    start = f"start_{scope.identifier(name)}"
    scope.line(f"for {start} in range({place}, {scope.spec.block(name)}):")
    body = scope.child()
    define_step(body, name, f"{start} + ", is_whole)
    return body


def define_step(scope: Scope, name: str, start: str = "", is_whole: bool = False) -> None:
    """Write the values of a block of a summed index, which begins at `start`."""
    block = scope.spec.block(name)
    if block > 1:
        scope.define(name, f"{start}{scope.spec.tile.arange(name)}", (name,))
    else:
        scope.define(name, f"{start}0")
    if not is_whole and not _takes_entries(scope.spec, name):
        bound_index(scope, name, block)
    _split_flat(scope, name)


def _split_flat(scope: Scope, name: str) -> None:
    """Define the index names that a flattened step holds, as expressions: addresses along it need none of them."""
    spec, value = scope.spec, scope.indices[name]
    parts = spec.schedule.parts_of(name)
    text = value.text
    for part in parts[:0:-1]:
        length = scope.extent(part) if spec.is_varying(part) else spec.schedule.extents[part]
        scope.indices[part] = Value(f"({text} % {length})", value.axes)
        text = f"({text} // {length})"
    for part in parts:
        scope.indices.setdefault(part, Value(text, value.axes))  # the first one
        if name in scope.bounds:
            scope.bounds[part] = scope.bounds[name]


# programs that share a sum


def _shared_loop(spec: KernelSpec) -> str | None:
    """Return the loop that programs share (split-K): that with the most turns, by the power of two of its length."""
    if spec.config.parts == 1:
        return None
    return max(spec.loops, key=lambda name: power_of_two(spec.schedule.extents[name]) / spec.step(name))


def _part_of(scope: Scope, turns: str) -> tuple[str, str]:
    """Return the first turn of this program's part and the one after its last."""
    share = scope.let(f"tl.cdiv({turns}, {scope.spec.config.parts})", (), "share").text
    return f"part * {share}", f"tl.minimum((part + 1) * {share}, {turns})"


# several loops as one


def inner_turns(spec: KernelSpec) -> int:
    """Return how many turns the inner loops take together for each turn of the outermost one."""
    return math.prod(_turns(spec, name) for name in spec.loops[1:])


def _turns(spec: KernelSpec, name: str) -> int:
    """Return the turns of a loop on whose length the source may rely."""
    return -(-spec.schedule.extents[name] // spec.step(name))


def _open_fused_loop(scope: Scope, loops: tuple[str, ...], segment: Segment) -> Scope:
    """Open one loop in the place of several nested ones."""
    spec, (outer, *inner) = scope.spec, loops
    total = inner_turns(spec)
    if spec.schedule.roles[outer] == "segment":
        first, last = segment(scope)
        turns = f"{first.text} * {total}, {last.text} * {total}"
    else:
        block, extent = spec.step(outer), scope.extent(outer)
        turns = f"{extent if block == 1 else f'tl.cdiv({extent}, {block})'} * {total}"
        if spec.config.parts > 1:
            turns = ", ".join(_part_of(scope, turns))
    scope.line(f"for turn in range({turns}):")
    body = scope.child()
    _define_turn(body, outer, f"turn // {total}")
    for name in inner:
        count = _turns(spec, name)
        total //= count
        _define_turn(body, name, f"{f'turn // {total}' if total > 1 else 'turn'} % {count}")
    load_available(body)
    return body


def _define_turn(scope: Scope, name: str, place: str) -> None:
    """Write the values of a loop's index in its turn number `place`."""
    if scope.spec.schedule.roles[name] == "step":
        define_step(scope, name, f"({place}) * {scope.spec.block(name)} + ")
    else:
        scope.define(name, place)
