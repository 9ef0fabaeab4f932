"""Gathered factors that a CPU multiplies at all positions first, where positions are few and entries are many.

`Y[D[e],o] += V[e] * X[S[e],c] * W[R[e],c,o]` gathers a matrix for each entry. `Z[s,r,o] = X[s,c] * W[r,c,o]` is one
product of matrices as they lie, and `Y[D[e],o] += V[e] * Z[S[e],R[e],o]` gathers rows of it. So are the gradients of
V and X, whose factors are `dY[D[e],o]` and `W[R[e],c,o]`.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from ..binding import Bound, contraction_path, example_of
from ..language import Access, Var
from .faster import Faster, direct_names
from .gathers import Value

__all__ = ["MultipliedFirst", "multiplied_first"]

MOST_WORK = 2  # times the products of the statement as it stands; those of matrices take less time each


class EarlyProduct(NamedTuple):
    """Two factors, and the dimensions of their product that stand for index tensors, which gather from it."""

    factors: tuple[Access, Access]
    positions: dict[Access, tuple[str, int]]  # of an index tensor: a tensor and the dimension that it points into
    kept: tuple[str, ...]  # names that the product has beside them


def multiplied_first(bound: Bound) -> EarlyProduct | None:
    """Return which factors of a sum are multiplied before they are gathered; None if that takes more memory or work.

    They have a name that is summed over and that no other factor has. Their product holds no more numbers than either
    would hold when it is gathered.
    """
    statement = bound.statement
    if bound.device.type != "cpu" or not statement.is_sum or bound.is_empty:
        return None
    pointing = {name for access in statement.index_accesses for name in access.names}
    for name in statement.summed:
        factors = tuple(access for access in statement.accesses if name in access.names)
        if name not in pointing and len(factors) == 2 and all(map(_reads_plainly, factors)):
            first = _early_product(bound, factors)
            if first is not None:
                return first
    return None


def _early_product(bound: Bound, factors: tuple[Access, ...]) -> EarlyProduct | None:
    statement, (left, right) = bound.statement, factors
    indexed = [(index, (access.name, dim)) for access in factors for dim, index in enumerate(access.indices)]
    positions = dict[Access, tuple[str, int]]()
    for index, place in indexed:
        if isinstance(index, Access):
            positions.setdefault(index, place)
    lengths = {(index, bound.shapes[name][dim]) for index, (name, dim) in indexed if isinstance(index, Access)}
    if not positions or len(lengths) > len(positions):  # one that points into dimensions of two lengths
        return None
    elsewhere = {*statement.free, *(name for index in statement.output.indirections for name in index.names)}
    elsewhere.update(name for access in statement.accesses if access not in factors for name in access.names)
    direct = [index.name for access in factors for index in access.indices if isinstance(index, Var)]
    kept = tuple(name for name in dict.fromkeys(direct) if name in elsewhere)
    if set(direct) & {name for index in positions for name in index.names}:
        return None
    entries, extents = list(dict.fromkeys(name for index in positions for name in index.names)), bound.extents
    rows = prod(example_of(bound.shapes[name][dim]) for name, dim in positions.values())
    own = prod(example_of(extents[name]) for name in kept)
    all_entries = prod(example_of(extents[name]) for name in entries)
    gathered = [prod(example_of(extents[name]) for name in access.names) for access in factors if access.is_indirect]
    if rows * own > max(gathered) or rows > MOST_WORK * all_entries:
        return None
    return EarlyProduct((left, right), positions, kept)


def _reads_plainly(access: Access) -> bool:
    """Return whether an access has names and index tensors alone, each once, and the latter are read as they lie."""
    if len({*access.indices}) < len(access.indices):
        return False
    return all(isinstance(index, Var) or direct_names(index) for index in access.indices)


class MultipliedFirst(Faster):
    """The graph of one bound statement, in which factors may be multiplied before they are gathered."""

    @cached_property
    def first(self) -> EarlyProduct | None:
        """The factors that are multiplied first; None if there are none, or the way is another."""
        first = multiplied_first(self.bound)
        if first is None or any(index.name in self.padded for index in first.positions):
            return None
        return first if self.takes("multiplies_first") else None

    def contract(self) -> Value:
        """Return the product of the factors, summed down to the names on the left."""
        first = self.first
        if first is None:
            return super().contract()
        others, hiding = [each for each in self.bound.statement.accesses if each not in first.factors], self.hiding()
        operands = [self.gathered_product(first), *map(self.gather, others)]
        return self.spread_out([self.prepare(operand, hiding) for operand in operands])

    def einsum(self, operands: list[Value], axes: tuple[str, ...]) -> Value:
        """Return the operands contracted to `axes`, pair by pair in the order that opt_einsum finds."""
        if self.first is None:
            return super().einsum(operands, axes)
        path = contraction_path([operand.axes for operand in operands], axes, self.bound.extents)
        for chosen in path[:-1]:
            pair = [operands[at] for at in chosen]
            operands = [operand for at, operand in enumerate(operands) if at not in chosen]
            needed = {*axes}.union(*(operand.axes for operand in operands))
            names = dict.fromkeys(name for operand in pair for name in operand.axes if name in needed)
            operands.append(self.pair(pair, tuple(names)))
        return self.pair(operands, axes)

    def gathered_product(self, first: EarlyProduct) -> Value:
        """Return what index tensors choose of the product of two factors at all positions."""
        axes = tuple(map(str, first.positions))
        for axis, (name, dim) in zip(axes, first.positions.values()):
            self.lengths[axis] = self.call(torch.Tensor.size, self.tensors[name], dim)
        factors = [self.prepare(self.as_it_lies(each), []) for each in first.factors]
        node = self.pair(factors, (*axes, *first.kept)).node
        joint, places = self.broadcast(list(first.positions))
        place = places[0] if len(places) == 1 else self.joined(places, self.sizes(axes))
        if len(places) > 1:
            node = self.call(torch.reshape, node, (-1, *self.sizes(first.kept)))
        node = self.call(torch.index_select, node, 0, self.flat(Value(place, joint)))
        return Value(self.spread(node, 0, joint), (*joint, *first.kept), is_wide=True)

    def as_it_lies(self, factor: Access) -> Value:
        """Return a factor at all positions, with zeros where none chooses it if torch differentiates the product.

        Torch's gradients multiply both factors by 0 for each product that is not chosen, and 0 times NaN is NaN.
        """
        node, axes = self.tensors[factor.name], tuple(map(str, factor.indices))
        indices = [index for index in factor.indices if isinstance(index, Access)]
        if indices and not self.way.by_rows:
            sizes = self.sizes(tuple(map(str, indices)))
            joint, places = self.broadcast(indices)
            place = places[0] if len(places) == 1 else self.joined(places, sizes)
            nothing = self.call(torch.zeros, (self.product(sizes),), dtype=torch.bool, device=self.bound.device)
            chosen = self.call(torch.index_fill, nothing, 0, self.as_int64(self.flat(Value(place, joint))), True)
            shape = [self.lengths[axis] if isinstance(each, Access) else 1 for axis, each in zip(axes, factor.indices)]
            node = self.call(torch.where, self.call(torch.reshape, chosen, shape), node, 0)
        return Value(node, axes)
