"""Opaque torch operators that make kernel maps: a tracer sees sizes, and the voxels are read when the call runs.

How many voxels a convolution reaches depends on where they are, so that a tracer gets a new symbol for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import FormatError
from ..torch_state import UNSAFE_IN_GRAPHS, is_exporting, is_inference_mode, uncompiled
from .grid import VoxelGrid
from .kernel_map import KernelMap
from .map_building import generated_map, submanifold_map
from .map_parts import MapParts, cached_map, cached_start, described, keep, know_copy, original_of

__all__ = ["checked", "from_parts", "map_of", "reached_again", "voxel_library"]

Sizes = tuple[int, ...]

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


def from_parts(parts: MapParts) -> KernelMap:
    """Return the map of its parts, outside of a tracer."""
    kernel_map = map_of(parts.source, parts.target, parts.geometry, parts.sizes)
    return kernel_map.inverse if parts.side else kernel_map


def map_of(source: Tensor, target: Tensor, text: str, sizes: Sizes) -> KernelMap:
    """Return the map between voxels, made once; an operator gets them, text and sizes of `MapParts`.

    Raises:
        FormatError: a voxel of the source is given twice or lies outside the grid, or the target is not what the source
            leads to.
    """
    kernel_map = cached_map(source, target, (text, sizes))
    if kernel_map is not None:
        return kernel_map
    originals = original_of(source), original_of(target)
    if originals[0] is not source or originals[1] is not target:  # copies, new in every call, of what a map holds
        return map_of(*originals, text, sizes)
    kernel_map = _start_of(source, text, sizes)
    if target is not source and not torch.equal(target, kernel_map.out_indices):
        raise FormatError(
            "the indices of voxels were changed in place since a convolution made or read them; change a clone of them "
            "and make a new SparseConvTensor of it"
        )
    keep((text, sizes), kernel_map, source, target)
    return kernel_map


def reached_by(source: Tensor, text: str, sizes: Sizes) -> Tensor:
    """Return the voxels that a convolution leads to, as a tensor that nobody else holds; its map is made once.

    Raises:
        FormatError: a voxel of the source is given twice or lies outside the grid.
    """
    voxels = reached_again(source, text, sizes)
    if voxels is None:
        original, key = original_of(source), (text, sizes)
        kernel_map = _start_of(original, text, sizes)
        voxels = _own_copy(kernel_map.out_indices)
        keep(key, kernel_map, original, voxels)
        know_copy(key, source, voxels, kernel_map.out_indices)
    return voxels


def reached_again(source: Tensor, text: str, sizes: Sizes) -> Tensor | None:
    """Return what `reached_by` does, if the map was made before and its voxels are unchanged; else None."""
    key = text, sizes
    kernel_map = cached_start(original_of(source), key)
    if kernel_map is None:
        return None
    voxels = _own_copy(kernel_map.out_indices)
    know_copy(key, source, voxels, kernel_map.out_indices)
    return voxels


def _own_copy(voxels: Tensor) -> Tensor:
    if not is_inference_mode():
        return voxels.clone()
    with torch.inference_mode(False):
        return voxels.clone()


def _start_of(source: Tensor, text: str, sizes: Sizes) -> KernelMap:
    """Return the map of a convolution that starts from voxels, which holds neither them nor what it is known by."""
    kernel_map = cached_start(source, (text, sizes))
    if kernel_map is not None:
        return kernel_map
    kind, geometry, grid, out_grid = _described(text, sizes)
    if kind == "subm":
        kernel_map = submanifold_map(source, grid, geometry)
        alias = source.detach()
        return replace(kernel_map, indices=alias, out_indices=alias)
    return replace(generated_map(source, grid, out_grid, geometry, kind), indices=source.detach())


_described = lru_cache(256)(described)
