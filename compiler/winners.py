"""`max` and `min` in a kernel: products compete in the accumulator, and where winners are is kept beside it.

A tile of the accumulator may hold several rivals of one output element, along the axis of a step: each lane keeps its
own winner through the loops, and the lanes compete once, after them.
"""

from __future__ import annotations

import torch

from .broadcast import Value
from .loads import TYPES
from .products import Products

__all__ = ["Winners"]

INTEGERS = {torch.int32: "tl.int32", torch.int64: "tl.int64"}


class Winners(Products):
    """Updates `acc`, and `place` where winners are wanted or `found` where an element may have no product."""

    @property
    def is_max(self) -> bool:
        return self.bound.statement.reduction == "max"

    @property
    def worst(self) -> str:
        return 'float("-inf")' if self.is_max else 'float("inf")'

    @property
    def place_type(self) -> str:
        return INTEGERS[self.bound.winner_dtype]

    def full(self, axes: tuple[str, ...], value: str, dtype: str) -> str:
        return f"tl.full({self.tile.shape(axes) if axes else '()'}, {value}, {dtype})"

    # before, in and after the loops

    def emit_no_winner(self, root: tuple[str, ...]) -> None:
        """Nothing has competed yet. Where something does is noted too, once the masks have told over which axes."""
        self.found: Value | None = None
        self.found_at = len(self.lines)
        if self.flags.wants_winners:
            self.line(f"acc = {self.full(root, '0.0', self.accumulate)}")
            self.line(f"place = {self.full(root, '-1', self.place_type)}")
        else:
            self.line(f"acc = {self.full(root, self.worst, self.accumulate)}")

    def emit_rivals(self, root: tuple[str, ...], loops: tuple[str, ...]) -> None:
        """The product of the tiles competes with the best so far."""
        product = self.rival(root)
        masks = [self.bounds[name] for name in self.schedule.names("segment", "step") if name in self.bounds]
        masks += self.valid.values()
        mask = self.conjunction(masks, root)
        if self.flags.wants_winners:
            self.emit_better(root, loops, self.spread(product, root), mask)
            return
        self.note_found(masks)
        text = self.spread(product, root)
        text = f"tl.where({mask}, {text}, {self.worst})" if mask else text
        function = "tl.maximum" if self.is_max else "tl.minimum"
        self.line(f"acc = {function}(acc, {text}, propagate_nan=tl.PropagateNan.ALL)")

    def rival(self, root: tuple[str, ...]) -> Value:
        """The product, its number included, in the type that products are compared in."""
        tree, scale = self.schedule.tree, self.bound.statement.scale
        number = f"tl.full((), {float(scale)!r}, {self.accumulate})"
        if tree is None:
            return self.let(number, (), "product")
        value = self.evaluate(tree, root)
        text = self.wide(value, value.axes)
        if scale == 1 and text.isidentifier():
            return Value(text, value.axes)
        return self.let(text if scale == 1 else f"{text} * {number}", value.axes, "product")

    def emit_better(self, root: tuple[str, ...], loops: tuple[str, ...], product: str, mask: str) -> None:
        """NaN beats every number; of equal products the one that is met first, or has the smaller position, stays."""
        place = self.spread(self.position_of_product(), root)
        loses = f"({product} {'<=' if self.is_max else '>='} acc)"  # false for a NaN
        beats = f"(place < 0) | (({loses} == 0) & (acc == acc))"
        reduced = self.bound.statement.reduced
        if loops != tuple(name for name in reduced if name in loops):
            same = f"(({product} == acc) | (({product} != {product}) & (acc != acc)))"
            beats += f" | ({same} & ({place} < place))"
        better = self.let(f"{mask} & ({beats})" if mask else beats, root, "better")
        self.line(f"acc = tl.where({better.text}, {product}, acc)")
        self.line(f"place = tl.where({better.text}, {place}, place)")

    def position_of_product(self) -> Value:
        """Its position over the reduced names, the last of which varies fastest."""
        reduced = self.bound.statement.reduced
        if not reduced:
            return self.let(self.full((), "0", self.place_type), (), "at")
        axes = self.axes_of(reduced)
        text = ""
        for name in reduced:
            value = f"tl.cast({self.spread(self.names[name], axes)}, {self.place_type})"
            before = f"({text})" if "+" in text else text
            text = f"{before} * {self.length(name)} + {value}" if text else value
        return self.let(text, axes, "at")

    def length(self, name: str) -> str:
        return self.extent(name) if self.is_varying(name) else str(self.schedule.extents[name])

    def note_found(self, masks: list[Value]) -> None:
        """Whether an element has any product must be known unless every one has."""
        if not self.valid and not self.schedule.names("segment"):
            return
        axes = self.ordered({axis for mask in masks for axis in mask.axes})
        text = self.conjunction(masks, axes)
        if not text:
            (segment,) = self.schedule.names("segment")
            text, axes = f"({self.names[segment].text} >= 0)", self.names[segment].axes
        self.found = Value("found", axes)
        self.lines.insert(self.found_at, f"    found = {self.full(axes, '0', 'tl.int1')}")
        self.line(f"found = found | {text}")

    def emit_winner(self, root: tuple[str, ...]) -> None:
        """The lanes of one output element compete, and what no product reached becomes 0."""
        for axis in root:
            if axis not in self.schedule.free:
                (self.emit_winning_lane if self.flags.wants_winners else self.emit_best_lane)(root, axis)
                root = tuple(other for other in root if other != axis)
        if self.found is not None:
            self.line(f"acc = tl.where({self.spread(self.found, root)}, acc, 0.0)")
        bounds = [self.bounds[name] for name in self.schedule.free if name in self.bounds]
        bounds += [self.valid[access] for access in self.schedule.output.indirections if access in self.valid]
        mask = self.conjunction(bounds, root)
        guard = f", mask={mask}" if mask else ""
        dtype = TYPES[self.bound.dtype]
        value = "acc" if dtype == self.accumulate else f"acc.to({dtype})"
        self.line(f"tl.store({self.pointer(self.schedule.output, 'output', root)}, {value}{guard})")
        if self.flags.wants_winners:
            self.line(f"tl.store({self.pointer(self.schedule.output, 'winners', root)}, place{guard})")

    def over(self, function: str, text: str, root: tuple[str, ...], axis: str) -> str:
        return self.tile.reduce(function, Value(text, root), axis).text

    def emit_best_lane(self, root: tuple[str, ...], axis: str) -> None:
        function = "tl.max" if self.is_max else "tl.min"
        self.line(f"is_nan = {self.over('tl.max', '(acc != acc).to(tl.int32)', root, axis)} > 0")
        self.line(f"acc = {self.over(function, f'tl.where(acc == acc, acc, {self.worst})', root, axis)}")
        self.line('acc = tl.where(is_nan, float("nan"), acc)')
        if self.found is not None and axis in self.found.axes:
            found = self.tile.reduce("tl.max", Value("found.to(tl.int32)", self.found.axes), axis)
            self.line(f"found = {found.text} > 0")
            self.found = Value("found", found.axes)

    def emit_winning_lane(self, root: tuple[str, ...], axis: str) -> None:
        function = "tl.max" if self.is_max else "tl.min"
        none = torch.iinfo(self.bound.winner_dtype).max
        rest = tuple(other for other in root if other != axis)

        def across(text: str) -> str:
            if not self.flags.lazy or not rest:
                return text
            slots = ", ".join("None" if other == axis else ":" for other in root)
            return f"{text}[{slots}]"

        self.line(f"is_nan = {self.over('tl.max', '(acc != acc).to(tl.int32)', root, axis)} > 0")
        lanes = f"tl.where((place >= 0) & (acc == acc), acc, {self.worst})"
        self.line(f"best = {self.over(function, lanes, root, axis)}")
        self.line(f"is_best = (place >= 0) & tl.where({across('is_nan')}, acc != acc, acc == {across('best')})")
        self.line(f"place = {self.over('tl.min', f'tl.where(is_best, place, {none})', root, axis)}")
        self.line(f'acc = tl.where(place == {none}, 0.0, tl.where(is_nan, float("nan"), best))')
        self.line(f"place = tl.where(place == {none}, -1, place)")
