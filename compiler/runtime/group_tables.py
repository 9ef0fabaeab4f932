"""The positions of an index tensor in tiles of equal value, worked out on the device and remembered with the tensor.

The number of tiles does not depend on the numbers in the tensor, so that nothing waits for the device and a CUDA graph
can be captured with the tables in it. A captured graph reads what its tensors hold at each replay: if it takes tables
that are remembered, it first compares the index tensor with what they were made of, and makes them again if it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...formats.fixed_kernel import FixedKernel
from ...formats.guard import KeptGuard, Unsaved, may_keep
from ...formats.torch_state import is_captured, is_deterministic
from ..binding import length_class
from ..planning import number_of_tiles
from .launch import INTERPRETED, SEVERAL_GPUS, on_device
from .ranges import remember_range, remember_segments
from .recording import active, paused

try:
    import triton

    from . import group_kernels as kernels
except ImportError:  # no Triton, not on Linux: sorting does it
    kernels = None  # type: ignore[assignment]

__all__ = [
    "GroupTables",
    "group_tables",
    "new_group_tables",
    "note_use",
    "sorted_tables",
    "was_used",
]

_CAPTURED = "_insum_captured_groups"
BLOCK, LONG_BLOCK = 512, 4096  # positions of a program, and counts of the one that adds them up; not measured
FEW_GROUPS = 128  # in which positions of a program are ranked before they are counted; not measured
MOST_HOT = 8192  # elements of a program's positions by groups, which registers hold
ALIGNED = 4  # numbers in 16 bytes: the parts of a table begin there, which is all that kernels are built for

GroupTables = tuple[Tensor, Tensor, Tensor]  # positions [T, Q] or [T], values [T], pointers [V+1]
# kernel, programs, tensors, numbers, constants
_Launch = tuple[FixedKernel, int, Sequence[Tensor], Sequence[int], tuple[Any, ...]]

if kernels is not None:
    COMPARE, COUNT, SCAN, PLACE = map(FixedKernel, (kernels.compare, kernels.count, kernels.scan, kernels.place))


class _Groups(KeptGuard):
    """The tables of one tensor, by how many values it has, the length of tiles and if positions of a value ascend."""

    __slots__ = ("tables",)
    attribute = "_insum_groups"

    def __init__(self, index: Tensor) -> None:
        super().__init__(index)
        self.tables: dict[tuple[int, int, bool], GroupTables | _Renewable] = {}


class _Renewable(Unsaved):
    """Tables made by kernels, in memory of their own, which the same kernels may make again in place."""

    def __init__(self, index: Tensor, count: int, tile: int) -> None:
        tiles = number_of_tiles(index.shape[0], count, tile)
        groups = count + 2  # -1, each value, and where tiles end
        lengths = [tiles, tiles * tile, groups, groups, groups]
        padded = [part for length in lengths for part in (length, -length % ALIGNED)]
        self.memory = torch.full((sum(padded),), -1, dtype=torch.int32, device=index.device)
        self.values, self.positions, self.counts, self.starts, self.slots = self.memory.split(padded)[::2]
        self.flags = self.counts  # not read before `load`
        self.seen = torch.empty(index.shape, dtype=index.dtype, device=index.device)
        # without tiles, all positions and values are written
        self.filled = sum(padded[:4]) if tile > 1 else 0
        self.tile, self.few = tile, triton.next_power_of_2(max(groups, 16)) if groups <= FEW_GROUPS else 0
        self.make(index, False)
        self.tables: GroupTables = (
            self.positions.view(tiles, tile) if tile > 1 else self.positions,
            self.values,
            self.starts[1:],
        )
        _remember_facts(self.tables, index.shape[0], count, tile)

    def make(self, index: Tensor, may_skip: bool) -> None:
        """Make the tables; if `may_skip`, only if the index tensor is not what they were made of."""
        for kernel, programs, tensors, numbers, constants in self.launches(index, may_skip):
            kernel((programs, 1), tensors, numbers, constants)

    def load(self, index: Tensor) -> None:
        """Prepare for being made again by a captured graph: no kernel can be loaded while it is captured."""
        self.flags = torch.zeros(2, dtype=torch.int32, device=index.device)  # alone: to write them changes no table
        for kernel, _, tensors, numbers, constants in self.launches(index, True):
            kernel.load(tensors, numbers, constants)

    def launches(self, index: Tensor, may_skip: bool) -> Iterator[_Launch]:
        """Yield the kernels that make the tables, in order."""
        (length,), (stride,), groups = index.shape, index.stride(), len(self.counts)
        block = MOST_HOT // self.few if self.few else BLOCK
        programs, along = -(-length // block), (length, stride, groups)
        flags, counts = self.flags, self.counts
        if may_skip:
            yield COMPARE, -(-length // BLOCK), (flags, index, self.seen), (length, stride), (BLOCK,)
        counted = flags, index, counts, self.memory
        yield COUNT, programs, counted, (*along, self.filled), (self.few, may_skip, block)
        yield SCAN, 1, (flags, counts, self.starts, self.slots), (groups,), (self.tile, may_skip, LONG_BLOCK)
        tensors = flags, index, self.seen, self.slots, self.positions, self.values
        yield PLACE, programs, tensors, along, (self.tile, self.few, may_skip, block)


def group_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return the tables of an index tensor [P], whose values are from -1 to `count` - 1, in tiles of `tile` positions.

    They are `positions` [T, tile], -1 where a tile is not full; `values` [T], the value that all positions of a tile
    have, or -1 if a tile is empty; and `pointers` [count+1]: the tiles of value v are pointers[v] to pointers[v+1] - 1.
    With tiles of 1, `positions` [P] has no -1. Positions of one value ascend if results must be the same again. For a
    launch plan the call is one step.
    """
    recording = active()
    if recording is None:
        return _remembered(index, count, tile)
    with paused():
        tables = _remembered(index, count, tile)
    recording.call(_remembered, (index, count, tile), {}, tables)
    if tile > 1:
        tiles = len(tables[1])
        known = length_class((tiles, tile), (tile, 1)) or tiles
        recording.derive(number_of_tiles, index.shape[0], count, tile, known=known)
    return tables


def note_use(index: Tensor) -> None:
    """Note that an index tensor was used: if it is used again, unchanged, its tables are worth being made."""
    may_note = not is_captured(index.device) and may_keep(index) and not index.is_inference()
    if may_note and _Groups.kept_with(index) is None:
        _Groups(index).keep(index)


def was_used(index: Tensor) -> bool:
    """Return whether an index tensor was used before, unchanged since; during a capture, whether it has tables."""
    groups = _Groups.kept_with(index)
    if groups is None or not is_captured(index.device):
        return groups is not None
    return any(isinstance(tables, _Renewable) for tables in list(groups.tables.values()))


def _remembered(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return the tables that are kept with a tensor, made first if there are none."""
    if not may_keep(index) or index.is_inference():
        return new_group_tables(index, count, tile)
    note_use(index)
    groups, key = _Groups.kept_with(index), (count, tile, is_deterministic())
    tables = None if groups is None else groups.tables.get(key)
    if is_captured(index.device):
        return _for_graph(index, tables) or new_group_tables(index, count, tile)
    assert groups is not None
    if tables is None:
        with torch.inference_mode(False):  # what is kept must be good for training too
            tables = _made(index, count, tile)
            if isinstance(tables, _Renewable) and index.is_cuda:
                with paused(), _on_device(index):
                    tables.load(index)
        groups.tables[key] = tables
    return tables.tables if isinstance(tables, _Renewable) else tables


def _for_graph(index: Tensor, tables: GroupTables | _Renewable | None) -> GroupTables | None:
    """Return remembered tables for a graph that is captured, which makes them again where the index differs."""
    if not isinstance(tables, _Renewable):
        return None
    with paused():
        tables.make(index, True)
    # the graph goes on with them after the tensor has got others
    setattr(index, _CAPTURED, [*getattr(index, _CAPTURED, ()), tables])
    return tables.tables


def new_group_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return new tables of an index tensor, which are not remembered with it; `group_tables` says what they are."""
    tables = _made(index, count, tile)
    return tables.tables if isinstance(tables, _Renewable) else tables


def _made(index: Tensor, count: int, tile: int) -> GroupTables | _Renewable:
    """Return new tables, by kernels or, if results must be the same again, by torch's stable sort."""
    length = index.shape[0]
    is_short = length + tile * (count + 2) < 2**31
    has_kernels = kernels is not None and (index.is_cuda or INTERPRETED) and index.layout is torch.strided
    with paused(), torch.no_grad():
        if has_kernels and is_short and length and not is_deterministic():
            with _on_device(index):
                return _Renewable(index, count, tile)
        return sorted_tables(index, count, tile)


def _on_device(index: Tensor) -> Any:
    return on_device(index.device) if SEVERAL_GPUS else nullcontext()


def _remember_facts(tables: GroupTables, length: int, count: int, tile: int) -> None:
    """Cache what is known of tables by how they are made, so that nothing is read."""
    positions, values, pointers = tables
    remember_range(positions, -1 if tile > 1 else 0, length - 1)
    remember_range(values, -1, count - 1, ascends=tile == 1)  # else tiles that are not needed have a -1
    remember_segments(pointers, 0)  # how long the longest is would have to be read


def sorted_tables(index: Tensor, count: int, tile: int) -> GroupTables:
    """Return new tables by torch's operations; positions of one value keep their order.

    >>> positions, values, pointers = sorted_tables(torch.tensor([2, 0, 2, 2]), count=3, tile=2)
    >>> positions.tolist(), values.tolist(), pointers.tolist()
    ([[-1, -1], [1, -1], [-1, -1], [0, 2], [3, -1], [-1, -1]], [-1, 0, 1, 2, 2, 2], [1, 2, 3, 6])
    """
    device, length = index.device, index.shape[0]
    narrow = torch.int16 if count < 2**15 else torch.int32 if count < 2**31 else torch.int64  # fewer bits are sorted
    wide = torch.int32 if length + tile * (count + 2) < 2**31 else torch.int64
    with paused():
        keys, order = index.clamp(min=-1).to(narrow).sort(stable=True)  # any negative position is one of none
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
            values.masked_fill_(numbers >= starts[-1], -1)  # tiles that no length of groups needs
            positions, pointers = positions.view(tiles, tile), starts[1:]
    tables = positions, values, pointers
    _remember_facts(tables, length, count, tile)
    return tables
