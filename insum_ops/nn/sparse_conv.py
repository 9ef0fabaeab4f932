"""`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]` as layers, with the names, arguments and weights of spconv."""

from __future__ import annotations

from ..compiler.errors import OperandError, ShapeError
from ..formats.kernel_map import KernelMap
from .sparse_conv_tensor import SparseConvTensor, Voxels
from .sparse_convolution import Size, SparseConvolution

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]


class _SubMConv(SparseConvolution):
    kind = "subm"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, indice_key, name=name
        )
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ShapeError(
                f"kernel_size is {list(self.kernel_size)}; a submanifold kernel has a centre, so each size is odd"
            )
        if max(self.stride) > 1:
            raise ShapeError(
                f"stride is {list(self.stride)}; a submanifold convolution keeps its voxels, so its stride is 1; "
                f"use SparseConv{self.ndim}d to downsample"
            )
        # any padding means the same: the kernel is centred
        self.layout = self.layout._replace(padding=(0,) * self.ndim)


class _SparseConv(SparseConvolution):
    kind = "strided"


class _SparseConvTranspose(SparseConvolution):
    kind = "transposed"


class _SparseInverseConv(SparseConvolution):
    kind = "inverse"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        indice_key: str,
        bias: bool = True,
        algo: object = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        groups: int = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, groups=groups, bias=bias, indice_key=indice_key, name=name
        )
        if not isinstance(indice_key, str):
            raise OperandError(f"indice_key is {indice_key!r}; name the key of the convolution that is to be undone")
        self.key = indice_key

    def map(self, x: SparseConvTensor) -> tuple[KernelMap, Voxels]:
        return x.inverse_map(self.kernel_size, self.key)


class SubMConv1d(_SubMConv):
    """Convolution whose outputs are its input voxels, in their order, along one axis."""

    ndim = 1


class SubMConv2d(_SubMConv):
    """Convolution whose outputs are its input voxels, in their order, over two axes."""

    ndim = 2


class SubMConv3d(_SubMConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution whose outputs are its input voxels, in their order."""

    ndim = 3


class SubMConv4d(_SubMConv):
    """Convolution whose outputs are its input voxels, in their order, over four axes."""

    ndim = 4


class SparseConv1d(_SparseConv):
    """`nn.Conv1d` on voxels."""

    ndim = 1


class SparseConv2d(_SparseConv):
    """`nn.Conv2d` on voxels."""

    ndim = 2


class SparseConv3d(_SparseConv):
    """`nn.Conv3d` on voxels: outputs are the cells that some voxel reaches, ascending by (batch, coordinates)."""

    ndim = 3


class SparseConv4d(_SparseConv):
    """The same over four axes."""

    ndim = 4


class SparseConvTranspose1d(_SparseConvTranspose):
    """`nn.ConvTranspose1d` on voxels."""

    ndim = 1


class SparseConvTranspose2d(_SparseConvTranspose):
    """`nn.ConvTranspose2d` on voxels."""

    ndim = 2


class SparseConvTranspose3d(_SparseConvTranspose):
    """`nn.ConvTranspose3d` on voxels: outputs are the cells that some voxel reaches, ascending."""

    ndim = 3


class SparseConvTranspose4d(_SparseConvTranspose):
    """The same over four axes."""

    ndim = 4


class SparseInverseConv1d(_SparseInverseConv):
    """Back from the outputs of the convolution that saved `indice_key` to its inputs, along one axis."""

    ndim = 1


class SparseInverseConv2d(_SparseInverseConv):
    """Back from the outputs of the convolution that saved `indice_key` to its inputs, over two axes."""

    ndim = 2


class SparseInverseConv3d(_SparseInverseConv):
    """Back from the outputs of the convolution that saved `indice_key` to its inputs: its map, swapped."""

    ndim = 3


class SparseInverseConv4d(_SparseInverseConv):
    """Back from the outputs of the convolution that saved `indice_key` to its inputs, over four axes."""

    ndim = 4
