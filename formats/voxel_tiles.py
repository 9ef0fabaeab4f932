"""A table's rows in tiles that need the same taps: three Triton kernels and a sort, the same as `voxel_sort`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import voxel_tile_kernels as kernels
from .voxel_pairs import on_device_of, power_of_2
from .voxel_sort import stretch

__all__ = ["tile"]

KEYED = 128  # rows that one program makes keys of
INT32_BITS = 31

_known_bits: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def tile(table: Tensor, bits: tuple[int, ...], size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ROW [T, size], TILE [P], NBR [P, size], TAP [P] and the first p of each tile [T+1], of table[x,z] = y."""
    rows, volume, device = *table.shape, table.device
    tiles = -(-rows // size)
    options = dict(V=volume, TAPS=power_of_2(volume))
    length = stretch(rows)
    needed_bits = volume + max(-(-rows // length) - 1, 0).bit_length()
    keys = torch.empty(rows, dtype=torch.int32 if needed_bits <= INT32_BITS else torch.int64, device=device)
    firsts = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
    with on_device_of(table):
        if rows:
            bits_of_taps = _on_device(bits, device)
            kernels.key[(-(-rows // KEYED),)](keys, table, bits_of_taps, rows, length, ROWS=KEYED, **options)
            order = keys.sort(stable=True).indices
            kernels.count[(tiles,)](firsts, table, order, rows, SIZE=size, **options)
            firsts = firsts.cumsum(0, dtype=torch.int32)
        count = int(firsts[-1])
        ROW, NBR = (torch.empty(count, size, dtype=torch.int32, device=device) for count in (tiles, count))
        TILE, TAP = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
        if rows:
            kernels.fill[(tiles,)](ROW, TILE, NBR, TAP, table, order, firsts, rows, SIZE=size, **options)
    return ROW, TILE, NBR, TAP, firsts


def _on_device(bits: tuple[int, ...], device: torch.device) -> Tensor:
    found = _known_bits.get((bits, device))
    if found is None:
        found = _known_bits[bits, device] = torch.tensor(bits, dtype=torch.int32, device=device)
    return found
