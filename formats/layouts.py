"""Sorted entries laid out, and the facts about their rows, by Triton kernels, with the results of `convert`.

What takes torch a hundred operations, each of which costs the host more than the GPU, takes a few launches here. This
builds index tensors. What is computed on them are statements.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from . import layout_kernels as kernels
from .facts import RowFacts, piece_count
from .fixed_kernel import FixedKernel
from .group_size import NEAR, SIZES_ON_GPU, pieces_of

__all__ = ["SURVEYED", "Survey", "find_facts", "list_keys", "merge_keys", "new_tally", "place", "survey", "unfold"]

BLOCK, AT_ONCE = 256, 32
SURVEYED = SIZES_ON_GPU

_list_keys, _survey, _place = (FixedKernel(kernel) for kernel in (kernels.list_keys, kernels.survey, kernels.place))
_point, _spread = FixedKernel(kernels.point), FixedKernel(kernels.spread)
_count_keys, _merge_keys = FixedKernel(kernels.count_keys), FixedKernel(kernels.merge_keys)
_unfold = FixedKernel(kernels.unfold)
_cut_rows, _order_pieces, _pack_rows = (
    FixedKernel(kernel) for kernel in (kernels.cut_rows, kernels.order_pieces, kernels.pack_rows)
)


class Survey(NamedTuple):
    """What is counted of a matrix's entries in sorted rows."""

    positions: Tensor  # [E]  how many entries of its row come before each entry
    outside: int  # entries that are not in the matrix
    descending: int  # entries that are not above the last one: as they are listed, if keys list them, else in rows
    fullest: int  # the most entries of a row
    rows: int  # that have entries
    repeated: int  # entries at the place of another; counted by keys alone
    shared: int  # rows that several pieces of `pieces_of` share
    groups: list[int]  # of each of `SURVEYED` sizes
    several: list[int]  # rows with more than one group of these sizes


def new_tally(device: torch.device) -> Tensor:
    """Return zeros for what `list_keys` and `survey` count: so the host can wait for all of it at once."""
    return torch.zeros(6 + 2 * len(SURVEYED), dtype=torch.int64, device=device)


def unfold(pointers: Tensor, others: Tensor, first: int) -> Tensor | None:
    """Return the coordinates [2, E] of a compressed matrix, those that are pointed to at `first`; the host waits.

    None if the pointers do not ascend from 0 to the number of entries.
    """
    entries, num_rows, device = len(others), len(pointers) - 1, others.device
    coords = torch.empty(2, entries, dtype=torch.int64, device=device)
    faults = torch.zeros(1, dtype=torch.int64, device=device)
    tensors, numbers = (coords, faults, pointers, others), (entries, num_rows, len(pointers).bit_length())
    _unfold(_programs(max(entries, len(pointers))), tensors, numbers, (first, BLOCK))
    return None if int(faults) else coords


def list_keys(rows: Tensor, columns: Tensor, grid: tuple[int, int], tally: Tensor) -> Tensor:
    """Return each entry's place in a matrix, counted row by row [E]; count those outside, and not above the last.

    A column may be for several entries, those of a group; where a row is -1 there is none, and the key is the largest.
    """
    entries, size = len(rows), len(rows) // len(columns)
    if rows.stride() != columns.stride():
        rows, columns = rows.contiguous(), columns.contiguous()
    # a sort takes as many passes as a key has bytes
    keys = torch.empty(entries, dtype=torch.int32 if prod(grid) < 2**31 else torch.int64, device=rows.device)
    numbers = entries, rows.stride(0), *grid, size
    _list_keys(_programs(entries), (keys, tally, rows, columns), numbers, (torch.iinfo(keys.dtype).max, BLOCK))
    return keys


def survey(listed: tuple[Tensor, Tensor], width: int | None, grid: tuple[int, int], tally: Tensor) -> Survey:
    """Return what there is to know of entries before they are laid out, for which the host waits.

    `listed` and `width` are those of `place`.
    """
    keys, columns = listed
    entries, (cut, is_packed) = len(keys), pieces_of(len(keys), grid[0])
    positions = torch.empty(entries, dtype=torch.int32, device=keys.device)
    numbers = entries, entries.bit_length(), width or 1, *grid, cut
    constants = len(SURVEYED), width is not None, is_packed, BLOCK
    _survey(_programs(entries), (positions, tally, keys, columns), numbers, constants)
    outside, descending, last, rows, repeated, shared, *counts = tally.tolist()
    groups, several = counts[: len(SURVEYED)], counts[len(SURVEYED) :]
    return Survey(positions, outside, descending, last + 1, rows, repeated, shared, groups, several)


def merge_keys(listed: tuple[Tensor, Tensor], width: int, distinct: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `distinct` keys, their rows and columns [2, D], and which of them each entry has [E]."""
    keys, others = listed
    entries, device = len(keys), keys.device
    ends = torch.empty(entries, dtype=torch.int64, device=device)
    _count_keys(_programs(entries), (ends, keys), (entries,), (BLOCK,))
    ends.cumsum_(0)
    merged, into = torch.empty(distinct, dtype=keys.dtype, device=device), torch.empty_like(ends)
    coords = torch.empty(2, distinct, dtype=torch.int64, device=device)
    tensors = merged, coords, into, keys, others, ends
    _merge_keys(_programs(entries), tensors, (entries, distinct, width), (BLOCK,))
    return merged, coords, into


def _programs(count: int) -> tuple[int, int]:
    return -(-count // BLOCK), 1


def place(
    listed: tuple[Tensor, Tensor],
    width: int | None,
    positions: Tensor,
    extents: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return AM [P], AK [P, Q], the entry that each slot holds [P, Q], and which are padding, None if none is.

    `listed` is the sorted rows and their columns, or if there is a width, sorted keys and which entry each is of.
    """
    (groups, size), entries, device = extents, len(positions), positions.device
    AM = torch.empty(groups, dtype=dtypes[0], device=device)
    AK = torch.empty(extents, dtype=dtypes[1], device=device)
    source = torch.empty(extents, dtype=torch.int64, device=device)
    ends, is_padding = positions, source
    if size > 1:
        ends = (positions % size == 0).cumsum(0)
        is_padding = torch.empty(extents, dtype=torch.bool, device=device)
    tensors = AM, AK, source, is_padding, positions, ends, *listed
    constants = size > 1, width is not None, BLOCK
    _place(_programs(entries), tensors, (entries, size, width or 1), constants)
    return AM, AK, source, is_padding if groups * size > entries else None


def find_facts(
    rows: Tensor,
    num_rows: int,
    cut: int = 0,
    is_packed: bool = False,
    columns: Tensor | None = None,
    zeros: int | None = None,
) -> RowFacts:
    """Return what `row_facts` does about the ascending row of each group.

    `zeros` is how many rows are to be zeroed; None if the host is to wait for it.
    """
    device, groups = rows.device, len(rows)
    count = piece_count(num_rows, groups, cut, is_packed) if cut else 0
    pointers = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    # one sort for all: rows by their length, whose keys are below 0, then pieces by their column
    dtype = torch.int32 if columns is None else columns.dtype
    keys = torch.empty(num_rows + (0 if is_packed else count), dtype=dtype, device=device)
    ends = torch.empty(num_rows, dtype=torch.int64, device=device)
    numbers = groups, num_rows, groups.bit_length(), cut or 1
    _point((num_rows // BLOCK + 1, 1), (pointers, keys, ends, rows), numbers, (is_packed, BLOCK))
    ends.cumsum_(0)
    is_shared = torch.empty(count if cut else groups, dtype=torch.bool, device=device)
    pieces = torch.empty(2 * count, dtype=torch.int32, device=device)
    bounds = pieces  # before they are ordered
    if is_packed:
        _pack_rows(_programs(count), (pieces, is_shared, pointers, rows), (count, groups, cut), (BLOCK,))
    elif cut:
        bounds, middles = torch.empty_like(pieces), rows if columns is None else columns
        numbers, last = (count, num_rows, num_rows.bit_length(), cut), torch.iinfo(dtype).max
        _cut_rows(_programs(count), (bounds, keys, pointers, ends, middles), numbers, (last, BLOCK))
    places = keys.sort(stable=True).indices
    to_zero = torch.empty(int(ends[-1]) & 0xFFFFFFFF if zeros is None else zeros, dtype=torch.int64, device=device)
    order = torch.empty(num_rows, dtype=torch.int32, device=device)
    if cut and not is_packed:
        ordered = to_zero, order, pieces, is_shared, bounds, places, pointers, ends, rows
        _order_pieces(_programs(count), ordered, (count, num_rows, cut), (NEAR, BLOCK, AT_ONCE))
    else:
        programs = _programs(num_rows if cut else max(num_rows, groups))
        tensors = to_zero, order, is_shared, pointers, ends, places, rows
        _spread(programs, tensors, (groups, num_rows), (not cut, BLOCK))
    return RowFacts(pointers, is_shared, to_zero, order, pieces if cut else None, cut, is_packed)
