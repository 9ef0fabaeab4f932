"""`Bound` -> `torch.fx.GraphModule`: gather what the factors point at, contract, scatter-add.

This is the meaning of a statement in plain torch. It runs anywhere, and every other backend is tested against it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import opt_einsum
import torch
from torch import fx
from torch.nn.functional import embedding_bag

from .bind import Bound
from .differentiate import fresh_name
from .errors import UnsupportedError
from .ir import Access, Const, Index, Var

__all__ = ["lower", "placeholders"]


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


def lower(bound: Bound, padded: frozenset[str] | None = None) -> fx.GraphModule:
    """The graph of a bound statement; `padded` names the index tensors that may hold -1 (default: all)."""
    if padded is None:
        padded = frozenset(access.name for access in bound.statement.index_accesses)
    return _Lowering(bound, padded).module()


class _Lowering:
    def __init__(self, bound: Bound, padded: frozenset[str]) -> None:
        self.bound, self.padded = bound, padded
        self.graph = fx.Graph()
        names = placeholders(bound)
        self.tensors = {
            name: self.graph.placeholder(fresh_name(f"{name}_", names) if name in RESERVED else name) for name in names
        }
        self.gathered: dict[Access, Value] = {}
        self.valid: dict[Access, Value] = {}  # where an index access that may hold -1 has an entry

    def module(self) -> fx.GraphModule:
        result = self.start() if self.bound.is_empty else self.scatter(self.contract())
        if self.bound.compute_dtype != self.bound.dtype:
            result = self.call(torch.Tensor.to, result, self.bound.dtype)
        self.graph.output(result)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph, "Insum")

    def call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a torch function, or of a tensor's method."""
        name = getattr(function, "__name__", "")
        if getattr(torch.Tensor, name, None) is function:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    # gather

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
            if isinstance(index, Access) and self.is_worth_a_zero(access, indices, index):
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

    def is_worth_a_zero(self, access: Access, indices: Sequence[Index], index: Access) -> bool:
        """Reading -1 as one more row, of zeros, costs a copy of the tensor; masking costs one of what is gathered."""
        is_value = access in self.bound.statement.accesses
        names = dict.fromkeys(n for item in indices for n in (item.names if isinstance(item, Access) else (str(item),)))
        gathered = math.prod(self.bound.extents[name] for name in names)
        size = math.prod(self.bound.shapes[access.name])
        return is_value and index.name in self.padded and not index.is_indirect and gathered >= size

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
            return Value(
                self.call(torch.arange, self.bound.extents[index.name], device=self.bound.device),
                (index.name,),
            )
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
            shape = tuple(self.bound.extents[axis] if axis in own else 1 for axis in axes)
            node = self.call(torch.reshape, node, shape)
        return node

    def permute(self, value: Value, axes: tuple[str, ...]) -> fx.Node:
        if value.axes == axes:
            return value.node
        return self.call(torch.permute, value.node, tuple(map(value.axes.index, axes)))

    def flat(self, value: Value) -> fx.Node:
        return value.node if len(value.axes) == 1 else self.call(torch.reshape, value.node, (-1,))

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.bound.extents[axis] for axis in axes)

    # contract

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

    def contract(self) -> Value:
        """The product of the factors, summed down to the names on the left."""
        bag = self.weighted_rows()
        if bag is not None:
            return self.scaled(bag)
        factors = [self.gather(access) for access in self.bound.statement.accesses]
        roots = (*self.bound.statement.accesses, self.bound.statement.output)
        groups = _connected(reduce(dict.__or__, map(self.masks, roots), dict[Access, Value]()).values())
        operands = [self.prepare(factor, groups) for factor in factors]
        free = self.bound.statement.free
        if not operands:
            full = self.call(
                torch.full,
                self.sizes(free),
                self.bound.statement.scale,
                dtype=self.bound.compute_dtype,
                device=self.bound.device,
            )
            return Value(full, free)
        reached = tuple(name for name in free if any(name in operand.axes for operand in operands))
        result = self.scaled(self.einsum(operands, reached))
        if reached != free:
            shape = self.sizes(free)
            result = Value(self.call(torch.Tensor.expand, self.expand_to(result, free), shape), free)
        return result

    def scaled(self, value: Value) -> Value:
        scale = self.bound.statement.scale
        return value if scale == 1 else Value(self.call(torch.mul, value.node, scale), value.axes)

    def weighted_rows(self) -> Value | None:
        """`AV[p,q] * B[AK[p,q],n]` summed over q, as one torch operation that never holds all gathered rows."""
        accesses = self.bound.statement.accesses
        is_one_type = all(self.bound.dtypes[access.name] == self.bound.compute_dtype for access in accesses)
        if len(accesses) != 2 or not is_one_type:
            return None
        for weights, rows in (accesses, accesses[::-1]):
            index, *others = rows.indices or (None,)
            column = others[0] if len(others) == 1 else None
            if isinstance(index, Access) and isinstance(column, Var) and self.is_bag(weights, index, column.name):
                return self.bag(weights, rows, index, column.name)
        return None

    def is_bag(self, weights: Access, index: Access, column: str) -> bool:
        """One weight for each position, one index summed, and everything else on the left."""
        places = [item.name for item in index.indices if isinstance(item, Var)]
        own = [item.name for item in weights.indices if isinstance(item, Var)]
        is_direct = len(places) == len(index.indices) and len(own) == len(weights.indices)
        is_one_to_one = len(set(places)) == len(places) and sorted(places) == sorted(own) and column not in places
        statement = self.bound.statement
        is_kept = {*places, column} == {*statement.free, *statement.summed}
        return is_direct and is_one_to_one and is_kept and len(statement.summed) == 1 and statement.summed[0] != column

    def bag(self, weights: Access, rows: Access, index: Access, column: str) -> Value:
        (summed,) = self.bound.statement.summed
        kept = tuple(name for name in map(str, index.indices) if name != summed)
        table, position, scales = self.tensors[rows.name], self.gather(index), self.gather(weights)
        if index.name in self.padded:
            table, position, mask = self.with_a_zero(table, 0, index)
            hidden = self.call(torch.where, self.expand_to(mask, scales.axes), scales.node, 0)
            scales = Value(hidden, scales.axes)
        shape = (-1, self.bound.extents[summed])
        flat = [self.call(torch.reshape, self.permute(v, (*kept, summed)), shape) for v in (position, scales)]
        total = self.call(embedding_bag, flat[0], table, per_sample_weights=flat[1], mode="sum")
        if len(kept) != 1:
            total = self.call(torch.reshape, total, (*self.sizes(kept), self.bound.extents[column]))
        return Value(self.permute(Value(total, (*kept, column)), self.bound.statement.free), self.bound.statement.free)

    def prepare(self, factor: Value, groups: list[list[Value]]) -> Value:
        """Zero what a -1 hides (never multiply it by zero: 0 * NaN is NaN); convert to the type sums are taken in."""
        node = factor.node
        for masks in groups:
            for mask in self.seen_from(factor, masks):
                if mask.node in factor.without:
                    continue
                node = self.call(torch.where, self.expand_to(mask, factor.axes), node, 0)
        names = [access.name for access in self.bound.statement.accesses]
        if any(self.bound.dtypes[name] != self.bound.compute_dtype for name in names):
            node = self.call(torch.Tensor.to, node, self.bound.compute_dtype)
        return Value(node, factor.axes)

    def seen_from(self, factor: Value, masks: list[Value]) -> list[Value]:
        """Masks as a factor sees them: where names that it lacks matter, whether any of their values has an entry."""
        if all(set(mask.axes) <= set(factor.axes) for mask in masks):
            return masks
        joint = tuple(dict.fromkeys(name for mask in masks for name in mask.axes))
        node = reduce(partial(self.call, torch.logical_and), (self.expand_to(mask, joint) for mask in masks))
        for dim in reversed(range(len(joint))):
            if joint[dim] not in factor.axes:
                node = self.call(torch.any, node, dim)
        return [Value(node, tuple(name for name in joint if name in factor.axes))]

    def einsum(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        if len(operands) <= 2:
            return self.pair(operands, axes)
        equation = self.equation(operands, axes)
        path, _ = opt_einsum.contract_path(equation, *(self.sizes(v.axes) for v in operands), shapes=True)
        for chosen in path[:-1]:
            pair = [operands[at] for at in chosen]
            operands = [operand for at, operand in enumerate(operands) if at not in chosen]
            needed = set(axes).union(*(operand.axes for operand in operands))
            kept = tuple(dict.fromkeys(name for value in pair for name in value.axes if name in needed))
            operands.append(self.pair(pair, kept))
        return self.pair(operands, axes)

    def pair(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """One or two operands contracted to `axes`."""
        if len(operands) == 1 and set(operands[0].axes) == set(axes):
            return Value(self.permute(operands[0], axes), axes)
        if self.is_elementwise(operands, axes):
            large, small = sorted(operands, key=lambda value: -len(value.axes))
            product = self.call(torch.mul, large.node, self.expand_to(small, large.axes))
            dims = tuple(dim for dim, name in enumerate(large.axes) if name not in axes)
            kept = tuple(name for name in large.axes if name in axes)
            total = self.call(torch.sum, product, dims) if dims else product
            return Value(self.permute(Value(total, kept), axes), axes)
        return Value(self.call(torch.einsum, self.equation(operands, axes), *(v.node for v in operands)), axes)

    def is_elementwise(self, operands: list[Value], axes: tuple[str, ...]) -> bool:
        """One operand scales the other, entry by entry: as a batched product of rows it is many times slower."""
        small, *rest = sorted((set(operand.axes) for operand in operands), key=len)
        return len(rest) == 1 and small <= rest[0] and bool(small & set(axes))

    def equation(self, operands: list[Value], axes: tuple[str, ...]) -> str:
        names = tuple(dict.fromkeys(name for operand in operands for name in operand.axes))
        if len(names) > len(string.ascii_letters):
            raise UnsupportedError(
                f"the statement uses {len(names)} index names, at most {len(string.ascii_letters)} can be contracted"
            )
        short = {name: name for name in names if len(name) == 1 and name in string.ascii_letters}
        spare = (letter for letter in string.ascii_letters if letter not in short)
        letter = {name: short.get(name) or next(spare) for name in names}
        terms = ("".join(letter[name] for name in operand.axes) for operand in operands)
        return f"{','.join(terms)}->{''.join(letter[name] for name in axes)}"

    # scatter

    def start(self) -> fx.Node:
        """What the sums are added to."""
        if self.bound.is_seeded:
            seed = self.tensors[self.bound.statement.output.name]
            return self.call(torch.Tensor.to, seed, self.bound.compute_dtype, copy=True)
        return self.call(torch.zeros, self.bound.size, dtype=self.bound.compute_dtype, device=self.bound.device)

    def scatter(self, result: Value) -> fx.Node:
        """The result added to the start at the positions on the left."""
        output = self.bound.statement.output
        pointing = self.pointing(output.indices)
        if not pointing:
            node = self.permute(result, tuple(map(str, output.indices)))
            if self.bound.is_seeded:
                return self.call(torch.add, self.start(), node)
            return self.call(torch.Tensor.clone, node, memory_format=torch.contiguous_format)
        source = Value(self.hide(result, self.masks(output)), result.axes)
        if len(pointing) == 1 and isinstance(output.indices[pointing[0]], Access):
            (dim,) = pointing
            position = self.position(output.indices[dim])
            names = tuple(map(str, output.indices))
            ordered = self.permute(source, names[:dim] + position.axes + names[dim + 1 :])
            if len(position.axes) != 1:
                stop = dim + len(position.axes) - 1
                ordered = (
                    self.call(torch.flatten, ordered, dim, stop)
                    if position.axes
                    else self.call(torch.unsqueeze, ordered, dim)
                )
            return self.call(torch.index_add, self.start(), dim, self.flat(position), ordered)
        rest = [dim for dim in range(len(output.indices)) if dim not in pointing]
        joint, positions = self.broadcast([output.indices[dim] for dim in pointing])
        order = (*pointing, *rest)
        start = self.call(torch.permute, self.start(), order)
        ordered = self.permute(source, joint + tuple(str(output.indices[dim]) for dim in rest))
        summed = self.call(torch.index_put, start, positions, ordered, accumulate=True)
        back = tuple(order.index(dim) for dim in range(len(order)))
        return self.call(torch.Tensor.contiguous, self.call(torch.permute, summed, back))

    def hide(self, result: Value, masks: dict[Access, Value]) -> fx.Node:
        node = result.node
        for mask in masks.values():
            node = self.call(torch.where, self.expand_to(mask, result.axes), node, 0)
        return node


def _connected(masks: Iterable[Value]) -> list[list[Value]]:
    """Masks in groups that share no index name with each other."""
    groups: list[list[Value]] = []
    for mask in masks:
        touching = [group for group in groups if any(set(mask.axes) & set(other.axes) for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([mask, *(other for group in touching for other in group)])
    return groups
