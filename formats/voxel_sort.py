"""Neighbouring voxels by sorting: plain torch on any device, and the reference of the hash."""

from __future__ import annotations

import torch
from torch import Tensor

from .geometry import Geometry
from .voxel_grid import VoxelGrid

__all__ = ["find", "generate"]


def find(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> Tensor:
    """NBR[x,z], int32 [N, V]: which voxel lies at tap z of voxel x, -1 where none does."""
    grid.check(indices)
    keys, order = grid.keys(indices).sort()
    wanted = _keys(indices, grid, geometry, to_coarse=False)
    if len(keys) == 0:
        return wanted.int()
    at = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
    return torch.where(keys[at] == wanted, order[at], -1).int()


def generate(
    indices: Tensor, grid: VoxelGrid, made: VoxelGrid, geometry: Geometry, to_coarse: bool
) -> tuple[Tensor, Tensor]:
    """The keys in `made` of all voxels that `indices` reach, ascending, and INV[y,z], int32: where y gets by tap z."""
    grid.check(indices)
    keys, rows = torch.unique(_keys(indices, made, geometry, to_coarse), return_inverse=True)
    if len(keys) and int(keys[0]) < 0:
        keys, rows = keys[1:], rows - 1
    return keys, rows.int()


def _keys(indices: Tensor, grid: VoxelGrid, geometry: Geometry, to_coarse: bool) -> Tensor:
    """The cell of `grid` that each voxel reaches by each tap, [N, V]; -1 where it leaves the grid."""
    keys = indices[:, 0].long()
    for axis, size in enumerate(grid.spatial_shape):
        kernel, stride, padding, dilation = geometry.axis(axis)
        taps = dilation * torch.arange(kernel, device=indices.device)
        position = indices[:, 1 + axis, None].long()
        if to_coarse:
            position = position + padding - taps
            is_inside = position % stride == 0
            position = position // stride
        else:
            position = position * stride - padding + taps
            is_inside = torch.ones_like(position, dtype=torch.bool)
        is_inside = is_inside & (position >= 0) & (position < size)
        middle = [len(indices), *[1] * (keys.ndim - 1), kernel]
        position, is_inside = position.view(middle), is_inside.view(middle)
        keys = torch.where(is_inside & (keys[..., None] >= 0), keys[..., None] * size + position, -1)
    return keys.flatten(1)
