"""Persistent rows: a program takes several rows, one after another in one loop, so that while the sums of one are
stored, what the next one reads is on its way.

A program for each row begins with loads that nothing is there to hide, and ends with a store. Four rows to a program,
and as many programs as a GPU has cores: pairs of rows of 32 x 32 blocks at a tenth, 4096^3 in float16, took 0.050 ms on
an H200, 0.060 with a program for each; rows of 128 x 128 blocks 0.033 and 0.039.
"""

from __future__ import annotations

from .broadcast import Value
from .grid import bound_index, split_merged
from .loads import conjunction, load_known, pointer
from .loops import inner_turns, is_fused, open_loops, row_segment
from .nan_recheck import is_needed, sum_rows_again, with_few_rows, without_rows
from .products import add_product, zeros
from .scope import Scope
from .stores import output_masks, store_sum

__all__ = ["write_persistent_rows"]


def write_persistent_rows(scope: Scope) -> None:
    """A dot over the groups of neighbouring rows; where a row's groups end its sums are stored and begin again."""
    needs_recheck = _write_rows(scope)
    _write_empty_rows(scope)
    if needs_recheck:
        _recheck_rows(scope)


def _write_rows(scope: Scope) -> bool:
    """All rows that have groups; whether sums of one may have reached another."""
    spec, owner = scope.spec, scope.spec.owner
    row, acc = scope.index(owner.row), Value("acc", spec.result_axes)
    scope.line("stored = 0")
    scope.line(f"acc = {zeros(spec, acc.axes)}")
    body = open_loops(scope, _segment_of_rows)
    add_product(body, acc, in_loop=True)
    if is_fused(spec):
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
    """The scope of a block in which variable `row` holds the program's row."""
    inside = scope.child()
    inside.indices[scope.spec.owner.row] = Value(row)
    return inside


def _segment_of_rows(scope: Scope) -> tuple[Value, Value]:
    """Where the groups of all rows of the program begin and end; the row's own variable begins with them."""
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
    """To the next row that has groups: the one of which the group `begin` is the first."""
    scope.line(f"while until == {begin}:")
    inside = scope.child()
    inside.line(f"{scope.index(scope.spec.owner.row)} += 1")
    inside.line(f"until = {_end_of_next(scope)}")


def _end_of_next(scope: Scope) -> str:
    """Where the groups of the row end that it has come to; -1 after its last one."""
    owner = scope.spec.owner
    row, pointers = scope.index(owner.row), scope.parameter("pointers", owner.index)
    return f"tl.load({pointers} + {row} + 1, mask={row} < past_row, other=-1)"


def _store_row(scope: Scope, acc: Value) -> None:
    """The sums of one row to where they belong."""
    load_known(scope)
    result = scope.spec.tile.result(acc.text, acc.axes)
    if result != acc.text:
        scope.line(f"result = {result}")
        acc = Value("result", acc.axes)
    store_sum(scope, acc)


def _write_empty_rows(scope: Scope) -> None:
    """Rows without groups, which the loop has not met."""
    spec = scope.spec
    scope.line("if stored < past_row - first_row:")
    some = scope.child(prefix="empty")
    row = some.index(spec.owner.row)
    some.line(f"for {row} in range(first_row, past_row):")
    each = _in_row(some, row)
    begin, end = row_segment(each)
    each.line(f"if {begin.text} == {end.text}:")
    empty = each.child()
    nothing = Value("nothing", spec.result_axes)
    empty.line(f"nothing = {zeros(spec, nothing.axes)}")
    _store_row(empty, nothing)


def _recheck_rows(scope: Scope) -> None:
    """As `nan_recheck.recheck_tile`, for all rows at the end.

    What reached another row is in all rows of a block: the first of each is read back, for all columns.
    """
    spec, owner = scope.spec, scope.spec.owner
    scope.line("tl.debug_barrier()")  # what other threads have stored comes first
    first = _first_of_each_block(scope)
    axes = spec.kept(spec.result_axes)
    first.line(f"is_wrong = tl.zeros({first.spec.tile.shape(axes)}, tl.int1)")
    first.line(f"for turn in tl.static_range({spec.config.rows}):")
    look = first.child()
    look.define(owner.row, "tl.minimum(first_row + turn, past_row - 1)")
    load_known(look)
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
    """The tile with one row of each block that stands beside others in it."""
    merged, size = scope.spec.merged, scope.spec.block(scope.spec.merged.name)
    first = without_rows(scope, with_few_rows(scope.spec, size // merged.width), "top")
    first.define(merged.name, f"{first.spec.tile.arange(merged.name)} * {merged.width}", (merged.name,))
    bound_index(first, merged.name, size)
    split_merged(first)
    return first
