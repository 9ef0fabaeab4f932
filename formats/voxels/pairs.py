"""The pairs of a table of neighbours, counted, grouped and swapped by Triton kernels, with the results of `sort`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..fixed_kernel import FixedKernel
from . import pair_kernels as kernels

__all__ = ["count", "count_into", "counts_shape", "group", "map_kernel", "power_of_2", "swap"]

TILE = 4096  # entries of a table that a program looks at at once
MOST_TAPS = 32  # of them side by side
WARPS = 16  # with fewer, a tile does not fit into a thread's registers
MOST_BLOCKS = 1024  # each block adds up the counts of those before it
SWAPPED_BLOCK = 1024

map_kernel = partial(
    FixedKernel,
    refusal="voxels without memory have no kernel map, as under FakeTensorMode or while a program is traced; "
    "call the layer once on real voxels first",
)
_count, _group = map_kernel(kernels.count, WARPS), map_kernel(kernels.group, WARPS)
_swap = map_kernel(kernels.swap)


def count(table: Tensor) -> Tensor:
    """Return COUNT[0,z], int32: the pairs of tap z in table[x,z] = y; the other rows are what `group` needs."""
    counts = torch.empty(counts_shape(table), dtype=torch.int32, device=table.device).zero_()
    count_into(counts, table)
    return counts


def counts_shape(table: Tensor) -> tuple[int, int]:
    """Return the shape of a table's counts: one row for the sums, then one for each block of rows."""
    rows, volume = table.shape
    return 1 + _tiling(rows, volume)[3][1], volume


def count_into(counts: Tensor, table: Tensor) -> None:
    """Count the pairs of a table into `counts`, which must hold zeros."""
    rows, volume = table.shape
    if rows:
        taps, step, span, grid = _tiling(rows, volume)
        _count(grid, (counts, table), (rows, span), (volume, taps, step))


def group(table: Tensor, counts: Tensor, groups: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return MAPX, MAPY [groups, group_size] and MAPZ [groups] of table[x,z] = y, ascending by tap and then by x.

    Groups that no pair is left for are of the last tap.
    """
    rows, volume = table.shape
    MAPX = torch.empty(groups, group_size, dtype=torch.int32, device=table.device)
    MAPY = torch.empty_like(MAPX)
    MAPZ = torch.empty(groups, dtype=torch.int32, device=table.device)
    if groups:
        taps, step, span, grid = _tiling(rows, volume)
        constants = volume, power_of_2(volume), taps, step
        _group(grid, (MAPX, MAPY, MAPZ, table, counts), (rows, span, group_size, groups), constants)
    return MAPX, MAPY, MAPZ


def swap(table: Tensor, rows: int) -> Tensor:
    """Return SWAPPED[y,z] = x [rows, V] of table[x,z] = y [X, V], -1 where there is none."""
    volume, entries = table.shape[1], table.numel()
    swapped = torch.full((rows, volume), -1, dtype=torch.int32, device=table.device)
    if entries:
        _swap((-(-entries // SWAPPED_BLOCK), 1), (swapped, table), (entries,), (volume, SWAPPED_BLOCK))
    return swapped


def _tiling(rows: int, volume: int) -> tuple[int, int, int, tuple[int, int]]:
    """Return taps and rows of a tile, rows of a block, and how many tiles of taps and blocks of rows there are."""
    taps = min(MOST_TAPS, power_of_2(volume))
    step = TILE // taps
    span = step * max(1, -(-rows // (step * MOST_BLOCKS)))
    return taps, step, span, (-(-volume // taps), -(-rows // span))


def power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
