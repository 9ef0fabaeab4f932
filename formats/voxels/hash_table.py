"""Neighbouring voxels by a hash table in the device's memory: three Triton kernels, the same results as sorting.

A table is a power of two of keys, -1 where free; a key starts at its hash and moves on to the next free slot.
This builds index tensors. What is computed on them are statements.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .fixed_kernel import FixedKernel
from .geometry import Geometry
from .grid import VoxelGrid
from .kernels import insert, look_up, place
from .pairs import count, count_into, counts_shape, group, swap
from .tiles import tile

__all__ = ["count", "find", "generate", "group", "swap", "tile"]

BLOCK = 256
FAULTS = 4  # numbers before the counts, so that these begin at a multiple of 16 bytes; the first two are used
SPARE = 2  # slots per key: half the table stays free, so that a search ends after a slot or two

Counts = tuple[Tensor, list[int]]  # what `count` makes, and its first row

_insert, _look_up, _place = FixedKernel(insert), FixedKernel(look_up), FixedKernel(place)


def find(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> tuple[Tensor, Counts | None]:
    """NBR[x,z], int32 [N, V]: which voxel lies at tap z of voxel x, -1 where none does; its pairs if they were read."""
    is_checked, device = grid.is_checked(indices), indices.device
    voxels = indices.shape[0]
    capacity = _capacity(voxels)
    keys = torch.full((capacity,), -1, dtype=_key_dtype(indices, grid, geometry), device=device)
    rows = torch.empty(capacity, dtype=torch.int32, device=device)
    found = torch.empty(voxels, geometry.volume, dtype=torch.int32, device=device)
    # nobody looks at the faults of voxels that were found right before
    marks = torch.empty(FAULTS, dtype=torch.int32, device=device) if is_checked else _marks(found)
    _insert_inputs(keys, rows, marks, indices, grid)
    _launch(_look_up, (keys, rows, found), indices, grid, geometry, capacity, (False,))
    return found, None if is_checked else _read(marks, found, indices, grid)


def generate(
    indices: Tensor, grid: VoxelGrid, made: VoxelGrid, geometry: Geometry, to_coarse: bool
) -> tuple[Tensor, Tensor, Tensor | None, Counts | None]:
    """All voxels of `made` that `indices` reach, ascending, and INV[y,z], int32: where y gets by tap z.

    Then, if its pairs were read, INV with its sides swapped and the pairs.
    """
    device, each = indices.device, geometry.reached if to_coarse else geometry.volume
    capacity = _capacity(min(len(indices) * each, made.cells))
    keys = torch.full((capacity,), -1, dtype=_key_dtype(indices, made, geometry), device=device)
    rows = torch.empty(capacity, dtype=torch.int32, device=device)
    _launch(_insert, (keys, rows, rows), indices, made, geometry, capacity, (to_coarse, False))
    slots = (keys >= 0).nonzero().flatten()
    ascending, order = keys[slots].sort()
    count, width = len(slots), 1 + len(made.spatial_shape)
    out_indices = torch.empty(count, width, dtype=indices.dtype, device=device)
    if count:
        placed = rows, out_indices, ascending, order, slots
        _place((-(-count // BLOCK), 1), placed, (count, *_sizes(made)), (width - 1, BLOCK))
    found = torch.empty(len(indices), geometry.volume, dtype=torch.int32, device=device)
    _launch(_look_up, (keys, rows, found), indices, made, geometry, capacity, (to_coarse,))
    if grid.is_checked(indices):
        return out_indices, found, None, None
    # not before all is under way; what a wrong voxel reached is dropped with the rest
    swapped = swap(found, count)
    marks, own = _marks(swapped), _capacity(len(indices))
    keys = torch.full((own,), -1, dtype=_key_dtype(indices, grid, geometry), device=device)
    _insert_inputs(keys, torch.empty(own, dtype=torch.int32, device=device), marks, indices, grid)
    return out_indices, found, swapped, _read(marks, swapped, indices, grid)


def _marks(table: Tensor) -> Tensor:
    """Zeros for the faults of voxels and then for the pairs of a table, so that one read from the device gets both."""
    blocks, volume = counts_shape(table)
    return torch.empty(FAULTS + blocks * volume, dtype=torch.int32, device=table.device).zero_()


def _read(marks: Tensor, table: Tensor, indices: Tensor, grid: VoxelGrid) -> Counts:
    """Count the pairs of a table and raise if voxels are at fault: the one read from the device."""
    shape = counts_shape(table)
    counts = marks.as_strided(shape, (shape[1], 1), FAULTS)
    count_into(counts, table)
    faults = marks[: FAULTS + shape[1]].tolist()
    if any(faults[:FAULTS]):
        grid.check(indices)
    grid.mark_checked(indices)
    return counts, faults[FAULTS:]


def _insert_inputs(keys: Tensor, rows: Tensor, faults: Tensor, indices: Tensor, grid: VoxelGrid) -> None:
    """Keys and rows of the voxels themselves, and whether one is outside or given twice."""
    itself = _itself(len(grid.spatial_shape))
    _launch(_insert, (keys, rows, faults), indices, grid, itself, rows.shape[0], (False, True))


@cache
def _itself(ndim: int) -> Geometry:
    """One tap, by which each voxel reaches itself."""
    ones = (1,) * ndim
    return Geometry(ones, ones, (0,) * ndim, ones)


def _capacity(keys: int) -> int:
    return 1 << max(SPARE * keys - 1, 1).bit_length()


def _key_dtype(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> torch.dtype:
    """int32 where neither a key nor a coordinate on the way to one can pass it."""
    if indices.dtype == torch.int64:
        return torch.int64
    size = max(grid.spatial_shape)
    longest = (size + max(geometry.padding)) * max(geometry.stride) + geometry.extent
    return torch.int32 if max(grid.cells, longest, 2 * size) < 2**31 else torch.int64


def _sizes(grid: VoxelGrid) -> tuple[int, ...]:
    return (*grid.spatial_shape, 1, 1, 1)[:4]


def _launch(
    kernel: FixedKernel, tensors: tuple[Tensor, ...], indices: Tensor, grid: VoxelGrid, geometry: Geometry,
    capacity: int, options: tuple[bool, ...],
) -> None:  # fmt: skip
    voxels, volume = indices.shape[0], geometry.volume
    if voxels:
        numbers = voxels, *indices.stride(), grid.batch_size, *_sizes(grid), capacity - 1
        constants = geometry.axes, volume, *options, BLOCK
        kernel((-(-voxels * volume // BLOCK), 1), (*tensors, indices), numbers, constants)
