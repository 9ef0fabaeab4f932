"""A scatter `Y[G[p],c] += ...` whose programs take neighbours of p in turn, and add up those of one position first.

Where G is sorted, most neighbours have one position: their sum stays in registers, and is added to memory once. It is
right for any G, since a sum is added to memory as soon as the position changes. Over constant tables there is a sum for
each row of the output that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from .broadcast import Value
from .loads import conjunction, load_available, pointer, position_type
from .products import add_product, zeros
from .scope import Scope
from .spec import KernelSpec
from .stores import add_to_output, entry_masks, finish_sum
from .unrolled import Load, LoadKey, add_row, has_entries, output_rows, rows_of

__all__ = ["write_runs"]

LOADED = 32  # elements of each factor that a thread has on their way, as far as registers allow; not more than
MOST, LEAST = 16, 4  # neighbours at once
MOST_OF_TABLES = 1  # of which one has many tiles already


class Neighbour(NamedTuple):
    """One value of p, whose loads are written."""

    place: Value
    add: Callable[[], None]  # writes the addition of its products to the sums


def write_runs(scope: Scope) -> None:
    """Write the loops over a program's values of p: several at once, whose loads come first, and the last ones."""
    spec, axes, count = scope.spec, scope.spec.result_axes, _at_once(scope.spec)
    (place,) = spec.schedule.output.indirections
    held, sums = Value("held"), [Value(name, axes) for name in _names_of_sums(scope)]
    for acc in filter(_is_held, sums):
        scope.line(f"{acc.text} = {zeros(spec, axes)}")
    scope.line(f"held = tl.full((), -1, {position_type(spec, place)})")
    if count > 1:
        scope.line(f"whole = first_row + (past_row - first_row) // {count} * {count}")
        _write_loop(scope, "start", f"first_row, whole, {count}", count, held, sums)
    _write_loop(scope, "last", "whole, past_row" if count > 1 else "first_row, past_row", 1, held, sums)
    _flush(scope, held, sums)


def _names_of_sums(scope: Scope) -> list[str]:
    """Return the variables of the sums, one for each row of the output; "" for a row that no entry of a table is in."""
    if not scope.spec.schedule.tables:
        return ["acc"]
    return [f"acc_{at}" if has_entries(row) else "" for at, row in enumerate(output_rows(scope))]


def _is_held(acc: Value) -> bool:
    return bool(acc.text)


def _at_once(spec: KernelSpec) -> int:
    """Return how many neighbours are loaded at once."""
    if spec.schedule.tables:
        return min(MOST_OF_TABLES, spec.config.run)
    width = prod(spec.block(axis) for axis in spec.result_axes)
    return min(MOST, max(LEAST, LOADED * 32 * spec.config.num_warps // width), spec.config.run)


def _write_loop(scope: Scope, variable: str, bounds: str, count: int, held: Value, sums: Sequence[Value]) -> None:
    """Write a loop over values of p, so many in a turn."""
    scope.line(f"for {variable} in range({bounds}):")
    body, loads = scope.child(), dict[LoadKey, Load]()
    places = [f"{variable} + {at}" for at in range(count)] if count > 1 else [variable]
    for neighbour in [_neighbour(body, place, loads, sums) for place in places]:
        _add(body, neighbour, held, sums)


def _neighbour(scope: Scope, at: str, loads: dict[LoadKey, Load], sums: Sequence[Value]) -> Neighbour:
    """Write the loads of one value of p; its product comes later, in one instruction with the addition."""
    spec, name = scope.spec, scope.spec.schedule.run
    entry = scope.child(indent=0)
    entry.indices[name] = entry.let(at, (), entry.index(name))
    load_available(entry)
    (target,) = spec.schedule.output.indirections
    place = entry.positions[target]
    if not spec.schedule.tables:
        return Neighbour(place, lambda: add_product(entry, sums[0], True))
    known = len(loads)
    rows = list(rows_of(entry, loads))
    for load in list(loads.values())[known:]:
        entry.lines += load.lines
    entries = [mask for mask in entry_masks(entry) if mask is not entry.valid.get(target)]
    if entries:  # what is multiplied with an absent entry may be NaN, so that its products belong nowhere
        place = entry.let(f"tl.where({conjunction(spec, entries, ())}, {place.text}, -1)", (), "place")

    def add() -> None:
        for row, acc in zip(rows, sums):
            add_row(row, acc)

    return Neighbour(place, add)


def _add(scope: Scope, neighbour: Neighbour, held: Value, sums: Sequence[Value]) -> None:
    """Write the addition of products to the sums that are held, which are added to memory first if of another place."""
    spec, at = scope.spec, neighbour.place.text
    scope.line(f"if {at} != held:")
    other = scope.child()
    _flush(other, held, sums)
    for acc in filter(_is_held, sums):
        other.line(f"{acc.text} = {zeros(spec, acc.axes)}")
    other.line(f"held = {at}")
    neighbour.add()


def _flush(scope: Scope, held: Value, sums: Sequence[Value]) -> None:
    """Write the addition of what is held to its place in memory, if it has one."""
    schedule = scope.spec.schedule
    scope.positions[schedule.output.indirections[0]] = held
    masks = [scope.bounds[name] for name in schedule.free if name in scope.bounds]
    masks.append(scope.let("held >= 0", (), "is_held"))
    for row, acc in zip(output_rows(scope), sums):
        if _is_held(acc):
            finish_sum(row, acc)
            address = pointer(row, schedule.output, "output", acc.axes)
            add_to_output(row, acc, address, conjunction(scope.spec, masks, acc.axes))
