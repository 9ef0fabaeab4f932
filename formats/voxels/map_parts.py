"""A kernel map as voxels, text and sizes, which is how a torch operator takes it, and the maps that are cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ...identity_cache import ByIdentity
from ..guard import ChangeGuard
from ..torch_state import is_capturing, is_exporting
from . import sort
from .geometry import Geometry
from .grid import VoxelGrid

if TYPE_CHECKING:
    from .kernel_map import KernelMap

__all__ = ["Key", "MapParts", "cached_map", "cached_start", "described", "keep", "know_copy", "original_of"]

Sizes = tuple[int, ...]
Key = tuple[str, Sizes]  # `MapParts.geometry` and `MapParts.sizes`


@dataclass(frozen=True, eq=False)
class MapParts:
    """A kernel map taken apart, which stands for it where a tracer follows the call.

    The map itself is made of it when the compiled call runs; until then only its sizes are known. No field has a
    default: a graph of torch 2.11 would ask for the fields at each call, in Python.
    """

    source: Tensor  # [N, 1+D]  voxels that the convolution starts from
    target: Tensor  # [X, 1+D]  voxels that it leads to; the source itself for a submanifold
    geometry: str  # kind, then kernel size, stride, padding and dilation of each axis
    sizes: Sizes  # of the batch, of the source's grid and of the target's
    kernel_size: Sizes
    side: int  # 1: backwards, from the target to the source; else 0

    @property
    def indices(self) -> Tensor:
        """The input voxels, as `KernelMap.indices`."""
        return self.target if self.side else self.source

    @property
    def out_indices(self) -> Tensor:
        """The output voxels, as `KernelMap.out_indices`."""
        return self.source if self.side else self.target

    @property
    def num_inputs(self) -> int:
        return self.indices.shape[0]

    @property
    def num_outputs(self) -> int:
        return self.out_indices.shape[0]

    @property
    def volume(self) -> int:
        return prod(self.kernel_size)

    @property
    def inverse(self) -> MapParts:
        """The same pairs with inputs and outputs swapped."""
        # not `dataclasses.replace`, of which a tracer guards each field in every compiled call
        return MapParts(self.source, self.target, self.geometry, self.sizes, self.kernel_size, 1 - self.side)

    @property
    def neighbours(self) -> Tensor:
        """NBR[x,z], int32 [X, V], as `KernelMap.neighbours`; torch.export records how torch itself finds them."""
        if not is_exporting():
            table: Tensor = torch.ops.insum_ops.neighbours.default(
                self.source, self.target, self.geometry, list(self.sizes), self.side
            )
            return table
        kind, geometry, grid, out_grid = described(self.geometry, self.sizes)
        to_coarse = (kind == "transposed") != bool(self.side)
        grid.assert_right(self.source)
        return sort.table_between(self.indices, self.out_indices, out_grid if self.side else grid, geometry, to_coarse)


def described(geometry: str, sizes: Sizes) -> tuple[str, Geometry, VoxelGrid, VoxelGrid]:
    """Return the kind, the geometry and the two grids that parts of a map tell of."""
    kind, *numbers = geometry.split(";")
    axes = [tuple([int(number) for number in part.split(",")]) for part in numbers]
    ndim = len(axes[0])
    grids = VoxelGrid(tuple(sizes[1 : 1 + ndim]), sizes[0]), VoxelGrid(tuple(sizes[1 + ndim :]), sizes[0])
    return kind, Geometry(*axes), *grids


class _Watch:
    """Whether voxels are unchanged: by their version, or, where inference mode counts none, by a copy."""

    __slots__ = ("copy", "guard")

    def __init__(self, voxels: Tensor) -> None:
        self.guard = ChangeGuard.of(voxels)
        self.copy = voxels.clone() if self.guard is None else None

    def holds_for(self, voxels: Tensor) -> bool:
        if self.guard is not None:
            return self.guard.holds_for(voxels)
        if voxels.is_cuda and is_capturing():
            return True  # nothing can be read now
        return self.copy is not None and torch.equal(self.copy, voxels)


class _CachedMap(NamedTuple):
    """A map, with the voxels that it starts from and what tells whether they, and those it leads to, have changed."""

    source: ref[Tensor]
    watches: tuple[_Watch, _Watch]
    map: Callable[[], KernelMap | None]

    def of(self, source: Tensor, target: Tensor) -> KernelMap | None:
        """Return the map, if it is one between these voxels and they are as they were."""
        is_same = self.source() is source and self.watches[0].holds_for(source)
        return self.map() if is_same and (target is source or self.watches[1].holds_for(target)) else None


# by the voxels that maps lead to, and by those that they start from; a map that is held here holds neither
_by_target: ByIdentity[dict[Key, _CachedMap]] = ByIdentity()
_by_source: ByIdentity[dict[Key, _CachedMap]] = ByIdentity()
# by a copy that an operator has returned: whether it is unchanged, and the voxels that a map holds
_originals: ByIdentity[tuple[_Watch, Tensor]] = ByIdentity()


def know_copy(key: Key, source: Tensor, voxels: Tensor, original: Tensor) -> None:
    """Let maps over a copy of the voxels that a map leads to be those over the original.

    An operator returns another copy in every call. The map from the source, which `cached_start` finds, is found by the
    copy itself.
    """
    watch, copied = _Watch(voxels), _originals.get(source)
    _originals.keep(voxels, (watch, original))
    start = (_by_source.get(source if copied is None else copied[1]) or {}).get(key)
    if start is not None:
        watches = start.watches[0] if copied is None else copied[0], watch
        _by_target.keep(voxels, {key: _CachedMap(ref(source), watches, start.map)})


def original_of(voxels: Tensor) -> Tensor:
    """Return what these voxels are an unchanged copy of, or themselves."""
    copied = _originals.get(voxels)
    return copied[1] if copied is not None and copied[0].holds_for(voxels) else voxels


def cached_map(source: Tensor, target: Tensor, key: Key) -> KernelMap | None:
    """Return the map between two sets of voxels, or between what they copy, if it was made before.

    None if they have changed since.
    """
    cached = (_by_target.get(target) or {}).get(key)
    if cached is not None:
        return cached.of(source, target)
    originals = original_of(source), original_of(target)
    return None if originals[0] is source and originals[1] is target else cached_map(*originals, key)


def cached_start(source: Tensor, key: Key) -> KernelMap | None:
    """Return a map that starts from voxels, wherever it leads to, if it was made before and they are unchanged."""
    cached = (_by_source.get(source) or {}).get(key)
    return None if cached is None else cached.of(source, source)


def keep(key: Key, kernel_map: KernelMap, source: Tensor, target: Tensor) -> None:
    """Let operators find a map by its voxels: as long as it lives, or if it holds neither of them as long as they do.

    >>> import torch
    >>> from insum_ops.formats import kernel_map
    >>> voxels = torch.tensor([[0, 4], [0, 5]])
    >>> line = kernel_map(voxels, [6], batch_size=1, kernel_size=3)
    >>> cached_map(voxels, voxels, ("subm;3;1;1;1", (1, 6, 6))) is line
    True
    """
    holds_them = kernel_map.indices is source or kernel_map.out_indices is target
    reference: Any = ref(kernel_map) if holds_them else lambda: kernel_map
    watch = _Watch(source)
    cached = _CachedMap(ref(source), (watch, watch if target is source else _Watch(target)), reference)
    # other dictionaries: threads may be reading these
    _by_target.keep(target, {**(_by_target.get(target) or {}), key: cached})
    if target is not source:
        _by_source.keep(source, {**(_by_source.get(source) or {}), key: cached})
