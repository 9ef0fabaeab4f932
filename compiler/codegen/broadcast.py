"""How values over different tile axes meet: lazily, an axis inserted where needed, or eagerly, with all axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Eager", "Lazy", "Value"]


@dataclass(frozen=True)
class Value:
    """An expression, the tile axes it varies over, and its type (None: the one that sums are taken in)."""

    text: str
    axes: tuple[str, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Lazy:
    """A value has just the axes it varies over; operands reach `tl.dot` as they were loaded."""

    axes: tuple[str, ...]
    blocks: Mapping[str, int]

    def shape(self, axes: Sequence[str]) -> str:
        """Of a tile over `axes`."""
        return _tuple([self.blocks[axis] for axis in axes])

    def arange(self, name: str) -> str:
        return f"tl.arange(0, {self.blocks[name]})"

    def spread(self, value: Value, axes: tuple[str, ...]) -> str:
        """`value` so that it broadcasts against a tile over `axes`."""
        if value.axes == axes or not value.axes:
            return value.text
        own = tuple(axis for axis in axes if axis in value.axes)
        text = value.text if own == value.axes else f"tl.trans({value.text})"
        return text if own == axes else f"{text}[{_slots(own, axes)}]"

    def operand(self, value: Value, axes: tuple[str, ...]) -> str:
        """A tile as one side of a dot."""
        return self.spread(value, axes)

    def result(self, text: str, axes: tuple[str, ...]) -> str:
        """A dot's result as a tile."""
        return text

    def reduce(self, function: str, value: Value, axis: str) -> Value:
        """`tl.sum` or `tl.max` over one axis."""
        kept = tuple(other for other in value.axes if other != axis)
        return Value(f"{function}({value.text}, {value.axes.index(axis)})", kept)


@dataclass(frozen=True)
class Eager(Lazy):
    """Every value has all axes, of size 1 where it does not vary; operands of a dot are reshaped, as Inductor does."""

    def shape(self, axes: Sequence[str]) -> str:
        return _tuple([self.blocks[axis] if axis in axes else 1 for axis in self.axes])

    def arange(self, name: str) -> str:
        text = super().arange(name)
        return text if len(self.axes) == 1 else f"{text}[{_slots((name,), self.axes)}]"

    def spread(self, value: Value, axes: tuple[str, ...]) -> str:
        return value.text

    def operand(self, value: Value, axes: tuple[str, ...]) -> str:
        own = tuple(axis for axis in self.axes if axis in axes)
        text = f"tl.reshape(tl.broadcast_to({value.text}, {self.shape(own)}), {_tuple([self.blocks[a] for a in own])})"
        return text if own == axes else f"tl.trans({text})"

    def result(self, text: str, axes: tuple[str, ...]) -> str:
        own = tuple(axis for axis in self.axes if axis in axes)
        text = text if own == axes else f"tl.trans({text})"
        return f"tl.reshape({text}, {self.shape(own)})"

    def reduce(self, function: str, value: Value, axis: str) -> Value:
        kept = tuple(other for other in value.axes if other != axis)
        keep = ", keep_dims=True" if len(self.axes) > 1 else ""
        return Value(f"{function}({value.text}, {self.axes.index(axis)}{keep})", kept)


def _tuple(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _slots(own: Sequence[str], axes: Sequence[str]) -> str:
    return ", ".join(":" if axis in own else "None" for axis in axes)
