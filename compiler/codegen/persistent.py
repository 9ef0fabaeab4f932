"""Persistent rows: a program takes several rows in one loop, so that storing one overlaps the loads of the next.

A program for each row begins with loads whose latency nothing hides, and ends with a store. Four rows to a program,
and as many programs as a GPU has cores: pairs of rows of 32 x 32 blocks at a tenth, 4096^3 in float16, took 0.050 ms on
an H200, 0.060 with a program for each; rows of 128 x 128 blocks 0.033 and 0.039.
"""

from __future__ import annotations

from .broadcast import Value
from .grid import bound_index, split_merged
from .loads import conjunction, load_available, pointer
from .loops import inner_turns, open_loops, row_segment
from .nan_recheck import is_needed, sum_rows_again, with_few_rows, without_rows
from .products import add_product, zeros
from .scope import Scope
from .stores import output_masks, store_sum

__all__ = ["write_persistent_rows"]


def write_persistent_rows(scope: Scope) -> None:
    """Write a dot over the groups of neighbouring rows, whose sums are stored where the groups of a row end."""
    needs_recheck = _write_rows(scope)
    _write_empty_rows(scope)
    if needs_recheck:
        _recheck_rows(scope)


def _write_rows(scope: Scope) -> bool:
    """Write the loop over all rows that have groups; return whether a NaN of one row may have reached another."""
    spec, owner = scope.spec, scope.spec.owner
    row, acc = scope.index(owner.row), Value("acc", spec.result_axes)
    scope.line("stored = 0")
    scope.line(f"acc = {zeros(spec, acc.axes)}")
    body = open_loops(scope, _segment_of_rows)
    add_product(body, acc, in_loop=True)
    if spec.schedule.are_fused(spec.loops):
        body.line(f"if turn + 1 == until * {inner_turns(spec)}:")
    else:
        body.line(f"if {body.index(owner.segment)} + 1 == until:")
    row_end = _in_row(body, row)
    _store_row(row_end, acc)
    row_end.line(f"acc = {zeros(spec, acc.axes)}")
    row_end.line("stored += 1")
    row_end.line(f"{row} += 1")
    row_end.line("before = until")
    row_end.line(f"until = {_end_of_next(scope)}")
    _skip_empty_rows(row_end, "before")
    return is_needed(body)


def _in_row(scope: Scope, row: str) -> Scope:
    """Return the scope of a block in which variable `row` holds the program's row."""
    inside = scope.child()
    inside.indices[scope.spec.owner.row] = Value(row)
    return inside


def _segment_of_rows(scope: Scope) -> tuple[Value, Value]:
    """Write where the groups of all rows of the program begin and end, and the variable of the first row."""
    owner = scope.spec.owner
    pointers = scope.parameter("pointers", owner.index)
    begin = scope.let(f"tl.load({pointers} + first_row)", (), "begin")
    end = scope.let(f"tl.load({pointers} + past_row)", (), "end")
    row = scope.index(owner.row)
    scope.line(f"{row} = first_row")
    scope.line(f"until = tl.load({pointers} + {row} + 1)")
    _skip_empty_rows(scope, begin.text)
    return begin, end


def _skip_empty_rows(scope: Scope, begin: str) -> None:
    """Write the step to the next row that has groups, the one whose first group is `begin`."""
    scope.line(f"while until == {begin}:")
    inside = scope.child()
    inside.line(f"{scope.index(scope.spec.owner.row)} += 1")
    inside.line(f"until = {_end_of_next(scope)}")


def _end_of_next(scope: Scope) -> str:
    """Return the load of where the groups of the row at hand end, which is -1 past the program's last row."""
    owner = scope.spec.owner
    row, pointers = scope.index(owner.row), scope.parameter("pointers", owner.index)
    return f"tl.load({pointers} + {row} + 1, mask={row} < past_row, other=-1)"


def _store_row(scope: Scope, acc: Value) -> None:
    """Write the store of the sums of one row."""
    load_available(scope)
    result = scope.spec.tile.result(acc.text, acc.axes)
    if result != acc.text:
        scope.line(f"result = {result}")
        acc = Value("result", acc.axes)
    store_sum(scope, acc)


def _write_empty_rows(scope: Scope) -> None:
    """Write zeros to rows without groups, which the loop does not visit."""
    spec = scope.spec
    scope.line("if stored < past_row - first_row:")
    rows = scope.child(prefix="empty")
    row = rows.index(spec.owner.row)
    rows.line(f"for {row} in range(first_row, past_row):")
    row_scope = _in_row(rows, row)
    begin, end = row_segment(row_scope)
    row_scope.line(f"if {begin.text} == {end.text}:")
    empty = row_scope.child()
    nothing = Value("nothing", spec.result_axes)
    empty.line(f"nothing = {zeros(spec, nothing.axes)}")
    _store_row(empty, nothing)


def _recheck_rows(scope: Scope) -> None:
    """Write the NaN recheck of all rows, after the last of them.

    A NaN that reached another row is in all rows of a block: the first of each is read back, for all columns.
    """
    spec, owner = scope.spec, scope.spec.owner
    scope.line("tl.debug_barrier()")  # what other threads have stored comes first
    first = _first_of_each_block(scope)
    axes = spec.kept(spec.result_axes)
    first.line(f"is_wrong = tl.zeros({first.spec.tile.shape(axes)}, tl.int1)")
    first.line(f"for turn in tl.static_range({spec.config.rows}):")
    look = first.child()
    look.define(owner.row, "tl.minimum(first_row + turn, past_row - 1)")
    load_available(look)
    mask = conjunction(look.spec, output_masks(look), axes)
    guard = f", mask={mask}, other=0.0" if mask else ""
    address = pointer(look, spec.schedule.output, "output", axes)
    stored = look.let(f"tl.load({address}{guard}).to({spec.accumulate})", axes, "result")
    look.line(f"is_wrong = is_wrong | ({stored.text} != {stored.text})")
    scope.line("if tl.max(is_wrong.to(tl.int32)) > 0:")
    wrong = scope.child(prefix="single")
    row = wrong.index(owner.row)
    wrong.line(f"for {row} in range(first_row, past_row):")
    sum_rows_again(_in_row(wrong, row))


def _first_of_each_block(scope: Scope) -> Scope:
    """Return a scope whose tile holds the first row of each block of the merged rows."""
    merged, size = scope.spec.merged, scope.spec.block(scope.spec.merged.name)
    first = without_rows(scope, with_few_rows(scope.spec, size // merged.width), "top")
    first.define(merged.name, f"{first.spec.tile.arange(merged.name)} * {merged.width}", (merged.name,))
    bound_index(first, merged.name, size)
    split_merged(first)
    return first
