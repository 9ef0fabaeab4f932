"""Pooling over the voxels that a window holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..formats.torch_state import is_autocast_enabled
from ..formats.voxels.geometry import MapLayout, per_axis
from ..formats.voxels.kernel_map import KernelMap
from ..functional import insum
from .convolution import Size, SparseModule, check_input, complete_classes
from .operands import neighbours
from .tensor import SparseConvTensor

__all__ = [
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparsePool",
]


class SparsePool(SparseModule):
    """A window slides as `nn.MaxPool3d`'s does; cells without a voxel take no part."""

    ndim: ClassVar[int]

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        indice_key: str | None = None,
        algo: object = None,
        record_voxel_count: bool = False,
        name: str | None = None,
        subm: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = per_axis("kernel_size", kernel_size, self.ndim, 1)
        none = (0,) * self.ndim
        stride = (1 if subm else self.kernel_size) if stride is None else stride
        self.stride = per_axis("stride", stride, self.ndim, 1)
        self.padding = none if subm else per_axis("padding", padding, self.ndim, 0)
        self.dilation = per_axis("dilation", dilation, self.ndim, 1)
        self.indice_key, self.subm, self.name = indice_key, subm, name
        kind = "subm" if subm else "strided"
        self.layout = MapLayout(kind, self.kernel_size, self.stride, self.padding, self.dilation, none)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Pool the features of a tensor.

        Args:
            x: features [N, C] on voxels.

        Returns:
            Features [X, C] on the voxels whose window holds a voxel of x; with `subm` on those of x.

        Raises:
            OperandError: x is no `SparseConvTensor`, its features are not floating point, or `indice_key` does not fit.
            ShapeError: x has another number of axes.
            FormatError: a voxel is given twice or lies outside `spatial_shape`, or no cell is left of it.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SparseMaxPool1d
            >>> x = SparseConvTensor(torch.tensor([[1.0], [5.0]]), torch.tensor([[0, 2], [0, 3]]), [4], batch_size=1)
            >>> SparseMaxPool1d(kernel_size=2)(x).features
            tensor([[5.]])
        """
        check_input(self, x, self.ndim)
        kernel_map, voxels = x.map(self.layout, self.indice_key)
        return x.at(self.pool(x.features, kernel_map), voxels)

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: SparseConvTensor) -> SparseConvTensor: ...

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Combine the features of each window; the two kinds of pooling differ in this alone.

        Args:
            features: features of the input voxels [N, C].
            kernel_map: which input voxels the window of each output holds.

        Returns:
            Features of the output voxels [X, C].

        Raises:
            NotImplementedError: this class itself does not say how.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> from insum_ops.nn import SparseAvgPool1d
            >>> windows = kernel_map(torch.tensor([[0, 2], [0, 3]]), [4], 1, kernel_size=2, stride=2, kind="strided")
            >>> SparseAvgPool1d(kernel_size=2).pool(torch.tensor([[1.0], [5.0]]), windows)
            tensor([[3.]])
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        words = [f"kernel_size={list(self.kernel_size)}, stride={list(self.stride)}"]
        words += [f"padding={list(self.padding)}"] if any(self.padding) else []
        words += [f"dilation={list(self.dilation)}"] if set(self.dilation) != {1} else []
        words += [f"indice_key={self.indice_key!r}"] if self.indice_key is not None else []
        words += ["subm=True"] if self.subm else []
        return ", ".join(words)


class _SparseMaxPool(SparsePool):
    EXPR = "Out[x,c] = max(In[NBR[x,z],c])"

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Out[x,c] = max(In[NBR[x,z],c]): the largest feature in each window, which holds at least one voxel.

        Args:
            features: features of the input voxels [N, C].
            kernel_map: which input voxels the window of each output holds.

        Returns:
            Features of the output voxels [X, C].

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> from insum_ops.nn import SparseMaxPool1d
            >>> windows = kernel_map(torch.tensor([[0, 2], [0, 3]]), [4], 1, kernel_size=2, stride=2, kind="strided")
            >>> SparseMaxPool1d(kernel_size=2).pool(torch.tensor([[1.0], [5.0]]), windows)
            tensor([[5.]])
        """
        return _in_its_own_type(self.EXPR, In=features, **neighbours(kernel_map))


class _SparseAvgPool(SparsePool):
    EXPR = "Out[x,c] += Share[x] * In[NBR[x,z],c]"

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Out[x,c] += Share[x] * In[NBR[x,z],c]: the mean over the voxels that each window holds.

        Args:
            features: features of the input voxels [N, C].
            kernel_map: which input voxels the window of each output holds.

        Returns:
            Features of the output voxels [X, C].

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> from insum_ops.nn import SparseAvgPool1d
            >>> windows = kernel_map(torch.tensor([[0, 2], [0, 3]]), [4], 1, kernel_size=2, stride=2, kind="strided")
            >>> SparseAvgPool1d(kernel_size=2).pool(torch.tensor([[1.0], [5.0]]), windows)
            tensor([[3.]])
        """
        table = neighbours(kernel_map)
        Share = (table["NBR"] >= 0).sum(1).to(features.dtype).reciprocal()
        return _in_its_own_type(self.EXPR, Share=Share, In=features, **table)


def _in_its_own_type(expr: str, In: Tensor, **operands: Any) -> Tensor:
    """Pooling keeps the type of its input under autocast, as torch's does."""
    device = In.device.type
    if is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return insum(expr, In=In, **operands)
    return insum(expr, In=In, **operands)


class SparseMaxPool1d(_SparseMaxPool):
    """`Out[x,c] = max(In[NBR[x,z],c])`: the largest feature in each window, over one axis.

    As `SparseMaxPool3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseMaxPool1d
        >>> indices = torch.tensor([[0, 0], [0, 1], [0, 3]])  # batch, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4], batch_size=1)
        >>> y = SparseMaxPool1d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[5.0], [-2.0]], [[0, 0], [0, 1]])
    """

    ndim = 1


class SparseMaxPool2d(_SparseMaxPool):
    """`Out[x,c] = max(In[NBR[x,z],c])`: the largest feature in each window, over two axes.

    As `SparseMaxPool3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseMaxPool2d
        >>> indices = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 3, 3]])  # batch, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4], batch_size=1)
        >>> y = SparseMaxPool2d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[5.0], [-2.0]], [[0, 0, 0], [0, 1, 1]])
    """

    ndim = 2


class SparseMaxPool3d(_SparseMaxPool):
    """`Out[x,c] = max(In[NBR[x,z],c])`: the largest feature in each window, over three axes.

    The window slides as that of `nn.MaxPool3d`, with the arguments of spconv's pooling layers. Cells without a voxel
    take no part, so the largest feature may be negative. The outputs are the cells whose window holds a voxel.

    A call takes a `SparseConvTensor` with features [N, C] at indices [N, 4], int32 or int64, each row the batch index
    and then 3 coordinates, each below its axis of `spatial_shape`. It returns one with features [X, C], of the same
    type under autocast too, ascending by batch and coordinates, or with `subm` at the same voxels in their order.

    Args:
        kernel_size: cells of the window on each axis, one number or one for each axis; odd with `subm`.
        stride: cells from one window to the next, one number or one for each axis; None for the kernel's size, or 1
            with `subm`.
        padding: cells added on both sides of each axis, which hold no voxel; not used with `subm`.
        dilation: cells from one of the window's cells to the next, one number or one for each axis.
        indice_key: name under which the tensor keeps the kernel map, for an inverse convolution that goes back, and for
            layers of the same geometry on the same voxels.
        algo: accepted for code written for spconv, and ignored.
        record_voxel_count: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        subm: whether the outputs are the input voxels, each in the middle of its window.

    Raises:
        FormatError: a size is no whole number, too small, or given for another number of axes; when a kernel map is
            made, a voxel is given twice or lies outside `spatial_shape`, no cell is left of it, or `subm` comes with an
            even kernel or a stride above 1.
        ShapeError: when called, a tensor with another number of axes.
        OperandError: when called, x is no `SparseConvTensor`, its features are not floating point, or `indice_key` was
            saved by a layer of another geometry or for other voxels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseMaxPool3d
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 3, 3, 3]])  # batch, z, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4, 4], batch_size=1)
        >>> y = SparseMaxPool3d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[5.0], [-2.0]], [[0, 0, 0, 0], [0, 1, 1, 1]])
    """

    ndim = 3


class SparseMaxPool4d(_SparseMaxPool):
    """`Out[x,c] = max(In[NBR[x,z],c])`: the largest feature in each window, over four axes.

    As `SparseMaxPool3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseMaxPool4d
        >>> indices = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 3, 3, 3, 3]])  # batch, t, z, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4, 4, 4], batch_size=1)
        >>> y = SparseMaxPool4d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[5.0], [-2.0]], [[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    """

    ndim = 4


class SparseAvgPool1d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over one axis.

    As `SparseAvgPool3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseAvgPool1d
        >>> indices = torch.tensor([[0, 0], [0, 1], [0, 3]])  # batch, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4], batch_size=1)
        >>> y = SparseAvgPool1d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[3.0], [-2.0]], [[0, 0], [0, 1]])
    """

    ndim = 1


class SparseAvgPool2d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over two axes.

    As `SparseAvgPool3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseAvgPool2d
        >>> indices = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 3, 3]])  # batch, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4], batch_size=1)
        >>> y = SparseAvgPool2d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[3.0], [-2.0]], [[0, 0, 0], [0, 1, 1]])
    """

    ndim = 2


class SparseAvgPool3d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over three axes.

    The window slides as that of `nn.AvgPool3d`, with the arguments of spconv's pooling layers. Cells without a voxel
    take no part: `Share[x]` is 1 over the number of voxels in window x, not of its cells. The outputs are the cells
    whose window holds a voxel.

    A call takes a `SparseConvTensor` with features [N, C] at indices [N, 4], int32 or int64, each row the batch index
    and then 3 coordinates, each below its axis of `spatial_shape`. It returns one with features [X, C], of the same
    type under autocast too, ascending by batch and coordinates, or with `subm` at the same voxels in their order.

    Args:
        kernel_size: cells of the window on each axis, one number or one for each axis; odd with `subm`.
        stride: cells from one window to the next, one number or one for each axis; None for the kernel's size, or 1
            with `subm`.
        padding: cells added on both sides of each axis, which hold no voxel; not used with `subm`.
        dilation: cells from one of the window's cells to the next, one number or one for each axis.
        indice_key: name under which the tensor keeps the kernel map, for an inverse convolution that goes back, and for
            layers of the same geometry on the same voxels.
        algo: accepted for code written for spconv, and ignored.
        record_voxel_count: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        subm: whether the outputs are the input voxels, each in the middle of its window.

    Raises:
        FormatError: a size is no whole number, too small, or given for another number of axes; when a kernel map is
            made, a voxel is given twice or lies outside `spatial_shape`, no cell is left of it, or `subm` comes with an
            even kernel or a stride above 1.
        ShapeError: when called, a tensor with another number of axes.
        OperandError: when called, x is no `SparseConvTensor`, its features are not floating point, or `indice_key` was
            saved by a layer of another geometry or for other voxels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseAvgPool3d
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 3, 3, 3]])  # batch, z, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4, 4], batch_size=1)
        >>> y = SparseAvgPool3d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[3.0], [-2.0]], [[0, 0, 0, 0], [0, 1, 1, 1]])
    """

    ndim = 3


class SparseAvgPool4d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over four axes.

    As `SparseAvgPool3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseAvgPool4d
        >>> indices = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 3, 3, 3, 3]])  # batch, t, z, y, x
        >>> features = torch.tensor([[1.0], [5.0], [-2.0]])
        >>> x = SparseConvTensor(features, indices, spatial_shape=[4, 4, 4, 4], batch_size=1)
        >>> y = SparseAvgPool4d(kernel_size=2)(x)
        >>> y.features.tolist(), y.indices.tolist()
        ([[3.0], [-2.0]], [[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    """

    ndim = 4


complete_classes({name: globals()[name] for name in __all__ if name != "SparsePool"})
