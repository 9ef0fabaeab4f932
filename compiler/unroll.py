"""Straight-line code for statements over known tables: every entry is a product of its own, with numbers for positions.

What is loaded once for a position serves all entries that name it, and each row of the output is stored when it is
complete. Coefficients of equivariant products are such tables: a few hundred entries that never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from .broadcast import Value
from .ir import Access, Var, walk
from .known import number_at
from .products import Products

__all__ = ["Unrolled"]

Term = tuple[float, list[str], list[str]]  # the table's number, factors that are one number each, factors with axes


class Unrolled(Products):
    """A program's rows one after another, each a sum over the entries of its tables."""

    def emit_unrolled(self) -> None:
        s = self.schedule
        root = self.ordered({*s.names("tile", "step")})
        rows = [name for name in s.names("unrolled") if name in s.free]
        sums = [name for name in s.names("unrolled") if name not in s.free]
        self.loaded: dict[str, Value] = {}
        # all loads before the first store: no compiler moves one past it, since they might overlap
        found = [[term for _ in self.places(sums) if (term := self.term()) is not None] for _ in self.places(rows)]
        for _, terms in zip(self.places(rows), found):
            self.emit_sum(terms, root)
            self.emit_scatter(root)

    def emit_scatter(self, root: tuple[str, ...]) -> None:
        raise NotImplementedError

    def emit_sum(self, terms: Sequence[Term], root: tuple[str, ...]) -> None:
        """One line for all products with one tile of the factor that has the fewest: it is multiplied by their sum."""
        shared = min(range(len(terms[0][2]) if terms else 0), key=lambda at: len({t[2][at] for t in terms}), default=-1)
        lines: dict[str, list[str]] = {}
        for scale, numbers, tiles in terms:
            number = " * ".join([*numbers, self.literal(scale)])
            others = [tile for at, tile in enumerate(tiles) if at != shared]
            text = " * ".join([*others, f"({number})" if others else number])
            lines.setdefault(tiles[shared] if tiles else "", []).append(text)
        if not lines or "" in lines:  # nothing that has the axes of a result
            self.line(f"acc = {self.zeros(root)}")
        for at, (tile, texts) in enumerate(lines.items()):
            total = " + ".join(texts)
            self.line(f"acc {'+=' if at or not tile else '='} {f'{tile} * ({total})' if tile else total}")

    def literal(self, number: float) -> str:
        return repr(number) if self.accumulate == "tl.float32" else f"tl.full((), {number!r}, {self.accumulate})"

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
                if access.name in s.tables:
                    position = self.number(access)
                    if position < 0:
                        return None
                    self.positions[access] = Value(str(int(position)))
            if factor.name in s.tables:
                scale *= self.number(factor)
        if scale == 0:
            return None
        numbers: list[str] = []
        tiles: list[str] = []
        for at, factor in enumerate(s.factors):
            assert isinstance(factor, Access)
            if factor.name not in s.tables:
                value = self.loaded_once(at, factor)
                (tiles if value.axes else numbers).append(self.wide(value, value.axes))
        return scale, numbers, tiles

    def number(self, access: Access) -> float:
        places = [int(self.names[index.name].text) for index in access.indices if isinstance(index, Var)]
        return float(number_at(self.schedule.tables[access.name], tuple(places)))

    def loaded_once(self, at: int, factor: Access) -> Value:
        place = self.pointer(factor, "tensor", self.axes_of(factor.names))
        if place not in self.loaded:
            self.loaded[place] = self.emit_factor(at, factor)
        return self.loaded[place]
