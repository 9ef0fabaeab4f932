"""A table's rows in tiles that need the same taps: three Triton kernels and a sort, with the results of `sort`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..guard import may_keep
from . import tile_kernels as kernels
from .pairs import map_kernel, power_of_2
from .sort import stretch

__all__ = ["tile"]

KEYED = 128  # rows that one program makes keys of
INT32_BITS = 31

_bits_on_device: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


_key, _count, _fill = map_kernel(kernels.key), map_kernel(kernels.count), map_kernel(kernels.fill)


def tile(table: Tensor, bits: tuple[int, ...], size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ROW [T, size], TILE [P], NBR [P, size], TAP [P] and the first p of each tile [T+1], of table[x,z] = y."""
    rows, volume, device = *table.shape, table.device
    if rows == 0:
        ROW, TILE = table.new_empty(0, size), table.new_empty(0)
        return ROW, TILE, torch.empty_like(ROW), torch.empty_like(TILE), table.new_zeros(1)
    tiles, length, taps = -(-rows // size), stretch(rows), power_of_2(volume)
    needed_bits = volume + (-(-rows // length) - 1).bit_length()
    keys = torch.empty(rows, dtype=torch.int32 if needed_bits <= INT32_BITS else torch.int64, device=device)
    _key((-(-rows // KEYED), 1), (keys, table, _on_device(bits, device)), (rows, length), (volume, taps, KEYED))
    order = keys.sort(stable=True).indices
    counts = torch.empty(tiles + 1, dtype=torch.int32, device=device)
    _count((tiles, 1), (counts, table, order), (rows,), (volume, taps, size))
    firsts = counts.cumsum(0, dtype=torch.int32)
    ROW = torch.empty(tiles, size, dtype=torch.int32, device=device)  # while the device counts
    needed = int(firsts[-1])
    NBR = torch.empty(needed, size, dtype=torch.int32, device=device)
    TILE, TAP = (torch.empty(needed, dtype=torch.int32, device=device) for _ in range(2))
    _fill((tiles, 1), (ROW, TILE, NBR, TAP, table, order, firsts), (rows,), (volume, taps, size))
    return ROW, TILE, NBR, TAP, firsts


def _on_device(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the bits of the taps as a tensor on a device, which is kept."""
    tensor = _bits_on_device.get((bits, device))
    if tensor is None:
        tensor = torch.tensor(bits, dtype=torch.int32, device=device)
        if may_keep(tensor):
            _bits_on_device[bits, device] = tensor
    return tensor
