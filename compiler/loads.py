"""The values a kernel works on: index names, positions behind indirections, and the tiles of factors, under masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .broadcast import Eager, Lazy, Value
from .differentiate import fresh_name
from .ir import Access, Const, Index, Var
from .kernel import Config, Flags, Parameter
from .scatter import Factor, OneHot, is_varying
from .schedule import Schedule, Strides

__all__ = ["TYPES", "Loads"]

TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


@dataclass
class Loads:
    """Lines of source so far, and what is known in them by which name."""

    schedule: Schedule
    strides: Strides
    config: Config
    flags: Flags
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    parameters: dict[Parameter, str] = field(default_factory=dict)
    names: dict[str, Value] = field(default_factory=dict)
    bounds: dict[str, Value] = field(default_factory=dict)  # index name -> where it is inside its extent
    positions: dict[Access, Value] = field(default_factory=dict)
    valid: dict[Access, Value] = field(default_factory=dict)
    tiles: dict[int, Value] = field(default_factory=dict)  # factor number -> loaded tile
    cleaned: dict[str, str] = field(default_factory=dict)  # a user's name -> its part in names of the kernel
    counter: int = 0
    stem: str = "i"  # of what index names are called
    sums: str = "acc"

    def __post_init__(self) -> None:
        self.bound = self.schedule.bound
        self.axes = tuple(axis for axis in self.schedule.axes if self.block(axis) > 1)
        self.tile = (Lazy if self.flags.lazy else Eager)(self.axes, dict(self.config.blocks))
        self.accumulate = "tl.float64" if self.bound.dtype == torch.float64 else "tl.float32"
        self.layouts: dict[int, tuple[str, ...]] = {}  # factor number -> the order in which its tile's axes are loaded

    def block(self, name: str) -> int:
        return self.config.block(name)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def clean(self, name: str) -> str:
        """A user's name as part of the kernel's: ASCII, its own, and never ending as only pointers do."""
        if name not in self.cleaned:
            wanted = _identifier(name)
            self.cleaned[name] = fresh_name(f"{wanted}_" if wanted.endswith("_ptr") else wanted, self.cleaned.values())
        return self.cleaned[name]

    def index(self, name: str) -> str:
        return f"{self.stem}_{self.clean(name)}"

    def let(self, text: str, axes: tuple[str, ...], stem: str, dtype: torch.dtype | None = None) -> Value:
        name = f"{stem}_{self.counter}"
        self.counter += 1
        self.line(f"{name} = {text}")
        return Value(name, axes, dtype)

    def parameter(self, kind: str, name: str = "", dim: int = 0) -> str:
        key = Parameter(kind, name, dim)
        clean = self.clean(name)
        text = {
            "tensor": f"{clean}_ptr",
            "output": "ptr_of_output",
            "winners": "ptr_of_winners",
            "seed": "ptr_of_seed",
            "pointers": f"ptr_of_{clean}_segments",
            "is_shared": f"ptr_of_{clean}_is_shared",
            "order": f"ptr_of_{clean}_order",
            "extent": f"extent_{clean}",
            "stride": f"stride_{clean}_{dim}",
        }[kind]
        return self.parameters.setdefault(key, text)

    # axes and broadcasting

    def ordered(self, axes: frozenset[str] | set[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in axes)

    def spread(self, value: Value, axes: tuple[str, ...]) -> str:
        return self.tile.spread(value, axes)

    def arange(self, name: str) -> str:
        return self.tile.arange(name)

    def extent(self, name: str) -> str:
        return self.parameter("extent", name)

    def is_varying(self, name: str) -> bool:
        return is_varying(self.bound, name)

    def is_known(self, names: Sequence[str]) -> bool:
        return all(name in self.names for name in names)

    def hidden_by(self, factor: Factor) -> tuple[str, ...]:
        return tuple(name for access in self.hiding(factor) for name in access.names)

    def hiding(self, factor: Factor) -> list[Access]:
        """Indirections of other factors whose -1 must hide this factor's value too: 0 * NaN is NaN."""
        found = []
        for other in self.schedule.factors:
            inside = other.indirections if isinstance(other, Access) else (other.position,)
            for root in inside:
                if set(root.names) <= set(factor.names):
                    found.append(root)
        return found

    def emit_position(self, access: Access) -> None:
        axes = self.axes_of(access.names)
        position = self.load(access, axes, "tensor", "-1", f"at_{self.clean(access.name)}", [])
        self.positions[access] = position
        if self.may_be_negative(access):
            self.valid[access] = self.let(f"{position.text} >= 0", position.axes, f"has_{self.clean(access.name)}")

    def may_be_negative(self, access: Access) -> bool:
        padded = self.flags.padded
        return padded is None or access.name in padded or any(map(self.may_be_negative, access.indirections))

    def emit_factor(self, at: int, factor: Factor) -> Value:
        axes = self.layouts.get(at) or self.axes_of(factor.names)
        if isinstance(factor, OneHot):
            position, name = self.positions[factor.position], self.names[factor.name]
            text = f"{self.spread(position, axes)} == {self.spread(name, axes)}"
            return self.let(text, axes, "one_hot", torch.bool)
        hiding = [self.valid[access] for access in self.hiding(factor) if access in self.valid]
        value = self.load(factor, axes, "tensor", "0.0", f"v_{self.clean(factor.name)}", hiding)
        dtype = self.bound.dtypes[factor.name]
        if self.flags.interpreted and dtype == torch.bfloat16:
            return Value(f"{value.text}.to(tl.float32)", value.axes, torch.float32)
        return Value(value.text, value.axes, dtype)

    def axes_of(self, names: Sequence[str]) -> tuple[str, ...]:
        found = {axis for name in names for axis in self.names[name].axes}
        return self.ordered(found)

    def load(
        self, access: Access, axes: tuple[str, ...], kind: str, other: str, stem: str, hiding: Sequence[Value]
    ) -> Value:
        pointer = self.pointer(access, kind, axes)
        masks = [self.bounds[name] for name in access.names if name in self.bounds]
        masks += [self.valid[index] for index in access.indirections if index in self.valid] + list(hiding)
        mask = self.conjunction(masks, axes)
        guard = f", mask={mask}, other={other}" if mask else ""
        return self.let(f"tl.load({pointer}{guard})", axes, stem)

    def conjunction(self, masks: Sequence[Value], axes: tuple[str, ...]) -> str:
        """All of the masks; those over the same axes meet before they are spread over the tile."""
        groups: dict[tuple[str, ...], dict[str, None]] = {}
        for mask in masks:
            groups.setdefault(mask.axes, {})[mask.text] = None
        joined = [
            Value(" & ".join(texts) if len(texts) == 1 else f"({' & '.join(texts)})", own)
            for own, texts in groups.items()
        ]
        return " & ".join(self.spread(mask, axes) for mask in joined)

    def pointer(self, access: Access, kind: str, axes: tuple[str, ...]) -> str:
        is_output = kind in ("output", "winners", "seed")
        base = self.parameter(kind, "" if is_output else access.name)
        shape = self.bound.size if is_output else self.bound.shapes[access.name]
        key = {"output": "", "winners": "", "seed": " seed"}.get(kind, access.name)
        strides = self.strides[key]
        dtype = self.bound.dtype if is_output else self.bound.dtypes[access.name]
        itemsize = self.bound.winner_dtype.itemsize if kind == "winners" else dtype.itemsize
        is_wide = _span(shape, strides) * itemsize >= 2**31
        terms = []
        for dim, index in enumerate(access.indices):
            value = self.index_value(index)
            if not {*value.axes} <= {*axes}:  # along which the address stays: see `moving_axes`
                continue
            text = self.spread(value, axes)
            if strides[dim] == 0 or shape[dim] == 1 or text == "0":
                if value.axes:  # the address stays, but its shape must be the tile's
                    terms.append(f"{text} * 0")
                continue
            if is_wide:
                text = f"tl.cast({text}, tl.int64)"
            terms.append(text if strides[dim] == 1 else f"{text} * {self.parameter('stride', key, dim)}")
        return " + ".join([base, *terms]) if len(axes) or terms else base

    def moving_axes(self, indices: Sequence[Index], shape: Sequence[int], strides: Sequence[int]) -> set[str]:
        """The axes along which an address moves: not those of a dimension that was expanded, or has one element."""
        moved = [index for index, size, stride in zip(indices, shape, strides) if size > 1 and stride != 0]
        return {axis for index in moved for axis in self.index_value(index).axes}

    def index_value(self, index: Index) -> Value:
        if isinstance(index, Var):
            return self.names[index.name]
        return Value(str(index.value)) if isinstance(index, Const) else self.positions[index]


def _identifier(name: str) -> str:
    """A user's name in ASCII."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"u{ord(c):x}" for c in name)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How far apart the first and last element lie."""
    return sum((size - 1) * abs(stride) for size, stride in zip(shape, strides) if size > 1)
