"""A contraction group by group on a CPU, where an index tensor chooses a matrix for each row, as experts are chosen.

`Y[p,m] += X[p,c] * W[E[p],c,m]` would copy a matrix for each row. Rows with the same matrix are multiplied by it at
once instead, one matrix after the other. So is `dW[E[p],c,m] += X[p,c] * dY[p,m]`, which would make one of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, fx

from ..binding import Bound
from ..language import Access, Statement, Var, fresh_name, walk
from .code import compiled
from .faster import Faster, direct_names, names_of
from .gathers import Value, placeholders
from .rows import add_rows, order_of_rows

__all__ = ["Grouped", "index_of_groups"]

# Numbers that are copied or made in the time of one group's operations: on two cores of a Xeon at 1 ns for each, and 25
# us for a slice, a gather and a product. A statement goes by groups if it saves more than that for each of them.
NUMBERS_FOR_A_GROUP = 25_000


@dataclass(frozen=True)
class _Grouping:
    """An index tensor `E[p]`, and what of a statement belongs to one value of it."""

    index: Access
    name: str  # p
    chosen: dict[str, int]  # tensors of which a group reads one slice, and the dimension that it is chosen from
    spread: dict[str, int]  # tensors that have a dimension p
    is_summed: bool  # a group's rows are summed: the output is chosen by the index too
    count: int  # groups


def index_of_groups(bound: Bound) -> str | None:
    """Return the text of the index by whose values a statement is contracted; None if it is not worth it."""
    grouping = _grouping(bound)
    return None if grouping is None else str(grouping.index)


def _grouping(bound: Bound) -> _Grouping | None:
    """Return how a statement falls apart into groups, by the index that saves the most; None if by none."""
    statement = bound.statement
    if bound.device.type != "cpu" or not statement.is_sum or bound.is_empty or not statement.accesses:
        return None
    found = []
    for index in statement.index_accesses:
        grouping = _by(bound, index)
        if grouping is not None:
            users = [access for access in (*statement.accesses, statement.output) if index in access.indices]
            numbers = max(math.prod(bound.extents[name] for name in access.names) for access in users)
            if numbers > NUMBERS_FOR_A_GROUP * grouping.count:
                found.append((numbers / grouping.count, grouping))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _by(bound: Bound, index: Access) -> _Grouping | None:
    """Return the groups of one index `E[p]`; None if it chooses no slices, or p stands where it can't be cut."""
    statement, p = bound.statement, index.indices[0] if len(index.indices) == 1 else None
    if not isinstance(p, Var):
        return None
    is_summed = index in statement.output.indices
    if is_summed and (statement.output.indices.count(index) > 1 or p.name in _names_beside(statement.output, index)):
        return None
    found: dict[str, set[tuple[str, int]]] = {}
    for access in dict.fromkeys(each for root in statement.reads for each in walk(root)):
        dims = [("chosen", dim) for dim, each in enumerate(access.indices) if each == index]
        dims += [("spread", dim) for dim, each in enumerate(access.indices) if each == p]
        found.setdefault(access.name, set()).update(dims or [("whole", 0)])
        if len(dims) > 1 or (dims[:1] and dims[0][0] == "chosen" and access not in statement.accesses):
            return None
    if found.pop(index.name) != {("spread", 0)} or any(len(ways) > 1 for ways in found.values()):
        return None
    places = {name: next(iter(ways)) for name, ways in found.items()}
    chosen = {name: dim for name, (way, dim) in places.items() if way == "chosen"}
    spread = {name: dim for name, (way, dim) in places.items() if way == "spread"}
    if not chosen and not is_summed:
        return None
    counts = [bound.shapes[name][dim] for name, dim in chosen.items()]
    if is_summed:
        counts.append(bound.size[statement.output.indices.index(index)])
    return _Grouping(index, p.name, chosen, spread, is_summed, max(counts))


def _names_beside(access: Access, index: Access) -> tuple[str, ...]:
    """Return the index names of an access in all places but those of one index."""
    return Access(access.name, tuple(each for each in access.indices if each != index)).names


class Grouped(Faster):
    """The graph of one bound statement, contracted group by group where that takes less."""

    @cached_property
    def grouping(self) -> _Grouping | None:
        """How the statement falls apart into groups; None if it does not, or its way is another."""
        grouping = _grouping(self.bound)
        return grouping if grouping is not None and self.takes("by_rows") else None

    def total(self) -> fx.Node:
        """Return the statement's sums; those of one output slice at a time if groups choose the slices."""
        grouping = self.grouping
        if grouping is None:
            return super().total()
        if not grouping.is_summed:
            rows = self.rows_by_group(grouping)
            return super().total() if rows is None else rows
        output = self.bound.statement.output
        dim = output.indices.index(grouping.index)
        slices = self.by_group(grouping, Access(output.name, output.indices[:dim] + output.indices[dim + 1 :]))
        total = self.call(torch.movedim, slices, 0, dim)
        if self.bound.is_seeded:
            return self.call(torch.add, self.start(), total)
        return self.call(torch.Tensor.contiguous, total)

    def rows_by_group(self, grouping: _Grouping) -> fx.Node | None:
        """Return rows that one index tensor scatters, those of a group once they are made; None for other sums."""
        output = self.bound.statement.output
        places, columns = direct_names(output.indices[0]), names_of(output.indices[1:])
        if not places or not columns or set(places) & set(columns) or grouping.name not in places:
            return None
        (index,) = output.indirections
        product = Access(fresh_name("T", self.tensors), tuple(map(Var, (*places, *columns))))
        owner = self.tensors[index.name], places.index(grouping.name), index.name in self.padded
        return self.by_group(grouping, product, owner)

    def contract(self) -> Value:
        """Return the product of the factors, summed down to the names on the left."""
        grouping = self.grouping
        if grouping is None:
            return super().contract()
        free = self.bound.statement.free
        name = fresh_name("T", self.tensors)
        return Value(self.by_group(grouping, Access(name, tuple(map(Var, free)))), free)

    def by_group(self, grouping: _Grouping, output: Access, owner: tuple[fx.Node, int, bool] | None = None) -> fx.Node:
        """Return the results of all groups: in the place of their rows if the output has p, or along a new axis.

        With an `owner` they are added to the rows that it holds: an index tensor, its dimension p, whether it may hide.
        """
        bound, statement = self.bound, self.bound.statement
        factors = tuple(
            Access(factor.name, tuple(index for index in factor.indices if index != grouping.index))
            if isinstance(factor, Access)
            else factor
            for factor in statement.factors
        )
        inner = Statement(output, factors, "=")
        shapes = {name: bound.shapes[name] for name in inner.tensor_names}
        for name, dim in grouping.chosen.items():
            shapes[name] = shapes[name][:dim] + shapes[name][dim + 1 :]
        dtypes = {name: bound.dtypes[name] for name in shapes}
        sizes = [bound.size[dim] for dim, index in enumerate(statement.output.indices) if index != grouping.index]
        size = tuple(sizes) if grouping.is_summed else tuple(bound.extents[str(index)] for index in output.indices)
        extents = {**bound.extents, grouping.name: -(-bound.extents[grouping.name] // grouping.count)}  # about
        part = Bound(inner, extents, shapes, dtypes, size, self.compute_dtype, bound.device, False)
        lowering = Faster(part, self.padded & set(shapes), True, way=self.way)
        function = compiled(lowering.finished_graph(False))
        self.choices |= lowering.choices
        lengths = [self.length_of(key, grouping) for key in lowering.length_arguments]
        varying = [at for at, key in enumerate(lowering.length_arguments) if key == grouping.name]
        places = [(grouping.chosen.get(name), grouping.spread.get(name)) for name in placeholders(part)]
        along = output.names.index(grouping.name) if grouping.name in output.names else None
        run = _runner(function, places, varying, along, grouping.is_summed, grouping.index.name in self.padded)
        tensors = tuple(self.tensors[name] for name in placeholders(part))
        arguments = self.tensors[grouping.index.name], tensors, tuple(lengths)
        if owner is not None:
            return self.call(run, self.start(), *arguments, *owner)
        if grouping.is_summed:
            at = statement.output.indices.index(grouping.index)
            size_of_all = (self.size[at], *self.size[:at], *self.size[at + 1 :])
        else:
            size_of_all = self.sizes(output.names)
        start = self.call(torch.zeros, size_of_all, dtype=self.compute_dtype, device=bound.device)
        return self.call(run, start, *arguments)

    def length_of(self, key: str | int, grouping: _Grouping) -> fx.Node | int:
        """Return a length that the program of one group takes: that of an index name, or of an output dimension."""
        if isinstance(key, str):
            return self.lengths[key]
        outputs = [dim for dim, index in enumerate(self.bound.statement.output.indices) if index != grouping.index]
        return self.lengths[outputs[key]]


def _runner(
    function: Callable[..., Tensor],
    places: list[tuple[int | None, int | None]],
    varying: list[int],
    along: int | None,
    is_stacked: bool,
    is_padded: bool,
) -> Callable[..., Tensor]:
    """Return what runs the program of one group on all of them."""

    def in_groups(
        result: Tensor,
        index: Tensor,
        tensors: Sequence[Tensor],
        lengths: Sequence[int],
        owner: Tensor | None = None,
        dim: int = 0,
        hides: bool = False,
    ) -> Tensor:
        counts = [tensor.shape[at] for tensor, (at, _) in zip(tensors, places) if at is not None]
        order, offsets = order_of_rows(index, len(result) if is_stacked else counts[0], is_padded)
        lengths = list(lengths)
        for group, (start, stop) in enumerate(pairwise(offsets)):
            if start == stop:
                continue
            members = None if order is None else order[start:stop]
            for at in varying:
                lengths[at] = stop - start
            parts = [_part(tensor, *place, group, start, stop, members) for tensor, place in zip(tensors, places)]
            total = function(*parts, *lengths)
            if owner is not None:
                add_rows(result, _part(owner, None, dim, group, start, stop, members), total, hides)
            elif is_stacked:
                result[group] = total
            elif along is None:
                result += total
            elif members is None:
                result.narrow(along, start, stop - start).copy_(total)
            else:
                result.index_copy_(along, members, total)
        return result

    in_groups.__module__ = __name__
    return in_groups


def _part(
    tensor: Tensor, chosen: int | None, spread: int | None, group: int, start: int, stop: int, members: Tensor | None
) -> Tensor:
    """Return what one group reads of a tensor: a slice that it chooses, the rows that are its members, or all."""
    if chosen is not None:
        return tensor.select(chosen, group)
    if spread is None:
        return tensor
    return tensor.narrow(spread, start, stop - start) if members is None else tensor.index_select(spread, members)
