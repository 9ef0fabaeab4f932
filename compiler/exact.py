"""Tiles of several rows hold a zero for each summand that one row has and another lacks: what 0 * NaN makes of it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TypeVar

from .broadcast import Value
from .contract import leaves, multiply
from .ir import Access
from .scatter import Merged
from .winners import Winners

__all__ = ["Exact"]

Emitter = TypeVar("Emitter", bound="Exact")

FEW_ROWS = 4  # that are summed again at a time: they take registers beside the tile's own


class Exact(Winners):
    """A dot whose sums are taken once more, product by product, where one of them is no number."""

    def may_leak(self) -> bool:
        """Rows of the tile differ in which summands they have, and a factor of the dot does not know of it."""
        s = self.schedule
        if not s.holds_set or not s.uses_dot:
            return False
        inside = [access for factor in s.factors if isinstance(factor, Access) for access in factor.indirections]
        own = [access for access in inside if access in self.valid and not {*access.names} <= {*s.free}]
        return any(not {*access.names} <= {*factor.names} for access in own for factor in s.factors)

    def sum_of_sums(self, root: tuple[str, ...]) -> str:
        """No number if one of the sums is none; along columns first, which are several sums side by side."""
        if not self.flags.lazy:
            return self.let(f"tl.sum({self.sums})", (), "total").text
        value = Value(self.sums, root)
        for axis in reversed(root[1:]):
            value = self.tile.reduce("tl.sum", value, axis)
        # the last without its axis: reducing a dot's sums to a vector and that to a number ends Triton's compiler in a
        # failed assertion for sm_100 (OptimizeTMemLayouts in 3.6 and 3.7), unless a reshape stands between
        return self.let(f"tl.sum({value.text})", (), "total").text

    def without_dot(self: Emitter, merged: Merged) -> Emitter:
        """What writes to the same source with a few rows of the tile and one summed index at a time, under masks."""
        few, whole = self.few_rows(merged, min(FEW_ROWS, self.block(merged.name))), self.schedule
        steps = whole.names("step")
        roles = {name: "loop" if name in steps else role for name, role in whole.roles.items()}
        axes = [leaf.axes - {*steps} for leaf in sorted(leaves(whole.tree), key=lambda leaf: leaf.at)]
        few.schedule = replace(whole, roles=roles, tree=multiply(axes))
        few.layouts, few.stem, few.sums = {}, "single", "exact"
        return few

    def few_rows(self: Emitter, merged: Merged, count: int) -> Emitter:
        """What writes to the same source with a tile of `count` rows, and knows nothing yet that depends on them."""
        few, own = copy(self), (merged.name, merged.outer, merged.inner)
        blocks = {**dict(self.config.blocks), merged.name: count}
        few.config = replace(self.config, blocks=tuple(blocks.items()))
        few.tile = type(self.tile)(self.axes, blocks)
        few.names = {name: value for name, value in self.names.items() if name not in own}
        few.bounds = {name: value for name, value in self.bounds.items() if name not in own}
        few.positions = {access: at for access, at in self.positions.items() if few.is_known(access.names)}
        few.valid = {access: mask for access, mask in self.valid.items() if few.is_known(access.names)}
        few.tiles = {}
        return few

    def emit_few_rows(self, merged: Merged, tile: Value, size: int) -> None:
        """A loop over the rows of the whole tile, a few at a time."""
        few, first = self.block(merged.name), self.let(f"tl.min({tile.text})", (), "first")
        self.line(f"for part in range({size // few}):")
        self.depth += 1
        clean = self.index(merged.name)
        self.line(f"{clean} = {first.text} + part * {few} + {self.arange(merged.name)}")
        self.names[merged.name] = Value(clean, (merged.name,))
