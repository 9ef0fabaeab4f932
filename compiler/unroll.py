"""Straight-line code for statements over known tables: every entry is a product of its own, with numbers for positions.

What is loaded once for a position serves all entries that name it, and each row of the output is stored when it is
complete. Coefficients of equivariant products are such tables: a few hundred entries that never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from .broadcast import Value
from .ir import Access, Var, walk
from .known import line_at, number_at
from .products import Products

__all__ = ["Unrolled"]


class Term(NamedTuple):
    """The product of one entry."""

    number: str  # the table's, times the factors that are one number each
    tiles: tuple[Value, ...]  # the factors with axes


class Load(NamedTuple):
    """A tile, or a number, and the lines that load it."""

    value: Value
    lines: list[str]


class Unrolled(Products):
    """A program's rows, each a sum over the entries of its tables."""

    def emit_unrolled(self) -> None:
        s = self.schedule
        root = self.ordered({*s.names("tile", "step")})
        rows = [name for name in s.names("unrolled") if name in s.free]
        sums = [name for name in s.names("unrolled") if name not in s.free]
        self.loaded: dict[str, Load] = {}
        found = [[term for _ in self.places(sums) if (term := self.term()) is not None] for _ in self.places(rows)]
        is_large = lambda tile: len(root) > 1 and tile.axes == root
        firsts = {next(filter(is_large, term.tiles), None) for terms in found for term in terms}
        large = [load for load in self.loaded.values() if load.value in firsts]
        # all loads before the first store: no compiler moves one past it, since they might overlap
        for load in self.loaded.values():
            if load not in large:
                self.lines += load.lines
        results = self.emit_by_tile(found, large, root) if large else {}
        kept = self.ordered({axis for axis in root if s.is_kept(axis)})
        for at, (_, terms) in enumerate(zip(self.places(rows), found)):
            for access in s.output.indirections:
                if access.name in s.tables:
                    self.find(access)
            if large:
                self.line(f"acc = {results.get(at) or self.zeros(kept)}")
            else:
                self.emit_sum(terms, root)
            self.emit_scatter(kept if large else root)

    def emit_scatter(self, root: tuple[str, ...]) -> None:
        raise NotImplementedError

    def emit_sum(self, terms: Sequence[Term], root: tuple[str, ...]) -> None:
        """One row: a line for all products with one tile of the factor that meets the sum of the others last."""
        summands = self.summands(terms)
        is_whole = bool(root) and bool(summands) and summands[0].axes == root
        if not is_whole:  # nothing has the axes of a result
            self.line(f"acc = {self.zeros(root)}")
        for at, value in enumerate(summands):
            self.line(f"acc {'=' if is_whole and not at else '+='} {self.spread(value, root)}")

    def emit_by_tile(
        self, found: Sequence[Sequence[Term]], large: Sequence[Load], root: tuple[str, ...]
    ) -> dict[int, str]:
        """The results of all rows, where a factor has every axis: each of its tiles is loaded once, for all rows.

        The next tiles are on their way meanwhile, as many as the config has stages. A row that is complete is summed
        over the axes that the output lacks: few rows are whole tiles at a time.
        """
        order = {load.value: at for at, load in enumerate(large)}
        uses: list[dict[int, list[Term]]] = [{} for _ in large]
        for row, terms in enumerate(found):
            for term in terms:
                uses[next(order[tile] for tile in term.tiles if tile in order)].setdefault(row, []).append(term)
        last = {row: at for at, rows in enumerate(uses) for row in rows}
        results: dict[int, str] = {}
        ahead = 0
        for at, rows in enumerate(uses):
            while ahead < min(at + self.config.num_stages, len(large)):
                self.lines += large[ahead].lines
                ahead += 1
            for row, terms in rows.items():
                for value in self.summands(terms):
                    self.line(f"acc_{row} {'+=' if row in results else '='} {self.spread(value, root)}")
                    results[row] = f"acc_{row}"
                if last[row] == at:
                    results[row] = self.let(self.total(Value(results[row], root)).text, (), "row").text
        return results

    def total(self, value: Value) -> Value:
        """Summed over the axes that the output lacks."""
        for axis in [axis for axis in value.axes if not self.schedule.is_kept(axis)]:
            value = self.tile.reduce("tl.sum", value, axis)
        return value

    def summands(self, terms: Sequence[Term]) -> list[Value]:
        """For each tile of the factor with the most axes, it times the sum of all it meets; of several that one which
        has the fewest tiles."""
        if not terms or not terms[0].tiles:
            return [Value(" + ".join(term.number for term in terms))] if terms else []
        factors = range(len(terms[0].tiles))
        kinds = [{term.tiles[at] for term in terms} for at in factors]
        widest = max(factors, key=lambda at: (len(terms[0].tiles[at].axes), -len(kinds[at])))
        groups: dict[Value, list[Term]] = {}
        for number, tiles in terms:
            groups.setdefault(tiles[widest], []).append(Term(number, (*tiles[:widest], *tiles[widest + 1 :])))
        found = []
        for tile, others in groups.items():
            parts = self.summands(others)
            axes = self.ordered({*tile.axes, *parts[0].axes})
            inner = Value(f"({' + '.join(part.text for part in parts)})", parts[0].axes)
            found.append(Value(f"{self.wide(tile, axes)} * {self.spread(inner, axes)}", axes))
        return found

    def literal(self, number: float) -> str:
        text = repr(number) if math.isfinite(number) else f'float("{number}")'
        return text if self.accumulate == "tl.float32" else f"tl.full((), {text}, {self.accumulate})"

    def places(self, names: Sequence[str]) -> Iterator[None]:
        """Every combination of values; while one is current the names stand for its numbers."""
        for place in product(*[range(self.schedule.extents[name]) for name in names]):
            self.names.update({name: Value(str(at)) for name, at in zip(names, place)})
            yield

    def term(self) -> Term | None:
        """The current entry; None: there is none, or it is 0."""
        s, scale = self.schedule, 1.0
        for factor in s.factors:
            assert isinstance(factor, Access)
            for access in (found for root in factor.indirections for found in walk(root)):
                if access.name in s.tables and not self.find(access):
                    return None
            if factor.name in s.tables:
                scale *= self.number(factor)
        if scale == 0:
            return None
        own = [(at, factor) for at, factor in enumerate(s.factors) if isinstance(factor, Access)]
        values = [self.loaded_once(at, factor) for at, factor in own if factor.name not in s.tables]
        numbers = [self.wide(value, ()) for value in values if not value.axes]
        return Term(" * ".join([*numbers, self.literal(scale)]), tuple(value for value in values if value.axes))

    def number(self, access: Access) -> float:
        places = [int(self.names[index.name].text) for index in access.indices if isinstance(index, Var)]
        return float(number_at(self.schedule.tables[access.name], tuple(places)))

    def find(self, access: Access) -> bool:
        """Note where a table leads for the current entry, on a line along an axis of tiles; False: there is none."""
        names = [index.name for index in access.indices if isinstance(index, Var)]
        place = [None if name in self.schedule.axes else int(self.names[name].text) for name in names]
        line = line_at(self.schedule.tables[access.name], tuple(place))
        assert line is not None
        start, step = line
        axis = self.names[names[place.index(None)]] if None in place else Value("")
        if axis.axes:
            along = axis.text if step == 1 else f"{axis.text} * {step}"
            text = f"{start} + {along}" if start else along
            self.positions[access] = Value(text if text.isidentifier() else f"({text})", axis.axes)
        else:
            self.positions[access] = Value(str(start))
        return bool(start >= 0)

    def loaded_once(self, at: int, factor: Access) -> Value:
        place = self.pointer(factor, "tensor", self.axes_of(factor.names))
        if place not in self.loaded:
            lines, self.lines = self.lines, []
            self.loaded[place] = Load(self.emit_factor(at, factor), self.lines)
            self.lines = lines
        return self.loaded[place].value
