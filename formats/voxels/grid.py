"""A batch of voxel grids: coordinates as flat keys, and what makes a list of voxels wrong."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...identity_cache import ByIdentity
from ..check import COORD_DTYPES, check_has_numbers, integer_sizes
from ..errors import FormatError
from ..guard import ChangeGuard
from ..torch_state import is_batched, is_compiling, undifferentiated

__all__ = ["VoxelGrid"]

LARGEST_DIM = 4


@dataclass(frozen=True)
class VoxelGrid:
    """`batch_size` grids of `spatial_shape` cells each; a row of indices is (batch, one coordinate per axis)."""

    spatial_shape: tuple[int, ...]
    batch_size: int

    def __post_init__(self) -> None:
        sizes, batch_size = integer_sizes("spatial_shape", self.spatial_shape), _integer(self.batch_size)
        for name, value in (("spatial_shape", sizes), ("batch_size", batch_size)):
            object.__setattr__(self, name, value)  # and not by vars: Dynamo of torch 2.11 traces this alone
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
        """Return the flat cell of each voxel, int64 [N]: batch first, the last axis fastest."""
        key = indices[:, 0].long()
        for axis, size in enumerate(self.spatial_shape):
            key = key * size + indices[:, 1 + axis]
        return key

    def indices(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the voxels that `keys` stand for, [N, 1+D]."""
        columns = []
        for size in reversed(self.spatial_shape):
            columns.append(keys % size)
            keys = keys // size
        return torch.stack([keys, *reversed(columns)], 1).to(dtype)

    def check_kind(self, indices: Tensor) -> None:
        """Raise FormatError if the voxels have another dtype or shape; no data is read."""
        if not isinstance(indices, Tensor):
            raise FormatError(f"indices is of type {type(indices).__name__}; pass an int32 tensor [N, 1 + axes]")
        if type(indices).__name__ == "DTensor":
            raise FormatError(
                "indices is a DTensor, but a convolution needs all voxels on every rank; pass indices.full_tensor(), "
                "and split features or weights by their channels"
            )
        width = 1 + len(self.spatial_shape)
        if indices.dtype not in COORD_DTYPES:
            raise FormatError(
                f"indices is {indices.dtype}; coordinates are torch.int32 or torch.int64, as indices.int() is"
            )
        if indices.ndim != 2 or indices.shape[1] != width:
            raise FormatError(
                f"indices is {list(indices.shape)} but spatial_shape is {list(self.spatial_shape)}; it must be "
                f"[N, {width}], the batch and then a coordinate for each axis"
            )
        if not is_compiling() and is_batched(undifferentiated(indices)):
            raise FormatError(
                "indices is batched by torch.func.vmap, but voxels are the same for all examples; batch the features, "
                "or list all clouds in one tensor, told apart by the batch index in column 0"
            )

    def is_checked(self, indices: Tensor) -> bool:
        """Return whether these very voxels were checked before and have not changed since."""
        grid, guard = _checked.get(indices) or (None, None)
        return grid == self and (guard is None or guard.holds_for(indices))

    def mark_checked(self, indices: Tensor) -> None:
        """Note of the tensor that its voxels are inside the grid and distinct."""
        _checked.keep(indices, (self, ChangeGuard.of(indices)))

    def check(self, indices: Tensor) -> None:
        """Raise FormatError if a voxel is outside the grid or given twice; each tensor is looked at once."""
        if not self.is_checked(indices):
            self.check_inside(indices)
            self.check_distinct(indices)
            self.mark_checked(indices)

    def check_inside(self, indices: Tensor) -> None:
        """Raise FormatError if a voxel is outside the grid."""
        check_has_numbers("indices", indices)
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
        """Raise FormatError if a voxel is given twice; all of them must be inside the grid."""
        keys, order = self.keys(indices).sort(stable=True)
        repeated = (keys[1:] == keys[:-1]).nonzero().flatten()
        if len(repeated):
            first, second = order[repeated[0] : repeated[0] + 2].tolist()
            raise FormatError(
                f"indices[{first}] and indices[{second}] are both {indices[first].tolist()}; give each voxel once "
                "and merge the features of its points first"
            )

    def assert_right(self, indices: Tensor) -> None:
        """Let an exported program stop at a voxel that is outside the grid or given twice; nothing is read now."""
        sizes = torch.tensor([self.batch_size, *self.spatial_shape], dtype=torch.int64, device=indices.device)
        keys = self.keys(indices).sort().values
        is_right = ((indices >= 0) & (indices < sizes)).all() & (keys[1:] != keys[:-1]).all()
        torch._assert_async(
            is_right, f"a voxel is given twice or lies outside spatial_shape {list(self.spatial_shape)}"
        )


def _integer(batch_size: Any) -> int:
    """Return the batch size as an integer; raise FormatError if it is no whole number."""
    try:
        integer = int(batch_size)
        is_integer = bool(integer == batch_size)
    except (TypeError, ValueError, OverflowError):
        is_integer = False
    if not is_integer:
        raise FormatError(f"batch_size is {batch_size}; it is a whole number")
    return integer


# the grid for which voxels were checked, and a guard of their tensor, None if that does not tell when it changes
_checked: ByIdentity[tuple[VoxelGrid, ChangeGuard | None]] = ByIdentity()
