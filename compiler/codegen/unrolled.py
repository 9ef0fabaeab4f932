"""Straight-line code for statements over constant tables: a product for each entry, with numbers for positions.

A tile is loaded once for all entries that read it, and each row of the output is stored when it is complete. What is
summed over along memory is taken in blocks, by a loop around that code. Coefficients of equivariant products are such
tables: a few hundred entries that never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import NamedTuple

from ..language import Access, Var, walk
from ..planning import line_of_access, number_at
from .broadcast import Value
from .loads import axes_of, hiding_masks, load_factor, pointer
from .loops import open_blocks
from .products import widened, zeros
from .scope import Scope
from .spec import Axes, KernelSpec
from .stores import finish_sum, store_interleaved, store_sum

__all__ = [
    "Load",
    "LoadKey",
    "Row",
    "add_row",
    "has_entries",
    "output_rows",
    "rows_of",
    "store_rows",
    "write_unrolled",
    "write_unrolled_sum",
]


class Term(NamedTuple):
    """The product of one entry."""

    number: str  # the table's number, times the factors that are scalars
    tiles: tuple[Value, ...]  # the factors with axes


class Load(NamedTuple):
    """A tile or a scalar, and the lines that load it."""

    value: Value
    lines: list[str]


LoadKey = tuple[object, ...]  # an address, and the masks of the factors that it is multiplied with


class Row(NamedTuple):
    """A row of an output, and the products whose sum it is."""

    scope: Scope
    terms: list[Term]


class RowGroup(NamedTuple):
    """Rows that are summed together, and what they wait for."""

    scope: Scope  # of the program
    body: Scope  # of a turn, with lines of its own, where what is summed over is taken in turns; else of the program
    rows: Sequence[Row]
    small: Sequence[Load]  # each comes before the first large one whose products read it
    large: Sequence[Load]  # tiles that have all axes, in the order in which they are loaded
    axes: Axes

    @property
    def has_turns(self) -> bool:
        return self.body is not self.scope


def write_unrolled(*scopes: Scope) -> None:
    """Write a program's rows, each a sum over the entries of its tables, of one statement or of several in turn."""
    scope, loads = scopes[0], dict[LoadKey, Load]()
    if len(scopes) == 1 and _turns(scope):
        write_unrolled_sum(scope)
        return
    axes = scope.spec.ordered({*scope.spec.schedule.names("tile", "step")})
    by_statement = [list(rows_of(statement, loads)) for statement in scopes]
    rows = [row for own in by_statement for row in own]
    large = _large_loads(rows, loads, axes)
    small = [load for load in loads.values() if load not in large]
    # all loads before the first store: a compiler moves no load before a store that it might alias
    totals = next(_sum_by_tile([RowGroup(scope, scope, rows, small, large, axes)]))
    first = 0
    for statement, own in zip(scopes, by_statement):
        is_summed = bool(large) and all(_is_summed_by_tile(row, large) for row in own)
        results = [totals.get(first + at, "") for at in range(len(own))] if is_summed else None
        store_rows(statement, own, results, axes)
        first += len(own)


def write_unrolled_sum(*scopes: Scope) -> None:
    """Write a program's rows, each the sum of a row of every statement: they are stored when all are added up."""
    loads = dict[LoadKey, Load]()
    parts = [_row_group(scope, loads) for scope in scopes]
    results = [""] * len(parts[0].rows)
    for part, totals in zip(parts, _sum_by_tile(parts)):
        for at, row in enumerate(part.rows):
            text = totals.get(at, "")
            if row.terms and not part.large and not part.has_turns:
                acc = Value(row.scope.symbols.fresh("sum"), part.axes)
                _sum_row(row, acc)
                text = _total(row.scope.spec, acc).text
            if text and results[at]:  # added at once: few results are held until the end
                text = part.scope.let(f"{results[at]} + {text}", (), "row").text
            results[at] = text or results[at]
    store_rows(scopes[0], [Row(row, []) for row in output_rows(scopes[0])], results, parts[0].axes)


def _row_group(scope: Scope, loads: dict[LoadKey, Load]) -> RowGroup:
    """Return a statement's rows and what they wait for, as one of several that are added up.

    What a loop loads is gone after it: it may take what is in `loads`, and leaves them as they are.
    """
    known, axes = {*loads}, scope.spec.ordered({*scope.spec.schedule.names("tile", "step")})
    names = _turns(scope)
    body = scope.aside() if names else scope
    for name in names:
        body = open_blocks(body, name)
    own = loads if body is scope else dict(loads)
    rows = list(rows_of(body, own))
    new = {key: load for key, load in own.items() if key not in known}
    large = _large_loads(rows, new, axes)
    large = large if all(_is_summed_by_tile(row, large) for row in rows) else []
    return RowGroup(scope, body, rows, [load for load in new.values() if load not in large], large, axes)


def _turns(scope: Scope) -> list[str]:
    """Return the summed axes of which a program takes a block in each turn of a loop."""
    return [name for name in scope.spec.schedule.names("step") if name not in scope.indices]


def rows_of(scope: Scope, loads: dict[LoadKey, Load]) -> Iterator[Row]:
    """Yield the rows of one statement's output, whose loads are added to `loads`."""
    schedule = scope.spec.schedule
    sums = [name for name in schedule.names("unrolled") if name not in schedule.free]
    for row in output_rows(scope):
        yield Row(row, _terms_of_row(row, sums, loads))


def output_rows(scope: Scope) -> list[Scope]:
    """Return a scope for each row of the output that tables name; the one row of a statement without tables."""
    schedule = scope.spec.schedule
    return list(_entries(scope, [name for name in schedule.names("unrolled") if name in schedule.free]))


def store_rows(scope: Scope, rows: Sequence[Row], totals: Sequence[str] | None, axes: Axes) -> None:
    """Write the stores of a statement's rows: of the sums `totals`, or if that is None of what is summed up here."""
    spec, schedule = scope.spec, scope.spec.schedule
    acc_axes = axes if totals is None else spec.ordered(set(spec.kept(axes)))
    waiting: list[tuple[str, int, int]] = []  # rows that lie between each other in memory, and their lines
    for at, (row, terms) in enumerate(rows):
        places = [access for access in schedule.output.indirections if access.name in schedule.tables]
        for access in places:
            _look_up(row, access)
        start, step = _line(row, places[0]) if _may_interleave(spec, acc_axes) else (0, 1)
        acc = Value("acc" if step <= 1 else scope.symbols.fresh("sum"), acc_axes)
        if totals is not None:
            row.line(f"{acc.text} = {totals[at] or zeros(spec, acc.axes)}")
        else:
            _sum_row(Row(row, terms), acc)
        if waiting and (step <= 1 or len(waiting) == step or start != waiting[-1][1] + 1 or step != waiting[-1][2]):
            _store_waiting(scope, waiting)
        if step <= 1:
            store_sum(row, acc)
        else:
            finish_sum(row, acc)
            waiting.append((acc.text, start, step))
    if waiting:
        _store_waiting(scope, waiting)


def _may_interleave(spec: KernelSpec, axes: Axes) -> bool:
    """Whether rows may be written several at a time: by a table, in one dimension of their own, to unit strides.

    Threads have whole sums of them then. What a tile sums up together would be exchanged once more: a fully connected
    product of 32 channels up to lmax 3 took an H200 0.347 ms so, and 0.323 row by row (10,000 samples).
    """
    schedule, strides = spec.schedule, spec.strides[""]
    last = schedule.output.indices[-1]
    return (
        schedule.strategy == "store-once"
        and isinstance(last, Access)
        and last.name in schedule.tables
        and len(schedule.output.indirections) == 1
        and strides[-1] == 1
        and len(axes) == len(spec.axes) == 1
        and not spec.bound.is_seeded
    )


def _store_waiting(scope: Scope, waiting: list[tuple[str, int, int]]) -> None:
    """Write the store of rows that lie between each other, of which there are none afterwards."""
    _, start, step = waiting[0]
    store_interleaved(scope.child(indent=0), [text for text, *_ in waiting], start, step)
    waiting.clear()


def _entries(scope: Scope, names: Sequence[str]) -> Iterator[Scope]:
    """Yield a scope for every combination of values of the names, in which they stand for those numbers."""
    for place in product(*[range(scope.spec.schedule.extents[name]) for name in names]):
        entry = scope.child(indent=0)
        entry.indices.update({name: Value(str(at)) for name, at in zip(names, place)})
        yield entry


def has_entries(row: Scope) -> bool:
    """Whether the tables have a product for a row of the output that is not 0."""
    schedule = row.spec.schedule
    sums = [name for name in schedule.names("unrolled") if name not in schedule.free]
    return any(_scale(entry) for entry in _entries(row, sums))


def _terms_of_row(row: Scope, sums: Sequence[str], loads: dict[LoadKey, Load]) -> list[Term]:
    """Return the products of one row that are not 0."""
    terms = [_term(entry, loads) for entry in _entries(row, sums)]
    return [term for term in terms if term is not None]


def _large_loads(rows: Sequence[Row], loads: dict[LoadKey, Load], axes: Axes) -> list[Load]:
    """Return the loads of tiles that have all axes, the first one of each product.

    There are none if but one axis has a fixed length: its tiles are as small as a program's share of the others.
    """
    if not rows or sum(not rows[0].scope.spec.is_varying(axis) for axis in axes) < 2:
        return []
    firsts = {next((tile for tile in term.tiles if tile.axes == axes), None) for row in rows for term in row.terms}
    return [load for load in loads.values() if load.value in firsts]


def _is_summed_by_tile(row: Row, large: Sequence[Load]) -> bool:
    """Whether a row is summed while the large tiles are loaded one by one; a row without products is if any is."""
    values = {load.value for load in large}
    return bool(large) and all(any(tile in values for tile in term.tiles) for term in row.terms)


# the product of one entry


def _term(scope: Scope, loads: dict[LoadKey, Load]) -> Term | None:
    """Return the product of the entry in scope, or None if there is no entry or it is 0."""
    spec, tables, scale = scope.spec, scope.spec.schedule.tables, _scale(scope)
    if scale == 0:
        return None
    factors = [(at, factor) for at, factor in enumerate(spec.schedule.factors) if isinstance(factor, Access)]
    values = [_load_once(scope, at, factor, loads) for at, factor in factors if factor.name not in tables]
    numbers = [widened(spec, value, ()) for value in values if not value.axes]
    return Term(" * ".join([*numbers, _literal(spec, scale)]), tuple(value for value in values if value.axes))


def _scale(scope: Scope) -> float:
    """Return the product of the tables' numbers for the entry in scope, 0 if there is none; define its positions."""
    tables, scale = scope.spec.schedule.tables, 1.0
    for factor in scope.spec.schedule.accesses:
        for access in (access for root in factor.indirections for access in walk(root)):
            if access.name in tables and not _look_up(scope, access):
                return 0.0
        if factor.name in tables:
            scale *= _number(scope, factor)
    return scale


def _number(scope: Scope, access: Access) -> float:
    places = [int(scope.indices[index.name].text) for index in access.indices if isinstance(index, Var)]
    return float(number_at(scope.spec.schedule.tables[access.name], tuple(places)))


def _literal(spec: KernelSpec, number: float) -> str:
    text = repr(number) if isfinite(number) else f'float("{number}")'
    return text if spec.accumulate == "tl.float32" else f"tl.full((), {text}, {spec.accumulate})"


def _look_up(scope: Scope, access: Access) -> bool:
    """Define the position that a table holds for the entry in scope, or along an axis of tiles the line of positions.

    Return False if the table holds no position there.
    """
    schedule = scope.spec.schedule
    start, step = _line(scope, access)
    along_axes = [index.name for index in access.indices if isinstance(index, Var) and index.name in schedule.axes]
    axis = scope.indices[along_axes[0]] if along_axes else Value("")
    if axis.axes:
        along = axis.text if step == 1 else f"{axis.text} * {step}"
        text = f"{start} + {along}" if start else along
        scope.positions[access] = Value(text if text.isidentifier() else f"({text})", axis.axes)
    else:
        scope.positions[access] = Value(str(start))
    return bool(start >= 0)


def _line(scope: Scope, access: Access) -> tuple[int, int]:
    """Return the position that a table holds for the entry in scope, and the step along an axis of tiles."""
    schedule = scope.spec.schedule
    at = {name: int(scope.indices[name].text) for name in access.names if name not in schedule.axes}
    line = line_of_access(access, schedule.tables, at)
    assert line is not None
    return line


def _load_once(scope: Scope, at: int, factor: Access, loads: dict[LoadKey, Load]) -> Value:
    """Return the tile of a factor, whose load is added to `loads` unless its address and masks are there."""
    key = pointer(scope, factor, "tensor", axes_of(scope, factor.names)), *hiding_masks(scope, factor)
    if key not in loads:
        aside = scope.aside()
        loads[key] = Load(load_factor(aside, at, factor), aside.lines)
    return loads[key].value


# sums of products


def _sum_row(row: Row, acc: Value) -> None:
    """Write the sum of one row, a line for each tile of its widest factor; see `_summands`."""
    summands = _summands(row.scope.spec, row.terms)
    is_whole = bool(acc.axes) and bool(summands) and summands[0].axes == acc.axes
    if not is_whole:  # nothing has the axes of a result
        row.scope.line(f"{acc.text} = {zeros(row.scope.spec, acc.axes)}")
    _add_summands(row.scope, summands, acc, is_new=is_whole)


def add_row(row: Row, acc: Value) -> None:
    """Write the addition of one row's products to a sum."""
    _add_summands(row.scope, _summands(row.scope.spec, row.terms), acc, is_new=False)


def _add_summands(scope: Scope, summands: Sequence[Value], acc: Value, is_new: bool) -> None:
    for at, value in enumerate(summands):
        scope.line(f"{acc.text} {'=' if is_new and not at else '+='} {scope.spec.tile.spread(value, acc.axes)}")


def _sum_by_tile(parts: Sequence[RowGroup]) -> Iterator[dict[int, str]]:
    """Write the sums of all rows where a factor has every axis; yield, after each part, the variables of rows that end.

    Each of that factor's tiles is loaded once, for all rows, as many tiles ahead as the config has stages. A row that
    is complete is summed over the axes that the output lacks, so that few rows are whole tiles at a time. Where the
    tiles of all parts have one shape a row is one tile for all of them, and is summed over these axes once. A part that
    has turns adds to the tiles of its rows in each.
    """
    uses, ahead = [_uses(part) for part in parts], parts[0].scope.spec.config.num_stages
    are_alike = len({_shape(part) for part in parts}) == 1
    group = lambda number: 0 if are_alike else number
    turns = [
        (number, at, row) for number, own in enumerate(uses) for at, terms_of in enumerate(own) for row in terms_of
    ]
    last = {(group(number), row): (number, at) for number, at, row in turns}
    in_line = [(part, own) for part, own in zip(parts, uses) if not part.has_turns]
    loads = LoadsAhead([lines for part, own in in_line for lines in _lines_of_loads(part, own)], ahead)
    sums: dict[tuple[int, int], str] = {}
    for number, part in enumerate(parts):
        results: dict[int, str] = {}
        scope, body, own = part.scope, part.body, loads
        if part.has_turns:
            own = LoadsAhead(_lines_of_loads(part, uses[number]), ahead)
            for row in dict.fromkeys(row for terms_of in uses[number] for row in terms_of):
                if (group(number), row) not in sums:
                    scope.line(f"acc_{row} = {zeros(scope.spec, part.axes)}")
                    sums[group(number), row] = f"acc_{row}"
        for at, terms_of in enumerate(uses[number] or [{}]):
            own.write_next(body)
            for row, terms in terms_of.items():
                key, spec = (group(number), row), part.rows[row].scope.spec
                for value in _summands(spec, terms):
                    sign = "+=" if key in sums else "="
                    body.line(f"acc_{row} {sign} {spec.tile.spread(value, part.axes)}")
                    sums[key] = f"acc_{row}"
                if last[key] == (number, at) and not part.has_turns:
                    results[row] = _whole_row(part, row)
        if part.has_turns:
            scope.lines += body.lines
            ended = [row for (own_group, row), (end, _) in last.items() if (own_group, end) == (group(number), number)]
            results |= {row: _whole_row(part, row) for row in ended}
        yield results


def _whole_row(part: RowGroup, row: int) -> str:
    """Write the sum of a row's tile over the axes that the output lacks; return its variable."""
    return part.scope.let(_total(part.rows[row].scope.spec, Value(f"acc_{row}", part.axes)).text, (), "row").text


@dataclass
class LoadsAhead:
    """Loads of tiles, in their order, of which `count` are written before the first is read."""

    lines: Sequence[list[str]]
    count: int
    written: int = 0
    read: int = 0

    def write_next(self, scope: Scope) -> None:
        """Write the loads that come before the next tile is read."""
        while self.written < min(self.read + self.count, len(self.lines)):
            scope.lines += self.lines[self.written]
            self.written += 1
        self.read += 1


def _shape(part: RowGroup) -> tuple[tuple[int, bool], ...]:
    """Return the lengths of a part's tiles, and along which of their axes rows are summed."""
    spec = part.scope.spec
    return tuple((spec.block(axis), spec.schedule.is_kept(axis)) for axis in part.axes)


def _lines_of_loads(part: RowGroup, uses: Sequence[dict[int, list[Term]]]) -> list[list[str]]:
    """Return the lines of each large load; before them, those of the small ones that its products read first.

    What no product of a large load reads as a tile comes before all of them.
    """
    small = {load.value: load.lines for load in part.small}
    lines = list[list[str]]()
    for load, terms_of in zip(part.large, uses):
        tiles = [tile for terms in terms_of.values() for term in terms for tile in term.tiles]
        lines.append([line for tile in tiles for line in small.pop(tile, [])] + load.lines)
    lines = lines or [[]]
    lines[0] = [line for each in small.values() for line in each] + lines[0]
    return lines


def _uses(part: RowGroup) -> list[dict[int, list[Term]]]:
    """Return for each large tile the products that wait for it, by their rows; all of a turn without such tiles."""
    if part.has_turns and not part.large:
        return [{number: row.terms for number, row in enumerate(part.rows) if row.terms}]
    order = {load.value: at for at, load in enumerate(part.large)}
    uses: list[dict[int, list[Term]]] = [{} for _ in part.large]
    for number, row in enumerate(part.rows):
        if _is_summed_by_tile(row, part.large):
            for term in row.terms:
                last = max(order[tile] for tile in term.tiles if tile in order)
                uses[last].setdefault(number, []).append(term)
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
