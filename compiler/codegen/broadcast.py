"""Broadcasting of values over different tile axes: lazy, an axis inserted where needed, or eager, with all axes."""

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
        """Return the shape of a tile over `axes`."""
        return _tuple([self.blocks[axis] for axis in axes])

    def arange(self, name: str) -> str:
        return f"tl.arange(0, {self.blocks[name]})"

    def spread(self, value: Value, axes: tuple[str, ...]) -> str:
        """Return `value` in a form that broadcasts against a tile over `axes`."""
        if value.axes == axes or not value.axes:
            return value.text
        ordered = tuple(axis for axis in axes if axis in value.axes)
        text = value.text if ordered == value.axes else f"tl.trans({value.text})"
        return text if ordered == axes else f"{text}[{_slots(ordered, axes)}]"

    def operand(self, value: Value, axes: tuple[str, ...]) -> str:
        """Return a tile as one operand of a dot."""
        return self.spread(value, axes)

    def result(self, text: str, axes: tuple[str, ...]) -> str:
        """Return a dot's result as a tile."""
        return text

    def reduce(self, function: str, value: Value, axis: str) -> Value:
        """Return the reduction of a value over one axis by `function`, such as `tl.sum`."""
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
        ordered = tuple(axis for axis in self.axes if axis in axes)
        flat = _tuple([self.blocks[axis] for axis in ordered])
        text = f"tl.reshape(tl.broadcast_to({value.text}, {self.shape(ordered)}), {flat})"
        return text if ordered == axes else f"tl.trans({text})"

    def result(self, text: str, axes: tuple[str, ...]) -> str:
        ordered = tuple(axis for axis in self.axes if axis in axes)
        text = text if ordered == axes else f"tl.trans({text})"
        return f"tl.reshape({text}, {self.shape(ordered)})"

    def reduce(self, function: str, value: Value, axis: str) -> Value:
        kept = tuple(other for other in value.axes if other != axis)
        keep = ", keep_dims=True" if len(self.axes) > 1 else ""
        return Value(f"{function}({value.text}, {self.axes.index(axis)}{keep})", kept)


def _tuple(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _slots(present: Sequence[str], axes: Sequence[str]) -> str:
    return ", ".join(":" if axis in present else "None" for axis in axes)
