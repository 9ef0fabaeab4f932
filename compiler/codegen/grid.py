"""The place of a program in the grid: the values of the grid's indices that it takes, by its program id."""

from __future__ import annotations

from ..binding import known_divisor
from .scope import Scope
from .spec import KernelSpec

__all__ = ["bound_index", "place_program", "split_merged", "wide_extent"]


def place_program(scope: Scope) -> tuple[tuple[str, int], ...]:
    """Write the grid positions and tiles that a program takes, by its program id.

    Return the grid: each index name with how many of its values a program takes, the fastest varying first.
    """
    spec, schedule = scope.spec, scope.spec.schedule
    order = [*schedule.names("grid"), *schedule.names("tile")]
    order = order if spec.config.reverse else order[::-1]
    grid = tuple((name, _share(spec, name)) for name in order)
    # an index of which one program takes all values is no part of the program id
    varying = [(name, block) for name, block in grid if schedule.extents[name] > block]
    _divide_program_id(scope, varying)
    for name, block in grid:
        if (name, block) not in varying:
            _place(scope, name, block, "")
    for name, block in grid:
        if not _is_persistent_row(spec, name):
            bound_index(scope, name, block)
    if schedule.owner is not None and spec.config.longest_first:
        _sort_rows(scope)
    if schedule.merged is not None:
        split_merged(scope)
    return grid


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


def _is_persistent_row(spec: KernelSpec, name: str) -> bool:
    """Whether a program owns several values of this index and takes one after another."""
    return spec.config.rows > 1 and name == spec.owner.row


def _share(spec: KernelSpec, name: str) -> int:
    """Return how many values of an index of the grid one program takes."""
    if _is_persistent_row(spec, name):
        return spec.config.rows
    return spec.block(name) if spec.schedule.roles[name] == "tile" else 1


def _place(scope: Scope, name: str, block: int, place: str) -> None:
    """Write the values of an index that a program takes, of which `place` is the number of its block.

    If `place` is "", the program takes all values. Persistent rows are from `first_row` to `past_row` - 1.
    """
    if _is_persistent_row(scope.spec, name):
        scope.line(f"first_row = {f'({place}) * {block}' if place else 0}")
        scope.line(f"past_row = tl.minimum(first_row + {block}, {scope.extent(name)})")
    elif block == 1:
        scope.define(name, place or "0")
    else:
        start = f"tl.cast({place}, tl.int64)" if _is_long(scope.spec, name, block) else f"({place})"
        scope.define(name, f"{f'{start} * {block} + ' if place else ''}{scope.spec.tile.arange(name)}", (name,))


def _sort_rows(scope: Scope) -> None:
    """Write the load of the program's row, by its place among rows that are sorted by length."""
    owner = scope.spec.owner
    row, order = scope.indices[owner.row], scope.parameter("order", owner.index)
    assert not row.axes
    scope.line(f"{row.text} = tl.load({order} + {row.text})")


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


def bound_index(scope: Scope, name: str, block: int) -> None:
    """Write where the values of an index are inside its extent, unless blocks divide the extent."""
    if block > 1 and _divisor(scope.spec, name) % block:
        value = scope.indices[name]
        text = f"{value.text} < {scope.extent(name)}"
        scope.bounds[name] = scope.let(text, value.axes, f"in_{scope.identifier(name)}")


def _divisor(spec: KernelSpec, name: str) -> int:
    """Return a divisor of an extent on which the source may rely, though it serves other lengths too."""
    extent, owner = spec.schedule.extents[name], spec.schedule.owner
    is_row = owner is not None and name == owner.row
    return known_divisor(extent) if is_row or spec.is_varying(name) else extent


def wide_extent(scope: Scope, name: str, block: int) -> str:
    """Return an extent in a type to which a block can be added without overflow."""
    extent = scope.extent(name)
    return f"tl.cast({extent}, tl.int64)" if _is_long(scope.spec, name, block) else extent


def _is_long(spec: KernelSpec, name: str, block: int) -> bool:
    """Whether the last tile may end beyond 32 bits; such lengths have a source of their own."""
    return spec.schedule.extents[name] + block > 2**31
