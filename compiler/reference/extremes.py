"""`C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])` as nodes of a `torch.fx` graph: products that compete, not add up.

Products hidden by a -1 take no part, an element that none reaches is 0, and a NaN wins. Of equal products the first
wins, in the lexicographic order of the names that are reduced: its position in that order is the winner's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce

import torch
from torch import fx

from ..language import Access
from .gathers import Gathers, Length, Value

__all__ = ["Extremes"]


@dataclass(frozen=True)
class Competing:
    """Products that compete, where they exist and their positions, each over some of the same axes."""

    value: Value
    entries: Value | None  # where there is a product; None: everywhere
    place: Value | None  # its position among those that it competes with; None: not wanted


class Extremes(Gathers):
    """The largest or smallest of the products that meet in one output element."""

    @property
    def is_max(self) -> bool:
        return self.bound.statement.reduction == "max"

    @property
    def worst(self) -> float:
        return -math.inf if self.is_max else math.inf

    @property
    def starts_at_worst(self) -> bool:
        """Whether scattered products compete with a number that all of them beat or equal, and not with nothing."""
        return False

    @cached_property
    def last(self) -> Length:
        """One past the last position of a product: the number of products that an element could have."""
        return self.product(self.sizes(self.bound.statement.reduced))

    def extremum(self, wants_winners: bool) -> tuple[fx.Node, fx.Node | None]:
        """Return the statement's value and, if `wants_winners`, the positions of its winners; else None for them."""
        if self.bound.is_empty:
            return self.filled(0, self.compute_dtype), self.no_winner() if wants_winners else None
        best = self.best_inside(self.products(wants_winners))
        if self.bound.statement.output.is_indirect:
            return self.compete(best)
        result = self.put(self.shown(best.value, best.entries, 0), 0)
        return result, self.put(self.shown(best.place, best.entries, -1), -1) if best.place is not None else None

    def shown(self, value: Value, entries: Value | None, otherwise: float | fx.Node) -> Value:
        """Return the value where there is an entry, and `otherwise` elsewhere."""
        if entries is None:
            return value
        names = {*value.axes, *entries.axes}
        axes = tuple(name for name in self.bound.statement.names if name in names)
        node = self.call(torch.where, self.expand_to(entries, axes), self.expand_to(value, axes), otherwise)
        return Value(node, axes)

    def no_winner(self) -> fx.Node:
        """Return winners' positions of an output that no product reaches: -1 everywhere."""
        return self.filled(-1, self.bound.winner_dtype)

    def filled(self, value: float | fx.Node, dtype: torch.dtype, size: Sequence[Length] | None = None) -> fx.Node:
        """Return a tensor of one value; its size is by default the output's."""
        size = self.size if size is None else tuple(size)
        if not isinstance(value, fx.Node) and value == 0:
            return self.call(torch.zeros, size, dtype=dtype, device=self.bound.device)  # which takes less to fill
        return self.call(torch.full, size, value, dtype=dtype, device=self.bound.device)

    # products

    def products(self, wants_winners: bool) -> Competing:
        """Return the products over all index names that they depend on: direct ones first, then the reduced ones."""
        statement = self.bound.statement
        roots = (*statement.accesses, statement.output)
        factors = [self.gather(access) for access in statement.accesses]
        masks = list(reduce(dict.__or__, map(self.masks, roots), dict[Access, Value]()).values())
        present = {name for value in (*factors, *masks) for name in value.axes}
        axes = tuple(name for name in (*statement.direct, *statement.reduced) if name in present)
        operands = [self.expand_to(self.widened(factor), axes) for factor in factors]
        if operands:
            product = self.scaled(Value(reduce(partial(self.call, torch.mul), operands), axes)).node
        else:
            product = self.filled(statement.scale, self.compute_dtype, (1,) * len(axes))
        if not any({*factor.axes} == {*axes} for factor in factors):
            product = self.call(torch.Tensor.expand, product, self.sizes(axes))
        return Competing(Value(product, axes), self.joint(masks, axes), self.places(axes) if wants_winners else None)

    def joint(self, masks: Sequence[Value], order: tuple[str, ...]) -> Value | None:
        """Return where all masks have an entry; None if there are no masks."""
        if not masks:
            return None
        axes = tuple(name for name in order if any(name in mask.axes for mask in masks))
        spread = [self.expand_to(mask, axes) for mask in masks]
        return Value(reduce(partial(self.call, torch.logical_and), spread), axes)

    def widened(self, factor: Value) -> Value:
        """Return the factor in the dtype that products are taken in."""
        names = [access.name for access in self.bound.statement.accesses]
        if all(self.bound.dtypes[name] == self.compute_dtype for name in names):
            return factor
        return Value(self.call(torch.Tensor.to, factor.node, self.compute_dtype), factor.axes)

    def places(self, order: tuple[str, ...]) -> Value:
        """Return the position of each product over the reduced names; 0 along a name that it does not depend on."""
        axes = tuple(name for name in order if name in self.bound.statement.reduced)
        total: fx.Node | None = None
        stride: Length = 1
        for name in reversed(self.bound.statement.reduced):
            if name in axes:
                stop = self.times(self.lengths[name], stride)
                steps = self.call(
                    torch.arange, 0, stop, stride, dtype=self.bound.winner_dtype, device=self.bound.device
                )
                along = self.expand_to(Value(steps, (name,)), axes)
                total = along if total is None else self.call(torch.add, total, along)
            stride = self.times(self.lengths[name], stride)
        return Value(self.filled(0, self.bound.winner_dtype, ()) if total is None else total, axes)

    def best_inside(self, products: Competing) -> Competing:
        """Return the best of the products over the names that only the right side has."""
        axes, inner = products.value.axes, self.bound.statement.summed
        dims = [dim for dim, name in enumerate(axes) if name in inner]
        if not dims:
            return products
        node, entries, place = products.value.node, products.entries, products.place
        spread = None if entries is None else self.expand_to(entries, axes)
        if spread is not None:
            node = self.call(torch.where, spread, node, self.worst)
        best = self.call(torch.amax if self.is_max else torch.amin, node, dims, place is not None)
        kept_axes = tuple(name for name in axes if name not in inner)
        if place is not None:
            is_best = self.is_best(node, best, spread)
            where = self.call(torch.where, is_best, self.expand_to(place, axes), self.last)
            place = Value(self.call(torch.amin, where, dims), kept_axes)
            best = self.call(torch.squeeze, best, tuple(dims))
        if entries is not None:
            entries = self.any_of(entries, inner)
        return Competing(Value(best, kept_axes), entries, place)

    def any_of(self, entries: Value, inner: tuple[str, ...]) -> Value:
        """Return whether there is an entry for any value of the names `inner`."""
        node = entries.node
        for dim in reversed(range(len(entries.axes))):
            if entries.axes[dim] in inner:
                node = self.call(torch.any, node, dim)
        return Value(node, tuple(name for name in entries.axes if name not in inner))

    def is_best(self, node: fx.Node, best: fx.Node, entries: fx.Node | None = None) -> fx.Node:
        """Return where a product exists and equals the best, or is NaN, which the best is too then."""
        is_equal = self.call(torch.logical_or, self.call(torch.eq, node, best), self.call(torch.isnan, node))
        return is_equal if entries is None else self.call(torch.logical_and, is_equal, entries)

    # where they go

    def put(self, result: Value, elsewhere: int) -> fx.Node:
        """Return the result at its positions, each of which is met once, and `elsewhere` at all others."""
        output, free = self.bound.statement.output, self.bound.statement.free
        if {*result.axes} != {*free}:
            result = Value(self.call(torch.Tensor.expand, self.expand_to(result, free), self.sizes(free)), free)
        indirect_dims = self.indirect_dims(output.indices)
        if not indirect_dims:
            return self.contiguous(self.permute(result, tuple(map(str, output.indices))))
        direct_dims = [dim for dim in range(len(output.indices)) if dim not in indirect_dims]
        joint, positions = self.broadcast([output.indices[dim] for dim in indirect_dims])
        size = [self.size[dim] for dim in (*indirect_dims, *direct_dims)]
        start = self.call(torch.Tensor.new_full, result.node, size, elsewhere)
        ordered = self.permute(result, joint + tuple(str(output.indices[dim]) for dim in direct_dims))
        return self.restored(self.call(torch.index_put, start, positions, ordered), (*indirect_dims, *direct_dims))

    def restored(self, node: fx.Node, order: tuple[int, ...]) -> fx.Node:
        """Return a tensor with its dimensions, which are the output's in this order, in the output's own order."""
        back = tuple(order.index(dim) for dim in range(len(order)))
        if back == tuple(range(len(order))):
            return node
        return self.call(torch.Tensor.contiguous, self.call(torch.permute, node, back))

    def compete(self, best: Competing) -> tuple[fx.Node, fx.Node | None]:
        """Return the best of the products that indirections on the left send to one element, and their positions.

        Products hidden by a -1 are sent to one more row, which is cut off at the end.
        """
        output = self.bound.statement.output
        indirect_dims = self.indirect_dims(output.indices)
        direct_dims = [dim for dim in range(len(output.indices)) if dim not in indirect_dims]
        joint, positions = self.broadcast([output.indices[dim] for dim in indirect_dims])
        axes = joint + tuple(str(output.indices[dim]) for dim in direct_dims)
        rows, columns = [self.size[dim] for dim in indirect_dims], [self.size[dim] for dim in direct_dims]
        shape, num_rows = (self.product(self.sizes(joint)), *columns), self.product(rows)
        all_rows = num_rows
        if best.entries is not None:  # of a product that is hidden
            all_rows = num_rows + 1 if isinstance(num_rows, int) else self.call(operator.add, num_rows, 1)

        def laid_out(value: Value) -> fx.Node:
            node = self.expand_to(value, axes)
            if len(value.axes) < len(axes):
                node = self.call(torch.Tensor.expand, node, self.sizes(axes))
            return node if len(joint) == 1 else self.call(torch.reshape, node, shape)

        def finished(node: fx.Node) -> fx.Node:
            if best.entries is not None:
                node = self.call(torch.narrow, node, 0, 0, num_rows)
            if len(rows) > 1:
                node = self.call(torch.reshape, node, (*rows, *columns))
            return self.restored(node, (*indirect_dims, *direct_dims))

        position = self.joined(positions, rows)
        if best.entries is not None:
            position = self.beyond(position, num_rows)
        index = laid_out(self.shown(Value(position, joint), best.entries, num_rows))
        source = laid_out(best.value)
        size, kind = (all_rows, *columns), "amax" if self.is_max else "amin"
        includes = best.place is not None and self.starts_at_worst  # winners tell what no product has reached
        start = self.filled(self.worst if includes else 0, self.compute_dtype, size)
        result = self.call(torch.Tensor.scatter_reduce_, start, 0, index, source, kind, include_self=includes)
        if best.place is None:
            return finished(result), None
        is_best = self.is_best(source, self.call(torch.gather, result, 0, index))
        place = self.call(torch.where, is_best, laid_out(best.place), self.last)
        none = self.filled(self.last, self.bound.winner_dtype, size)
        first = finished(self.call(torch.Tensor.scatter_reduce_, none, 0, index, place, "amin"))
        is_won, value = self.call(torch.lt, first, self.last), finished(result)
        if includes:
            value = self.call(torch.where, is_won, value, 0)
        return value, self.call(torch.where, is_won, first, -1)

    def joined(self, positions: Sequence[fx.Node], rows: Sequence[Length]) -> fx.Node:
        """Return positions in several dimensions as one position in their flattened product."""
        total = self.as_int64(positions[0])
        for position, extent in zip(positions[1:], rows[1:]):
            total = self.call(torch.add, position, total, alpha=extent)
            if self.refuses:  # what would lie in the next row
                total = self.call(torch.where, self.call(torch.lt, position, extent), total, self.product(rows))
        return total
