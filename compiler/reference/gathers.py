"""What a statement reads, as nodes of a `torch.fx` graph: factors behind indirections, and where entries are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..binding import Bound
from ..language import Access, Const, Index, Var, fresh_name

__all__ = ["Gathers", "Length", "Value", "large_gathers", "lengths_of", "placeholders"]

Length = int | fx.Node  # a number, or an argument of the graph and what is reckoned from it

RESERVED = (
    "self",
    "torch",
    "device",
    "inf",
    "nan",
    "NoneType",
    "fx_pytree",
    "pytree",
)  # names that FX's code uses itself


@dataclass(frozen=True)
class Value:
    """A node of the graph and the index name that each of its dimensions runs over."""

    node: fx.Node
    axes: tuple[str, ...]
    without: frozenset[fx.Node] = frozenset()  # masks that it already obeys


def placeholders(bound: Bound) -> tuple[str, ...]:
    """The graph's arguments in order: the tensors read, then the output tensor if it is the start."""
    seed = (bound.statement.output.name,) if bound.is_seeded else ()
    return tuple(name for name in bound.statement.tensor_names if name not in seed) + seed


def lengths_of(bound: Bound) -> dict[str | int, int]:
    """Every length that a graph may depend on: of each index name, and of each output dimension that no name tells."""
    lengths: dict[str | int, int] = dict(bound.extents.items())
    for dim, index in enumerate(bound.statement.output.indices):
        if not isinstance(index, Var):
            lengths[dim] = bound.size[dim]
    return lengths


def large_gathers(bound: Bound) -> frozenset[Access]:
    """The factors of which at least as many elements are gathered as their tensors hold."""
    return frozenset(
        access
        for access in bound.statement.accesses
        if math.prod(bound.extents[name] for name in access.names) >= math.prod(bound.shapes[access.name])
    )


class Gathers:
    """A graph under construction; every index access is gathered and compared once.

    The lengths in it are those of `bound`, as numbers. A graph that `takes_lengths` has an argument for each length
    that it needs instead, after its tensors, and so runs on tensors of any lengths. Numbers are multiplied and summed
    in `compute_dtype`, by default the bound statement's own.
    """

    def __init__(
        self,
        bound: Bound,
        padded: frozenset[str],
        takes_lengths: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.bound, self.padded = bound, padded
        self.compute_dtype = compute_dtype or bound.compute_dtype
        self.graph = fx.Graph()
        self.large_gathers = large_gathers(bound)
        names = placeholders(bound)
        self.lengths: dict[str | int, Length] = dict(lengths_of(bound))
        targets = {key: fresh_name(f"length{number}_", names) for number, key in enumerate(self.lengths)}
        taken = (*names, *targets.values()) if takes_lengths else names
        self.tensors = {name: self.argument(name, taken) for name in names}
        if takes_lengths:
            self.lengths = {key: self.argument(target, taken) for key, target in targets.items()}
        self.gathered: dict[Access, Value] = {}
        self.valid: dict[Access, Value] = {}  # where an index access that may hold -1 has an entry

    def argument(self, name: str, names: Sequence[str]) -> fx.Node:
        """A tensor as an argument of the graph's code, which calls it `node.name`: never what another one is called."""
        target = fresh_name(f"{name}_", names) if name in RESERVED else name
        hints = (target, *(f"tensor{number}_" for number in range(len(names) + 1)))
        for hint in hints:
            node = self.graph.create_node("placeholder", target, name=hint)
            if node.name == target or node.name not in names:
                break
            self.graph.erase_node(node)
        return node

    def call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a torch function, or of a tensor's method."""
        name = getattr(function, "__name__", "")
        if getattr(torch.Tensor, name, None) is function:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def gather(self, access: Access) -> Value:
        """The access as a tensor over its index names; entries behind a -1 hold something harmless."""
        if access not in self.gathered:
            self.gathered[access] = self.read(self.tensors[access.name], access)
        return self.gathered[access]

    def read(self, node: fx.Node, access: Access) -> Value:
        indices: list[Index] = []
        for dim in reversed(range(len(access.indices))):
            index = access.indices[dim]
            if isinstance(index, Const):
                node = self.call(torch.select, node, dim, index.value)
            else:
                indices.insert(0, index)
        pointing = self.pointing(indices)
        if not pointing:
            return Value(node, tuple(map(str, indices)))
        if len(pointing) == 1:
            (dim,) = pointing
            index, without = indices[dim], frozenset[fx.Node]()
            if isinstance(index, Access) and self.is_worth_a_zero(access, index):
                node, position, mask = self.with_a_zero(node, dim, index)
                without = frozenset({mask.node})
            else:
                position = self.position(index)
            node = self.call(torch.index_select, node, dim, self.flat(position))
            if len(position.axes) != 1:
                node = (
                    self.call(torch.unflatten, node, dim, self.sizes(position.axes))
                    if position.axes
                    else self.call(torch.squeeze, node, dim)
                )
            axes = tuple(map(str, indices))
            return Value(node, axes[:dim] + position.axes + axes[dim + 1 :], without)
        rest = [dim for dim in range(len(indices)) if dim not in pointing]
        joint, positions = self.broadcast([indices[dim] for dim in pointing])
        if pointing != list(range(len(pointing))):
            node = self.call(torch.permute, node, (*pointing, *rest))
        node = self.call(torch.ops.aten.index.Tensor, node, positions)
        return Value(node, joint + tuple(str(indices[dim]) for dim in rest))

    def is_worth_a_zero(self, access: Access, index: Access) -> bool:
        """Reading -1 as one more row, of zeros, costs a copy of the tensor; masking costs one of what is gathered."""
        can_be_zero = access in self.large_gathers and self.bound.statement.is_sum
        return can_be_zero and index.name in self.padded and not index.is_indirect

    def with_a_zero(self, node: fx.Node, dim: int, index: Access) -> tuple[fx.Node, Value, Value]:
        """The tensor with a row of zeros at its end, positions that point -1 there, and the mask that this obeys."""
        value, mask = self.gather(index), self.mask(index)
        row = self.call(torch.zeros_like, self.call(torch.narrow, node, dim, 0, 1))
        end = self.call(torch.Tensor.size, node, dim)
        position = self.call(torch.where, mask.node, value.node, end)
        return self.call(torch.cat, [node, row], dim), Value(position, value.axes), mask

    def pointing(self, indices: Sequence[Index]) -> list[int]:
        """Dimensions that need an index tensor: indirections, and names that stand twice."""
        inside = {name for index in indices if isinstance(index, Access) for name in index.names}
        names = [str(index) for index in indices]
        return [
            dim
            for dim, index in enumerate(indices)
            if not isinstance(index, Var) or index.name in inside or names.count(index.name) > 1
        ]

    def position(self, index: Index) -> Value:
        """Where an index points, as a tensor of positions that are safe to read."""
        if isinstance(index, Var):
            places = self.call(torch.arange, self.lengths[index.name], device=self.bound.device)
            return Value(places, (index.name,))
        if isinstance(index, Const):
            return Value(self.call(torch.full, (), index.value, dtype=torch.int64, device=self.bound.device), ())
        value = self.gather(index)
        if self.may_be_negative(index):
            return Value(self.call(torch.clamp, value.node, min=0), value.axes)
        return value

    def may_be_negative(self, access: Access) -> bool:
        return access.name in self.padded or any(map(self.may_be_negative, access.indirections))

    def broadcast(self, indices: Sequence[Index]) -> tuple[tuple[str, ...], list[fx.Node]]:
        """Positions of several indices over the union of their names."""
        positions = [self.position(index) for index in indices]
        joint = tuple(dict.fromkeys(name for position in positions for name in position.axes))
        return joint, [self.expand_to(position, joint) for position in positions]

    def expand_to(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        """The value with its dimensions in the order of `axes` and size 1 where it lacks one."""
        own = tuple(axis for axis in axes if axis in value.axes)
        node = self.permute(value, own)
        if own != axes:
            shape = tuple(self.lengths[axis] if axis in own else 1 for axis in axes)
            node = self.call(torch.reshape, node, shape)
        return node

    def permute(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        if value.axes == axes:
            return value.node
        return self.call(torch.permute, value.node, tuple(map(value.axes.index, axes)))

    def flat(self, value: Value) -> fx.Node:
        return value.node if len(value.axes) == 1 else self.call(torch.reshape, value.node, (-1,))

    def sizes(self, axes: tuple[str, ...]) -> tuple[Length, ...]:
        return tuple(self.lengths[axis] for axis in axes)

    @property
    def size(self) -> tuple[Length, ...]:
        """Of the output."""
        own = enumerate(self.bound.statement.output.indices)
        return tuple(self.lengths[index.name if isinstance(index, Var) else dim] for dim, index in own)

    def product(self, lengths: Iterable[Length]) -> Length:
        found: Length = 1
        for length in lengths:
            found = self.times(found, length)
        return found

    def times(self, one: Length, other: Length) -> Length:
        if isinstance(one, int) and isinstance(other, int):
            return one * other
        return self.call(operator.mul, one, other) if one != 1 else other

    def masks(self, access: Access) -> dict[Access, Value]:
        """For each index of `access` that may hold -1: where it has an entry."""
        found: dict[Access, Value] = {}
        for index in access.indirections:
            found.update(self.masks(index))
            if index.name in self.padded:
                found[index] = self.mask(index)
        return found

    def mask(self, index: Access) -> Value:
        """Where an index has an entry."""
        if index not in self.valid:
            value = self.gather(index)
            self.valid[index] = Value(self.call(torch.ge, value.node, 0), value.axes)
        return self.valid[index]

    def scaled(self, value: Value) -> Value:
        scale = self.bound.statement.scale
        return value if scale == 1 else Value(self.call(torch.mul, value.node, scale), value.axes)
