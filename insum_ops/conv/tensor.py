"""Features on the occupied voxels of a batch of grids: what sparse convolutions take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from ..compiler import OperandError, ShapeError
from ..formats.moves import Moves, Target, destination, pinned
from ..formats.not_tensors import no_attribute
from ..formats.torch_state import is_followed
from ..formats.voxels.geometry import MapLayout
from ..formats.voxels.grid import VoxelGrid
from ..formats.voxels.map_operators import checked
from .operators import same_rows
from .saved_maps import SavesMaps

# pickles look for all of these here
from .voxels import CachedMap, Found, Layout, MapCache, SavedMap, Stamp, Voxels, guard_of  # noqa: F401

__all__ = ["SparseConvTensor"]


@dataclass(init=False, eq=False, repr=False)
class _Fields:
    """The fields of a `SparseConvTensor`, by which torch finds its tensors; each is an argument of the constructor."""

    features: Tensor
    indices: Tensor
    spatial_shape: list[int]
    batch_size: int
    grid: Tensor | None
    voxel_num: Tensor | None
    benchmark: bool
    map_cache: MapCache


def _not_a_tensor(problem: str) -> str:
    """Say that torch was about to take a sparse tensor for a tensor, and what takes it."""
    return (
        f"a SparseConvTensor is not a tensor, so {problem}; use its features, as in x.replace_feature(f(x.features)), "
        "and insum_ops.nn.SparseSequential in the place of nn.Sequential"
    )


class SparseConvTensor(Moves, SavesMaps, _Fields):
    """Features [N, C] on the occupied voxels, `indices` [N, 1+D], of a batch of grids of `spatial_shape`.

    It is what every sparse convolution takes and returns, with the arguments of spconv's class of this name. Row order
    is kept by submanifold convolutions, and what strided and transposed ones make is ascending by (batch, coordinates).
    Voxels are checked when they are first used. Kernel maps are kept with the voxels, so that layers of one geometry
    share them. `features`, `indices`, `spatial_shape` and `batch_size` are not set on a tensor: make another, as by
    `replace_feature`. `x + y` adds features on the same voxels.

    Torch finds the tensors in it: it is a dataclass and a node of torch's pytrees. So it goes in and out of modules
    under DistributedDataParallel (`static_graph` and `find_unused_parameters` too), `fully_shard` and
    `torch.utils.checkpoint(..., use_reentrant=False)`, and `tree_map(lambda tensor: tensor.to(device), x)` moves it.
    Torch looks for tensors alone, and so not into this one, in a checkpoint with `use_reentrant=True`, in
    `nn.DataParallel` and in backward hooks of modules: pass `features` where you need one of these.

    Args:
        features: features of the voxels [N, C].
        indices: voxels [N, 1+D], int32 or int64, each given once: the batch index, then a coordinate for each axis.
        spatial_shape: cells on each of one to four axes.
        batch_size: how many grids there are.
        grid: kept for code written for spconv, and not used.
        voxel_num: kept for code written for spconv, and not used.
        indice_dict: kernel maps by indice_key, shared with another tensor; None for none yet.
        benchmark: kept for code written for spconv, and not used.
        map_cache: that of another tensor, whose kernel maps are used again where the indices are the same.

    Raises:
        OperandError: features are no tensor, or on another device than the indices.
        ShapeError: features are not [N, C].
        FormatError: indices are not integers [N, 1+D], or `spatial_shape` or `batch_size` is no size of a grid; when
            first used, a voxel is given twice or lies outside the grid.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor
        >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
        >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
        >>> x
        SparseConvTensor(voxels=2, channels=1, spatial_shape=[3, 2], batch_size=1, dtype=torch.float32)
        >>> x.dense()
        tensor([[[[0., 1.],
                  [0., 0.],
                  [2., 0.]]]])
        >>> x.features.tolist(), x.indices.tolist(), x.spatial_shape, x.batch_size, x.spatial_size
        ([[1.0], [2.0]], [[0, 0, 1], [0, 2, 0]], [3, 2], 1, 6)
        >>> clone = SparseConvTensor(x.features, x.indices, [3, 2], batch_size=1, map_cache=x.map_cache)
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, SavedMap] | None = None,
        benchmark: bool = False,
        map_cache: MapCache | None = None,
    ) -> None:
        voxel_grid = VoxelGrid(spatial_shape, batch_size)  # type: ignore[arg-type]  # which makes a tuple of them
        voxel_grid.check_kind(indices)
        voxels, saved = (Voxels.of(indices, voxel_grid), {}) if map_cache is None else map_cache.on(indices, voxel_grid)
        self._hold(features, voxels, saved if indice_dict is None else indice_dict)
        if indices.device != features.device:
            raise OperandError(f"features are on {features.device} but indices on {indices.device}; move one")
        self.grid, self.voxel_num, self.benchmark = grid, voxel_num, benchmark

    def _hold(self, features: Tensor, voxels: Voxels, indice_dict: dict[str, SavedMap]) -> None:
        """Set the features, voxels and saved maps; refuse features that are not [voxels, channels]."""
        if not isinstance(features, Tensor):
            raise OperandError(f"features is of type {type(features).__name__}; pass a tensor [voxels, channels]")
        if features.is_nested:
            raise OperandError(
                "features is a nested tensor; pass one [voxels, channels], as torch.cat(features.unbind())"
            )
        shape = features.shape
        if len(shape) != 2 or shape[0] != voxels.indices.shape[0]:
            raise ShapeError(
                f"features is {list(shape)} but there are {len(voxels.indices)} voxels; features are [voxels, channels]"
            )
        self._features, self.voxels, self.indice_dict = features, voxels, indice_dict

    @property
    def features(self) -> Tensor:
        """The features of the voxels [N, C]; `replace_feature` makes a tensor with others."""
        return self._features

    @features.setter
    def features(self, features: Tensor) -> None:
        if features is self._features:  # copying a dataclass field by field sets the same ones
            return
        is_tensor = isinstance(features, Tensor)
        if not is_tensor or features.shape != self._features.shape or features.dtype == self._features.dtype:
            raise OperandError("features of a SparseConvTensor are not set; write x = x.replace_feature(features)")
        self._features = features  # the same ones in another type, as casting a dataclass field by field sets them

    @property
    def indices(self) -> Tensor:
        """The voxels [N, 1+D], int32 or int64: the batch index, then a coordinate for each axis."""
        return self.voxels.indices

    @indices.setter
    def indices(self, indices: Tensor) -> None:
        if indices is not self.indices:
            raise OperandError(
                "indices of a SparseConvTensor are not set; write "
                "x = SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)"
            )

    @property
    def spatial_shape(self) -> list[int]:
        """The cells on each axis, as a list of D numbers."""
        return list(self.voxels.grid.spatial_shape)

    @spatial_shape.setter
    def spatial_shape(self, spatial_shape: Sequence[int]) -> None:
        if list(spatial_shape) != self.spatial_shape:
            raise OperandError(
                "spatial_shape of a SparseConvTensor is not set; write "
                "x = SparseConvTensor(x.features, x.indices, spatial_shape, x.batch_size)"
            )

    @property
    def batch_size(self) -> int:
        """How many grids the batch holds."""
        return self.voxels.grid.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        if batch_size != self.batch_size:
            raise OperandError(
                "batch_size of a SparseConvTensor is not set; write "
                "x = SparseConvTensor(x.features, x.indices, x.spatial_shape, batch_size)"
            )

    @property
    def map_cache(self) -> MapCache:
        """The kernel maps of this tensor, for the constructor of another one with the same indices."""
        return MapCache(self.voxels, self.indice_dict)

    @map_cache.setter
    def map_cache(self, map_cache: MapCache) -> None:
        self.voxels, self.indice_dict = map_cache.on(self.indices, self.voxels.grid)

    @property
    def spatial_size(self) -> int:
        """How many cells one grid has."""
        return prod(self.voxels.grid.spatial_shape)

    def replace_feature(self, features: Tensor) -> SparseConvTensor:
        """Return a tensor with other features on the same voxels, sharing the kernel maps.

        Args:
            features: features [N, C] in the order of the voxels, of any number of channels.

        Returns:
            A new `SparseConvTensor`; this one stays as it is.

        Raises:
            OperandError: features are no tensor.
            ShapeError: features are not [N, C].

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.replace_feature(x.features.relu()).features.tolist()
            [[1.0], [2.0]]
        """
        try:
            return self.at(features, self.voxels)
        except ShapeError as error:
            if features.dim() != 2:
                raise
            raise ShapeError(
                f"{error}; with other voxels write "
                "x = SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)"
            ) from None

    def at(self, features: Tensor, voxels: Voxels) -> SparseConvTensor:
        """Return a tensor with features on other voxels, sharing the saved kernel maps; a layer's output is made by it.

        Args:
            features: features [X, C] in the order of the voxels.
            voxels: what `map` or `inverse_map` gives beside a kernel map.

        Returns:
            A new `SparseConvTensor`.

        Raises:
            OperandError: features are no tensor.
            ShapeError: features are not [X, C].

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.at(torch.zeros(2, 5), x.voxels)
            SparseConvTensor(voxels=2, channels=5, spatial_shape=[3, 2], batch_size=1, dtype=torch.float32)
        """
        result = object.__new__(SparseConvTensor)
        saved = self.indice_dict
        if voxels.saves is not None:  # not in the tensor that was given: a tracer would see a change of it
            key, made = voxels.saves
            voxels, saved = made.target, {**saved, key: made}
        result._hold(features, voxels, saved)
        result.grid, result.voxel_num, result.benchmark = self.grid, None, False
        return result

    def shadow_copy(self) -> SparseConvTensor:
        """Return another `SparseConvTensor` over the same features, voxels and kernel maps, as spconv does.

        Returns:
            A new `SparseConvTensor`; nothing is copied.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.shadow_copy().features is x.features
            True
        """
        return self.replace_feature(self._features)

    def to(
        self,
        device: Target = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> SparseConvTensor:
        """Return the tensor on another device, or with features of another dtype, or both.

        Args:
            device: where to, or a dtype or a tensor that has both in its place; None to stay.
            dtype: of what type the features are to be; None for the type they have.
            non_blocking: whether to copy without waiting, as `Tensor.to` does.

        Returns:
            The tensor itself where nothing changes. On the same device kernel maps are shared; on another one they are
            worked out again, and what was saved under an indice_key is not there.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.to(torch.float16).features.dtype, x.half().features.dtype
            (torch.float16, torch.float16)
        """
        device, dtype = destination(device, dtype)
        place = self._features.device if device is None else device
        features = self._features.to(device=place, dtype=dtype, non_blocking=non_blocking)
        if features.device == self.indices.device:
            return self if features is self._features else self.replace_feature(features)
        return self._over(features, self.indices.to(features.device, non_blocking=non_blocking))

    def pin_memory(self) -> SparseConvTensor:
        """Return the tensor in pinned memory, from which a GPU copies while the host goes on; a DataLoader calls it.

        Returns:
            A new `SparseConvTensor`.

        Raises:
            RuntimeError: torch finds no accelerator to pin memory for.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> pinned = x.pin_memory() if torch.cuda.is_available() else x
        """
        return self._over(pinned(self._features), pinned(self.indices))

    def share_memory_(self) -> SparseConvTensor:
        """Move features and voxels into memory that processes share, so that they are sent without a copy.

        Returns:
            The tensor itself.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.share_memory_().features.is_shared()
            True
        """
        self._features.share_memory_()
        self.indices.share_memory_()
        return self

    def _over(self, features: Tensor, indices: Tensor) -> SparseConvTensor:
        """Return a tensor over copies of features and voxels, without kernel maps."""
        grid = self.voxels.grid
        extra = self.grid, self.voxel_num, None, self.benchmark
        return SparseConvTensor(features, indices, grid.spatial_shape, grid.batch_size, *extra)

    def __getstate__(self) -> dict[str, Any]:
        """Return tensors and sizes for pickle and deepcopy, and of saved kernel maps what they are worked out of."""
        saved = {key: (tuple(each.layout), each.source.indices, *_sizes(each.source)) for key, each in self._lasting()}
        names = ("grid", "voxel_num", "benchmark")
        parts = {name: getattr(self, name) for name in names}
        return {
            **parts,
            "features": self._features,
            "indices": self.indices,
            "sizes": _sizes(self.voxels),
            "maps": saved,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle; those of earlier versions hold all attributes."""
        if "sizes" not in state:
            vars(self).update(state)
            return
        spatial_shape, batch_size = state["sizes"]
        extra = state["grid"], state["voxel_num"], None, state["benchmark"]
        self.__init__(state["features"], state["indices"], spatial_shape, batch_size, *extra)  # type: ignore[misc]
        by_tensor = {id(self.indices): self.voxels}
        for key, (layout, indices, shape, batch) in state["maps"].items():
            source = by_tensor.setdefault(id(indices), Voxels.of(indices, VoxelGrid(tuple(shape), batch)))
            kernel_map, target = source.map(MapLayout(*layout))
            by_tensor[id(target.indices)] = target
            self.indice_dict[key] = SavedMap(kernel_map, MapLayout(*layout), source, target, guard_of(indices))

    def _lasting(self) -> list[tuple[str, SavedMap]]:
        """Return the saved maps that a tracer has not left behind, by their keys."""
        saved = [(key, self.find_indice_pair(key)) for key in self.indice_dict]
        return [(key, each) for key, each in saved if each is not None]

    def select_by_index(self, valid: Tensor) -> SparseConvTensor:
        """Return the voxels that a mask or a list of rows picks, as a tensor of its own.

        Args:
            valid: bool [N], true for the voxels to keep, or integers [n], their rows.

        Returns:
            A `SparseConvTensor` without kernel maps.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.select_by_index(x.features[:, 0] > 1).indices.tolist()
            [[0, 2, 0]]
        """
        grid = self.voxels.grid
        return SparseConvTensor(self._features[valid], self.indices[valid], grid.spatial_shape, grid.batch_size)

    def dense(self, channels_first: bool = True) -> Tensor:
        """Return the features on the whole grid, zero where there is no voxel.

        Args:
            channels_first: whether the channels come after the batch, as dense convolutions take them, or last.

        Returns:
            [batch_size, C, *spatial_shape], or [batch_size, *spatial_shape, C].

        Raises:
            FormatError: a voxel is given twice or lies outside the grid.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> x.dense().shape, x.dense(channels_first=False).shape
            (torch.Size([1, 1, 3, 2]), torch.Size([1, 3, 2, 1]))
        """
        grid, features, indices = self.voxels.grid, self._features, self.indices
        if is_followed(indices):
            indices = checked(indices, grid)
        else:
            grid.check(indices)
        flat = features.new_zeros(grid.cells, features.shape[1]).index_copy(0, grid.keys(indices), features)
        dense = flat.view(grid.batch_size, *grid.spatial_shape, features.shape[1])
        return dense.movedim(-1, 1).contiguous() if channels_first else dense

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """Return the cells of a dense tensor that hold anything but zeros.

        Args:
            x: dense tensor [batch_size, *spatial_shape, C], channels last.

        Returns:
            A `SparseConvTensor` with those cells as voxels, int32, ascending by batch and coordinates.

        Raises:
            ShapeError: x has no axis between batch and channels.
            FormatError: x has more than four axes between batch and channels.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> x = SparseConvTensor.from_dense(torch.tensor([[[0.0], [5.0], [7.0]]]))
            >>> x.indices.tolist(), x.features.tolist(), x.spatial_shape
            ([[0, 1], [0, 2]], [[5.0], [7.0]], [3])
        """
        if x.ndim < 3:
            raise ShapeError(f"x is {list(x.shape)}; it must be [batch, *spatial_shape, channels]")
        indices = (x != 0).any(-1).nonzero()
        return cls(x[tuple(indices.T)], indices.int(), x.shape[1:-1], len(x))

    if not TYPE_CHECKING:  # to which every attribute would be one

        def __getattr__(self, name: str) -> Any:
            """Refuse what a tensor has, and the sparse tensor has not."""
            if hasattr(type(self), name):  # a property has said why there is none
                return object.__getattribute__(self, name)
            if hasattr(Tensor, name) and not name.startswith("_"):
                raise AttributeError(_not_a_tensor(f"it has no {name}"), obj=self)
            raise no_attribute(self, name, "x", {})

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse functions and plain modules of torch, which take features; what calls a function may hand it on."""
        if isinstance(function, HigherOrderOperator):  # as a checkpoint inside of torch.compile
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise TypeError(_not_a_tensor(f"torch's {function.__name__} does not take it"))

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        if not isinstance(other, SparseConvTensor):
            return self.replace_feature(self._features + other)
        refusal = "the two tensors lie on different voxels; bring them to the same ones to add them"
        added = other._features
        if not is_followed(self.indices) or self.voxels.grid != other.voxels.grid:
            if not self.voxels.is_same(other.voxels):
                raise OperandError(refusal)
        elif not self.voxels.is_one(other.voxels):  # to a tracer their sizes may be two symbols
            added = added[same_rows(self.indices, other.indices, refusal)]
        return self.replace_feature(self._features + added)

    def __repr__(self) -> str:
        leaves: tuple[object, ...] = self._features, self.indices
        if not all(isinstance(leaf, Tensor) for leaf in leaves):  # whatever a pytree's function made of them
            return f"SparseConvTensor(spatial_shape={self.spatial_shape}, batch_size={self.batch_size})"
        return (
            f"SparseConvTensor(voxels={len(self.indices)}, channels={self._features.shape[1]}, "
            f"spatial_shape={self.spatial_shape}, batch_size={self.batch_size}, dtype={self._features.dtype})"
        )


def _sizes(voxels: Voxels) -> tuple[list[int], int]:
    """Return the spatial shape and the batch size of voxels, as a file holds them."""
    return list(voxels.grid.spatial_shape), voxels.grid.batch_size
