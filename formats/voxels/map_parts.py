"""A kernel map as voxels, text and sizes, which is how a torch operator takes it, and the maps that are cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
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
Map = Callable[[], "KernelMap | None"]  # a cached map, None if it has died


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


class _Copy:
    """Whether voxels are unchanged, where inference mode counts no versions: by a copy of them."""

    __slots__ = ("copy",)

    def __init__(self, voxels: Tensor) -> None:
        self.copy = voxels.clone()

    def holds_for(self, voxels: Tensor) -> bool:
        if voxels.is_cuda and is_capturing():
            return True  # nothing can be read now
        return torch.equal(self.copy, voxels)


class _Known:
    """What is known of voxels, as long as they are unchanged: what they are a copy of, and the maps over them."""

    __slots__ = ("leading", "original", "starting", "watch")

    def __init__(self, voxels: Tensor, original: Tensor | None = None) -> None:
        self.watch: ChangeGuard | _Copy = ChangeGuard.of(voxels) or _Copy(voxels)
        self.original = original  # which a map holds; an operator has returned the copy
        # maps to these voxels, each with those that it starts from and what tells whether they have changed
        self.leading: dict[Key, tuple[ref[Tensor], ChangeGuard | _Copy, Map]] = {}
        self.starting: dict[Key, Map] = {}  # maps to other voxels


_known: ByIdentity[_Known] = ByIdentity()  # a map that is held here holds neither of its voxels


def _known_of(voxels: Tensor) -> _Known:
    known = _known.get(voxels)
    if known is None or not known.watch.holds_for(voxels):
        known = _Known(voxels)
        _known.keep(voxels, known)
    return known


def know_copy(key: Key, source: Tensor, voxels: Tensor, original: Tensor) -> None:
    """Let maps over a copy of the voxels that a map leads to be those over the original.

    An operator returns another copy in every call. The map from the source, which `cached_start` finds, is found by the
    copy itself.
    """
    known, start = _Known(voxels, original), _known.get(source)
    if start is not None:
        origin = start if start.original is None else _known.get(start.original)
        kernel_map = None if origin is None else origin.starting.get(key)
        if kernel_map is not None:
            known.leading[key] = ref(source), start.watch, kernel_map
    _known.keep(voxels, known)


def original_of(voxels: Tensor) -> Tensor:
    """Return what these voxels are an unchanged copy of, or themselves."""
    known = _known.get(voxels)
    if known is None or known.original is None or not known.watch.holds_for(voxels):
        return voxels
    return known.original


def cached_map(source: Tensor, target: Tensor, key: Key) -> KernelMap | None:
    """Return the map between two sets of voxels, or between what they copy, if it was made before.

    None if they have changed since.
    """
    known = _known.get(target)
    lead = None if known is None else known.leading.get(key)
    if known is None or lead is None:
        return _map_of_originals(source, target, key)
    start, watch, kernel_map = lead
    is_same = start() is source and watch.holds_for(source) and (target is source or known.watch.holds_for(target))
    return kernel_map() if is_same else None


def _map_of_originals(source: Tensor, target: Tensor, key: Key) -> KernelMap | None:
    """Return the map between what two sets of voxels are copies of, if it was made before."""
    originals = original_of(source), original_of(target)
    kernel_map = None if originals[0] is source and originals[1] is target else cached_map(*originals, key)
    if kernel_map is not None and target is source:  # its gradients are over the same copy
        known, origin = _known.get(target), _known.get(originals[1])
        if known is not None and origin is not None and key in origin.leading:
            known.leading[key] = ref(source), known.watch, origin.leading[key][2]
    return kernel_map


def cached_start(source: Tensor, key: Key) -> KernelMap | None:
    """Return a map that starts from voxels, wherever it leads to, if it was made before and they are unchanged."""
    known = _known.get(source)
    kernel_map = None if known is None else known.starting.get(key)
    return kernel_map() if known is not None and kernel_map is not None and known.watch.holds_for(source) else None


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
    start = _known_of(source)
    known = start if target is source else _known_of(target)
    known.leading[key] = ref(source), start.watch, reference
    if target is not source:
        start.starting[key] = reference
