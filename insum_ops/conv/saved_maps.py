"""The kernel maps of layers over a tensor's voxels, saved with it under keys for the layers that follow."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..compiler import OperandError
from ..formats.guard import is_real
from ..formats.torch_state import is_followed
from ..formats.voxels.geometry import MapLayout
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_building import parts_of
from ..formats.voxels.map_operators import from_parts
from .operators import same_rows
from .voxels import SavedMap, Voxels, guard_of

__all__ = ["SavesMaps"]

Sizes = tuple[int, ...]


class SavesMaps:
    """What a `SparseConvTensor` knows of kernel maps: those over its voxels, and those saved under keys."""

    if TYPE_CHECKING:
        indices: Tensor
        indice_dict: dict[str, SavedMap]
        voxels: Voxels

    def find_indice_pair(self, key: str | None) -> SavedMap | None:
        """Return what a layer saved under an indice_key.

        Args:
            key: the key that the layer has; None finds nothing.

        Returns:
            The saved map, with the attributes `kernel_map`, `layout`, `source` and `target`; None where nothing was
            saved.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> from insum_ops.nn import SparseConv2d
            >>> y = SparseConv2d(1, 4, kernel_size=2, indice_key="down1")(x)
            >>> y.find_indice_pair("down1").kernel_map.kind, y.find_indice_pair("other")
            ('strided', None)
        """
        saved = None if key is None else self.indice_dict.get(key)
        if key is None or saved is None or saved.is_lasting or is_followed(self.indices):
            return saved
        if not (is_real(saved.source.indices) and is_real(saved.target.indices)):  # a tracer has left it behind
            return None
        guard, made = guard_of(saved.source.indices), from_parts(parts_of(saved.kernel_map))
        saved = self.indice_dict[key] = saved._replace(kernel_map=made, guard=guard, is_lasting=True)
        return saved

    def map(self, layout: MapLayout, indice_key: str | None) -> tuple[KernelMap, Voxels]:
        """Return the kernel map of a layer over these voxels, and the voxels that it leads to.

        A map is worked out once for each geometry. Under a key it is saved as well, for inverse convolutions.

        Args:
            layout: the geometry of a layer, its attribute `layout`.
            indice_key: the name to save the map under, or to find it by; None for neither.

        Returns:
            (kernel map, voxels), the voxels for `at`.

        Raises:
            OperandError: the key was saved by a layer of another geometry, for other voxels, or before indices were
                changed in place.
            FormatError: a voxel is given twice or lies outside the grid, or no cell is left of it.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> from insum_ops.nn import SubMConv2d
            >>> kernel_map, voxels = x.map(SubMConv2d(1, 1, kernel_size=3).layout, "subm1")
            >>> kernel_map
            KernelMap(subm, inputs=2, outputs=2, kernel_size=[3, 3], stride=[1, 1], padding=[1, 1], dilation=[1, 1])
        """
        if indice_key is None:
            return self.voxels.map(layout)
        saved = self.find_indice_pair(indice_key)
        is_traced = is_followed(self.indices)
        if saved is None or (is_traced and not saved.source.is_one(self.voxels)):  # which a tracer could not compare
            kernel_map, target = self.voxels.map(layout)
            guard = None if is_traced else guard_of(self.indices)
            saved = SavedMap(kernel_map, layout, self.voxels, target, guard, not is_traced)
            if is_traced:
                return kernel_map, Voxels(target.indices, target.grid, {}, None, (indice_key, saved))
            self.indice_dict[indice_key] = saved
            return kernel_map, target
        if saved.layout != layout:
            raise OperandError(
                f"indice_key {indice_key!r} was saved by a layer with {_words(saved.layout)}, but this one has "
                f"{_words(layout)}; give it another key"
            )
        if is_traced:
            return parts_of(saved.kernel_map), saved.target  # type: ignore[return-value]  # which stand for a map
        if not saved.source.is_same(self.voxels):
            raise OperandError(
                f"indice_key {indice_key!r} was saved for {_place(saved.source)}, but this layer got "
                f"{_place(self.voxels)}; give it another key"
            )
        _refuse_changed(saved, indice_key)
        if layout.kind == "subm":
            return saved.kernel_map, self.voxels
        if not saved.target.is_as_made():
            raise OperandError(
                f"indice_key {indice_key!r} leads to voxels whose indices were changed in place since it was saved; "
                "change a clone of them"
            )
        return saved.kernel_map, saved.target

    def inverse_map(self, kernel_size: Sizes, indice_key: str) -> tuple[KernelMap, Voxels]:
        """Return the map that was saved under a key with inputs and outputs swapped, and the voxels that it came from.

        Args:
            kernel_size: taps on each axis of the inverse convolution, those of the layer that saved the map.
            indice_key: the key of that layer, a strided or transposed convolution or a pooling layer.

        Returns:
            (kernel map, voxels), the voxels for `at`.

        Raises:
            OperandError: nothing was saved under the key, or by a submanifold convolution, with another kernel_size,
                for other voxels, or before indices were changed in place.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor
            >>> indices = torch.tensor([[0, 0, 1], [0, 2, 0]])  # batch, y, x
            >>> x = SparseConvTensor(torch.tensor([[1.0], [2.0]]), indices, spatial_shape=[3, 2], batch_size=1)
            >>> from insum_ops.nn import SparseConv2d
            >>> y = SparseConv2d(1, 4, kernel_size=2, indice_key="down1")(x)
            >>> kernel_map, voxels = y.inverse_map((2, 2), "down1")
            >>> voxels.indices is x.indices
            True
        """
        saved = self.find_indice_pair(indice_key)
        if saved is None:
            keys = ", ".join(map(repr, self.indice_dict)) or "none"
            one = "one of kernel_size 1 and stride 1 keeps its voxels and saves no map: a second such one undoes it"
            raise OperandError(
                f"no map was saved under indice_key {indice_key!r}; saved are {keys}; give the key to the strided "
                f"convolution that this one is to undo{f'; {one}' if prod(kernel_size) == 1 else ''}"
            )
        if saved.layout.kind == "subm":
            raise OperandError(
                f"indice_key {indice_key!r} was saved by a submanifold convolution, which keeps its voxels; "
                "an inverse convolution undoes a strided or transposed one"
            )
        if saved.layout.kernel_size != kernel_size:
            raise OperandError(
                f"indice_key {indice_key!r} was saved with kernel_size {list(saved.layout.kernel_size)}, but this "
                f"inverse has {list(kernel_size)}; they must agree"
            )
        is_traced = is_followed(self.indices)
        if not (saved.target.is_one(self.voxels) if is_traced else saved.target.is_same(self.voxels)):
            remedy = "bring the features to the voxels that the strided convolution made"
            if not is_traced or saved.target.grid != self.voxels.grid:
                raise OperandError(
                    f"indice_key {indice_key!r} leads back from {_place(saved.target)}, but this inverse got "
                    f"{_place(self.voxels)}; {remedy}"
                )
            refusal = f"indice_key {indice_key!r} leads back from other voxels than this inverse got; {remedy}"
            target = saved.target.indices[same_rows(self.indices, saved.target.indices, refusal)]
            return replace(parts_of(saved.kernel_map), target=target).inverse, saved.source  # type: ignore[return-value]
        if is_traced:
            return parts_of(saved.kernel_map).inverse, saved.source  # type: ignore[return-value]
        _refuse_changed(saved, indice_key)
        return saved.kernel_map.inverse, saved.source


def _refuse_changed(saved: SavedMap, indice_key: str) -> None:
    """Refuse a saved map whose indices were changed in place since."""
    if saved.guard is None or not saved.guard.hold():
        raise OperandError(
            f"indice_key {indice_key!r} was saved before the indices of its voxels were changed in place; "
            "make a new SparseConvTensor of the changed ones"
        )


def _words(layout: MapLayout) -> str:
    """Return the geometry of a layer as text, for an error."""
    kind, *numbers = layout
    named: list[Any] = [f"{name} {list(sizes)}" for name, sizes in zip(MapLayout._fields[1:5], numbers)]
    return f"kind {kind!r}, {', '.join(named)}"


def _place(voxels: Voxels) -> str:
    """Return the number of voxels and their grid as text, for an error."""
    return f"{len(voxels.indices)} voxels of spatial_shape {list(voxels.grid.spatial_shape)}"
