"""Sums by row on a CPU: entries in the order of their rows, found once for index tensors and remembered with them.

`torch.embedding_bag` sums the entries of a row in one pass, in the order in which they came, without a tensor of all
that is gathered. It takes the offset of each row. They are read off an index tensor that is sorted; one that is not is
sorted once it is met a second time, unless the rows are so narrow that adding them up one by one takes less than that.
At first its rows are added up one by one, in the same order and so to the same bits, in less time than sorting takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.guard import TensorsGuard, Unsaved, may_keep

__all__ = ["Groups", "add_rows", "chosen_rows", "grouped_entries", "row_products", "row_sums", "weighted_row_sums"]

_ORDERS, _GROUPS = "_insum_row_orders", "_insum_entry_groups"
KEPT = 4  # orders with one index tensor: it may stand in statements with other rows or columns
LONG, PART = 256, 128  # entries of a row from which on it is summed in parts, and those of a part
GLANCE = 32  # positions that are looked at before all of them are
NARROW = 8  # columns below which unsorted rows are added up as they come: of 4, in a third of the time of sorting


class _Entries(NamedTuple):
    """Entries in the order of their rows: `columns[offsets[r]:offsets[r + 1]]` is what row r reads."""

    order: Tensor | None  # which of all entries they are; None: all, as they lie
    columns: Tensor | None  # None: those that were given, which what is kept with them must not hold
    offsets: Tensor  # [rows + 1]
    is_ascending: bool  # all entries, as they lie
    parts: tuple[Tensor, Tensor] | None  # where the parts of long rows begin, and which parts a row has


class Groups(NamedTuple):
    """Entries in the order of their groups, without those that a -1 hides: those of group g lie between two offsets."""

    offsets: list[int]
    order: Tensor | None  # which of all entries they are; None: all, as they lie
    owners: Tensor | None  # to which position of the index each belongs; None: one belongs to each, as they lie
    members: tuple[Tensor | None, ...]  # what index tensors hold for them, as int64; None: what was given, as it lies


class _Kept(TensorsGuard, Unsaved):
    """What is known of some index tensors that have not changed since; None if their rows are not sorted."""

    __slots__ = ("entries", "is_ascending", "rows")

    def __init__(self, tensors: tuple[Tensor | None, ...], rows: object) -> None:
        super().__init__(tensors)
        self.rows, self.is_ascending = rows, False
        self.entries: Any = None  # _Entries or Groups

    @classmethod
    def of(cls, tensors: tuple[Tensor | None, ...], rows: object) -> _Kept | None:
        """Return an empty entry, to be made before the tensors are read; None if nothing may be kept of them."""
        is_counted = not any([tensor is not None and tensor.is_inference() for tensor in tensors])
        return cls(tensors, rows) if may_keep() and is_counted else None

    @staticmethod
    def kept_with(keeper: Any, attribute: str, tensors: tuple[Tensor | None, ...], rows: object) -> _Kept | None:
        """Return what one of the tensors keeps of all of them, with this many rows; None if there is nothing valid."""
        for kept in getattr(keeper, attribute, ()):
            # of a tensor from a pickle, empty dictionaries
            if kept and kept.rows == rows and kept.holds_for(tensors):
                return kept  # type: ignore[no-any-return]
        return None

    def keep(self, keeper: Any, attribute: str) -> None:
        """Keep this with one of the tensors, in the place of the oldest if there are many."""
        setattr(keeper, attribute, (self, *getattr(keeper, attribute, ())[: KEPT - 1]))


def row_sums(values: Tensor, index: Tensor, rows: int, is_padded: bool) -> Tensor:
    """Return `Y[index[p],c] += values[p,c]` with this many rows; `values` is [p, c], and `index` holds p positions.

    A position of -1 hides its row if the index `is_padded`.
    """
    sorts = values.shape[1] >= NARROW
    entries = _entries_of(None, index, rows, is_padded, sorts, may_wait=values.dtype.itemsize > 2)
    if entries is None:
        return _added_up(values, index, rows, is_padded)
    return _bags(values, entries, None, index)


def weighted_row_sums(
    table: Tensor, columns: Tensor, weights: Tensor | None, index: Tensor | None, rows: int, is_padded: bool
) -> Tensor:
    """Return `Y[index[p],c] += weights[p,q] * table[columns[p,q],c]`; row p for entries p if there is no index.

    `weights` are as many as `columns`, in the same order, and 1 if there are none. A position of -1 hides an entry if
    one of the index tensors `is_padded`.
    """
    entries = _entries_of(columns, index, rows, is_padded, table.shape[1] >= NARROW)
    if entries is not None:
        return _bags(table, entries, weights, columns)
    assert index is not None, "rows that follow each other are sorted"
    flat = columns.reshape(-1)
    gathered = table.index_select(0, flat.clamp(min=0) if is_padded else flat)
    if weights is not None:
        if gathered.dtype.itemsize == 2:  # products are not rounded before they are summed
            gathered = gathered.float()
        gathered *= weights.reshape(-1, 1)
    if is_padded:
        gathered.masked_fill_((flat < 0).unsqueeze(1), 0)
    spread = index.reshape(-1, 1).expand(-1, flat.numel() // index.numel())
    return _added_up(gathered, spread, rows, is_padded).to(table.dtype)


def row_products(table: Tensor, index: Tensor, other: Tensor, columns: Tensor, is_padded: bool) -> Tensor:
    """Return `Y[p,q] += table[index[p],c] * other[columns[p,q],c]` as a vector.

    It is 0 where a column is negative, if the columns are `is_padded`. It is torch's gradient of the weights of
    `embedding_bag`, which multiplies rows where they lie, and leaves out -1 alone.
    """
    flat, owners = columns.reshape(-1), index.reshape(-1)
    if is_padded:
        flat = flat.clamp(min=-1)
    if len(owners) < len(flat):
        owners = owners.unsqueeze(1).expand(-1, len(flat) // len(owners)).reshape(-1)
    if owners.dtype != flat.dtype:
        owners, flat = owners.long(), flat.long()
    table, other, flat, owners = (part.contiguous() for part in (table, other, flat, owners))
    weights_gradient = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return weights_gradient(table, other, flat, flat[:0], owners, 0)  # type: ignore[no-any-return]


def chosen_rows(table: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the rows of a tensor along a dimension at these positions, zeros for -1."""
    rows = table.index_select(dim, index.clamp(min=0))
    return rows.index_fill_(dim, (index < 0).nonzero().squeeze(1), 0)


def add_rows(result: Tensor, dim: int, index: Tensor, values: Tensor, is_padded: bool) -> None:
    """Add values to the rows along a dimension that an index holds, whose own dimensions they have in its place.

    A position of -1 hides its values, which are overwritten, if the index `is_padded`.
    """
    flat = index.reshape(-1)
    if index.dim() > 1:
        values = values.flatten(dim, dim + index.dim() - 1)
    if is_padded:
        values.index_fill_(dim, (flat < 0).nonzero().squeeze(1), 0)
        flat = flat.clamp(min=0)
    result.index_add_(dim, flat.long(), values)  # torch adds rows at int32 positions one by one, up to 28 times slower


def grouped_entries(
    index: Tensor,
    members: tuple[Tensor, ...],
    hides: tuple[bool, ...],
    each: int,
    count: int,
    is_padded: bool,
    needs: tuple[bool, bool],
) -> Groups:
    """Return the entries that belong to each value of an index, of which there are `count`: `each` for a position.

    `members` are index tensors with one position for an entry, or for a position of the index. One that is -1 hides the
    entry if the tensor `hides`; so does the index where it `is_padded`. `needs` says whether the order is asked for,
    and whether the owners are.
    """
    tensors, sizes = (index, *members), (count, each, needs)
    kept = _Kept.kept_with(index, _GROUPS, tensors, sizes)
    if kept is not None:
        return kept.entries  # type: ignore[no-any-return]
    new = _Kept.of(tensors, sizes)
    hiding = [member for member, is_hiding in zip(members, hides) if is_hiding]
    groups = _grouped_entries(index, members, [*hiding, *([index] if is_padded else [])], each, count, needs)
    if new is not None:
        new.entries = groups
        new.keep(index, _GROUPS)
    return groups


def _grouped_entries(
    index: Tensor, members: tuple[Tensor, ...], hiding: list[Tensor], each: int, count: int, needs: tuple[bool, bool]
) -> Groups:
    positions, order = index.reshape(-1), None
    total = positions.numel() * each
    if not _is_ascending(positions):
        order = torch.argsort(positions, stable=True)
        order = order if each == 1 else _spread(order, each)
    if hiding:
        is_shown = _for_each(hiding[0] >= 0, total)
        for member in hiding[1:]:
            is_shown &= _for_each(member >= 0, total)
        order = is_shown.nonzero().squeeze(1) if order is None else order[is_shown[order]]
    groups, owners = _for_each(positions, total), order
    counts = torch.bincount(groups if order is None else groups[order], minlength=count)
    if each > 1 and needs[1]:
        owners = (torch.arange(total, device="cpu") if order is None else order) // each
    held = [_for_each(member, total) if order is None else _for_each(member, total)[order] for member in members]
    is_given = [order is None and own.numel() == total and own.dtype == torch.int64 for own in members]
    kept = [None if is_as_it_lies else own.long() for own, is_as_it_lies in zip(held, is_given)]
    return Groups(
        [0, *counts.cumsum(0).tolist()], order if needs[0] else None, owners if needs[1] else None, tuple(kept)
    )


def _for_each(held: Tensor, total: int) -> Tensor:
    """Return what is held for each of this many entries, by a tensor that has it for them or for their owners."""
    return held.reshape(-1) if held.numel() == total else held.reshape(-1).repeat_interleave(total // held.numel())


def _bags(table: Tensor, entries: _Entries, weights: Tensor | None, given: Tensor) -> Tensor:
    """Return the sums of rows; long ones in two steps, which err less, and neither in half precision."""
    order, columns, offsets, _, parts = entries
    dtype = table.dtype
    if columns is None:
        columns = given if given.ndim == 1 else given.reshape(-1)
    if weights is not None:
        weights = weights if weights.ndim == 1 else weights.reshape(-1)
        weights = weights if order is None else weights.index_select(0, order)
    if parts is None:
        return torch.embedding_bag(table, columns, offsets, False, 0, False, weights, True)[0]
    if dtype.itemsize == 2:
        table, weights = table.float(), None if weights is None else weights.float()
    begins, rows = parts
    sums = torch.embedding_bag(table, columns, begins, False, 0, False, weights, True)[0]
    every = torch.arange(len(sums), device="cpu")
    return torch.embedding_bag(sums, every, rows, False, 0, False, None, True)[0].to(dtype)


def _parts(offsets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return where the parts of rows begin, each of which has at most PART entries, and which parts each row has.

    The result is None if no row is longer than LONG.
    """
    lengths = offsets.diff()
    if not len(lengths) or int(lengths.max()) <= LONG:
        return None
    rows = torch.zeros_like(offsets)
    counts = (lengths + PART - 1) // PART
    torch.cumsum(counts, 0, out=rows[1:])
    owner = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    begins = offsets[owner] + PART * (torch.arange(len(owner), device="cpu") - rows[owner])
    return torch.cat([begins, offsets[-1:]]), rows


def _added_up(values: Tensor, index: Tensor, rows: int, is_padded: bool) -> Tensor:
    """Return `row_sums` without an order of the rows; half precision is summed in float32."""
    flat = index.reshape(-1)
    if is_padded:
        values = values.masked_fill((flat < 0).unsqueeze(1), 0)
        flat = flat.clamp(min=0)
    dtype = torch.float32 if values.dtype.itemsize == 2 else values.dtype
    start = torch.zeros(rows, values.shape[1], dtype=dtype, device="cpu")
    return start.index_add_(0, flat.long(), values.to(dtype)).to(values.dtype)


def _entries_of(
    columns: Tensor | None, index: Tensor | None, rows: int, is_padded: bool, sorts: bool, may_wait: bool = False
) -> _Entries | None:
    """Return the entries of each row in order; None if they are not and nobody `sorts` them.

    What `may_wait` is not sorted when an index is met for the first time. It is for rows that are neither weighted nor
    rounded on the way: adding them up as they come gives the same bits, but for long rows, which are cut in parts.
    """
    tensors = columns, index
    keeper = index if columns is None else columns
    assert keeper is not None
    kept = _Kept.kept_with(keeper, _ORDERS, tensors, rows)
    if kept is not None:
        if kept.entries is None and sorts:
            kept.entries = _ordered_entries(columns, index, rows, is_padded, kept.is_ascending)
        return kept.entries if sorts or kept.is_ascending else None
    new = _Kept.of(tensors, rows)
    is_ascending = index is None or _is_ascending(index.reshape(-1))
    entries = None
    if is_ascending or (sorts and not (may_wait and not _has_long_rows(index, rows, is_padded))):
        entries = _ordered_entries(columns, index, rows, is_padded, is_ascending)
    if new is not None:
        new.entries, new.is_ascending = entries, is_ascending
        new.keep(keeper, _ORDERS)
    return entries


def _has_long_rows(index: Tensor | None, rows: int, is_padded: bool) -> bool:
    """Return whether some row has so many entries that it is summed in parts."""
    if index is None or index.numel() <= LONG:
        return False
    positions = index.reshape(-1)
    if is_padded:
        positions = positions[positions >= 0]
    return int(torch.bincount(positions, minlength=rows).max()) > LONG


def _is_ascending(positions: Tensor) -> bool:
    first = positions[:GLANCE].tolist()  # most that do not ascend show it soon
    return first == sorted(first) and bool((positions[1:] >= positions[:-1]).all())


def _ordered_entries(
    columns: Tensor | None, index: Tensor | None, rows: int, is_padded: bool, is_ascending: bool
) -> _Entries:
    """Return the entries in the order of their rows, those of a row in the order in which they came."""
    row = torch.arange(rows, device="cpu") if index is None else index.reshape(-1)
    count = row.numel() if columns is None else columns.numel()
    each = count // row.numel()
    if is_ascending and not is_padded:
        offsets = torch._convert_indices_from_coo_to_csr(row.contiguous(), rows)  # which reads no strides
        return _entries_at(None, columns, offsets.long() if each == 1 else offsets.long() * each, count)
    owners = None if is_ascending else torch.argsort(row, stable=True)
    order = owners if owners is None or each == 1 else _spread(owners, each)
    if is_padded:
        row = row.unsqueeze(1).expand(-1, each).reshape(-1)
        is_shown = row >= 0 if columns is None else (row >= 0) & (columns.reshape(-1) >= 0)
        order = is_shown.nonzero().squeeze(1) if order is None else order[is_shown[order]]
        row, each = row[order], 1
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(row, minlength=rows).mul_(each), 0, out=offsets[1:])
    return _entries_at(order, columns, offsets, count)


def _entries_at(order: Tensor | None, columns: Tensor | None, offsets: Tensor, count: int) -> _Entries:
    """Return entries in an order, in which those of each row lie between two offsets."""
    parts = _parts(offsets) if count > LONG else None
    if columns is None:
        every = torch.arange(count, device="cpu") if order is None else order
        return _Entries(None, every, offsets, order is None, parts)
    chosen = None if order is None else columns.reshape(-1)[order]
    if parts is not None:
        parts = parts[0].to(columns.dtype), parts[1]
    return _Entries(order, chosen, offsets.to(columns.dtype), order is None, parts)


def _spread(owners: Tensor, each: int) -> Tensor:
    """Return the entries of some owners, each of which has as many, one owner's after the other's."""
    return (owners.unsqueeze(1) * each + torch.arange(each, device="cpu")).reshape(-1)
