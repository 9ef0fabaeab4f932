"""`Bound` -> `torch.fx` graph: gather what the factors point at, contract, scatter-add.

This is the meaning of a statement in plain torch. It runs anywhere, and every other backend is tested against it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx
from torch.nn.functional import embedding_bag

from ...lru_cache import LRUCache
from ..binding import Bound, contraction_path
from ..language import Access, UnsupportedError, Var
from .extremes import Extremes
from .gathers import Value, large_gathers, lengths_of, placeholders

__all__ = ["Program", "lower", "placeholders", "program_for"]

PROGRAMS = 512  # a program is a few kB of byte code
VIEWS = (torch.permute, torch.reshape)  # of one tensor, or a copy of it

_programs: LRUCache[Program] = LRUCache(PROGRAMS)


def lower(bound: Bound, padded: frozenset[str] | None = None, wants_winners: bool = False) -> fx.GraphModule:
    """Return the graph of a bound statement; `padded` names the index tensors that may hold -1 (default: all).

    With `wants_winners` the graph of a `max` or `min` returns two tensors, the second of the winners' positions.
    """
    if padded is None:
        padded = frozenset(access.name for access in bound.statement.index_accesses)
    graph = _Lowering(bound, padded).finished_graph(wants_winners)
    return fx.GraphModule(torch.nn.Module(), graph, "Insum")


@dataclass(frozen=True)
class Program:
    """The graph of a statement as a Python function; it takes tensors of any lengths, and then those lengths."""

    function: Callable[..., Any]
    lengths: tuple[str | int, ...]  # which of `lengths_of(bound)` come after the tensors

    def lengths_in(self, bound: Bound) -> list[int]:
        """Return the lengths that the function takes when it runs this bound statement."""
        lengths = lengths_of(bound)
        return [lengths[key] for key in self.lengths]


def program_for(
    bound: Bound, padded: frozenset[str], wants_winners: bool = False, sums_in_half: bool = False
) -> Program:
    """Return the program of a bound statement; statements that differ only in lengths share one.

    With `sums_in_half` half precision is left to torch's operations as it is: for those that sum in float32.

    Lengths also decide what a program does, though seldom: whether anything is summed at all, in which order factors
    are contracted, which of them get a row of zeros for -1, and the type of winners' positions. The key holds these.
    """
    winner_dtype = bound.winner_dtype if wants_winners else None
    sizes = bound.is_empty, winner_dtype, large_gathers(bound), _contraction_path(bound)
    kinds = *bound.dtypes.items(), bound.dtype, bound.device, bound.is_seeded, sums_in_half
    key = (str(bound.statement), padded, wants_winners, *kinds, *sizes)
    program = _programs.get(key)
    if program is None:
        lowering = _Lowering(bound, padded, True, bound.dtype if sums_in_half else None)
        code = lowering.finished_graph(wants_winners).python_code("self")
        # not a GraphModule, of which torch.fx would keep the text for as long as the process lives
        exec(compile(code.src, "<torch.fx graph of an indirect einsum>", "exec"), code.globals)
        program = _programs[key] = Program(partial(code.globals["forward"], None), lowering.length_arguments)
    return program


def _contraction_path(bound: Bound) -> tuple[tuple[int, ...], ...]:
    """Return which factors are contracted with each other, in order; nothing for one or two factors."""
    statement = bound.statement
    if len(statement.accesses) <= 2 or not statement.is_sum or bound.is_empty:
        return ()
    return contraction_path([access.names for access in statement.accesses], statement.free, bound.extents)


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


class _Lowering(Extremes):
    """The graph of one bound statement under construction: gathers, a contraction or a max, and a scatter."""

    @property
    def length_arguments(self) -> tuple[str | int, ...]:
        """The lengths that are arguments of the finished graph, in order."""
        return tuple(key for key, length in self.lengths.items() if isinstance(length, fx.Node))

    def finished_graph(self, wants_winners: bool) -> fx.Graph:
        """Return the complete graph, without arguments for lengths that nothing in it needs."""
        if self.bound.statement.is_sum:
            result, winners = self.start() if self.bound.is_empty else self.scatter(self.contract()), None
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

    # contract

    def contract(self) -> Value:
        """Return the product of the factors, summed down to the names on the left."""
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
        node = factor.node
        for masks in groups:
            for mask in self.seen_from(factor, masks):
                if mask.node in factor.without:
                    continue
                node = self.call(torch.where, self.expand_to(mask, factor.axes), node, 0)
        names = [access.name for access in self.bound.statement.accesses]
        if any(self.bound.dtypes[name] != self.compute_dtype for name in names):
            node = self.call(torch.Tensor.to, node, self.compute_dtype)
        return Value(node, factor.axes)

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
        for chosen in _contraction_path(self.bound)[:-1]:
            pair = [operands[at] for at in chosen]
            operands = [operand for at, operand in enumerate(operands) if at not in chosen]
            needed = set(axes).union(*(operand.axes for operand in operands))
            kept_axes = tuple(dict.fromkeys(name for value in pair for name in value.axes if name in needed))
            operands.append(self.pair(pair, kept_axes))
        return self.pair(operands, axes)

    def pair(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """Return one or two operands contracted to `axes`."""
        if len(operands) == 1 and set(operands[0].axes) == set(axes):
            return Value(self.permute(operands[0], axes), axes)
        if len(operands) == 2 and set(operands[0].axes) | set(operands[1].axes) == set(axes):  # nothing is summed
            return Value(self.call(torch.mul, *[self.expand_to(operand, axes) for operand in operands]), axes)
        if self.is_elementwise(operands, axes):
            large, small = sorted(operands, key=lambda value: -len(value.axes))
            product = self.call(torch.mul, large.node, self.expand_to(small, large.axes))
            dims = tuple(dim for dim, name in enumerate(large.axes) if name not in axes)
            kept_axes = tuple(name for name in large.axes if name in axes)
            total = self.call(torch.sum, product, dims) if dims else product
            return Value(self.permute(Value(total, kept_axes), axes), axes)
        equation = _equation([operand.axes for operand in operands], axes)
        return Value(self.call(torch.einsum, equation, *(operand.node for operand in operands)), axes)

    def is_elementwise(self, operands: list[Value], axes: tuple[str, ...]) -> bool:
        """Return True if one operand scales the other entry by entry.

        torch.einsum would take that for a batched product of rows, which is many times slower.
        """
        small, *larger = sorted((set(operand.axes) for operand in operands), key=len)
        return len(larger) == 1 and small <= larger[0] and bool(small & set(axes))

    # scatter

    def start(self) -> fx.Node:
        """Return what the sums are added to: a copy of the output tensor, or zeros."""
        if self.bound.is_seeded:
            seed = self.tensors[self.bound.statement.output.name]
            return self.call(torch.Tensor.to, seed, self.compute_dtype, copy=True)
        return self.call(torch.zeros, self.size, dtype=self.compute_dtype, device=self.bound.device)

    def scatter(self, result: Value) -> fx.Node:
        """Return the start with the result added at the positions on the left."""
        output = self.bound.statement.output
        indirect_dims = self.indirect_dims(output.indices)
        if not indirect_dims:
            node = self.permute(result, tuple(map(str, output.indices)))
            if self.bound.is_seeded:
                return self.call(torch.add, self.start(), node)
            if self.makes_memory(node):
                return self.call(torch.Tensor.contiguous, node)
            return self.call(torch.Tensor.clone, node, memory_format=torch.contiguous_format)
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
            return self.call(torch.index_add, self.start(), dim, self.flat(position), ordered)
        direct_dims = [dim for dim in range(len(output.indices)) if dim not in indirect_dims]
        joint, positions = self.broadcast([output.indices[dim] for dim in indirect_dims])
        order = (*indirect_dims, *direct_dims)
        start = self.call(torch.permute, self.start(), order)
        ordered = self.permute(source, joint + tuple(str(output.indices[dim]) for dim in direct_dims))
        summed = self.call(torch.index_put, start, positions, ordered, accumulate=True)
        back = tuple(order.index(dim) for dim in range(len(order)))
        return self.call(torch.Tensor.contiguous, self.call(torch.permute, summed, back))

    def makes_memory(self, node: fx.Node) -> bool:
        """Return whether a value lies in memory of its own, as a product does; a view lies in an operand's."""
        while node.target in VIEWS:
            (node,) = node.all_input_nodes
        if node.target is torch.einsum:
            read, _, kept = str(node.args[0]).partition("->")
            return "," in read or bool(set(read) - set(kept))  # `ii->i` is a view
        return node.target in (torch.mul, torch.sum)

    def hide(self, result: Value, masks: dict[Access, Value]) -> fx.Node:
        """Return the result with zeros where a mask has no entry."""
        node = result.node
        for mask in masks.values():
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
