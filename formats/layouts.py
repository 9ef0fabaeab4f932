"""Sorted entries laid out, and the facts about their rows, by Triton kernels, with the results of `convert`.

What takes torch a hundred operations, each of which costs the host more than the GPU, takes a few launches here. This
builds index tensors. What is computed on them are statements.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from . import layout_kernels as kernels
from .facts import RowFacts
from .fixed_kernel import FixedKernel
from .group_size import SIZES_ON_GPU

__all__ = ["SURVEYED", "find_facts", "list_keys", "new_tally", "place", "point", "spread", "survey"]

BLOCK = 256
SURVEYED = SIZES_ON_GPU

_list_keys, _survey, _place = (FixedKernel(kernel) for kernel in (kernels.list_keys, kernels.survey, kernels.place))
_point, _spread = FixedKernel(kernels.point), FixedKernel(kernels.spread)


def new_tally(device: torch.device) -> Tensor:
    """Return zeros for what `list_keys` counts, faults, and then `survey`: so the host can wait for all of it at once.

    It is how many entries are outside, how many descend, the most entries before one in its row, how many rows there
    are, how many groups of each of `SURVEYED` sizes, and how many rows with more than one of these.
    """
    return torch.zeros(4 + 2 * len(SURVEYED), dtype=torch.int64, device=device)


def list_keys(rows: Tensor, columns: Tensor, grid: tuple[int, int], tally: Tensor) -> Tensor:
    """Return each entry's place in a matrix, counted row by row [E]; count those outside, and not above the last."""
    entries = len(rows)
    # a sort takes as many passes as a key has bytes
    keys = torch.empty(entries, dtype=torch.int32 if prod(grid) < 2**31 else torch.int64, device=rows.device)
    numbers = entries, rows.stride(0), *grid
    _list_keys((-(-entries // BLOCK), 1), (keys, tally, rows, columns), numbers, (BLOCK,))
    return keys


def survey(keys: Tensor, width: int, tally: Tensor) -> Tensor:
    """Return how many entries of its row, which is `keys // width`, come before each entry [E]; count them."""
    entries = len(keys)
    positions = torch.empty(entries, dtype=torch.int32, device=keys.device)
    grid, numbers = (-(-entries // BLOCK), 1), (entries, entries.bit_length(), width)
    _survey(grid, (positions, tally, keys), numbers, (len(SURVEYED), BLOCK))
    return positions


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
    _place((-(-entries // BLOCK), 1), tensors, (entries, size, width or 1), constants)
    return AM, AK, source, is_padding if groups * size > entries else None


def find_facts(rows: Tensor, num_rows: int, zeros: int | None = None) -> RowFacts:
    """Return the facts about the ascending row of each group, which are not cut.

    `zeros` is how many rows have another number of groups than one; None if the host is to wait for it.
    """
    pointers, lengths, ends = point(rows, num_rows)
    to_zero, is_shared = spread(rows, pointers, ends, int(ends[-1]) if zeros is None else zeros)
    return RowFacts(pointers, is_shared, to_zero, lengths.argsort(descending=True, stable=True).int())


def point(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first group of each row, how many groups each has, and how many so far have not one [D]."""
    device = rows.device
    pointers = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, dtype=torch.int64, device=device)
    numbers = len(rows), num_rows, len(rows).bit_length()
    _point((num_rows // BLOCK + 1, 1), (pointers, lengths, counts, rows), numbers, (BLOCK,))
    return pointers, lengths, counts.cumsum(0)


def spread(rows: Tensor, pointers: Tensor, ends: Tensor, zeros: int) -> tuple[Tensor, Tensor]:
    """Return rows_to_zero, of which there are `zeros`, and is_shared; `pointers` and `ends` are those of `point`."""
    to_zero = torch.empty(zeros, dtype=torch.int64, device=rows.device)
    is_shared = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    programs = -(-max(len(ends), len(rows)) // BLOCK)
    _spread((programs, 1), (to_zero, is_shared, pointers, ends, rows), (len(rows), len(ends)), (BLOCK,))
    return to_zero, is_shared
