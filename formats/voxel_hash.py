"""Neighbouring voxels by a hash table in the device's memory: two Triton kernels, the same results as sorting.

A table is a power of two of keys, -1 where free; a key starts at its hash and moves on to the next free slot.
This builds index tensors. What is computed on them are statements.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from .geometry import Geometry
from .voxel_grid import VoxelGrid
from .voxel_kernels import insert, look_up
from .voxel_pairs import count, group, on_device_of, swap
from .voxel_tiles import tile

__all__ = ["count", "find", "generate", "group", "swap", "tile"]

BLOCK = 256
SPARE = 2  # slots per key: half the table stays free, so that a search ends after a slot or two


def find(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> Tensor:
    """NBR[x,z], int32 [N, V]: which voxel lies at tap z of voxel x, -1 where none does."""
    keys, rows = _input_table(indices, grid, geometry)
    found = torch.empty(len(indices), geometry.volume, dtype=torch.int32, device=indices.device)
    _launch(look_up, (keys, rows, found), indices, grid, geometry, len(rows), TO_COARSE=False)
    _raise_faults(keys, indices, grid)
    return found


def generate(
    indices: Tensor, grid: VoxelGrid, made: VoxelGrid, geometry: Geometry, to_coarse: bool
) -> tuple[Tensor, Tensor]:
    """The keys in `made` of all voxels that `indices` reach, ascending, and INV[y,z], int32: where y gets by tap z."""
    own = None if grid.is_checked(indices) else _input_table(indices, grid, geometry)[0]
    each = geometry.reached if to_coarse else geometry.volume
    capacity = _capacity(min(len(indices) * each, made.cells))
    keys = torch.full((capacity,), -1, dtype=_key_dtype(indices, made, geometry), device=indices.device)
    rows = torch.empty(capacity, dtype=torch.int32, device=indices.device)
    common = dict(TO_COARSE=to_coarse)
    _launch(insert, (keys, rows), indices, made, geometry, capacity, IS_INPUT=False, **common)
    slots = (keys >= 0).nonzero().flatten()
    ascending, order = keys[slots].sort()
    rows[slots[order]] = torch.arange(len(slots), dtype=torch.int32, device=indices.device)
    found = torch.empty(len(indices), geometry.volume, dtype=torch.int32, device=indices.device)
    _launch(look_up, (keys, rows, found), indices, made, geometry, capacity, **common)
    if own is not None:  # not before all is under way; what a wrong voxel reached is dropped with the rest
        _raise_faults(own, indices, grid)
    return ascending.long(), found


def _input_table(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Keys and rows of the voxels themselves; after the keys two faults, -1 if there is none."""
    capacity, device = _capacity(len(indices)), indices.device
    keys = torch.full((capacity + 2,), -1, dtype=_key_dtype(indices, grid, geometry), device=device)
    rows = torch.empty(capacity, dtype=torch.int32, device=device)
    itself = _itself(len(grid.spatial_shape))
    _launch(insert, (keys, rows), indices, grid, itself, capacity, TO_COARSE=False, IS_INPUT=True)
    return keys, rows


@cache
def _itself(ndim: int) -> Geometry:
    """One tap, by which each voxel reaches itself."""
    ones = (1,) * ndim
    return Geometry(ones, ones, (0,) * ndim, ones)


def _raise_faults(keys: Tensor, indices: Tensor, grid: VoxelGrid) -> None:
    """The one read from the device; none for voxels that were found right before."""
    if not grid.is_checked(indices):
        if keys[-2:].tolist() != [-1, -1]:
            grid.check(indices)
        grid.mark_checked(indices)


def _capacity(keys: int) -> int:
    return 1 << max(SPARE * keys - 1, 1).bit_length()


def _key_dtype(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> torch.dtype:
    """int32 where neither a key nor a coordinate on the way to one can pass it."""
    if indices.dtype == torch.int64:
        return torch.int64
    size = max(grid.spatial_shape)
    longest = (size + max(geometry.padding)) * max(geometry.stride) + geometry.extent
    return torch.int32 if max(grid.cells, longest, 2 * size) < 2**31 else torch.int64


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], indices: Tensor, grid: VoxelGrid, geometry: Geometry,
    capacity: int, **options: bool,
) -> None:  # fmt: skip
    voxels, volume = indices.shape[0], geometry.volume
    if voxels == 0:
        return
    sizes = (*grid.spatial_shape, 1, 1, 1)[:4]
    with on_device_of(indices):
        kernel[(-(-voxels * volume // BLOCK),)](
            *tensors, indices, voxels, *indices.stride(), grid.batch_size, *sizes, capacity - 1,
            AXES=geometry.axes, V=volume, BLOCK=BLOCK, **options,
        )  # fmt: skip
