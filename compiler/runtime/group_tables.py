"""Tables by which the positions of an index tensor are grouped by its values: made once per tensor and remembered."""
from __future__ import annotations
import torch
from torch import Tensor
from typing import NamedTuple

class GroupTables(NamedTuple):
    positions: Tensor  # [T, Q] or [T]
    values: Tensor  # [T]
    pointers: Tensor  # [V+1] the tiles of value v are pointers[v] to pointers[v+1] - 1
    order: Tensor | None

def key_dtype(count):
    return torch.int16 if count < 2**15 else torch.int32 if count < 2**31 else torch.int64

def make_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    device, length = index.device, index.shape[0]
    small = key_dtype(count)
    keys, order = index.to(small).sort(stable=True)
    bounds = torch.searchsorted(keys, torch.arange(count + 1, device=device, dtype=small), out_int32=True)
    if tile == 1:
        return GroupTables(order.int(), keys.int(), bounds, None)
    tiles = -(-length // tile) + min(count + 1, length)
    first = torch.nn.functional.pad(bounds, (1, 0))  # with the group of -1
    lengths = first.diff()
    ends = ((lengths + (tile - 1)) // tile).cumsum(0, dtype=torch.int32)
    numbers = torch.arange(tiles, device=device, dtype=torch.int32)
    group = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    inside = group <= count
    group = group.clamp_(max=count)
    begin = ends - (lengths + (tile - 1)) // tile
    at = (first[group] + (numbers - begin[group]) * tile)[:, None] + torch.arange(tile, device=device, dtype=torch.int32)
    valid = (at < first[group + 1][:, None]) & inside[:, None]
    positions = torch.where(valid, order[at.clamp(max=length - 1)].int(), -1)
    values = torch.where(inside, group - 1, -1)
    return GroupTables(positions, values, ends, None)   # pointers: ends[v] is where value v begins, as -1 is group 0
