"""Neighbouring voxels by sorting, and their pairs in groups: plain torch on any device, and the kernels' reference."""

from __future__ import annotations

import torch
from torch import Tensor

from .geometry import Geometry
from .grid import VoxelGrid

__all__ = ["count", "find", "generate", "group", "reached_voxels", "swap", "table_between", "tile"]

STRETCH, MOST_STRETCHES = 65_536, 16
NO_CELL = 2**63 - 1  # above every key of a grid


def find(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> tuple[Tensor, None]:
    """Return NBR[x,z], int32 [N, V]: which voxel lies at tap z of voxel x, -1 where none does; and None for its counts.

    Raises FormatError if a voxel is outside the grid or given twice.
    """
    grid.check(indices)
    return table_between(indices, indices, grid, geometry, to_coarse=False), None


def table_between(indices: Tensor, outputs: Tensor, grid: VoxelGrid, geometry: Geometry, to_coarse: bool) -> Tensor:
    """Return NBR[x,z], int32 [X, V]: which voxel of `grid` lies at tap z of output x, -1 where none does.

    It asks nothing about the voxels, so that a tracer can follow it.
    """
    keys, order = grid.keys(indices).sort()
    keys = torch.cat([keys, keys.new_full((1,), NO_CELL)])  # so that what is searched for always has a place
    order = torch.cat([order, order.new_full((1,), -1)])
    reached = _keys(outputs, grid, geometry, to_coarse)
    at = torch.searchsorted(keys, reached)
    return torch.where(keys[at] == reached, order[at], -1).int()


def reached_voxels(indices: Tensor, out_grid: VoxelGrid, geometry: Geometry, to_coarse: bool) -> Tensor:
    """Return all voxels of `out_grid` that `indices` reach, ascending; it asks nothing about them, for a tracer."""
    keys = torch.unique(_keys(indices, out_grid, geometry, to_coarse))
    return out_grid.indices(keys[keys >= 0], indices.dtype)


def generate(
    indices: Tensor, grid: VoxelGrid, out_grid: VoxelGrid, geometry: Geometry, to_coarse: bool
) -> tuple[Tensor, Tensor, None, None]:
    """Return all voxels of `out_grid` that `indices` reach, ascending, and INV[y,z], int32: which one y reaches by z.

    None stands for the swapped INV and the counts of its pairs. Raises FormatError if a voxel of `indices` is outside
    the grid or given twice.
    """
    grid.check(indices)
    keys, rows = torch.unique(_keys(indices, out_grid, geometry, to_coarse), return_inverse=True)
    if len(keys) and int(keys[0]) < 0:
        keys, rows = keys[1:], rows - 1
    return out_grid.indices(keys, indices.dtype), rows.int(), None, None


def _keys(indices: Tensor, grid: VoxelGrid, geometry: Geometry, to_coarse: bool) -> Tensor:
    """Return the cell of `grid` that each voxel reaches by each tap, [N, V]; -1 where it leaves the grid."""
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
        middle = [indices.shape[0], *[1] * (keys.ndim - 1), kernel]
        position, is_inside = position.view(middle), is_inside.view(middle)
        keys = torch.where(is_inside & (keys[..., None] >= 0), keys[..., None] * size + position, -1)
    return keys.flatten(1)


def count(table: Tensor) -> Tensor:
    """Return COUNT[0,z]: the pairs of tap z in table[x,z] = y."""
    return (table >= 0).sum(0, keepdim=True)


def group(table: Tensor, counts: Tensor, groups: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return MAPX, MAPY [groups, group_size] and MAPZ [groups] of table[x,z] = y, ascending by tap and then by x.

    Groups that no pair is left for are of the last tap.
    """
    rows, volume, device = *table.shape, table.device
    neighbours = table.T.flatten()  # tap by tap
    is_pair = neighbours >= 0
    pairs = counts[0]
    ends = ((pairs + group_size - 1) // group_size).cumsum(0)
    MAPZ = torch.searchsorted(ends, torch.arange(groups, device=device), right=True).clamp(max=volume - 1).int()
    # a pair's place: the first of its tap, and how many pairs of that tap came before it
    first = torch.cat([ends.new_zeros(1), ends[:-1]]) * group_size
    before = pairs.cumsum(0) - pairs
    place = (is_pair.cumsum(0) - 1).view(volume, rows) + (first - before)[:, None]
    place = torch.where(is_pair, place.flatten(), groups * group_size)
    outputs = torch.arange(rows, dtype=torch.int32, device=device).expand(volume, rows).flatten()
    slots = groups * group_size
    MAPX, MAPY = (_placed(values, place, slots).view(groups, group_size) for values in (outputs, neighbours))
    return MAPX, MAPY, MAPZ


def tile(table: Tensor, bits: tuple[int, ...], size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ROW [T, size], TILE [P], NBR [P, size], TAP [P] and the first p of each tile [T+1], of table[x,z] = y."""
    rows, volume, device = *table.shape, table.device
    tiles = -(-rows // size)
    keys = ((table >= 0).long() << torch.tensor(bits, device=device)).sum(1)
    keys += torch.arange(rows, device=device) // stretch(rows) << volume
    order = keys.sort(stable=True).indices
    ROW = torch.full((tiles * size,), -1, dtype=torch.int32, device=device)
    ROW[:rows] = order.int()
    sorted_table = torch.full((tiles * size, volume), -1, dtype=torch.int32, device=device)
    sorted_table[:rows] = table[order]
    by_tile = sorted_table.view(tiles, size, volume).transpose(1, 2)
    needs = (by_tile >= 0).any(2)
    TILE, TAP = needs.nonzero().int().T.contiguous()
    firsts = torch.cat([TILE.new_zeros(1), needs.sum(1).cumsum(0).int()])
    return ROW.view(tiles, size), TILE, by_tile[needs], TAP, firsts


def stretch(rows: int) -> int:
    """Return how many rows are sorted among themselves: neighbours stay near each other, so that a cache holds them."""
    return max(STRETCH, 1 << (max(-(-rows // MOST_STRETCHES), 1) - 1).bit_length())


def swap(table: Tensor, rows: int) -> Tensor:
    """Return SWAPPED[y,z] = x [rows, V] of table[x,z] = y [X, V], -1 where there is none."""
    volume, device = table.shape[1], table.device
    taps = torch.arange(volume, device=device)
    place = torch.where(table >= 0, table.long() * volume + taps, rows * volume)
    outputs = torch.arange(len(table), dtype=torch.int32, device=device)[:, None].expand_as(table)
    return _placed(outputs.flatten(), place.flatten(), rows * volume).view(rows, volume)


def _placed(values: Tensor, place: Tensor, size: int) -> Tensor:
    """Return int32 [size] with each value in its place, -1 elsewhere; a place of `size` drops the value."""
    table = torch.full((size + 1,), -1, dtype=torch.int32, device=values.device)
    return table.scatter_(0, place, values)[:-1]
