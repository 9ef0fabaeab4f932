"""The tree of a tile's products as expressions: elementwise, `tl.dot`, sums, and the accumulator they are added to."""

from __future__ import annotations

import torch

from .broadcast import Lazy, Value
from .contract import Dot, Leaf, Node, Product, Sum
from .ir import Access
from .loads import TYPES, Loads

__all__ = ["Products"]

LEAST_DEPTH = 16  # of tl.dot, whatever its rows and columns


class Products(Loads):
    """Evaluates the schedule's tree over tiles that are already loaded."""

    def root_axes(self) -> tuple[str, ...]:
        tree, s = self.schedule.tree, self.schedule
        axes = self.ordered(set(s.names("tile")) | (set(tree.axes) if tree is not None else set()))
        return axes[::-1] if self.config.swap and len(axes) == 2 else axes

    def assign_layouts(self, node: Node | None, axes: tuple[str, ...]) -> None:
        """Decide for each factor in which order its tile's axes are loaded, so that dots need no transpose."""
        if isinstance(node, Leaf):
            self.layouts[node.at] = tuple(axis for axis in axes if axis in node.axes)
        elif isinstance(node, Sum):
            self.assign_layouts(node.of, self.sum_axes(node, axes))
        elif isinstance(node, Product):
            self.assign_layouts(node.left, axes)
            self.assign_layouts(node.right, axes)
        elif isinstance(node, Dot):
            for side, want in self.dot_sides(node, axes):
                self.assign_layouts(side, want)

    def sum_axes(self, node: Sum, axes: tuple[str, ...]) -> tuple[str, ...]:
        if self.block(node.over) == 1:
            return axes
        return (*(axis for axis in axes if axis in node.of.axes), node.over)

    def dot_sides(self, node: Dot, axes: tuple[str, ...]) -> tuple[tuple[Node, tuple[str, ...]], ...]:
        first, second = (axis for axis in axes if axis in node.axes)
        left, right = (node.left, node.right) if first in node.left.axes else (node.right, node.left)
        if self.is_deep(node):
            return (left, (first, node.over)), (right, (node.over, second))
        return (left, self.short_axes(node, first)), (right, self.short_axes(node, second))

    def short_axes(self, node: Dot, *axes: str) -> tuple[str, ...]:
        """A sum by multiply-adds is over the first axis, swapped over the last: one in the middle Triton makes tf32."""
        return (*axes, node.over) if self.config.swap else (node.over, *axes)

    def is_deep(self, node: Dot) -> bool:
        """As deep as `tl.dot` takes it."""
        return self.block(node.over) >= LEAST_DEPTH

    def zeros(self, root: tuple[str, ...]) -> str:
        if not root:
            return f"tl.full((), 0.0, {self.accumulate})"
        shape = self.tile.shape(root)
        if isinstance(self.schedule.tree, Dot):  # a dot adds to two dimensions, whatever the tiles around it look like
            shape = Lazy(self.axes, self.tile.blocks).shape(root)
        return f"tl.zeros({shape}, {self.accumulate})"

    def emit_update(self, root: tuple[str, ...], in_loop: bool) -> None:
        tree = self.schedule.tree
        if isinstance(tree, Dot) and in_loop:
            self.line(f"{self.sums} = {self.dot(tree, root, self.sums)}")
            return
        value = self.evaluate(tree, root) if tree is not None else Value("1.0")
        text = self.wide(value, root)
        entries = self.entries_seen_from(root)
        if entries:
            text = f"tl.where({entries}, {text}, 0.0)"
        is_whole = value.axes == root and bool(root) and not entries and self.flags.lazy
        if in_loop:
            self.line(f"{self.sums} += {text}")
        elif is_whole or isinstance(tree, Dot):
            self.line(f"{self.sums} = {text}")
        else:
            self.line(f"{self.sums} = {self.zeros(root)} + {text}")

    def entries_seen_from(self, root: tuple[str, ...]) -> str:
        """Where a product has all its entries, if some factor would not notice: it lacks an index of a -1's tensor."""
        factors = self.schedule.factors
        inside = [
            access for factor in factors for access in (factor.indirections if isinstance(factor, Access) else ())
        ]
        found = [access for access in dict.fromkeys(inside) if access in self.valid]
        if self.schedule.uses_dot or all(set(access.names) <= set(f.names) for access in found for f in factors):
            return ""
        joint = self.ordered({axis for access in found for axis in self.valid[access].axes})
        seen = Value(self.conjunction([self.valid[access] for access in found], joint), joint)
        for axis in joint:
            if axis not in root:
                seen = self.tile.reduce("tl.max", Value(f"({seen.text}).to(tl.int32)", seen.axes), axis)
                seen = Value(f"({seen.text} > 0)", seen.axes)
        return self.spread(Value(f"({seen.text})", seen.axes), root)

    def wide(self, value: Value, axes: tuple[str, ...]) -> str:
        """In the type sums are taken in."""
        return self.convert(self.spread(value, axes), value)

    def convert(self, text: str, value: Value) -> str:
        if value.dtype is None or TYPES.get(value.dtype) == self.accumulate:
            return text
        return f"{text if text.isidentifier() else f'({text})'}.to({self.accumulate})"

    def evaluate(self, node: Node, axes: tuple[str, ...]) -> Value:
        if isinstance(node, Leaf):
            return self.tiles[node.at]
        if isinstance(node, Dot):
            own = tuple(axis for axis in axes if axis in node.axes)
            return self.let(self.tile.result(self.dot(node, own), own), own, "product")
        if isinstance(node, Sum):
            if self.block(node.over) == 1:
                return self.evaluate(node.of, axes)
            inner = self.sum_axes(node, axes)
            value = self.evaluate(node.of, inner)
            total = self.tile.reduce("tl.sum", Value(self.wide(value, value.axes), value.axes), node.over)
            return self.let(total.text, total.axes, "total")
        return self.product(node, axes)

    def product(self, node: Product, axes: tuple[str, ...]) -> Value:
        left, right = self.evaluate(node.left, axes), self.evaluate(node.right, axes)
        joint = tuple(axis for axis in axes if axis in left.axes or axis in right.axes)
        if left.dtype == torch.bool or right.dtype == torch.bool:
            chosen, value = (left, right) if left.dtype == torch.bool else (right, left)
            if value.dtype != torch.bool:
                text = f"tl.where({self.spread(chosen, joint)}, {self.wide(value, joint)}, 0.0)"
                return self.let(text, joint, "scattered")
        return self.let(f"{self.wide(left, joint)} * {self.wide(right, joint)}", joint, "scaled")

    def dot(self, node: Dot, axes: tuple[str, ...], accumulator: str = "") -> str:
        (left, left_axes), (right, right_axes) = self.dot_sides(node, axes)
        a, b = self.evaluate(left, left_axes), self.evaluate(right, right_axes)
        if not self.is_deep(node):
            return self.short_dot(node, axes, a, b, accumulator)
        texts = [self.tile.operand(a, left_axes), self.tile.operand(b, right_axes)]
        dtype = a.dtype if a.dtype == b.dtype and a.dtype in TYPES else None
        if dtype is None:
            texts = [self.convert(text, value) for text, value in zip(texts, (a, b))]
        extra = f", {accumulator}" if accumulator else ""
        if self.accumulate == "tl.float64":
            return f"tl.dot({', '.join(texts)}{extra}, out_dtype=tl.float64)"
        if dtype in (None, torch.float32):
            # products of half-precision factors are at most tf32's rounding away from exact
            is_half = self.bound.dtype in (torch.float16, torch.bfloat16)
            extra += f', input_precision="{"tf32" if is_half else self.flags.precision}"'
        return f"tl.dot({', '.join(texts)}{extra})"

    def short_dot(self, node: Dot, axes: tuple[str, ...], a: Value, b: Value, accumulator: str) -> str:
        """By multiply-adds."""
        joint = self.short_axes(node, *axes)
        text = f"{self.wide(a, joint)} * {self.wide(b, joint)}"
        total = self.tile.reduce("tl.sum", Value(text, joint), node.over).text
        return f"{accumulator} + {total}" if accumulator else total
