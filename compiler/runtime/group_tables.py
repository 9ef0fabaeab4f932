"""The positions of an index tensor in tiles of equal value, worked out on the device and remembered with the tensor.

The number of tiles does not depend on the numbers in the tensor, so that nothing waits for the device and a CUDA graph
can be captured with the tables in it. Tables that are remembered are those of the numbers that a tensor holds now: a
captured graph reads what its tensors hold at each replay, so that it has tables made in it and no remembered ones.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...formats.guard import ChangeGuard, may_keep
from ...formats.torch_state import is_capturing
from .ranges import remember_range, remember_segments
from .recording import active, paused

__all__ = ["GroupTables", "group_tables", "has_met", "meet", "new_group_tables", "number_of_tiles"]

_GROUPS = "_insum_groups"

GroupTables = tuple[Tensor, Tensor, Tensor]  # positions [T, Q] or [T], values [T], pointers [V+1]


class _Groups(ChangeGuard):
    """The tables of one tensor, by the number of its values and the length of tiles."""

    __slots__ = ("owner", "tables")

    def __init__(self, index: Tensor) -> None:
        super().__init__(index)
        self.owner = ref(index)
        self.tables: dict[tuple[int, int], GroupTables] = {}

    def __reduce__(self) -> Any:
        return dict, ()  # nothing: a copy of the tensor makes its own


def number_of_tiles(length: int, count: int, tile: int) -> int:
    """Return the tiles of `length` positions: each of `count` values, and -1, has one at most that is not full."""
    return length if tile == 1 else length // tile + count + 1


def group_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return the tables of an index tensor [P], whose values are from -1 to `count` - 1, in tiles of `tile` positions.

    They are `positions` [T, tile], -1 where a tile is not full; `values` [T], the value that all positions of a tile
    have; and `pointers` [count+1]: the tiles of value v are pointers[v] to pointers[v+1] - 1. Positions of one value
    keep their order. With tiles of 1, `positions` [P] has no -1. For a launch plan the call is one step.
    """
    recording = active()
    if recording is None:
        return _remembered(index, count, tile)
    with paused():
        tables = _remembered(index, count, tile)
    recording.call(_remembered, (index, count, tile), {}, tables)
    return tables


def meet(index: Tensor) -> None:
    """Note that an index tensor was used: if it is used again, unchanged, its tables are worth being made."""
    if _known(index) is None and may_keep(index) and not index.is_inference():
        setattr(index, _GROUPS, _Groups(index))


def has_met(index: Tensor) -> bool:
    """Return whether an index tensor was used before and has not changed since; False during a capture."""
    return not (index.is_cuda and is_capturing()) and _known(index) is not None


def _known(index: Tensor) -> _Groups | None:
    groups: _Groups | None = getattr(index, _GROUPS, None)
    if not groups:  # a pickle has an empty dictionary in its place
        return None
    return groups if groups.owner() is index and groups.holds_for(index) else None


def _remembered(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return the tables that are kept with a tensor, made first if there are none; none are kept during a capture."""
    if (index.is_cuda and is_capturing()) or not may_keep(index) or index.is_inference():
        return new_group_tables(index, count, tile)
    meet(index)
    groups = _known(index)
    assert groups is not None
    tables = groups.tables.get((count, tile))
    if tables is None:
        with torch.inference_mode(False):  # what is kept must be good for training too
            tables = groups.tables[count, tile] = new_group_tables(index, count, tile)
    return tables


def new_group_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return what `group_tables` does, made now.

    >>> positions, values, pointers = new_group_tables(torch.tensor([2, 0, 2, 2]), count=3, tile=2)
    >>> positions.tolist(), values.tolist(), pointers.tolist()
    ([[-1, -1], [1, -1], [-1, -1], [0, 2], [3, -1], [-1, -1]], [-1, 0, 1, 2, 2, 2], [1, 2, 3, 6])
    """
    device, length = index.device, index.shape[0]
    narrow = torch.int16 if count < 2**15 else torch.int32 if count < 2**31 else torch.int64  # fewer bits are sorted
    wide = torch.int32 if length + tile * (count + 2) < 2**31 else torch.int64
    with paused(), torch.no_grad():
        keys, order = index.to(narrow).sort(stable=True)
        queries = torch.arange(-1, count + 1, device=device, dtype=narrow)
        first = torch.searchsorted(keys, queries, out_int32=wide is torch.int32)  # [count+2], of -1 too
        if tile == 1:
            positions, values, pointers = order.to(wide), keys.to(wide), first[1:]
        else:
            # the tiles of a value begin at one that is free whatever the lengths are, so that no sum over them is made
            starts = first // tile + torch.arange(count + 2, device=device, dtype=wide)
            tiles = number_of_tiles(length, count, tile)
            group = keys.long() + 1
            begin = first[group]
            slots = starts[group] * tile + (torch.arange(length, device=device, dtype=wide) - begin)
            positions = torch.full((tiles * tile,), -1, device=device, dtype=wide)
            positions[slots.long()] = order.to(wide)
            numbers = torch.arange(tiles, device=device, dtype=wide)
            values = torch.searchsorted(starts, numbers, right=True, out_int32=wide is torch.int32) - 2
            positions, pointers = positions.view(tiles, tile), starts[1:]
    remember_range(positions, -1 if tile > 1 else 0, length - 1)
    remember_range(values, -1, count - 1)
    remember_segments(pointers, 0)  # how long the longest is would have to be read
    return positions, values, pointers
