"""What a statement reads, as nodes of a `torch.fx` graph: factors behind indirections, and where entries are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.functional import embedding_bag

from ..binding import Bound, example_of
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

VIEWS = (torch.permute, torch.reshape, torch.squeeze, torch.unflatten)  # of one tensor, or a copy of it
# functions whose results lie in memory of their own
MAKERS: tuple[Callable[..., object], ...] = (
    *(torch.mul, torch.sum, torch.where, torch.amax, torch.amin),
    *(torch.index_select, torch.gather, torch.ops.aten.index.Tensor, embedding_bag),
    *(torch.mm, torch.mv, torch.bmm, torch.dot),
)


@dataclass(frozen=True)
class Value:
    """A node of the graph and the index name that each of its dimensions runs over."""

    node: fx.Node
    axes: tuple[str, ...]
    without: frozenset[fx.Node] = frozenset()  # masks that it already obeys
    is_wide: bool = False  # of the dtype that numbers are summed in, though the tensor is not


def placeholders(bound: Bound) -> tuple[str, ...]:
    """Return the graph's arguments in order: the tensors it reads, then the output tensor if sums start from it."""
    seed = (bound.statement.output.name,) if bound.is_seeded else ()
    return tuple(name for name in bound.statement.tensor_names if name not in seed) + seed


def lengths_of(bound: Bound) -> dict[str | int, int]:
    """Return every length that a graph may depend on.

    They are by index name, and by output dimension for those dimensions that are not indexed by a name.
    """
    lengths: dict[str | int, int] = dict(bound.extents.items())
    for dim, index in enumerate(bound.statement.output.indices):
        if not isinstance(index, Var):
            lengths[dim] = bound.size[dim]
    return lengths


def _product(extents: Iterable[int]) -> int:
    return math.prod(example_of(extent) for extent in extents)


def large_gathers(bound: Bound) -> frozenset[Access]:
    """Return the factors of which at least as many elements are gathered as their tensors hold."""
    return frozenset(
        access
        for access in bound.statement.accesses
        if _product(bound.extents[name] for name in access.names) >= _product(bound.shapes[access.name])
    )


def _rounds_twice(bound: Bound) -> bool:
    """Return whether torch's operations would round half precision more than once if they were given it as it is.

    A lone factor is only moved, whether or not its numbers compete, and the product of two is rounded once, so that
    nothing has to be made float32. So is the sum of a lone factor, which torch takes in float32 by itself.
    """
    statement = bound.statement
    is_lone = len(statement.accesses) == 1 and statement.scale == 1
    is_plain_sum = is_lone and not bound.is_seeded and not statement.index_names
    is_summed = bound.is_seeded or (bool(statement.reduced) and (statement.is_sum or not is_lone) and not is_plain_sum)
    return is_summed or len(statement.accesses) > 2 or (statement.scale != 1 and len(statement.accesses) > 1)


class Gathers:
    """A graph under construction; every index access is gathered and compared once.

    The lengths in it are those of `bound`, as numbers. A graph that `takes_lengths` has an argument for each length
    that it needs instead, after its tensors, and so runs on tensors of any lengths. One that `refuses` fails at a
    position that is out of range, where nobody has looked at them before. Numbers are multiplied and summed in
    `compute_dtype`, by default the bound statement's own.
    """

    def __init__(
        self,
        bound: Bound,
        padded: frozenset[str],
        takes_lengths: bool = False,
        compute_dtype: torch.dtype | None = None,
        refuses: bool = False,
    ) -> None:
        self.bound, self.padded, self.refuses = bound, padded, refuses
        self.compute_dtype = compute_dtype or (bound.compute_dtype if _rounds_twice(bound) else bound.dtype)
        self.graph, self.makers = fx.Graph(), MAKERS
        self.large_gathers = large_gathers(bound)
        names = placeholders(bound)
        self.lengths: dict[str | int, Length] = dict(lengths_of(bound))
        targets = {key: fresh_name(f"length{number}_", names) for number, key in enumerate(self.lengths)}
        names_in_use = (*names, *targets.values()) if takes_lengths else names
        self.tensors = {name: self.argument(name, names_in_use) for name in names}
        if takes_lengths:
            self.lengths = {key: self.argument(target, names_in_use) for key, target in targets.items()}
        self.gathered: dict[Access, Value] = {}
        self.valid: dict[Access, Value] = {}  # where an index access that may hold -1 has an entry

    def argument(self, name: str, names: Sequence[str]) -> fx.Node:
        """Return a new argument of the graph; its name in the graph's code, `node.name`, is not among `names`."""
        target = fresh_name(f"{name}_", names) if name in RESERVED else name
        hints = (target, *(f"tensor{number}_" for number in range(len(names) + 1)))
        for hint in hints:
            node = self.graph.create_node("placeholder", target, name=hint)
            if node.name == target or node.name not in names:
                break
            self.graph.erase_node(node)
        return node

    def call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """Return the node of a call of a torch function, or of a tensor's method."""
        name = getattr(function, "__name__", "")
        if getattr(torch.Tensor, name, None) is function:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def gather(self, access: Access) -> Value:
        """Return the access as a tensor over its index names; entries behind a -1 hold something harmless."""
        if access not in self.gathered:
            self.gathered[access] = self.read(self.tensors[access.name], access)
        return self.gathered[access]

    def read(self, node: fx.Node, access: Access) -> Value:
        """Return the elements of the tensor `node` that `access` reads, over its index names."""
        indices: list[Index] = []
        for dim in reversed(range(len(access.indices))):
            index = access.indices[dim]
            if isinstance(index, Const):
                node = self.call(torch.select, node, dim, index.value)
            else:
                indices.insert(0, index)
        node, indices = self.diagonals(node, indices)
        indirect_dims = self.indirect_dims(indices)
        if not indirect_dims:
            return Value(node, tuple(map(str, indices)))
        if len(indirect_dims) == 1:
            (dim,) = indirect_dims
            node, position, without = self.chosen(node, dim, access, indices[dim])
            axes = tuple(map(str, indices))
            node = self.spread(node, dim, position.axes)
            return Value(node, axes[:dim] + position.axes + axes[dim + 1 :], without)
        return self.read_jointly(node, access, indices, indirect_dims)

    def chosen(
        self, node: fx.Node, dim: int, access: Access, index: Index
    ) -> tuple[fx.Node, Value, frozenset[fx.Node]]:
        """Return what an index chooses along a dimension of a tensor, the positions, and the masks that it obeys."""
        without = frozenset[fx.Node]()
        if isinstance(index, Access) and self.is_worth_a_zero(access, index):
            node, position, mask = self.with_a_zero(node, dim, index)
            without = frozenset({mask.node})
        else:
            position = self.position(index)
        return self.call(torch.index_select, node, dim, self.flat(position)), position, without

    def spread(self, node: fx.Node, dim: int, axes: tuple[str, ...]) -> fx.Node:
        """Return what was chosen along one dimension with a dimension for each name of the positions, or with none."""
        if len(axes) == 1:
            return node
        return self.call(torch.unflatten, node, dim, self.sizes(axes)) if axes else self.call(torch.squeeze, node, dim)

    def read_jointly(self, node: fx.Node, access: Access, indices: list[Index], indirect_dims: list[int]) -> Value:
        """Return the elements of the tensor `node` at positions in several dimensions."""
        direct_dims = [dim for dim in range(len(indices)) if dim not in indirect_dims]
        joint, positions = self.broadcast([indices[dim] for dim in indirect_dims])
        if indirect_dims != list(range(len(indirect_dims))):
            node = self.call(torch.permute, node, (*indirect_dims, *direct_dims))
        node = self.call(torch.ops.aten.index.Tensor, node, positions)
        return Value(node, joint + tuple(str(indices[dim]) for dim in direct_dims))

    def diagonals(self, node: fx.Node, indices: list[Index]) -> tuple[fx.Node, list[Index]]:
        """Return a tensor with one dimension, its last, for a name that stands twice: a view, with nothing gathered."""
        inside = {name for index in indices if isinstance(index, Access) for name in index.names}
        names = [index.name for index in indices if isinstance(index, Var) and index.name not in inside]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            while len(places := [dim for dim, index in enumerate(indices) if str(index) == name]) > 1:
                first, second, *_ = places
                node = self.call(torch.diagonal, node, 0, first, second)
                indices = [index for dim, index in enumerate(indices) if dim not in (first, second)] + [Var(name)]
        return node, indices

    def is_worth_a_zero(self, access: Access, index: Access) -> bool:
        """Return True if -1 is better read as one more row, of zeros, than masked.

        The row costs a copy of the tensor, and a mask costs a copy of what is gathered.
        """
        can_be_zero = access in self.large_gathers and self.bound.statement.is_sum
        return can_be_zero and index.name in self.padded and not index.is_indirect

    def with_a_zero(self, node: fx.Node, dim: int, index: Access) -> tuple[fx.Node, Value, Value]:
        """Return the tensor with a row of zeros at its end, positions that read that row for -1, and the mask of -1."""
        value, mask = self.gather(index), self.mask(index)
        row = self.call(torch.zeros_like, self.call(torch.narrow, node, dim, 0, 1))
        end = self.call(torch.Tensor.size, node, dim)
        position = self.call(torch.where, mask.node, self.beyond(value.node, end), end)
        return self.call(torch.cat, [node, row], dim), Value(position, value.axes), mask

    def beyond(self, position: fx.Node, extent: Length) -> fx.Node:
        """Return positions for a dimension that is one longer than its extent, where the first beyond is beyond too."""
        if not self.refuses:
            return position
        return self.call(torch.add, position, self.call(torch.ge, position, extent))

    def indirect_dims(self, indices: Sequence[Index]) -> list[int]:
        """Return the dimensions that need an index tensor: constants, indirections, and names that stand twice."""
        inside = {name for index in indices if isinstance(index, Access) for name in index.names}
        names = [str(index) for index in indices]
        return [
            dim
            for dim, index in enumerate(indices)
            if not isinstance(index, Var) or index.name in inside or names.count(index.name) > 1
        ]

    def position(self, index: Index) -> Value:
        """Return where an index points, as a tensor of positions that are safe to read."""
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
        """Return True if the access, or an indirection inside it, may hold -1."""
        return access.name in self.padded or any(map(self.may_be_negative, access.indirections))

    def broadcast(self, indices: Sequence[Index]) -> tuple[tuple[str, ...], list[fx.Node]]:
        """Return the union of the names of several indices, and the positions of each over that union."""
        positions = [self.position(index) for index in indices]
        joint = tuple(dict.fromkeys(name for position in positions for name in position.axes))
        return joint, [self.expand_to(position, joint) for position in positions]

    def expand_to(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        """Return the value with its dimensions in the order of `axes` and size 1 where it lacks one."""
        present = tuple(axis for axis in axes if axis in value.axes)
        node = self.permute(value, present)
        if present != axes:
            shape = tuple(self.lengths[axis] if axis in present else 1 for axis in axes)
            node = self.call(torch.reshape, node, shape)
        return node

    def permute(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        if value.axes == axes:
            return value.node
        return self.call(torch.permute, value.node, tuple(map(value.axes.index, axes)))

    def contiguous(self, node: fx.Node) -> fx.Node:
        """Return a value laid out row by row in memory of its own."""
        if self.makes_memory(node):
            return self.call(torch.Tensor.contiguous, node)
        return self.call(torch.Tensor.clone, node, memory_format=torch.contiguous_format)

    def makes_memory(self, node: fx.Node) -> bool:
        """Return whether a value lies in memory of its own, as a product does; a view lies in an operand's."""
        while node.target in VIEWS:
            node = node.all_input_nodes[0]  # after it come lengths
        if node.target is torch.einsum:
            read, _, kept = str(node.args[0]).partition("->")
            return "," in read or bool(set(read) - set(kept))  # `ii->i` is a view
        return node.target in self.makers

    def as_int64(self, positions: fx.Node) -> fx.Node:
        """Return positions as int64, by which torch scatters; an operand that is so already as it is."""
        wide = [node for name, node in self.tensors.items() if self.bound.dtypes[name] == torch.int64]
        return positions if positions in wide else self.call(torch.Tensor.to, positions, torch.int64)

    def flat(self, value: Value) -> fx.Node:
        return value.node if len(value.axes) == 1 else self.call(torch.reshape, value.node, (-1,))

    def sizes(self, axes: tuple[str, ...]) -> tuple[Length, ...]:
        return tuple(self.lengths[axis] for axis in axes)

    @property
    def size(self) -> tuple[Length, ...]:
        """The lengths of the output's dimensions."""
        output_indices = enumerate(self.bound.statement.output.indices)
        return tuple(self.lengths[index.name if isinstance(index, Var) else dim] for dim, index in output_indices)

    def product(self, lengths: Iterable[Length]) -> Length:
        total: Length = 1
        for length in lengths:
            total = self.times(total, length)
        return total

    def times(self, left: Length, right: Length) -> Length:
        if isinstance(left, int) and isinstance(right, int):
            return left * right
        if left == 1 or right == 1:
            return right if left == 1 else left
        return self.call(operator.mul, left, right)

    def masks(self, access: Access) -> dict[Access, Value]:
        """Return, for each index inside `access` that may hold -1, where it has an entry."""
        masks: dict[Access, Value] = {}
        for index in access.indirections:
            masks.update(self.masks(index))
            if index.name in self.padded:
                masks[index] = self.mask(index)
        return masks

    def mask(self, index: Access) -> Value:
        """Return where an index tensor has an entry, that is, holds no -1."""
        if index not in self.valid:
            value = self.gather(index)
            self.valid[index] = Value(self.call(torch.ge, value.node, 0), value.axes)
        return self.valid[index]

    def scaled(self, value: Value) -> Value:
        """Return the value times the statement's literal factors."""
        scale = self.bound.statement.scale
        return value if scale == 1 else Value(self.call(torch.mul, value.node, scale), value.axes)
