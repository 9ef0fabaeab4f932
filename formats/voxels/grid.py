"""A batch of voxel grids: coordinates as flat keys, and what makes a list of voxels wrong."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..check import whole_sizes
from ..errors import FormatError
from ..guard import ChangeGuard
from ..torch_state import is_compiling

__all__ = ["VoxelGrid"]

INDEX_DTYPES = (torch.int32, torch.int64)
LARGEST_DIM = 4
_CHECKED = "_insum_checked_voxels"


class _Checked(NamedTuple):
    """For which grid voxels were found right, and what their tensor was like then."""

    grid: VoxelGrid
    guard: ChangeGuard | None  # None: the tensor does not tell when it changes

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # nothing: it is about one tensor, and torch.load's weights_only knows this word


@dataclass(frozen=True)
class VoxelGrid:
    """`batch_size` grids of `spatial_shape` cells each; a row of indices is (batch, one coordinate per axis)."""

    spatial_shape: tuple[int, ...]
    batch_size: int

    def __post_init__(self) -> None:
        sizes, batch_size = whole_sizes("spatial_shape", self.spatial_shape), _whole(self.batch_size)
        vars(self).update(spatial_shape=sizes, batch_size=batch_size)
        shape = list(sizes)
        if not 1 <= len(shape) <= LARGEST_DIM:
            raise FormatError(f"spatial_shape is {shape}; voxels have from 1 to {LARGEST_DIM} axes")
        if min(shape) < 1:
            raise FormatError(f"spatial_shape is {shape}; each axis has at least one cell")
        if self.batch_size < 0:
            raise FormatError(f"batch_size is {self.batch_size}; it is at least 0")
        if self.cells >= 2**63:
            raise FormatError(
                f"batch_size {self.batch_size} and spatial_shape {shape} make {self.cells} cells, more than a 64-bit "
                "key can tell apart; crop the grid or use larger voxels"
            )

    @property
    def cells(self) -> int:
        return self.batch_size * prod(self.spatial_shape)

    def keys(self, indices: Tensor) -> Tensor:
        """The flat cell of each voxel, int64 [N]: batch first, the last axis fastest."""
        key = indices[:, 0].long()
        for axis, size in enumerate(self.spatial_shape):
            key = key * size + indices[:, 1 + axis]
        return key

    def indices(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The voxels that `keys` stand for, [N, 1+D]."""
        columns = []
        for size in reversed(self.spatial_shape):
            columns.append(keys % size)
            keys = keys // size
        return torch.stack([keys, *reversed(columns)], 1).to(dtype)

    def check_kind(self, indices: Tensor) -> None:
        """Dtype and shape; reads no data."""
        if not isinstance(indices, Tensor):
            raise FormatError(f"indices is of type {type(indices).__name__}; pass an int32 tensor [N, 1 + axes]")
        width = 1 + len(self.spatial_shape)
        if indices.dtype not in INDEX_DTYPES:
            raise FormatError(
                f"indices is {indices.dtype}; coordinates are torch.int32 or torch.int64, as indices.int() is"
            )
        if indices.ndim != 2 or indices.shape[1] != width:
            raise FormatError(
                f"indices is {list(indices.shape)} but spatial_shape is {list(self.spatial_shape)}; it must be "
                f"[N, {width}], the batch and then a coordinate for each axis"
            )

    def is_checked(self, indices: Tensor) -> bool:
        """These very voxels were found right before, and nobody has changed them since."""
        known: _Checked | None = getattr(indices, _CHECKED, None)
        if not known or known.grid != self:  # nor what a pickle has of it
            return False
        if known.guard is None:
            return True
        if is_compiling():  # a tracer's tensors lie nowhere
            return known.guard.has_version_of(indices)
        return known.guard.holds_for(indices)

    def mark_checked(self, indices: Tensor) -> None:
        if not is_compiling():
            setattr(indices, _CHECKED, _Checked(self, ChangeGuard.of(indices)))

    def check(self, indices: Tensor) -> None:
        """Raise on a voxel outside the grid or given twice; looked at once per tensor."""
        if not self.is_checked(indices):
            self.check_inside(indices)
            self.check_distinct(indices)
            self.mark_checked(indices)

    def check_inside(self, indices: Tensor) -> None:
        sizes = indices.new_tensor([self.batch_size, *self.spatial_shape], dtype=torch.int64)
        is_outside = (indices < 0) | (indices >= sizes)
        if not bool(is_outside.any()):
            return
        row, column = is_outside.nonzero()[0].tolist()
        voxel = indices[row].tolist()
        if column == 0:
            raise FormatError(
                f"indices[{row}] is {voxel}, whose batch index {voxel[0]} is outside batch_size {self.batch_size}; "
                "column 0 is the batch"
            )
        raise FormatError(
            f"indices[{row}] is {voxel}, whose coordinate {voxel[column]} on axis {column - 1} is outside "
            f"spatial_shape {list(self.spatial_shape)}; drop such voxels or enlarge spatial_shape"
        )

    def check_distinct(self, indices: Tensor) -> None:
        """No voxel is given twice; expects all of them inside."""
        keys, order = self.keys(indices).sort(stable=True)
        again = (keys[1:] == keys[:-1]).nonzero().flatten()
        if len(again):
            first, second = order[again[0] : again[0] + 2].tolist()
            raise FormatError(
                f"indices[{first}] and indices[{second}] are both {indices[first].tolist()}; give each voxel once "
                "and merge the features of its points first"
            )


def _whole(batch_size: Any) -> int:
    try:
        whole = int(batch_size)
        is_whole = bool(whole == batch_size)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise FormatError(f"batch_size is {batch_size}; it is a whole number")
    return whole
