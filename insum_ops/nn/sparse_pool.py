"""Pooling over the voxels that a window holds."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..conv_operands import neighbours
from ..formats.geometry import per_axis
from ..formats.kernel_map import KernelMap
from ..formats.torch_state import is_autocast_enabled, is_compiling, may_autocast
from ..functional import insum
from .sparse_conv_tensor import Layout, SparseConvTensor
from .sparse_convolution import Size, SparseModule, check_input

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
        self.layout = Layout(kind, self.kernel_size, self.stride, self.padding, self.dilation, none)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        check_input(self, x, self.ndim)
        kernel_map, voxels = x.map(self.layout, self.indice_key)
        return x.at(self.pool(x.features, kernel_map), voxels)

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        words = [f"kernel_size={list(self.kernel_size)}, stride={list(self.stride)}"]
        words += [f"padding={list(self.padding)}"] if any(self.padding) else []
        words += [f"dilation={list(self.dilation)}"] if set(self.dilation) != {1} else []
        words += [f"indice_key={self.indice_key!r}"] if self.indice_key is not None else []
        words += ["subm=True"] if self.subm else []
        return ", ".join(words)


class _SparseMaxPool(SparsePool):
    EXPR = "Out[x,c] = max(In[NBR[x,z],c])"

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Out[x,c] = the largest In[NBR[x,z],c]; every output has a voxel in its window."""
        return _in_its_own_type(self.EXPR, In=features, **neighbours(kernel_map))


class _SparseAvgPool(SparsePool):
    EXPR = "Out[x,c] += Share[x] * In[NBR[x,z],c]"

    def pool(self, features: Tensor, kernel_map: KernelMap) -> Tensor:
        """Out[x,c] = the mean of In[NBR[x,z],c] over the voxels there are."""
        table = neighbours(kernel_map)
        Share = (table["NBR"] >= 0).sum(1).to(features.dtype).reciprocal()
        return _in_its_own_type(self.EXPR, Share=Share, In=features, **table)


def _in_its_own_type(expr: str, In: Tensor, **operands: Any) -> Tensor:
    """Pooling keeps the type of its input under autocast, as torch's does."""
    device = In.device.type
    if (is_compiling() or may_autocast()) and is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return insum(expr, In=In, **operands)
    return insum(expr, In=In, **operands)


class SparseMaxPool1d(_SparseMaxPool):
    """The largest feature in each window, along one axis."""

    ndim = 1


class SparseMaxPool2d(_SparseMaxPool):
    """The largest feature in each window, over two axes."""

    ndim = 2


class SparseMaxPool3d(_SparseMaxPool):
    """`Out[x,c] = max(In[NBR[x,z],c])`: the largest feature in each window, over three axes."""

    ndim = 3


class SparseMaxPool4d(_SparseMaxPool):
    """The largest feature in each window, over four axes."""

    ndim = 4


class SparseAvgPool1d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, along one axis."""

    ndim = 1


class SparseAvgPool2d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over two axes."""

    ndim = 2


class SparseAvgPool3d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over three axes."""

    ndim = 3


class SparseAvgPool4d(_SparseAvgPool):
    """`Out[x,c] += Share[x] * In[NBR[x,z],c]`: the mean over each window's voxels, over four axes."""

    ndim = 4
