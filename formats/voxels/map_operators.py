"""Opaque torch operators that make kernel maps: a tracer sees sizes, and the voxels are read when the call runs.

How many voxels a convolution reaches depends on where they are, so that a tracer gets a new symbol for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_state import UNSAFE_IN_GRAPHS, is_exporting, uncompiled
from .grid import VoxelGrid
from .kernel_map import map_of, reached_by

__all__ = ["checked", "voxel_library"]

voxel_library = torch.library.Library("insum_ops", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, *UNSAFE_IN_GRAPHS)

voxel_library.define(
    "reached_voxels(Tensor source, str geometry, SymInt[] sizes) -> Tensor",
    tags=(*_TAGS, torch.Tag.dynamic_output_shape),
)
voxel_library.define(
    "neighbours(Tensor source, Tensor target, str geometry, SymInt[] sizes, int side) -> Tensor", tags=_TAGS
)
voxel_library.define("checked_voxels(Tensor indices, SymInt[] sizes) -> Tensor", tags=_TAGS)


def _reached(source: Tensor, geometry: str, sizes: Sequence[int]) -> Tensor:
    return reached_by(source, geometry, tuple(sizes))


@torch.library.register_fake("insum_ops::reached_voxels", lib=voxel_library)
def _fake_reached(source: Tensor, geometry: str, sizes: Sequence[int]) -> Tensor:
    voxels = torch.library.get_ctx().new_dynamic_size()
    return source.new_empty((voxels, source.shape[1]))


def _neighbours(source: Tensor, target: Tensor, geometry: str, sizes: Sequence[int], side: int) -> Tensor:
    kernel_map = map_of(source, target, geometry, tuple(sizes))
    with torch.inference_mode(False):
        return (kernel_map.inverse if side else kernel_map).neighbours.clone()  # the map keeps its own


@torch.library.register_fake("insum_ops::neighbours", lib=voxel_library)
def _fake_neighbours(source: Tensor, target: Tensor, geometry: str, sizes: Sequence[int], side: int) -> Tensor:
    taps = 1
    for size in geometry.split(";")[1].split(","):
        taps *= int(size)
    return source.new_empty(((source if side else target).shape[0], taps), dtype=torch.int32)


def _checked(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    VoxelGrid(tuple(sizes[1:]), sizes[0]).check(indices)
    return indices.clone()


@torch.library.register_fake("insum_ops::checked_voxels", lib=voxel_library)
def _fake_checked(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.empty_like(indices)


for _key in ("CPU", "CUDA"):
    voxel_library.impl("reached_voxels", uncompiled(_reached), _key)
    voxel_library.impl("neighbours", uncompiled(_neighbours), _key)
    voxel_library.impl("checked_voxels", uncompiled(_checked), _key)


def checked(indices: Tensor, grid: VoxelGrid) -> Tensor:
    """Return voxels that are refused when a compiled call runs, if one is outside the grid or given twice."""
    if is_exporting():
        grid.assert_right(indices)
        return indices
    return torch.ops.insum_ops.checked_voxels.default(indices, [grid.batch_size, *grid.spatial_shape])  # type: ignore[no-any-return]
