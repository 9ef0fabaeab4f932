"""The voxels of a batch of grids, and what is kept with them: the kernel maps that start there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import outside_transforms
from ..formats.guard import ChangeGuards, may_keep
from ..formats.torch_state import is_capturing, is_followed
from ..formats.voxels.geometry import MapLayout
from ..formats.voxels.grid import VoxelGrid
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_building import map_on, traced_map

__all__ = ["CachedMap", "MapCache", "SavedMap", "Voxels", "guard_of"]

Layout = MapLayout  # as pickles of version 0.1.0 call it


@dataclass(frozen=True, eq=False)
class Voxels:
    """The voxels of the rows of features, and the kernel maps that start from them.

    All tensors of one resolution share them.
    """

    indices: Tensor
    grid: VoxelGrid
    maps: dict[MapLayout, CachedMap] = field(default_factory=dict)
    made: ChangeGuards | None = None  # of indices that a convolution made, when it had; None: of those that were given
    saves: tuple[str, SavedMap] | None = None  # what a tracer saves under an indice_key, with the tensor that it makes

    @staticmethod
    def of(indices: Tensor, grid: VoxelGrid, made: ChangeGuards | None = None) -> Voxels:
        """Return voxels without kernel maps.

        Of a frozen dataclass that was left a default, a graph of torch 2.11 asks for the fields at each call, in
        Python, which takes longer than all its other guards. So none is left one here.
        """
        return Voxels(indices, grid, {}, made, None)

    def map(self, layout: MapLayout) -> tuple[KernelMap, Voxels]:
        """Return the kernel map of a convolution over these voxels and the voxels it leads to, computed once.

        It is computed again if the indices that it starts from, or those that it made, were changed in place. For a
        tracer it is computed when the compiled call runs.
        """
        if is_followed(self.indices):
            return self._traced(layout)
        cached = self.maps.get(layout)
        if cached is None or not cached.is_current():
            with outside_transforms():
                kernel_map = map_on(self.indices, self.grid, layout)
            target = None
            if layout.kind != "subm":
                grid = VoxelGrid(kernel_map.out_spatial_shape, self.grid.batch_size)
                target = Voxels.of(kernel_map.out_indices, grid, guard_of(kernel_map.out_indices))
            cached = CachedMap(kernel_map, target, guard_of(self.indices))
            if may_keep(kernel_map.indices, kernel_map.out_indices, *kernel_map.known_neighbours):
                self.maps[layout] = cached
        return cached.kernel_map, cached.target or self

    def _traced(self, layout: MapLayout) -> tuple[KernelMap, Voxels]:
        """Return a map in its parts, and the voxels that it leads to, for a tracer."""
        parts: Any = traced_map(self.indices, self.grid, layout)
        if layout.kind == "subm":
            return parts, self
        shape = parts.sizes[1 + len(layout.kernel_size) :]
        return parts, Voxels.of(parts.target, VoxelGrid(shape, self.grid.batch_size))

    def check(self) -> None:
        """Refuse a voxel outside the grid or given twice, for layers that make no kernel map, which would refuse it.

        Nothing is checked while torch traces or captures the call.
        """
        if not (is_followed(self.indices) or self.indices.is_meta or (self.indices.is_cuda and is_capturing())):
            with outside_transforms():
                self.grid.check(self.indices)

    def is_as_made(self) -> bool:
        """Whether the indices are unchanged since a convolution made them."""
        return self.made is None or self.made.hold()

    def is_same(self, other: Voxels) -> bool:
        """Whether two sets of voxels are equal and in one order; they are read unless they are one tensor."""
        return self.is_one(other) or (self.grid == other.grid and torch.equal(self.indices, other.indices))

    def is_one(self, other: Voxels) -> bool:
        """Whether two sets of voxels are one tensor on one grid."""
        return self is other or (self.indices is other.indices and self.grid == other.grid)


def guard_of(indices: Tensor, hold: bool = True) -> ChangeGuards:
    """Return the guard of voxels; those made in inference mode are not compared, which would read them at each call."""
    return ChangeGuards([indices], hold, compares=False)


Stamp = guard_of  # as pickles of version 0.1.0 call it


class CachedMap(NamedTuple):
    """A kernel map that starts from some voxels, as they keep it."""

    kernel_map: KernelMap
    target: Voxels | None  # None: the voxels themselves
    guard: ChangeGuards  # of their indices when it was made

    def is_current(self) -> bool:
        """Whether the indices that the map starts from, and those that it made, are unchanged."""
        return self.guard.hold() and (self.target is None or self.target.is_as_made())


Found = CachedMap  # as pickles of version 0.1.0 call it


class SavedMap(NamedTuple):
    """The kernel map that a layer saved under an indice_key, and the voxels that it leads from and to."""

    kernel_map: KernelMap
    layout: MapLayout
    source: Voxels
    target: Voxels
    guard: ChangeGuards | None  # of the source's indices when it was made; None: a tracer has saved it
    is_lasting: bool = True  # False: a tracer has saved it, in its parts; a field, not a property: pickles have it


class MapCache:
    """The voxels and the saved maps of a `SparseConvTensor`, as one object that torch hands on and does not look into.

    Torch rebuilds a dataclass from its fields, and copies each dict, tuple and dataclass that it finds there. With maps
    among the fields, every wrapped module would work them out again, and other modules would miss what a layer saves.
    """

    def __init__(self, voxels: Voxels, indice_dict: dict[str, SavedMap]) -> None:
        self.voxels, self.indice_dict = voxels, indice_dict

    def on(self, indices: Tensor, grid: VoxelGrid) -> tuple[Voxels, dict[str, SavedMap]]:
        """Return the voxels and the saved maps of a tensor at `indices`, those of this cache as far as they hold.

        They are shared if `indices` is the very tensor that the voxels were made of. Other indices on the same device,
        such as a clone, start with a copy of the saved maps, which are checked against the voxels wherever they are
        used: a tracer's stand-ins save nothing for the tensor that they stand for.
        """
        voxels = self.voxels
        if indices is voxels.indices and grid == voxels.grid:
            return voxels, self.indice_dict
        stays = isinstance(indices, Tensor) and isinstance(voxels.indices, Tensor)  # else what torch puts for a tensor
        stays = stays and indices.device == voxels.indices.device
        return Voxels.of(indices, grid), dict(self.indice_dict) if stays else {}
