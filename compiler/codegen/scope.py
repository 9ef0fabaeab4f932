"""The scope of a kernel's next line: its indentation, and the names that are defined there."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import NamedTuple

import torch

from ..language import Access, fresh_name
from ..planning import SHORT
from .broadcast import Value
from .kernel import ALIGNED, Parameter
from .spec import Axes, KernelSpec

__all__ = ["Narrow", "Scope", "Symbols"]


@dataclass
class Symbols:
    """The names of one kernel: its parameters, in the order of their first use, and unique names for the rest."""

    parameters: dict[Parameter, str] = field(default_factory=dict)
    identifiers: dict[str, str] = field(default_factory=dict)  # a user's name -> its part in names of the kernel
    count: int = 0  # of the names that `fresh` has made

    def identifier(self, name: str) -> str:
        """Return a user's name as part of the kernel's names: ASCII, unique, and never ending in `_ptr`."""
        if name not in self.identifiers:
            wanted = "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"u{ord(c):x}" for c in name)
            wanted = f"{wanted}_" if wanted.endswith("_ptr") else wanted
            self.identifiers[name] = fresh_name(wanted, self.identifiers.values())
        return self.identifiers[name]

    def fresh(self, stem: str) -> str:
        name = f"{stem}_{self.count}"
        self.count += 1
        return name

    def parameter(self, kind: str, name: str, dim: int) -> str:
        identifier = self.identifier(name)
        text = {
            "tensor": f"{identifier}_ptr",
            "output": f"ptr_of_output_{identifier}" if name else "ptr_of_output",
            "winners": "ptr_of_winners",
            "seed": "ptr_of_seed",
            "pointers": f"ptr_of_{identifier}_segments",
            "is_shared": f"ptr_of_{identifier}_is_shared",
            "order": f"ptr_of_{identifier}_order",
            "pieces": f"ptr_of_{identifier}_pieces",
            "extent": f"extent_{identifier}",
            "stride": f"stride_{identifier}_{dim}",
            "copy": "elements_of_copy",
        }[kind]
        return self.parameters.setdefault(Parameter(kind, name, dim), text)


class Narrow(NamedTuple):
    """The first of two names of a flattened axis, over an axis of its own: a warp loads each of its values once.

    By its address a factor that has this name alone would be loaded again for every element along the second.
    """

    outer: str
    inner: str
    values: Value
    bound: Value  # where they are inside the extent
    places: Value  # for each element of the flattened axis, the number of its value

    def is_all_of(self, factor: Access) -> bool:
        """Return whether a factor has the first name, and not the second."""
        return self.outer in factor.names and self.inner not in factor.names


@dataclass
class Scope:
    """A block of the kernel's text and what is defined in it.

    The body of a loop or of an `if` is a child: it writes to the same lines, one level deeper, and knows all that its
    parent knew when it was opened. Its own definitions end with it.
    """

    spec: KernelSpec
    symbols: Symbols = field(default_factory=Symbols)
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    prefix: str = "i"  # of the variables that hold index values
    indices: dict[str, Value] = field(default_factory=dict)  # index name -> its value or values
    starts: dict[str, Value] = field(default_factory=dict)  # index name -> the first of its values
    sums: dict[str, tuple[Value, Value]] = field(default_factory=dict)  # index name -> two values, whose sum it is
    bounds: dict[str, Value] = field(default_factory=dict)  # index name -> where it is inside its extent
    positions: dict[Access, Value] = field(default_factory=dict)  # indirection -> what was loaded for it
    valid: dict[Access, Value] = field(default_factory=dict)  # indirection -> where it is not -1
    tiles: dict[int, Value] = field(default_factory=dict)  # factor number -> loaded tile
    narrow: list[Narrow] = field(default_factory=list)
    segment: tuple[Value, Value] | None = None  # where the groups begin and end that the program has of its rows
    piece: Value | None = None  # the number of the piece of a row that the program has, where rows are cut
    loaded: dict[str, Value] | None = None  # expression -> its value, where several statements share what is loaded

    # children

    def child(self, indent: int = 1, prefix: str | None = None) -> Scope:
        """Return the scope of a block inside this one; with indent=0, of lines at this level with their own names."""
        return replace(
            self,
            depth=self.depth + indent,
            prefix=self.prefix if prefix is None else prefix,
            indices=dict(self.indices),
            bounds=dict(self.bounds),
            positions=dict(self.positions),
            valid=dict(self.valid),
            tiles=dict(self.tiles),
        )

    def without(self, names: Container[str], spec: KernelSpec, prefix: str) -> Scope:
        """Return a scope in this place for another spec's tiles, without some index names and all that uses them."""

        def is_kept(access: Access) -> bool:
            return not any(name in names for name in access.names)

        return replace(
            self,
            spec=spec,
            prefix=prefix,
            indices={name: value for name, value in self.indices.items() if name not in names},
            bounds={name: value for name, value in self.bounds.items() if name not in names},
            positions={access: value for access, value in self.positions.items() if is_kept(access)},
            valid={access: value for access, value in self.valid.items() if is_kept(access)},
            tiles={},
        )

    def aside(self) -> Scope:
        """Return a scope with separate lines, which the caller inserts where they belong."""
        return replace(self.child(indent=0), lines=[], loaded=None)

    # text

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def let(self, text: str, axes: Axes, stem: str, dtype: torch.dtype | None = None) -> Value:
        """Write the assignment of an expression to a fresh name, and return that name's value."""
        name = self.symbols.fresh(stem)
        self.line(f"{name} = {text}")
        return Value(name, axes, dtype)

    def let_once(self, text: str, axes: Axes, stem: str) -> Value:
        """Write the assignment of an expression to a fresh name, once for all statements that share what is loaded."""
        if self.loaded is None:
            return self.let(text, axes, stem)
        if text not in self.loaded:
            self.loaded[text] = self.let(text, axes, stem)
        return self.loaded[text]

    def define(self, name: str, text: str, axes: Axes = ()) -> None:
        """Write the value of an index name."""
        variable = self.index(name)
        self.line(f"{variable} = {text}")
        self.indices[name] = Value(variable, axes)

    # names

    def index(self, name: str) -> str:
        """Return the variable that holds an index name's value."""
        return f"{self.prefix}_{self.identifier(name)}"

    def identifier(self, name: str) -> str:
        return self.symbols.identifier(name)

    def parameter(self, kind: str, name: str = "", dim: int = 0) -> str:
        return self.symbols.parameter(kind, name, dim)

    def extent(self, name: str) -> str:
        return self.parameter("extent", name)

    def stride(self, name: str, dim: int, stride: int, is_vector: bool) -> str:
        """Return the parameter of a stride, written as a multiple of what divides it if whole vectors are loaded.

        Triton's launcher tells the compiler about multiples of 16 alone, and rows of 24 floats start at multiples of 8.
        Entries that are loaded at once are a number of bytes apart that the source holds, so that they share addresses.
        The output is another matter: it may be a part of a larger tensor. Short rows of a table are left as they are:
        what a thread then has of one is not what a dot or its sums take, and is exchanged (compiled for sm_90, a fully
        connected product of 64 channels up to lmax 3 took 168 registers and 12 barriers in the place of 124 and 7).
        """
        is_walked = bool(self.spec.schedule.run) or self.spec.schedule.walks_rows
        if is_walked and name in self.spec.bound.shapes and not self.spec.flags.strides_vary:
            return str(stride)
        text, divisor = self.parameter("stride", name, dim), gcd(stride, ALIGNED)
        shape = self.spec.bound.shapes.get(name)
        is_of_table = self.spec.schedule.has_table and shape is not None and shape[-1] <= SHORT
        is_vector = is_vector and not is_of_table
        return f"({text} // {divisor} * {divisor})" if is_vector and 1 < divisor < ALIGNED else text

    def knows(self, names: Iterable[str]) -> bool:
        return all(name in self.indices for name in names)
