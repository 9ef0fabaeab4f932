"""A scatter `Y[G[p],c] += ...` whose programs take neighbours of p in turn, and add up those of one position first.

Where G is sorted, most neighbours have one position: their sum stays in registers, and is added to memory once. It is
right for any G, since a sum is added to memory as soon as the position changes. Over constant tables there is a sum for
each row of the output that they name, and several statements may share the neighbours: what one of them stores for each
neighbour, or scatters by an index in no order, is written in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from .broadcast import Value
from .loads import (
    conjunction,
    define_narrow,
    load_ahead,
    load_available,
    load_next,
    pointer,
    position_type,
    take_loaded,
)
from .products import add_product, zeros
from .scope import Scope
from .spec import KernelSpec
from .stores import add_to_output, entry_masks, finish_sum
from .unrolled import Load, LoadKey, Row, add_row, has_entries, output_rows, rows_of, store_rows

__all__ = ["write_runs"]

LOADED = 32  # elements of each factor that a thread has on their way, as far as registers allow; not more than
MOST, LEAST = 16, 4  # neighbours at once
MOST_OF_TABLES = 1  # of which one has many tiles already


class Held(NamedTuple):
    """The sums of a statement that wait in registers, and the position in its output that they belong to."""

    scope: Scope  # of the program
    place: Value
    sums: list[Value]


class Neighbour(NamedTuple):
    """One value of p, whose loads are written."""

    place: Value
    add: Callable[[], None]  # writes the addition of its products to the sums


def write_runs(*scopes: Scope) -> None:
    """Write the loops over a program's values of p: several at once, whose loads come first, and the last ones."""
    scope, count = scopes[0], _at_once(scopes[0].spec)
    define_narrow(scope)
    held = [_start(statement) for statement in scopes if statement.spec.schedule.run]
    if count > 1:
        scope.line(f"whole = first_row + (past_row - first_row) // {count} * {count}")
        _write_loop(scopes, "start", f"first_row, whole, {count}", count, held)
    _write_loop(scopes, "last", "whole, past_row" if count > 1 else "first_row, past_row", 1, held)
    for own in held:
        _flush(own.scope, own)


def _start(scope: Scope) -> Held:
    """Write the sums of a statement, which are 0 and belong nowhere yet."""
    spec, number = scope.spec, f"_{scope.spec.output}" if scope.spec.output else ""
    (place,) = spec.schedule.output.indirections
    sums = [Value(f"{name}{number if name else ''}", spec.result_axes) for name in _names_of_sums(scope)]
    for acc in filter(_is_held, sums):
        scope.line(f"{acc.text} = {zeros(spec, acc.axes)}")
    scope.line(f"held{number} = tl.full((), -1, {position_type(spec, place)})")
    return Held(scope, Value(f"held{number}"), sums)


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
    return min(MOST, max(LEAST, LOADED * spec.threads // width), spec.config.run)


def _write_loop(scopes: Sequence[Scope], variable: str, bounds: str, count: int, held: Sequence[Held]) -> None:
    """Write a loop over values of p, so many in a turn."""
    scope, is_ahead = scopes[0], count > 1 and scopes[0].spec.config.is_ahead
    ahead = [_with_end(_entry(scope, f"first_row + {at}")) for at in range(count)] if is_ahead else []
    for entry in ahead:
        load_ahead(entry)
    scope.line(f"for {variable} in range({bounds}):")
    body = scope.child()
    if scope.spec.schedule.tables:
        _write_turn(body, scopes, variable, held)
        return
    (own,) = held
    entries = [_entry(body, f"{variable} + {at}" if count > 1 else variable) for at in range(count)]
    for entry, loaded in zip(entries, ahead):
        take_loaded(entry, loaded)
    neighbours = [_neighbour(entry, own) for entry in entries]
    for at, loaded in enumerate(ahead):
        load_next(_with_end(_entry(body, f"{variable} + {count + at}")), loaded)
    for neighbour in neighbours:
        _add(body, neighbour, own)


def _entry(scope: Scope, at: str) -> Scope:
    """Write one value of p, and return the scope in which it has this value."""
    entry, name = scope.child(indent=0), scope.spec.turn
    entry.indices[name] = entry.let(at, (), entry.index(name))
    return entry


def _with_end(entry: Scope) -> Scope:
    """Write whether a value of p is one of the program's, which those of the next turn may not be."""
    name = entry.spec.turn
    entry.bounds[name] = entry.let(f"{entry.indices[name].text} < past_row", (), f"in_{entry.identifier(name)}")
    return entry


def _neighbour(entry: Scope, held: Held) -> Neighbour:
    """Write the loads of one value of p, of a statement without tables.

    Its product comes later, in one instruction with the addition.
    """
    load_available(entry)
    (target,) = entry.spec.schedule.output.indirections
    return Neighbour(entry.positions[target], lambda: add_product(entry, held.sums[0], True))


def _write_turn(scope: Scope, scopes: Sequence[Scope], at: str, held: Sequence[Held]) -> None:
    """Write the loads of one value of p for all statements over constant tables, then their sums."""
    entry, loads, written = _entry(scope, at), dict[LoadKey, Load](), list[tuple[Scope, list[Row]]]()
    shared: dict[str, Value] | None = {} if len(scopes) > 1 else None
    for statement in scopes:
        own = replace(entry.child(indent=0), spec=statement.spec, loaded=shared)
        load_available(own)
        written.append((own, list(rows_of(own, loads))))
    for load in loads.values():
        entry.lines += load.lines
    waiting = iter(held)
    for own, rows in written:
        if own.spec.schedule.run:
            target = next(waiting)
            _add(scope, _neighbour_of_tables(own, rows, target), target)
        else:
            store_rows(own, rows, None, own.spec.ordered({*own.spec.schedule.names("tile", "step")}))


def _neighbour_of_tables(entry: Scope, rows: Sequence[Row], held: Held) -> Neighbour:
    """Return one value of p of a statement over tables, whose loads are written."""
    spec = entry.spec
    (target,) = spec.schedule.output.indirections
    place = entry.positions[target]
    entries = [mask for mask in entry_masks(entry) if mask is not entry.valid.get(target)]
    if entries:  # what is multiplied with an absent entry may be NaN, so that its products belong nowhere
        place = entry.let(f"tl.where({conjunction(spec, entries, ())}, {place.text}, -1)", (), "place")

    def add() -> None:
        for row, acc in zip(rows, held.sums):
            add_row(row, acc)

    return Neighbour(place, add)


def _add(scope: Scope, neighbour: Neighbour, held: Held) -> None:
    """Write the addition of products to the sums that are held, which are added to memory first if of another place."""
    at, place = neighbour.place.text, held.place.text
    scope.line(f"if {at} != {place}:")
    other = replace(scope.child(), spec=held.scope.spec)
    _flush(other, held)
    for acc in filter(_is_held, held.sums):
        other.line(f"{acc.text} = {zeros(other.spec, acc.axes)}")
    other.line(f"{place} = {at}")
    neighbour.add()


def _flush(scope: Scope, held: Held) -> None:
    """Write the addition of what is held to its place in memory, if it has one."""
    schedule = scope.spec.schedule
    scope.positions[schedule.output.indirections[0]] = held.place
    masks = [scope.bounds[name] for name in schedule.free if name in scope.bounds]
    masks.append(scope.let(f"{held.place.text} >= 0", (), "is_held"))
    for row, acc in zip(output_rows(scope), held.sums):
        if _is_held(acc):
            finish_sum(row, acc)
            address = pointer(row, schedule.output, "output", acc.axes)
            add_to_output(row, acc, address, conjunction(scope.spec, masks, acc.axes))
