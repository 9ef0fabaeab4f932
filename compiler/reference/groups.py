"""A contraction group by group on a CPU, where an index tensor chooses a matrix for each row, as experts are chosen.

`Y[p,m] += X[p,c] * W[E[p],c,m]` would copy a matrix for each row. Rows with the same matrix are multiplied by it at
once instead, one matrix after the other. So is `dW[E[p],c,m] += X[p,c] * dY[p,m]`, which would make one of each row.

Where names always follow p, as in `Out[I[p,q],m] += In[J[p,q],c] * W[E[p],c,m]`, a row is an entry (p, q). The order of
entries by their groups, without those that a -1 hides, and what index tensors hold in that order are remembered with
the index tensors: what is left of a group is to gather its rows, multiply them by its matrix and add them up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..binding import Bound
from ..language import Access, Statement, Var, fresh_name, walk
from .code import compiled
from .faster import Faster, direct_names, names_of, overwrite
from .first import MultipliedFirst
from .gathers import Value, placeholders
from .rows import Groups, add_rows, grouped_entries

__all__ = ["Grouped", "index_of_groups"]

# Numbers that are copied or made in the time of one group's operations: on two cores of a Xeon at 1 ns for each, and 25
# us for a slice, a gather and a product. A statement goes by groups if it saves more than that for each of them.
NUMBERS_FOR_A_GROUP = 25_000
FEWEST_NUMBERS = NUMBERS_FOR_A_GROUP // 16  # from which on groups are timed


@dataclass(frozen=True)
class _Grouping:
    """An index tensor `E[p]`, and what of a statement belongs to one value of it."""

    index: Access
    entry: tuple[str, ...]  # p, and the names that always follow it
    chosen: dict[str, int]  # tensors of which a group reads one slice, and the dimension that it is chosen from
    spread: dict[str, tuple[int, bool]]  # tensors with a dimension p, and whether the rest of the entry follows it
    is_summed: bool  # a group's rows are summed: the output is chosen by the index too
    count: int  # groups

    @property
    def name(self) -> str:
        """The name that stands for an entry in the statement of one group."""
        return self.entry[0]

    def flat(self, access: Access) -> Access:
        """Return an access over entries, without the index of groups."""
        kept = [index for index in access.indices if index != self.index]
        inside = [self.flat(index) if isinstance(index, Access) else index for index in kept]
        return Access(access.name, tuple(index for index in inside if str(index) not in self.entry[1:]))


def index_of_groups(bound: Bound, is_timed: bool = False) -> str | None:
    """Return the text of the index by whose values a statement is contracted; None if it is not worth it.

    If `is_timed`, it may be worth it.
    """
    grouping = _grouping(bound, FEWEST_NUMBERS if is_timed else NUMBERS_FOR_A_GROUP)
    return None if grouping is None else str(grouping.index)


def _grouping(bound: Bound, least: int) -> _Grouping | None:
    """Return how a statement falls apart into groups, by the index that saves the most; None if by none.

    Groups of which each saves fewer than `least` numbers are not worth it.
    """
    statement = bound.statement
    if bound.device.type != "cpu" or not statement.is_sum or bound.is_empty or not statement.accesses:
        return None
    found = []
    for index in statement.index_accesses:
        grouping = _by(bound, index)
        if grouping is not None:
            users = [access for access in (*statement.accesses, statement.output) if index in access.indices]
            numbers = max(math.prod(bound.extents[name] for name in access.names) for access in users)
            if numbers > least * grouping.count:
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
    reads = list(dict.fromkeys(each for root in statement.reads for each in walk(root)))
    entry = _entry(statement, [access for access in reads if access != index], p.name, is_summed)
    found: dict[str, set[tuple[str, int, bool]]] = {}
    for access in reads:
        is_whole = len(entry) == 1 or Var(entry[1]) in access.indices
        dims = [("chosen", dim, True) for dim, each in enumerate(access.indices) if each == index]
        dims += [("spread", dim, is_whole) for dim, each in enumerate(access.indices) if each == p]
        found.setdefault(access.name, set()).update(dims or [("whole", 0, True)])
        if len(dims) > 1 or (dims[:1] and dims[0][0] == "chosen" and access not in statement.accesses):
            return None
    if {(way, dim) for way, dim, _ in found.pop(index.name)} != {("spread", 0)}:
        return None
    if any(len(ways) > 1 for ways in found.values()):
        return None
    places = {name: next(iter(ways)) for name, ways in found.items()}
    chosen = {name: dim for name, (way, dim, _) in places.items() if way == "chosen"}
    spread = {name: (dim, is_whole) for name, (way, dim, is_whole) in places.items() if way == "spread"}
    if not chosen and not is_summed:
        return None
    counts = [bound.shapes[name][dim] for name, dim in chosen.items()]
    if is_summed:
        counts.append(bound.size[statement.output.indices.index(index)])
    return _Grouping(index, entry, chosen, spread, is_summed, max(counts))


def _entry(statement: Statement, reads: list[Access], p: str, is_summed: bool) -> tuple[str, ...]:
    """Return p and the names that follow it wherever they stand, so that all of them are one name of entries.

    What a group sums or scatters is one row for each entry: a result for each p has none of the other names.
    """
    runs = [direct_names(access) or () for access in reads if access.indices and access.indices[0] == Var(p)]
    longest = max(runs, key=len, default=())
    output = Access(statement.output.name, tuple(index for index in statement.output.indices if isinstance(index, Var)))
    sent = [*([] if is_summed else [output]), *statement.output.indirections]
    for end in range(len(longest), 1, -1):
        entry = longest[:end]
        is_in_all = all(_has_run(access, entry) for access in (*reads, output))
        if is_in_all and not any(Var(p) in access.indices and Var(entry[1]) not in access.indices for access in sent):
            return entry
    return (p,)


def _has_run(access: Access, entry: tuple[str, ...]) -> bool:
    """Return whether the names of an entry stand one after the other in an access, or none but the first does."""
    names = tuple(index.name if isinstance(index, Var) else "" for index in access.indices)
    if not set(names) & set(entry[1:]):
        return True
    at = names.index(entry[0]) if entry[0] in names else 0
    return names[at : at + len(entry)] == entry and all(names.count(name) == 1 for name in entry)


def _names_beside(access: Access, index: Access) -> tuple[str, ...]:
    """Return the index names of an access in all places but those of one index."""
    return Access(access.name, tuple(each for each in access.indices if each != index)).names


class Grouped(MultipliedFirst):
    """The graph of one bound statement, contracted group by group where that takes less."""

    @cached_property
    def grouping(self) -> _Grouping | None:
        """How the statement falls apart into groups; None if it does not, or its way is another."""
        grouping, few = (_grouping(self.bound, least) for least in (NUMBERS_FOR_A_GROUP, FEWEST_NUMBERS))
        if (grouping is None and few is None) or self.first is not None or not self.takes("by_rows"):
            return None
        return few if grouping is None and self.takes("in_groups") else grouping

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
        indices = self.bound.statement.output.indices
        sent = [index for index in indices if isinstance(index, Access)]
        places, columns = direct_names(sent[0]) if len(sent) == 1 else None, [x for x in indices if x not in sent]
        kept = names_of(columns)
        if not places or not kept or set(places) & set(kept) or grouping.name not in places:
            return None
        if indices[0] not in sent and len(places) > len(grouping.entry):
            return None
        at = indices.index(sent[0])
        product = Access(fresh_name("T", self.tensors), tuple(map(Var, (*kept[:at], *places, *kept[at:]))))
        return self.by_group(grouping, product, sent[0])

    def contract(self) -> Value:
        """Return the product of the factors, summed down to the names on the left."""
        grouping = self.grouping
        if grouping is None:
            return super().contract()
        free = self.bound.statement.free
        name = fresh_name("T", self.tensors)
        return Value(self.by_group(grouping, Access(name, tuple(map(Var, free)))), free)

    def by_group(self, grouping: _Grouping, output: Access, owner: Access | None = None) -> fx.Node:
        """Return the results of all groups: in the place of their rows if the output has p, or along a new axis.

        With an `owner`, which is an index tensor, they are added to the rows that it holds.
        """
        bound, statement = self.bound, self.bound.statement
        factors = tuple(grouping.flat(each) if isinstance(each, Access) else each for each in statement.factors)
        flat_output = grouping.flat(output)
        inner = Statement(flat_output, factors, "=")
        shapes = {name: self.flat_shape(grouping, name) for name in inner.tensor_names}
        dtypes = {name: bound.dtypes[name] for name in shapes}
        count = math.prod(bound.extents[name] for name in grouping.entry)
        extents = {name: extent for name, extent in bound.extents.items() if name not in grouping.entry[1:]}
        extents[grouping.name] = -(-count // grouping.count)  # about
        sizes = [bound.size[dim] for dim, index in enumerate(statement.output.indices) if index != grouping.index]
        size = tuple(sizes) if grouping.is_summed else tuple(extents[str(index)] for index in flat_output.indices)
        part = Bound(inner, extents, shapes, dtypes, size, self.compute_dtype, bound.device, False)
        names = placeholders(part)
        read_by_entry = [
            name for name in (*names, *([owner.name] if owner is not None else [])) if self.is_member(grouping, name)
        ]
        members = tuple(dict.fromkeys(read_by_entry))
        padded = self.padded - set(members)
        lowering = Faster(part, padded & set(shapes), True, way=self.way)
        graph = lowering.finished_graph(False)
        overwrite(lowering.entry_products)
        function = compiled(graph)
        self.choices |= lowering.choices
        lengths = [self.length_of(key, grouping) for key in lowering.length_arguments]
        varying = [at for at, key in enumerate(lowering.length_arguments) if key == grouping.name]
        along = output.names.index(grouping.name) if grouping.name in output.names and owner is None else None
        form = _Form(
            tuple(_place(grouping, name, members) for name in names),
            None if owner is None else _place(grouping, owner.name, members),
            0 if owner is None else statement.output.indices.index(owner),
            owner is not None and owner.name in padded,
            len(grouping.entry),
            tuple(varying),
            along,
            grouping.is_summed,
            grouping.index.name in self.padded,
            tuple(name in self.padded for name in members),
        )
        tensors = tuple(self.tensors[name] for name in names)
        index = self.tensors[grouping.index.name]
        member_tensors = tuple(self.tensors[name] for name in members)
        arguments = index, member_tensors, tensors, tuple(lengths), self.product(self.sizes(grouping.entry[1:]))
        run = _runner(function, form)
        self.makers += (run,)
        if owner is not None:
            return self.call(run, self.start(), *arguments, self.tensors[owner.name])
        if grouping.is_summed:
            at = statement.output.indices.index(grouping.index)
            size_of_all = (self.size[at], *self.size[:at], *self.size[at + 1 :])
        else:
            size_of_all = self.sizes(output.names)
        start = self.call(torch.zeros, size_of_all, dtype=self.compute_dtype, device=bound.device)
        return self.call(run, start, *arguments)

    def flat_shape(self, grouping: _Grouping, name: str) -> tuple[int, ...]:
        """Return about the shape of what one group reads of a tensor."""
        shape = self.bound.shapes[name]
        if name in grouping.chosen:
            dim = grouping.chosen[name]
            return shape[:dim] + shape[dim + 1 :]
        if name not in grouping.spread:
            return shape
        dim, is_whole = grouping.spread[name]
        end = dim + (len(grouping.entry) if is_whole else 1)
        count = math.prod(self.bound.extents[each] for each in grouping.entry)
        return (*shape[:dim], -(-count // grouping.count), *shape[end:])

    def is_member(self, grouping: _Grouping, name: str) -> bool:
        """Return whether a tensor is an index tensor with one position for each entry, or for each p."""
        if name not in grouping.spread or name not in self.bound.statement.index_names:
            return False
        dim, is_whole = grouping.spread[name]
        return dim == 0 and len(self.bound.shapes[name]) == (len(grouping.entry) if is_whole else 1)

    def length_of(self, key: str | int, grouping: _Grouping) -> fx.Node | int:
        """Return a length that the program of one group takes: that of an index name, or of an output dimension."""
        if isinstance(key, str):
            return self.lengths[key]
        outputs = [dim for dim, index in enumerate(self.bound.statement.output.indices) if index != grouping.index]
        return self.lengths[outputs[key]]


class _Place(NamedTuple):
    """What one group reads of a tensor: a slice that it chooses, its rows along a dimension, or all."""

    member: int | None  # which of the index tensors that are remembered in the order of entries
    chosen: int | None
    spread: int | None
    is_whole: bool  # it has a row for each entry, not for each p


def _place(grouping: _Grouping, name: str, members: tuple[str, ...]) -> _Place:
    spread, is_whole = grouping.spread.get(name, (None, True))
    return _Place(members.index(name) if name in members else None, grouping.chosen.get(name), spread, is_whole)


class _Form(NamedTuple):
    """How the program of one group runs on all of them."""

    places: tuple[_Place, ...]  # of its tensors
    owner: _Place | None  # of the index tensor that says where rows are added
    owner_dim: int  # along which dimension of the result
    owner_hides: bool  # it may hold -1
    entry_dims: int  # dimensions of an entry
    varying: tuple[int, ...]  # which of the lengths are those of the group
    along: int | None  # the dimension of the result that entries begin at
    is_stacked: bool  # each group has a slice of the result
    is_padded: bool  # the index of groups may hold -1
    hides: tuple[bool, ...]  # and which of the members


def _runner(function: Callable[..., Tensor], form: _Form) -> Callable[..., Tensor]:
    """Return what runs the program of one group on all of them."""
    spread = [place for place in (*form.places, *([form.owner] if form.owner else [])) if place.spread is not None]
    rows = [place for place in spread if place.member is None]
    is_single = form.entry_dims == 1
    needs_order = form.along is not None or any(place.is_whole or is_single for place in rows)
    needs = needs_order, any(not (place.is_whole or is_single) for place in rows)

    def in_groups(
        result: Tensor,
        index: Tensor,
        members: tuple[Tensor, ...],
        tensors: Sequence[Tensor],
        lengths: Sequence[int],
        each: int,
        owner: Tensor | None = None,
    ) -> Tensor:
        counts = [tensor.shape[place.chosen] for tensor, place in zip(tensors, form.places) if place.chosen is not None]
        count = len(result) if form.is_stacked else counts[0]
        groups = grouped_entries(index, members, form.hides, each, count, form.is_padded, needs)
        held = [
            member.reshape(-1) if sorted_member is None else sorted_member
            for member, sorted_member in zip(members, groups.members)
        ]
        read = [_rows_of(tensor, place, form.entry_dims, groups, held) for tensor, place in zip(tensors, form.places)]
        sent = (
            None if owner is None or form.owner is None else _rows_of(owner, form.owner, form.entry_dims, groups, held)
        )
        flat = result if form.along is None else result.flatten(form.along, form.along + form.entry_dims - 1)
        lengths = list(lengths)
        for group, (start, stop) in enumerate(pairwise(groups.offsets)):
            if start == stop:
                continue
            for at in form.varying:
                lengths[at] = stop - start
            parts = [part(group, start, stop) for part in read]
            total = function(*parts, *lengths)
            if sent is not None:
                add_rows(result, form.owner_dim, sent(group, start, stop), total, form.owner_hides)
            elif form.is_stacked:
                result[group] = total
            elif form.along is None:
                result += total
            elif groups.order is None:
                flat.narrow(form.along, start, stop - start).copy_(total)
            else:
                flat.index_copy_(form.along, groups.order[start:stop], total)
        return result

    in_groups.__module__ = __name__
    return in_groups


def _rows_of(tensor: Tensor, place: _Place, entry_dims: int, groups: Groups, held: list[Tensor]) -> Any:
    """Return what a group reads of a tensor, as a function of the group and of where its entries begin and end."""
    if place.member is not None:
        rows = held[place.member]
        return lambda group, start, stop: rows[start:stop]
    if place.chosen is not None:
        slices = tensor.unbind(place.chosen)
        return lambda group, start, stop: slices[group]
    if place.spread is None:
        return lambda group, start, stop: tensor
    dim, order = place.spread, groups.owners
    if place.is_whole or entry_dims == 1:
        tensor = tensor.flatten(dim, dim + entry_dims - 1) if entry_dims > 1 else tensor
        order = groups.order
    if order is None:
        return lambda group, start, stop: tensor.narrow(dim, start, stop - start)
    if tensor.dim() == 1:  # of one number for each entry all are put in order at once
        tensor = tensor.index_select(0, order)
        return lambda group, start, stop: tensor[start:stop]
    return lambda group, start, stop: tensor.index_select(dim, order[start:stop])
