"""Dense tensors and lists of entries -> the tensors of each format; the only file that sorts or pads.

Everything starts as a list of entries, `A[coords[:,e]] += values[e]`, whose values are blocks when the format
is blocked. Sorted and with its duplicates added, the list is laid out over p, or over p and q. All of it is
torch code on the device of its input; the host waits only for sizes: how many entries, groups, per group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .check import check_inside, pattern_part
from .device_kernels import layouts, runs_kernels
from .facts import RowFacts
from .group_size import groups_of, pieces_of, size_on_gpu
from .torch_state import untransformed

if TYPE_CHECKING:
    from .layouts import Survey

Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entries:
    """A[coords[:,e]] += values[e]; the coordinates count blocks when the values are blocks."""

    coords: Tensor  # [ndim, E]  int64
    values: Tensor  # [E, *block_size]


@dataclass(frozen=True, eq=False)
class Gather:
    """out[p,q] = values[source[p,q]], or 0 at padding; differentiable in values."""

    source: Tensor  # [P] or [P, Q]  int64
    is_padding: Tensor | None  # like source; None: nothing is

    def __call__(self, values: Tensor) -> Tensor:
        if len(values) == 0:  # padding reads entry 0, so there must be one
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        gathered = values.index_select(0, self.source.flatten())
        if self.is_padding is not None:
            gathered = gathered.masked_fill(self.is_padding.view(-1, *[1] * (values.ndim - 1)), 0)
        return gathered.view(*self.source.shape, *values.shape[1:])

    def after(self, first: Tensor) -> Gather:
        """Return the gather from the list out of which `first` picks the entries that this gather reads."""
        return Gather(first[self.source] if len(first) else self.source, self.is_padding)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a list of entries goes: the coordinates of the slots and the gather that fills their values."""

    coords: tuple[Tensor | None, ...]
    gather: Gather | None  # None: value e is entry e
    facts: RowFacts | None = None  # about the rows of the groups; None: not worked out yet

    def along(self, group_dim: int) -> Layout:
        """Return the layout of a matrix, whose groups are of rows, for one whose groups are along `group_dim`."""
        return self if group_dim == 0 else replace(self, coords=self.coords[::-1])


def block_grid(shape: Sizes, block_size: Sizes | None) -> Sizes:
    """Return how many blocks, or elements if there are no blocks, cover each dimension.

    >>> block_grid((5, 4), (2, 2))
    (3, 2)
    """
    if block_size is None:
        return shape
    return tuple(-(-size // block) for size, block in zip(shape, block_size, strict=True))


def dense_entries(A: Tensor, group_dim: int, block_size: Sizes | None) -> Entries:
    """Return the nonzeros of A, or its blocks that hold one, in the order of `merge`; NaN is a nonzero."""
    if block_size is None:
        is_stored = A != 0
    else:
        A = split_blocks(A, block_size)
        is_stored = (A != 0).flatten(len(block_size)).any(-1)
    rotated = pattern_part("A", is_stored).movedim(group_dim, 0).nonzero().T
    coords = torch.cat([rotated[1 : group_dim + 1], rotated[:1], rotated[group_dim + 1 :]])
    return Entries(coords, A[tuple(coords)])


def scatter_dense(entries: Entries, shape: Sizes, block_size: Sizes | None) -> Tensor:
    """Return the dense tensor of `entries`; what the last blocks hold beyond its shape is dropped."""
    grid = block_grid(shape, block_size)
    dense = entries.values.new_zeros((*grid, *(block_size or ())))
    dense.index_put_(tuple(entries.coords), entries.values, accumulate=True)
    if block_size is None:
        return dense
    ndim = len(shape)
    dense = dense.permute([axis for dim in range(ndim) for axis in (dim, ndim + dim)])
    dense = dense.reshape([count * block for count, block in zip(grid, block_size, strict=True)])
    return dense[tuple(slice(size) for size in shape)]


def merge(entries: Entries, grid: Sizes, group_dim: int) -> Entries:
    """Return entries ordered by the group dimension first, with duplicates added; refuse any outside of the grid."""
    with untransformed():
        keys, are_inside, is_ascending = entry_keys(entries.coords, grid, group_dim)
        if not are_inside:
            check_inside(entries.coords, grid)
    return entries if is_ascending else _add_up(entries.coords, keys, (), entries.values, ())


def merge_into_blocks(elements: Entries, grid: Sizes, group_dim: int, block_size: Sizes) -> Entries:
    """Return elements collected into blocks, ordered by the group dimension first, with duplicates added.

    The elements lie in the tensor, which is not checked.
    """
    sizes = elements.coords.new_tensor(block_size)[:, None]
    coords, within = elements.coords // sizes, elements.coords % sizes
    return _add_up(coords, _keys(coords, grid, group_dim), tuple(within), elements.values, block_size)


def entry_keys(coords: Tensor, grid: Sizes, group_dim: int) -> tuple[Tensor, bool, bool]:
    """Return a number for each of the entries [ndim, E] by which they are sorted, the group dimension first.

    Then come whether all of them lie inside the grid, and whether the numbers ascend, so that the entries are sorted
    and distinct.
    """
    if coords.shape[1] == 0:
        return _keys(coords, grid, group_dim), True, True
    if _has_kernels(coords, grid):
        keys, tally = _keys_by_kernels(coords, grid, group_dim)
        outside, descending, *_ = tally.tolist()
        return keys, outside == 0, descending == 0
    keys = _keys(coords, grid, group_dim)
    return keys, is_inside(coords, grid), bool((keys[1:] > keys[:-1]).all())


def is_inside(coords: Tensor, grid: Sizes) -> bool:
    """Return whether all entries [ndim, E] lie inside the grid."""
    if coords.shape[1] == 0:
        return True
    lowest, *highest = torch.cat([coords.amin().view(1), coords.amax(1)]).tolist()
    return lowest >= 0 and all([high < size for high, size in zip(highest, grid)])


def sort_order(coords: Tensor, grid: Sizes, group_dim: int) -> Tensor:
    """Return the permutation that orders entries by the group dimension, then by the others from first to last."""
    if coords.shape[1] and _has_kernels(coords, grid):
        keys, _ = _keys_by_kernels(coords, grid, group_dim)
    else:
        keys = _keys(coords, grid, group_dim)
    return keys.argsort(stable=True)


def lay_out_entries(coords: Tensor, grid: Sizes) -> Layout:
    """Return the layout of COO: entry p is value p."""
    return Layout(tuple(c.to(coord_dtype(size)) for c, size in zip(coords, grid, strict=True)), None)


def lay_out_groups(
    coords: Tensor, grid: Sizes, group_dim: int, group_size: int | None, is_blocked: bool = False
) -> Layout:
    """Return the layout of GroupCOO: a row's entries fill groups, the last one padded; an empty row has no group."""
    rows, ones = coords[group_dim], len(grid) == 2 and not is_blocked
    if ones and len(rows) and _has_kernels(coords, grid):
        parts = rows, coords[1 - group_dim], _turned(grid, group_dim)
        listed = lay_out_listed(*parts, is_sorted=True, group_size=group_size)
        assert listed is not None
        return listed.layout.along(group_dim)
    positions = _positions_in_row(rows)
    size, num_groups = groups_of(positions, group_size, ones and coords.is_cuda) if len(rows) else (group_size or 1, 0)
    within = positions % size
    group = (within == 0).cumsum(0).sub_(1)
    rows = rows.to(coord_dtype(grid[group_dim]))
    group_rows = rows.new_empty(num_groups).scatter_(0, group, rows)
    return _pad(coords, grid, group_dim, within.add_(group, alpha=size), (num_groups, size), group_rows)


class Listed(NamedTuple):
    """A list of a matrix's entries, laid out by kernels."""

    layout: Layout
    merged: tuple[Tensor, Tensor] | None  # distinct coordinates [2, D] and which of them each entry has; None: all are
    is_in_order: bool  # the entries were listed in the order of their rows


@torch.inference_mode(False)  # facts are kept, and must be good for training too
def lay_out_listed(
    rows: Tensor,
    columns: Tensor,
    grid: tuple[int, int],
    refuse: Callable[[], object] | None = None,
    is_sorted: bool = False,
    adds: bool = False,
    group_size: int | None = None,
) -> Listed | None:
    """Return the layout of GroupCOO of a matrix's entries, each in a slot of its own, be it listed twice.

    The host waits once. With the layout come the facts about its rows. None if no kernels do it.

    Args:
        rows: row of each entry [E].
        columns: column of each entry [E].
        grid: the number of rows and of columns.
        refuse: raises the error for an entry outside the grid; None if there are none.
        is_sorted: whether rows ascend, so that entries stay in their order. If they do not, they are sorted.
        adds: whether entries that are listed twice are one; if there are any, the host waits twice.
        group_size: entries of a group; None to choose it.
    """
    if not (_has_kernels(rows, grid) and len(rows)):
        return None
    tally, width = layouts.new_tally(rows.device), None if is_sorted else grid[1]
    listed = rows.contiguous(), columns.contiguous()
    if not is_sorted:
        listed = layouts.list_keys(rows, columns, grid, tally).sort(stable=True)
    survey = layouts.survey(listed, width, grid, tally)
    if survey.outside and refuse is not None:
        refuse()
    if is_sorted and survey.descending:
        return lay_out_listed(rows, columns, grid, refuse, False, adds, group_size)
    if not (adds and survey.repeated):
        return Listed(_placed(listed, width, survey, grid, group_size), None, survey.descending == 0)
    keys, *merged = layouts.merge_keys(listed, grid[1], len(rows) - survey.repeated)
    listed = keys, torch.arange(len(keys), device=keys.device)
    survey = layouts.survey(listed, width, grid, layouts.new_tally(rows.device))
    return Listed(_placed(listed, width, survey, grid, group_size), (merged[0], merged[1]), True)


@torch.inference_mode(False)
def lay_out_across(rows: Tensor, columns: Tensor, entries: int, grid: tuple[int, int]) -> Layout | None:
    """Return the layout of GroupCOO of a matrix that is grouped by columns; None if no kernels do it.

    `rows` [P, Q] are those of its slots, -1 for padding, which all but so many entries are, and `columns` [P] those of
    its groups.
    """
    rows, columns = rows.flatten(), columns.contiguous()
    if not (entries and _has_kernels(rows, grid)):
        return None
    tally = layouts.new_tally(rows.device)
    listed = layouts.list_keys(rows, columns, grid, tally).sort(stable=True)
    in_order = listed.values[:entries], listed.indices[:entries]  # the keys of padding come last
    return _placed(in_order, grid[1], layouts.survey(in_order, grid[1], grid, tally), grid, None)


def _placed(
    listed: tuple[Tensor, Tensor], width: int | None, survey: Survey, grid: tuple[int, int], group_size: int | None
) -> Layout:
    """Return the layout of entries in rows, with the facts about them; `listed` and `width` as in `layouts.place`."""
    positions, sizes = survey.positions, layouts.SURVEYED
    entries = len(positions)
    size = group_size or size_on_gpu(entries, survey.rows, survey.fullest, survey.groups)
    num_groups = survey.groups[sizes.index(size)] if size in sizes else int((positions % size == 0).sum())
    dtypes = coord_dtype(grid[0]), coord_dtype(grid[1])
    AM, AK, source, is_padding = layouts.place(listed, width, positions, (num_groups, size), dtypes)
    facts, empty = None, grid[0] - survey.rows
    if size == 1:
        facts = layouts.find_facts(AM, grid[0], *pieces_of(entries, grid[0]), AK.flatten(), empty + survey.shared)
    elif size in sizes:
        facts = layouts.find_facts(AM, grid[0], zeros=empty + survey.several[sizes.index(size)])
    return Layout((AM, AK), Gather(source, is_padding), facts)


def _turned(grid: Sizes, group_dim: int) -> tuple[int, int]:
    """Return the number of rows and of columns of a matrix whose rows are along `group_dim`."""
    return grid[group_dim], grid[1 - group_dim]


def _keys_by_kernels(coords: Tensor, grid: Sizes, group_dim: int) -> tuple[Tensor, Tensor]:
    """Return what `layouts.list_keys` does of a matrix, and what it counts."""
    tally = layouts.new_tally(coords.device)
    return layouts.list_keys(coords[group_dim], coords[1 - group_dim], _turned(grid, group_dim), tally), tally


def _has_kernels(coords: Tensor, grid: Sizes) -> bool:
    """Whether kernels take the coordinates of a matrix, whose places and entries they can count."""
    return runs_kernels(coords) and len(grid) == 2 and max(*grid, coords.shape[-1]) < 2**31


def lay_out_rows(coords: Tensor, grid: Sizes, group_dim: int) -> Layout:
    """Return the layout of ELL: p is the row, and q goes as far as the fullest row; a vector's row is one element."""
    rows = coords[group_dim]
    positions = _positions_in_row(rows)
    width = 1 if len(grid) == 1 else int(positions.max()) + 1 if len(rows) else 0
    slot = rows.long() * width + positions
    return _pad(coords, grid, group_dim, slot, (grid[group_dim], width), None)


def split_blocks(A: Tensor, block_size: Sizes) -> Tensor:
    """Return A [*shape] as [*grid, *block_size], the last block of each dimension padded with zeros."""
    grid = block_grid(tuple(A.shape), block_size)
    missing = [count * block - size for count, block, size in zip(grid, block_size, A.shape, strict=True)]
    if any(missing):
        A = pad(A, [end for size in reversed(missing) for end in (0, size)])
    split = A.reshape([extent for pair in zip(grid, block_size, strict=True) for extent in pair])
    return split.permute(*range(0, 2 * A.ndim, 2), *range(1, 2 * A.ndim, 2))


def _keys(coords: Tensor, grid: Sizes, group_dim: int) -> Tensor:
    """Return a number for each entry, ordered as the entries are: by the group dimension, then by the others."""
    dtype = key_dtype(prod(grid))
    keys, span = coords[group_dim].to(dtype), grid[group_dim]
    for dim in (dim for dim in range(len(grid)) if dim != group_dim):
        digits, base = coords[dim].to(dtype), grid[dim]
        if span * base > 2**63 - 1:  # not 2**63, which a tracer's tensor is not compared with; ranks are small
            keys, digits = (torch.unique(x, return_inverse=True)[1] for x in (keys, digits))
            span = base = coords.shape[1]
        keys, span = keys * base + digits, span * base
    return keys


def _add_up(coords: Tensor, keys: Tensor, within: Sequence[Tensor], values: Tensor, block_size: Sizes) -> Entries:
    """Return one entry per distinct key, in order; its block sums the values with that key, each put at `within`."""
    keys, order = keys.sort(stable=True)
    is_new = keys[1:] != keys[:-1]
    if not block_size and bool(is_new.all()):
        return Entries(coords.index_select(1, order), values.index_select(0, order))
    is_first = torch.cat([is_new.new_ones(min(len(keys), 1)), is_new])
    first = order[is_first]
    into = torch.zeros_like(order).scatter(0, order, is_first.cumsum(0) - 1)
    merged = values.new_zeros(len(first), *(block_size or values.shape[1:]))
    return Entries(coords[:, first], merged.index_put_((into, *within), values, accumulate=True))


def _positions_in_row(rows: Tensor) -> Tensor:
    """Return how many entries of its row come before each entry; `rows` ascend."""
    entry = torch.arange(len(rows), device=rows.device)
    if len(rows) == 0:
        return entry
    begins = entry[1:].masked_fill(rows[1:] == rows[:-1], 0)
    return entry - torch.cat([begins.new_zeros(1), begins]).cummax(0).values


def _pad(
    coords: Tensor, grid: Sizes, group_dim: int, slot: Tensor, extents: tuple[int, int], rows: Tensor | None
) -> Layout:
    """Return the layout with entry e in `slot[e]` of the P*Q slots; the others are padding, -1 in the coordinates."""
    total = prod(extents)
    # every slot of padding reads another entry, so that backward does not add all their zeros to one address
    source = torch.arange(total, device=slot.device) % max(len(slot), 1)
    source[slot] = torch.arange(len(slot), device=slot.device)
    is_padding = torch.ones(total, dtype=torch.bool, device=slot.device)
    is_padding[slot] = False
    gather = Gather(source.view(extents), is_padding.view(extents) if total > len(slot) else None)
    placed: list[Tensor | None] = []
    for dim, size in enumerate(grid):
        if dim == group_dim:
            placed.append(rows)
            continue
        coord = coords[dim].to(coord_dtype(size))[gather.source]
        placed.append(coord if gather.is_padding is None else coord.masked_fill(gather.is_padding, -1))
    return Layout(tuple(placed), gather)


def key_dtype(count: int) -> torch.dtype:
    """Return the narrowest type of so many numbers to sort by: a sort takes as many passes as it has bytes."""
    return torch.int16 if count < 2**15 else coord_dtype(count)


def coord_dtype(size: int) -> torch.dtype:
    """Return the type of the coordinates of a dimension."""
    return torch.int32 if size < 2**31 else torch.int64
