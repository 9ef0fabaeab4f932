"""The pairs of a table of neighbours, counted, grouped and swapped: a Triton kernel each, the same as `voxel_sort`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import voxel_pair_kernels as kernels

__all__ = ["count", "group", "on_device_of", "power_of_2", "swap"]

TILE = 4096  # entries of a table that a program looks at at once
MOST_TAPS = 32  # of them side by side
WARPS = 16  # with fewer, a tile does not fit into a thread's registers
MOST_BLOCKS = 1024  # each block adds up the counts of those before it
SWAPPED_BLOCK = 1024
SEVERAL_GPUS = torch.cuda.device_count() > 1
ANYWHERE = nullcontext()


def count(table: Tensor) -> Tensor:
    """COUNT[0,z], int32: the pairs of tap z in table[x,z] = y; the other rows are what `group` needs."""
    rows, volume = table.shape
    taps, step, span, grid = _tiling(rows, volume)
    counts = torch.zeros(1 + grid[1], volume, dtype=torch.int32, device=table.device)
    if rows:
        with on_device_of(table):
            kernels.count[grid](counts, table, rows, span, V=volume, TAPS=taps, ROWS=step, num_warps=WARPS)
    return counts


def group(table: Tensor, counts: Tensor, groups: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """MAPX, MAPY [groups, group_size] and MAPZ [groups] of table[x,z] = y, ascending by tap and then by x."""
    rows, volume = table.shape
    MAPX = torch.empty(groups, group_size, dtype=torch.int32, device=table.device)
    MAPY = torch.empty_like(MAPX)
    MAPZ = torch.empty(groups, dtype=torch.int32, device=table.device)
    if groups:
        taps, step, span, grid = _tiling(rows, volume)
        with on_device_of(table):
            kernels.group[grid](
                MAPX, MAPY, MAPZ, table, counts, rows, span, group_size,
                V=volume, ALL_TAPS=power_of_2(volume), TAPS=taps, ROWS=step, num_warps=WARPS,
            )  # fmt: skip
    return MAPX, MAPY, MAPZ


def swap(table: Tensor, rows: int) -> Tensor:
    """table[x,z] = y, [X, V] -> [y,z] = x, [rows, V], -1 where there is none."""
    volume, entries = table.shape[1], table.numel()
    swapped = torch.full((rows, volume), -1, dtype=torch.int32, device=table.device)
    if entries:
        with on_device_of(table):
            kernels.swap[(-(-entries // SWAPPED_BLOCK),)](swapped, table, entries, V=volume, BLOCK=SWAPPED_BLOCK)
    return swapped


def _tiling(rows: int, volume: int) -> tuple[int, int, int, tuple[int, int]]:
    """Taps and rows of a tile, rows of a block, and how many tiles of taps and blocks of rows there are."""
    taps = min(MOST_TAPS, power_of_2(volume))
    step = TILE // taps
    span = step * max(1, -(-rows // (step * MOST_BLOCKS)))
    return taps, step, span, (-(-volume // taps), -(-rows // span))


def power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: with several GPUs that is to be the tensor's."""
    return torch.cuda.device_of(tensor) if SEVERAL_GPUS else ANYWHERE
