"""Neighbouring voxels by a hash table in the device's memory: three Triton kernels, with the results of `sort`.

A table is a power of two of keys, -1 where free; a key starts at its hash and moves on to the next free slot.
This builds index tensors. What is computed on them are statements.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..fixed_kernel import FixedKernel
from .geometry import Geometry
from .grid import VoxelGrid
from .kernels import insert, look_up, place
from .pairs import count, count_into, counts_shape, group, map_kernel, swap
from .tiles import tile

__all__ = ["count", "find", "generate", "group", "swap", "tile"]

BLOCK = 256
FAULTS = 4  # numbers before the counts, so that these begin at a multiple of 16 bytes; the first two are used
SPARE = 2  # slots per key: half the table stays free, so that a search ends after a slot or two

Counts = tuple[Tensor, list[int]]  # what `count` makes, and its first row

_insert, _look_up, _place = map_kernel(insert), map_kernel(look_up), map_kernel(place)


def find(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> tuple[Tensor, Counts | None]:
    """Return NBR[x,z], int32 [N, V]: which voxel lies at tap z of voxel x, -1 where none does.

    With it come the counts of its pairs, None for voxels that were checked before: their faults need not be read, and
    so nothing is read. Raises FormatError if a voxel is outside the grid or given twice.
    """
    is_checked, device = grid.is_checked(indices), indices.device
    voxels = indices.shape[0]
    capacity = _capacity(voxels)
    keys = torch.full((capacity,), -1, dtype=_key_dtype(indices, grid, geometry), device=device)
    rows = torch.empty(capacity, dtype=torch.int32, device=device)
    neighbours = torch.empty(voxels, geometry.volume, dtype=torch.int32, device=device)
    # the faults of voxels that were checked before are not read
    marks = torch.empty(FAULTS, dtype=torch.int32, device=device) if is_checked else _zero_marks(neighbours)
    _insert_inputs(keys, rows, marks, indices, grid)
    _launch(_look_up, (keys, rows, neighbours), indices, grid, geometry, capacity, (False,))
    return neighbours, None if is_checked else _read(marks, neighbours, indices, grid)


def generate(
    indices: Tensor, grid: VoxelGrid, out_grid: VoxelGrid, geometry: Geometry, to_coarse: bool
) -> tuple[Tensor, Tensor, Tensor | None, Counts | None]:
    """Return all voxels of `out_grid` that `indices` reach, ascending, and INV[y,z], int32: which one y reaches by z.

    Then come INV with its sides swapped and the counts of its pairs, None for voxels that were checked before. Raises
    FormatError if a voxel of `indices` is outside the grid or given twice.
    """
    device, most_reached = indices.device, geometry.reached if to_coarse else geometry.volume
    capacity = _capacity(min(len(indices) * most_reached, out_grid.cells))
    keys = torch.full((capacity,), -1, dtype=_key_dtype(indices, out_grid, geometry), device=device)
    rows = torch.empty(capacity, dtype=torch.int32, device=device)
    _launch(_insert, (keys, rows, rows), indices, out_grid, geometry, capacity, (to_coarse, False))
    slots = (keys >= 0).nonzero().flatten()
    ascending, order = keys[slots].sort()
    count, width = len(slots), 1 + len(out_grid.spatial_shape)
    out_indices = torch.empty(count, width, dtype=indices.dtype, device=device)
    if count:
        placed = rows, out_indices, ascending, order, slots
        _place((-(-count // BLOCK), 1), placed, (count, *_sizes(out_grid)), (width - 1, BLOCK))
    inverse = torch.empty(len(indices), geometry.volume, dtype=torch.int32, device=device)
    _launch(_look_up, (keys, rows, inverse), indices, out_grid, geometry, capacity, (to_coarse,))
    if grid.is_checked(indices):
        return out_indices, inverse, None, None
    # not before all is under way; what a wrong voxel reached is dropped with the rest
    swapped = swap(inverse, count)
    marks, input_capacity = _zero_marks(swapped), _capacity(len(indices))
    keys = torch.full((input_capacity,), -1, dtype=_key_dtype(indices, grid, geometry), device=device)
    _insert_inputs(keys, torch.empty(input_capacity, dtype=torch.int32, device=device), marks, indices, grid)
    return out_indices, inverse, swapped, _read(marks, swapped, indices, grid)


def _zero_marks(table: Tensor) -> Tensor:
    """Return zeros for the faults of voxels and then for the pairs of a table: one read from the device gets both."""
    blocks, volume = counts_shape(table)
    return torch.empty(FAULTS + blocks * volume, dtype=torch.int32, device=table.device).zero_()


def _read(marks: Tensor, table: Tensor, indices: Tensor, grid: VoxelGrid) -> Counts:
    """Return the counts of a table's pairs, by the one read from the device; raise FormatError if a voxel is wrong."""
    shape = counts_shape(table)
    counts = marks.as_strided(shape, (shape[1], 1), FAULTS)
    count_into(counts, table)
    faults = marks[: FAULTS + shape[1]].tolist()
    if any(faults[:FAULTS]):
        grid.check(indices)
    grid.mark_checked(indices)
    return counts, faults[FAULTS:]


def _insert_inputs(keys: Tensor, rows: Tensor, faults: Tensor, indices: Tensor, grid: VoxelGrid) -> None:
    """Put keys and rows of the voxels into the table, and into `faults` whether one is outside or given twice."""
    itself = _itself(len(grid.spatial_shape))
    _launch(_insert, (keys, rows, faults), indices, grid, itself, rows.shape[0], (False, True))


@cache
def _itself(ndim: int) -> Geometry:
    """Return the geometry of one tap, by which each voxel reaches itself."""
    ones = (1,) * ndim
    return Geometry(ones, ones, (0,) * ndim, ones)


def _capacity(keys: int) -> int:
    """Return how many slots a table for so many keys has: a power of two."""
    return 1 << max(SPARE * keys - 1, 1).bit_length()


def _key_dtype(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> torch.dtype:
    """Return the dtype of keys: int32 if neither a key nor a coordinate on the way to one can pass it, else int64."""
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
    """Launch a kernel over all voxels and taps."""
    voxels, volume = indices.shape[0], geometry.volume
    if voxels:
        numbers = voxels, *indices.stride(), grid.batch_size, *_sizes(grid), capacity - 1
        constants = geometry.axes, volume, *options, BLOCK
        kernel((-(-voxels * volume // BLOCK), 1), (*tensors, indices), numbers, constants)
