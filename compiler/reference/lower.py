"""`Bound` -> `torch.fx` graph: gather what the factors point at, contract, scatter-add.

This is the meaning of a statement in plain torch. It runs anywhere, and every other backend is tested against it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import fx
from torch.nn.functional import embedding_bag

from ..binding import Bound
from ..language import Access, UnsupportedError, Var
from .demands import orders_of, path_of
from .extremes import Extremes
from .gathers import Value, placeholders

__all__ = ["Lowering", "lower", "placeholders"]


def lower(bound: Bound, padded: frozenset[str] | None = None, wants_winners: bool = False) -> fx.GraphModule:
    """Return the graph of a bound statement; `padded` names the index tensors that may hold -1 (default: all).

    With `wants_winners` the graph of a `max` or `min` returns two tensors, the second of the winners' positions.
    """
    if padded is None:
        padded = frozenset(access.name for access in bound.statement.index_accesses)
    graph = Lowering(bound, padded).finished_graph(wants_winners)
    return fx.GraphModule(torch.nn.Module(), graph, "Insum")


def _equation(operands: Sequence[tuple[str, ...]], axes: tuple[str, ...]) -> str:
    """Return the equation, in torch.einsum's notation, that contracts operands over these index names to `axes`.

    Raises UnsupportedError if there are more index names than letters.
    """
    names = tuple(dict.fromkeys(name for operand in operands for name in operand))
    if len(names) > len(string.ascii_letters):
        raise UnsupportedError(
            f"the statement uses {len(names)} index names, at most {len(string.ascii_letters)} can be contracted"
        )
    short = {name: name for name in names if len(name) == 1 and name in string.ascii_letters}
    spare = (letter for letter in string.ascii_letters if letter not in short)
    letter = {name: short.get(name) or next(spare) for name in names}
    terms = ("".join(letter[name] for name in operand) for operand in operands)
    return f"{','.join(terms)}->{''.join(letter[name] for name in axes)}"


class Lowering(Extremes):
    """The graph of one bound statement under construction: gathers, a contraction or a max, and a scatter."""

    @property
    def length_arguments(self) -> tuple[str | int, ...]:
        """The lengths that are arguments of the finished graph, in order."""
        nodes = {key: length for key, length in self.lengths.items() if isinstance(length, fx.Node)}
        return tuple(key for key, node in nodes.items() if node.op == "placeholder")

    def finished_graph(self, wants_winners: bool) -> fx.Graph:
        """Return the complete graph, without arguments for lengths that nothing in it needs."""
        if self.bound.statement.is_sum:
            result, winners = self.start() if self.bound.is_empty else self.total(), None
        else:
            result, winners = self.extremum(wants_winners)
        if self.compute_dtype != self.bound.dtype:
            result = self.call(torch.Tensor.to, result, self.bound.dtype)
        self.graph.output(result if winners is None else (result, winners))
        for key, length in list(self.lengths.items()):
            if isinstance(length, fx.Node) and not length.users:
                self.graph.erase_node(length)
                del self.lengths[key]
        self.graph.lint()
        return self.graph

    def total(self) -> fx.Node:
        """Return the statement's sums, in the output's order."""
        return self.scatter(self.contract())

    # contract

    def contract(self) -> Value:
        """Return the product of the factors, summed down to the names on the left."""
        bag = self.weighted_rows()
        if bag is not None:
            return self.scaled(bag)
        hiding, accesses = self.hiding(), self.bound.statement.accesses
        operands = [self.prepare(self.gather(access), hiding) for access in accesses]
        product = self.spread_out(operands)
        if not operands:
            return product
        return replace(product, without=frozenset.intersection(*[operand.without for operand in operands]))

    def hiding(self) -> list[list[Value]]:
        """Return where index tensors have an entry, those together that share an index name."""
        roots = (*self.bound.statement.accesses, self.bound.statement.output)
        return _connected(reduce(dict.__or__, map(self.masks, roots), dict[Access, Value]()).values())

    def spread_out(self, operands: list[Value]) -> Value:
        """Return the product of all factors over the names on the left, those too that no factor has."""
        free = self.bound.statement.free
        if not operands:
            full = self.call(
                torch.full,
                self.sizes(free),
                self.bound.statement.scale,
                dtype=self.compute_dtype,
                device=self.bound.device,
            )
            return Value(full, free)
        reached = tuple(name for name in free if any(name in operand.axes for operand in operands))
        result = self.scaled(self.einsum(operands, reached))
        if reached != free:
            shape = self.sizes(free)
            result = Value(self.call(torch.Tensor.expand, self.expand_to(result, free), shape), free)
        return result

    def weighted_rows(self) -> Value | None:
        """Return `AV[p,q] * B[AK[p,q],n]` summed over q by one torch operation that never holds all gathered rows.

        The result is None for a statement that is not of this form.
        """
        accesses = self.bound.statement.accesses
        has_one_dtype = all(self.bound.dtypes[access.name] == self.compute_dtype for access in accesses)
        if len(accesses) != 2 or not has_one_dtype:
            return None
        for weights, rows in (accesses, accesses[::-1]):
            index, *others = rows.indices or (None,)
            column = others[0] if len(others) == 1 else None
            if isinstance(index, Access) and isinstance(column, Var) and self.is_bag(weights, index, column.name):
                return self.bag(weights, rows, index, column.name)
        return None

    def is_bag(self, weights: Access, index: Access, column: str) -> bool:
        """Return True if there is one weight for each position, one index is summed, and all others are on the left."""
        places = [item.name for item in index.indices if isinstance(item, Var)]
        weight_names = [item.name for item in weights.indices if isinstance(item, Var)]
        is_direct = len(places) == len(index.indices) and len(weight_names) == len(weights.indices)
        is_unique = len(set(places)) == len(places) and column not in places
        is_one_to_one = is_unique and sorted(places) == sorted(weight_names)
        statement = self.bound.statement
        has_all_names = {*places, column} == {*statement.free, *statement.summed}
        has_one_sum = len(statement.summed) == 1 and statement.summed[0] != column
        return is_direct and is_one_to_one and has_all_names and has_one_sum

    def bag(self, weights: Access, rows: Access, index: Access, column: str) -> Value:
        """Return the weighted sum of rows by `torch.nn.functional.embedding_bag`."""
        (summed,) = self.bound.statement.summed
        kept_axes = tuple(name for name in map(str, index.indices) if name != summed)
        table, position, scales = self.tensors[rows.name], self.gather(index), self.gather(weights)
        if index.name in self.padded:
            table, position, mask = self.with_a_zero(table, 0, index)
            hidden = self.call(torch.where, self.expand_to(mask, scales.axes), scales.node, 0)
            scales = Value(hidden, scales.axes)
        shape = (-1, self.lengths[summed])
        flat = [self.call(torch.reshape, self.permute(v, (*kept_axes, summed)), shape) for v in (position, scales)]
        total = self.call(embedding_bag, flat[0], table, per_sample_weights=flat[1], mode="sum")
        if len(kept_axes) != 1:
            total = self.call(torch.reshape, total, (*self.sizes(kept_axes), self.lengths[column]))
        free = self.bound.statement.free
        return Value(self.permute(Value(total, (*kept_axes, column)), free), free)

    def prepare(self, factor: Value, groups: list[list[Value]]) -> Value:
        """Return a factor in the dtype of the sums, and zero where a -1 hides it.

        It is never multiplied by zero instead, since 0 * NaN is NaN.
        """
        node, without = factor.node, factor.without
        for masks in groups:
            for mask in self.seen_from(factor, masks):
                if mask.node in without:
                    continue
                without |= {mask.node}
                node = self.call(torch.where, self.expand_to(mask, factor.axes), node, 0)
        names = [access.name for access in self.bound.statement.accesses]
        if not factor.is_wide and any(self.bound.dtypes[name] != self.compute_dtype for name in names):
            node = self.call(torch.Tensor.to, node, self.compute_dtype)
        return Value(node, factor.axes, without)

    def seen_from(self, factor: Value, masks: list[Value]) -> list[Value]:
        """Return masks over the factor's own names: over a name that it lacks, whether any value has an entry."""
        if all(set(mask.axes) <= set(factor.axes) for mask in masks):
            return masks
        joint = tuple(dict.fromkeys(name for mask in masks for name in mask.axes))
        node = reduce(partial(self.call, torch.logical_and), (self.expand_to(mask, joint) for mask in masks))
        for dim in reversed(range(len(joint))):
            if joint[dim] not in factor.axes:
                node = self.call(torch.any, node, dim)
        return [Value(node, tuple(name for name in joint if name in factor.axes))]

    def einsum(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """Return the operands contracted to `axes`, pair by pair in the order that opt_einsum finds."""
        for chosen, kept_axes in zip(path_of(self.bound), orders_of(self.bound)):
            pair = [operands[at] for at in chosen]
            operands = [operand for at, operand in enumerate(operands) if at not in chosen]
            operands.append(self.pair(pair, kept_axes))
        return self.pair(operands, axes)

    def pair(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """Return one or two operands contracted to `axes`."""
        if len(operands) == 1 and set(operands[0].axes) == set(axes):
            return Value(self.permute(operands[0], axes), axes)
        if len(operands) == 2 and set(operands[0].axes) | set(operands[1].axes) == set(axes):  # nothing is summed
            return Value(self.multiplied(operands, axes), axes)
        if self.is_elementwise(operands, axes):
            large, small = sorted(operands, key=lambda value: -len(value.axes))
            product = self.multiplied((large, small), large.axes)
            dims = tuple(dim for dim, name in enumerate(large.axes) if name not in axes)
            kept_axes = tuple(name for name in large.axes if name in axes)
            total = self.summed_along(product, large.axes, dims) if dims else product
            return Value(self.permute(Value(total, kept_axes), axes), axes)
        # torch writes the names of the first operand first: then the result need not be laid out anew
        own = [name for name in axes if sum(name in operand.axes for operand in operands) == 1]
        operands = sorted(operands, key=lambda operand: bool(own) and own[0] not in operand.axes)
        equation = _equation([operand.axes for operand in operands], axes)
        return Value(self.call(torch.einsum, equation, *(operand.node for operand in operands)), axes)

    def multiplied(self, operands: Sequence[Value], axes: tuple[str, ...]) -> fx.Node:
        """Return the products of operands entry by entry, over all of their axes."""
        return self.call(torch.mul, *[self.expand_to(operand, axes) for operand in operands])

    def summed(self, node: fx.Node, dims: tuple[int, ...]) -> fx.Node:
        """Return a tensor summed over some dimensions; a lone one is given as a number, which torch reads sooner."""
        return self.call(torch.sum, node, dims[0] if len(dims) == 1 else dims)

    def summed_along(self, node: fx.Node, axes: tuple[str, ...], dims: tuple[int, ...]) -> fx.Node:
        """Return products of entries over some axes, summed over some of their dimensions."""
        return self.summed(node, dims)

    def is_elementwise(self, operands: list[Value], axes: tuple[str, ...]) -> bool:
        """Return True if one operand scales the other entry by entry.

        torch.einsum would take that for a batched product of rows, which is many times slower.
        """
        small, *larger = sorted((set(operand.axes) for operand in operands), key=len)
        return len(larger) == 1 and small <= larger[0] and bool(small & set(axes))

    # scatter

    def start(self, order: Sequence[int] = ()) -> fx.Node:
        """Return what the sums are added to, in new memory: the output tensor, or zeros; its dimensions in an order."""
        if self.bound.is_seeded:
            seed = self.tensors[self.bound.statement.output.name]
            if not order:
                return self.call(torch.Tensor.to, seed, self.compute_dtype, copy=True)
            laid_out, kind = self.call(torch.permute, seed, tuple(order)), torch.contiguous_format
            return self.call(torch.Tensor.to, laid_out, self.compute_dtype, copy=True, memory_format=kind)
        size = [self.size[dim] for dim in order] if order else self.size
        return self.call(torch.zeros, size, dtype=self.compute_dtype, device=self.bound.device)

    def scatter(self, result: Value) -> fx.Node:
        """Return the start with the result added at the positions on the left."""
        output = self.bound.statement.output
        indirect_dims = self.indirect_dims(output.indices)
        if not indirect_dims:
            node = self.permute(result, tuple(map(str, output.indices)))
            if self.bound.is_seeded:
                return self.call(torch.add, self.start(), node)
            return self.contiguous(node)
        source = Value(self.hide(result, self.masks(output)), result.axes)
        if len(indirect_dims) == 1 and isinstance(output.indices[indirect_dims[0]], Access):
            (dim,) = indirect_dims
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
            return self.added(self.start(), dim, self.flat(position), ordered)
        direct_dims = [dim for dim in range(len(output.indices)) if dim not in indirect_dims]
        joint, positions = self.broadcast([output.indices[dim] for dim in indirect_dims])
        # one position among the elements of all these dimensions: torch sorts by several, and adds by one
        rows, columns = ([self.size[dim] for dim in dims] for dims in (indirect_dims, direct_dims))
        ordered = self.permute(source, joint + tuple(str(output.indices[dim]) for dim in direct_dims))
        start = self.start((*indirect_dims, *direct_dims))
        flat = [
            self.call(torch.reshape, node, (-1, *shape))
            for node, shape in ((start, columns), (ordered, columns), (self.joined(positions, rows), ()))
        ]
        summed = self.added(flat[0], 0, flat[2], flat[1])
        return self.restored(self.call(torch.reshape, summed, (*rows, *columns)), (*indirect_dims, *direct_dims))

    def added(self, start: fx.Node, dim: int, positions: fx.Node, source: fx.Node) -> fx.Node:
        """Return a start with slices of a source added along a dimension at these positions."""
        return self.call(torch.Tensor.index_add_, start, dim, positions, source)

    def hide(self, result: Value, masks: dict[Access, Value]) -> fx.Node:
        """Return the result with zeros where a mask has no entry, unless all of its factors have them there."""
        node = result.node
        for mask in masks.values():
            if mask.node in result.without:
                continue
            node = self.call(torch.where, self.expand_to(mask, result.axes), node, 0)
        return node


def _connected(masks: Iterable[Value]) -> list[list[Value]]:
    """Return masks in groups that share no index name with each other."""
    groups: list[list[Value]] = []
    for mask in masks:
        touching = [group for group in groups if any(set(mask.axes) & set(earlier.axes) for earlier in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([mask, *(earlier for group in touching for earlier in group)])
    return groups
