"""Straight-line code for statements over constant tables: a product for each entry, with numbers for positions.

A tile is loaded once for all entries that read it, and each row of the output is stored when it is complete.
Coefficients of equivariant products are such tables: a few hundred entries that never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ..language import Access, Var, walk
from ..planning import line_at, number_at
from .broadcast import Value
from .loads import axes_of, load_factor, pointer
from .products import widened, zeros
from .scope import Scope
from .spec import Axes, KernelSpec
from .stores import store_sum

__all__ = ["write_unrolled"]


class Term(NamedTuple):
    """The product of one entry."""

    number: str  # the table's number, times the factors that are scalars
    tiles: tuple[Value, ...]  # the factors with axes


class Load(NamedTuple):
    """A tile or a scalar, and the lines that load it."""

    value: Value
    lines: list[str]


def write_unrolled(scope: Scope) -> None:
    """Write a program's rows, each a sum over the entries of its tables."""
    spec, schedule = scope.spec, scope.spec.schedule
    axes = spec.ordered({*schedule.names("tile", "step")})
    rows = [name for name in schedule.names("unrolled") if name in schedule.free]
    sums = [name for name in schedule.names("unrolled") if name not in schedule.free]
    loads: dict[str, Load] = {}  # by address
    terms = [_terms_of_row(row, sums, loads) for row in _entries(scope, rows)]
    large = _large_loads(terms, loads, axes)
    # all loads before the first store: a compiler moves no load before a store that it might alias
    for load in loads.values():
        if load not in large:
            scope.lines += load.lines
    totals = _sum_by_tile(scope, terms, large, axes) if large else {}
    for at, row in enumerate(_entries(scope, rows)):
        for access in schedule.output.indirections:
            if access.name in schedule.tables:
                _look_up(row, access)
        acc = Value("acc", spec.ordered(set(spec.kept(axes))) if large else axes)
        if large:
            row.line(f"acc = {totals.get(at) or zeros(spec, acc.axes)}")
        else:
            _sum_row(row, terms[at], acc)
        store_sum(row, acc)


def _entries(scope: Scope, names: Sequence[str]) -> Iterator[Scope]:
    """Yield a scope for every combination of values of the names, in which they stand for those numbers."""
    for place in product(*[range(scope.spec.schedule.extents[name]) for name in names]):
        entry = scope.child(indent=0)
        entry.indices.update({name: Value(str(at)) for name, at in zip(names, place)})
        yield entry


def _terms_of_row(row: Scope, sums: Sequence[str], loads: dict[str, Load]) -> list[Term]:
    """Return the products of one row that are not 0."""
    terms = [_term(entry, loads) for entry in _entries(row, sums)]
    return [term for term in terms if term is not None]


def _large_loads(rows: Sequence[Sequence[Term]], loads: dict[str, Load], axes: Axes) -> list[Load]:
    """Return the loads of tiles that have all axes, the first one of each product; none if there is but one axis."""
    if len(axes) < 2:
        return []
    firsts = {next((tile for tile in term.tiles if tile.axes == axes), None) for terms in rows for term in terms}
    return [load for load in loads.values() if load.value in firsts]


# the product of one entry


def _term(scope: Scope, loads: dict[str, Load]) -> Term | None:
    """Return the product of the entry in scope, or None if there is no entry or it is 0."""
    spec, tables, scale = scope.spec, scope.spec.schedule.tables, 1.0
    factors = [(at, factor) for at, factor in enumerate(spec.schedule.factors) if isinstance(factor, Access)]
    for _, factor in factors:
        for access in (access for root in factor.indirections for access in walk(root)):
            if access.name in tables and not _look_up(scope, access):
                return None
        if factor.name in tables:
            scale *= _number(scope, factor)
    if scale == 0:
        return None
    values = [_load_once(scope, at, factor, loads) for at, factor in factors if factor.name not in tables]
    numbers = [widened(spec, value, ()) for value in values if not value.axes]
    return Term(" * ".join([*numbers, _literal(spec, scale)]), tuple(value for value in values if value.axes))


def _number(scope: Scope, access: Access) -> float:
    places = [int(scope.indices[index.name].text) for index in access.indices if isinstance(index, Var)]
    return float(number_at(scope.spec.schedule.tables[access.name], tuple(places)))


def _literal(spec: KernelSpec, number: float) -> str:
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return text if spec.accumulate == "tl.float32" else f"tl.full((), {text}, {spec.accumulate})"


def _look_up(scope: Scope, access: Access) -> bool:
    """Define the position that a table holds for the entry in scope, or along an axis of tiles the line of positions.

    Return False if the table holds no position there.
    """
    schedule = scope.spec.schedule
    names = [index.name for index in access.indices if isinstance(index, Var)]
    place = [None if name in schedule.axes else int(scope.indices[name].text) for name in names]
    line = line_at(schedule.tables[access.name], tuple(place))
    assert line is not None
    start, step = line
    axis = scope.indices[names[place.index(None)]] if None in place else Value("")
    if axis.axes:
        along = axis.text if step == 1 else f"{axis.text} * {step}"
        text = f"{start} + {along}" if start else along
        scope.positions[access] = Value(text if text.isidentifier() else f"({text})", axis.axes)
    else:
        scope.positions[access] = Value(str(start))
    return bool(start >= 0)


def _load_once(scope: Scope, at: int, factor: Access, loads: dict[str, Load]) -> Value:
    """Return the tile of a factor, whose load is added to `loads` unless its address is there."""
    address = pointer(scope, factor, "tensor", axes_of(scope, factor.names))
    if address not in loads:
        aside = scope.aside()
        loads[address] = Load(load_factor(aside, at, factor), aside.lines)
    return loads[address].value


# sums of products


def _sum_row(scope: Scope, terms: Sequence[Term], acc: Value) -> None:
    """Write the sum of one row, a line for each tile of its widest factor; see `_summands`."""
    summands = _summands(scope.spec, terms)
    is_whole = bool(acc.axes) and bool(summands) and summands[0].axes == acc.axes
    if not is_whole:  # nothing has the axes of a result
        scope.line(f"acc = {zeros(scope.spec, acc.axes)}")
    for at, value in enumerate(summands):
        scope.line(f"acc {'=' if is_whole and not at else '+='} {scope.spec.tile.spread(value, acc.axes)}")


def _sum_by_tile(scope: Scope, rows: Sequence[Sequence[Term]], large: Sequence[Load], axes: Axes) -> dict[int, str]:
    """Write the sums of all rows where a factor has every axis; return the variable of each row's result.

    Each of that factor's tiles is loaded once, for all rows, as many tiles ahead as the config has stages. A row that
    is complete is summed over the axes that the output lacks, so that few rows are whole tiles at a time.
    """
    spec = scope.spec
    uses = _uses(rows, large)
    last = {row: at for at, terms_of in enumerate(uses) for row in terms_of}
    results: dict[int, str] = {}
    loaded = 0
    for at, terms_of in enumerate(uses):
        while loaded < min(at + spec.config.num_stages, len(large)):
            scope.lines += large[loaded].lines
            loaded += 1
        for row, terms in terms_of.items():
            for value in _summands(spec, terms):
                scope.line(f"acc_{row} {'+=' if row in results else '='} {spec.tile.spread(value, axes)}")
                results[row] = f"acc_{row}"
            if last[row] == at:
                results[row] = scope.let(_total(spec, Value(results[row], axes)).text, (), "row").text
    return results


def _uses(rows: Sequence[Sequence[Term]], large: Sequence[Load]) -> list[dict[int, list[Term]]]:
    """Return for each large tile the products that it is in, by their rows."""
    order = {load.value: at for at, load in enumerate(large)}
    uses: list[dict[int, list[Term]]] = [{} for _ in large]
    for row, terms in enumerate(rows):
        for term in terms:
            uses[next(order[tile] for tile in term.tiles if tile in order)].setdefault(row, []).append(term)
    return uses


def _total(spec: KernelSpec, value: Value) -> Value:
    """Return a value summed over the axes that the output lacks."""
    for axis in [axis for axis in value.axes if not spec.schedule.is_kept(axis)]:
        value = spec.tile.reduce("tl.sum", value, axis)
    return value


def _summands(spec: KernelSpec, terms: Sequence[Term]) -> list[Value]:
    """Return the products, factored: each tile of the widest factor times the sum of all that it is multiplied with.

    The widest factor has the most axes and, of several such, the fewest tiles.
    """
    if not terms or not terms[0].tiles:
        return [Value(" + ".join(term.number for term in terms))] if terms else []
    factors = range(len(terms[0].tiles))
    kinds = [{term.tiles[at] for term in terms} for at in factors]
    widest = max(factors, key=lambda at: (len(terms[0].tiles[at].axes), -len(kinds[at])))
    groups: dict[Value, list[Term]] = {}
    for number, tiles in terms:
        groups.setdefault(tiles[widest], []).append(Term(number, (*tiles[:widest], *tiles[widest + 1 :])))
    summands = []
    for tile, others in groups.items():
        parts = _summands(spec, others)
        axes = spec.ordered({*tile.axes, *parts[0].axes})
        inner = Value(f"({' + '.join(part.text for part in parts)})", parts[0].axes)
        summands.append(Value(f"{widened(spec, tile, axes)} * {spec.tile.spread(inner, axes)}", axes))
    return summands
