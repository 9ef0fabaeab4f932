"""`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]` as layers, with the names, arguments and weights of spconv."""

from __future__ import annotations

from ..compiler import OperandError, ShapeError
from ..formats.voxels.kernel_map import KernelMap
from .convolution import Size, SparseConvolution, complete_classes
from .tensor import SparseConvTensor
from .voxels import Voxels

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
        """Return the kernel map that was saved under `indice_key`, backwards, and the voxels that it leads back to.

        Args:
            x: the tensor on the voxels that the earlier convolution made.

        Returns:
            (kernel map, voxels), as `SparseConvTensor.inverse_map` gives them.

        Raises:
            OperandError: the key has no map that this layer can go back over; see `SparseConvTensor.inverse_map`.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConv1d, SparseConvTensor, SparseInverseConv1d
            >>> x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
            >>> y = SparseConv1d(1, 4, kernel_size=2, stride=2, indice_key="down1")(x)
            >>> kernel_map, voxels = SparseInverseConv1d(4, 1, kernel_size=2, indice_key="down1").map(y)
            >>> kernel_map.kind, voxels.indices.tolist()
            ('inverse', [[0, 4], [0, 5]])
        """
        return x.inverse_map(self.kernel_size, self.key)


class SubMConv1d(_SubMConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over one axis whose outputs are its input voxels.

    As `SubMConv3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SubMConv1d
        >>> indices = torch.tensor([[0, 1], [0, 2], [0, 4]])  # batch, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[5], batch_size=1)
        >>> layer = SubMConv1d(16, 32, kernel_size=3, indice_key="subm1")
        >>> layer(x)
        SparseConvTensor(voxels=3, channels=32, spatial_shape=[5], batch_size=1, dtype=torch.float32)
        >>> list(layer.weight.shape)
        [32, 3, 16]
    """

    ndim = 1


class SubMConv2d(_SubMConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over two axes whose outputs are its input voxels.

    As `SubMConv3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SubMConv2d
        >>> indices = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 4, 4]])  # batch, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[5, 5], batch_size=1)
        >>> layer = SubMConv2d(16, 32, kernel_size=3, indice_key="subm1")
        >>> layer(x)
        SparseConvTensor(voxels=3, channels=32, spatial_shape=[5, 5], batch_size=1, dtype=torch.float32)
        >>> list(layer.weight.shape)
        [32, 3, 3, 16]
    """

    ndim = 2


class SubMConv3d(_SubMConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over three axes whose outputs are its input voxels.

    A submanifold convolution, with the arguments of spconv's `SubMConv3d`: the kernel is centred on each input voxel,
    and tap z of output x reads the voxel `NBR[x,z]`, if there is one. `weight` is [out_channels, *kernel_size,
    in_channels / groups] and `bias` [out_channels], as spconv stores them, and spconv's checkpoints load. With a kernel
    and a stride of 1 the layer is a matrix product, and the memory of `weight` holds the matrix [in_channels,
    out_channels], as spconv's does; `kernel` has it in the order that its shape says.

    A call takes a `SparseConvTensor` with features [N, in_channels] at indices [N, 4], int32 or int64, each row the
    batch index and then 3 coordinates, each below its axis of `spatial_shape`, and returns one with features [N,
    out_channels] at the same indices, in their order.

    Args:
        in_channels: channels of the input features, at least 1.
        out_channels: channels of the output features, at least 1.
        kernel_size: taps on each axis, one odd number or one for each axis.
        stride: 1, since the voxels stay.
        padding: accepted and ignored, since the kernel is centred.
        dilation: cells from one tap to the next, one number or one for each axis.
        groups: how many groups of channels are convolved apart; divides both numbers of channels.
        bias: whether a trained bias [out_channels] is added to every output voxel.
        indice_key: name under which the tensor keeps the kernel map; layers that share it have the same geometry and
            voxels. With None layers of one geometry share a map all the same.
        algo: accepted for code written for spconv, and ignored.
        fp32_accum: accepted for code written for spconv, and ignored.
        large_kernel_fast_algo: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.

    Raises:
        ShapeError: channels below 1, `groups` that does not divide them, an even kernel, or a stride above 1; when
            called, a tensor with another number of axes or channels.
        FormatError: a size is no whole number, too small, or given for another number of axes; when a kernel map is
            made, a voxel is given twice or lies outside `spatial_shape`.
        OperandError: when called, x is no `SparseConvTensor`, its features are not floating point, or `indice_key` was
            saved by a layer of another geometry or for other voxels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SubMConv3d
        >>> indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 4, 4, 4]])  # batch, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[5, 5, 5], batch_size=1)
        >>> layer = SubMConv3d(16, 32, kernel_size=3, indice_key="subm1")
        >>> layer(x)
        SparseConvTensor(voxels=3, channels=32, spatial_shape=[5, 5, 5], batch_size=1, dtype=torch.float32)
        >>> list(layer.weight.shape)
        [32, 3, 3, 3, 16]
    """

    ndim = 3


class SubMConv4d(_SubMConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: convolution over four axes whose outputs are its input voxels.

    As `SubMConv3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SubMConv4d
        >>> indices = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 2], [0, 4, 4, 4, 4]])  # batch, t, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[5, 5, 5, 5], batch_size=1)
        >>> layer = SubMConv4d(16, 32, kernel_size=3, indice_key="subm1")
        >>> layer(x)
        SparseConvTensor(voxels=3, channels=32, spatial_shape=[5, 5, 5, 5], batch_size=1, dtype=torch.float32)
        >>> list(layer.weight.shape)
        [32, 3, 3, 3, 3, 16]
    """

    ndim = 4


class SparseConv1d(_SparseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: strided sparse convolution over one axis.

    As `SparseConv3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConv1d
        >>> indices = torch.tensor([[0, 1], [0, 2], [0, 4]])  # batch, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6], batch_size=1)
        >>> y = SparseConv1d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")(x)
        >>> y
        SparseConvTensor(voxels=3, channels=32, spatial_shape=[3], batch_size=1, dtype=torch.float32)
        >>> y.indices[0].tolist()
        [0, 0]
    """

    ndim = 1


class SparseConv2d(_SparseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: strided sparse convolution over two axes.

    As `SparseConv3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConv2d
        >>> indices = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 4, 4]])  # batch, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6], batch_size=1)
        >>> y = SparseConv2d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")(x)
        >>> y
        SparseConvTensor(voxels=5, channels=32, spatial_shape=[3, 3], batch_size=1, dtype=torch.float32)
        >>> y.indices[0].tolist()
        [0, 0, 0]
    """

    ndim = 2


class SparseConv3d(_SparseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: strided sparse convolution over three axes.

    It computes what `nn.Conv3d` would on the dense grid, at every cell that some input voxel reaches, with the
    arguments of spconv's `SparseConv3d`. `weight` is [out_channels, *kernel_size, in_channels / groups] and `bias`
    [out_channels], as spconv stores them, and spconv's checkpoints load. With a kernel and a stride of 1 the layer is a
    matrix product, and the memory of `weight` holds the matrix [in_channels, out_channels], as spconv's does; `kernel`
    has it in the order that its shape says. Then the voxels stay in their order.

    A call takes a `SparseConvTensor` with features [N, in_channels] at indices [N, 4], int32 or int64, each row the
    batch index and then 3 coordinates, each below its axis of `spatial_shape`. It returns one with features [X,
    out_channels] at the cells that are reached, ascending by batch and coordinates, whose spatial_shape is that of the
    dense convolution's output.

    Args:
        in_channels: channels of the input features, at least 1.
        out_channels: channels of the output features, at least 1.
        kernel_size: taps on each axis, one number or one for each axis.
        stride: cells from one output to the next, one number or one for each axis.
        padding: cells added on both sides of each axis, one number or one for each axis.
        dilation: cells from one tap to the next, one number or one for each axis.
        groups: how many groups of channels are convolved apart; divides both numbers of channels.
        bias: whether a trained bias [out_channels] is added to every output voxel.
        indice_key: name under which the tensor keeps the kernel map, for a `SparseInverseConv3d` that goes back, and
            for layers of the same geometry on the same voxels.
        algo: accepted for code written for spconv, and ignored.
        fp32_accum: accepted for code written for spconv, and ignored.
        record_voxel_count: accepted for code written for spconv, and ignored.
        large_kernel_fast_algo: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        output_padding: 0; only transposed convolutions take another.

    Raises:
        ShapeError: channels below 1, `groups` that does not divide them, or padding around a kernel of 1 with a stride
            of 1; when called, a tensor with another number of axes or channels.
        FormatError: a size is no whole number, too small, or given for another number of axes; when a kernel map is
            made, a voxel is given twice or lies outside `spatial_shape`, no cell is left of it, or output_padding is
            not 0.
        OperandError: when called, x is no `SparseConvTensor`, its features are not floating point, or `indice_key` was
            saved by a layer of another geometry or for other voxels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConv3d
        >>> indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 4, 4, 4]])  # batch, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6, 6], batch_size=1)
        >>> y = SparseConv3d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")(x)
        >>> y
        SparseConvTensor(voxels=9, channels=32, spatial_shape=[3, 3, 3], batch_size=1, dtype=torch.float32)
        >>> y.indices[0].tolist()
        [0, 0, 0, 0]
    """

    ndim = 3


class SparseConv4d(_SparseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: strided sparse convolution over four axes.

    As `SparseConv3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConv4d
        >>> indices = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 2], [0, 4, 4, 4, 4]])  # batch, t, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6, 6, 6], batch_size=1)
        >>> y = SparseConv4d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")(x)
        >>> y
        SparseConvTensor(voxels=17, channels=32, spatial_shape=[3, 3, 3, 3], batch_size=1, dtype=torch.float32)
        >>> y.indices[0].tolist()
        [0, 0, 0, 0, 0]
    """

    ndim = 4


class SparseConvTranspose1d(_SparseConvTranspose):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: transposed sparse convolution over one axis.

    As `SparseConvTranspose3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConvTranspose1d
        >>> indices = torch.tensor([[0, 0], [0, 1]])  # batch, x
        >>> x = SparseConvTensor(torch.ones(2, 16), indices, spatial_shape=[2], batch_size=1)
        >>> SparseConvTranspose1d(16, 8, kernel_size=2, stride=2)(x)
        SparseConvTensor(voxels=4, channels=8, spatial_shape=[4], batch_size=1, dtype=torch.float32)
    """

    ndim = 1


class SparseConvTranspose2d(_SparseConvTranspose):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: transposed sparse convolution over two axes.

    As `SparseConvTranspose3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConvTranspose2d
        >>> indices = torch.tensor([[0, 0, 0], [0, 1, 1]])  # batch, y, x
        >>> x = SparseConvTensor(torch.ones(2, 16), indices, spatial_shape=[2, 2], batch_size=1)
        >>> SparseConvTranspose2d(16, 8, kernel_size=2, stride=2)(x)
        SparseConvTensor(voxels=8, channels=8, spatial_shape=[4, 4], batch_size=1, dtype=torch.float32)
    """

    ndim = 2


class SparseConvTranspose3d(_SparseConvTranspose):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: transposed sparse convolution over three axes.

    It computes what `nn.ConvTranspose3d` would on the dense grid, at every cell that some input voxel reaches, with the
    arguments of spconv's `SparseConvTranspose3d`. It makes new voxels; `SparseInverseConv3d` goes back to voxels that
    there were. `weight` is [out_channels, *kernel_size, in_channels / groups] and `bias` [out_channels], as spconv
    stores them, and spconv's checkpoints load. With a kernel and a stride of 1 the layer is a matrix product, and the
    memory of `weight` holds the matrix [in_channels, out_channels], as spconv's does; `kernel` has it in the order that
    its shape says. Then the voxels stay in their order.

    A call takes a `SparseConvTensor` with features [N, in_channels] at indices [N, 4], int32 or int64, each row the
    batch index and then 3 coordinates, each below its axis of `spatial_shape`. It returns one with features [X,
    out_channels] at the cells that are reached, ascending by batch and coordinates, whose spatial_shape is that of the
    dense convolution's output.

    Args:
        in_channels: channels of the input features, at least 1.
        out_channels: channels of the output features, at least 1.
        kernel_size: taps on each axis, one number or one for each axis.
        stride: output cells from one input cell to the next, one number or one for each axis.
        padding: cells taken away on both sides of each axis of the output, one number or one for each axis.
        dilation: cells from one tap to the next, one number or one for each axis.
        groups: how many groups of channels are convolved apart; divides both numbers of channels.
        bias: whether a trained bias [out_channels] is added to every output voxel.
        indice_key: name under which the tensor keeps the kernel map, for a `SparseInverseConv3d` that goes back, and
            for layers of the same geometry on the same voxels.
        algo: accepted for code written for spconv, and ignored.
        fp32_accum: accepted for code written for spconv, and ignored.
        record_voxel_count: accepted for code written for spconv, and ignored.
        large_kernel_fast_algo: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        output_padding: cells added to the end of each axis of the output, one number or one for each axis.

    Raises:
        ShapeError: channels below 1, `groups` that does not divide them, or padding around a kernel of 1 with a stride
            of 1; when called, a tensor with another number of axes or channels.
        FormatError: a size is no whole number, too small, or given for another number of axes; when a kernel map is
            made, a voxel is given twice or lies outside `spatial_shape`, or no cell is left of it.
        OperandError: when called, x is no `SparseConvTensor`, its features are not floating point, or `indice_key` was
            saved by a layer of another geometry or for other voxels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConvTranspose3d
        >>> indices = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]])  # batch, z, y, x
        >>> x = SparseConvTensor(torch.ones(2, 16), indices, spatial_shape=[2, 2, 2], batch_size=1)
        >>> SparseConvTranspose3d(16, 8, kernel_size=2, stride=2)(x)
        SparseConvTensor(voxels=16, channels=8, spatial_shape=[4, 4, 4], batch_size=1, dtype=torch.float32)
    """

    ndim = 3


class SparseConvTranspose4d(_SparseConvTranspose):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: transposed sparse convolution over four axes.

    As `SparseConvTranspose3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseConvTranspose4d
        >>> indices = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])  # batch, t, z, y, x
        >>> x = SparseConvTensor(torch.ones(2, 16), indices, spatial_shape=[2, 2, 2, 2], batch_size=1)
        >>> SparseConvTranspose4d(16, 8, kernel_size=2, stride=2)(x)
        SparseConvTensor(voxels=32, channels=8, spatial_shape=[4, 4, 4, 4], batch_size=1, dtype=torch.float32)
    """

    ndim = 4


class SparseInverseConv1d(_SparseInverseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: back from a convolution's outputs to its inputs, over one axis.

    As `SparseInverseConv3d`, with one coordinate in each row of the indices [N, 2].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConv1d, SparseConvTensor, SparseInverseConv1d
        >>> indices = torch.tensor([[0, 1], [0, 2], [0, 4]])  # batch, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6], batch_size=1)
        >>> down = SparseConv1d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")
        >>> up = SparseInverseConv1d(32, 16, kernel_size=3, indice_key="down1")
        >>> y = up(down(x))
        >>> y
        SparseConvTensor(voxels=3, channels=16, spatial_shape=[6], batch_size=1, dtype=torch.float32)
        >>> torch.equal(y.indices, x.indices)
        True
    """

    ndim = 1


class SparseInverseConv2d(_SparseInverseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: back from a convolution's outputs to its inputs, over two axes.

    As `SparseInverseConv3d`, with two coordinates in each row of the indices [N, 3].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConv2d, SparseConvTensor, SparseInverseConv2d
        >>> indices = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 4, 4]])  # batch, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6], batch_size=1)
        >>> down = SparseConv2d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")
        >>> up = SparseInverseConv2d(32, 16, kernel_size=3, indice_key="down1")
        >>> y = up(down(x))
        >>> y
        SparseConvTensor(voxels=3, channels=16, spatial_shape=[6, 6], batch_size=1, dtype=torch.float32)
        >>> torch.equal(y.indices, x.indices)
        True
    """

    ndim = 2


class SparseInverseConv3d(_SparseInverseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: back from a convolution's outputs to its inputs, over three axes.

    It undoes the voxels of an earlier `SparseConv3d` or `SparseConvTranspose3d`, not its numbers: it goes over the
    kernel map that this one saved under `indice_key`, with inputs and outputs swapped, and has a kernel of its own, as
    spconv's `SparseInverseConv3d`. `weight` is [out_channels, *kernel_size, in_channels / groups] and `bias`
    [out_channels], as spconv stores them, and spconv's checkpoints load.

    A call takes a `SparseConvTensor` with features [N, in_channels] at indices [N, 4], int32 or int64, each row the
    batch index and then 3 coordinates, each below its axis of `spatial_shape`: those that the earlier convolution made.
    It returns one with features [X, out_channels] at the voxels that the earlier convolution took, in their order, with
    their spatial_shape.

    Args:
        in_channels: channels of the input features, at least 1.
        out_channels: channels of the output features, at least 1.
        kernel_size: taps on each axis, those of the convolution that saved the map.
        indice_key: the key of the convolution to go back over.
        bias: whether a trained bias [out_channels] is added to every output voxel.
        algo: accepted for code written for spconv, and ignored.
        fp32_accum: accepted for code written for spconv, and ignored.
        large_kernel_fast_algo: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        groups: how many groups of channels are convolved apart; divides both numbers of channels.

    Raises:
        ShapeError: channels below 1, or `groups` that does not divide them; when called, a tensor with another number
            of axes or channels.
        FormatError: a size is no whole number, too small, or given for another number of axes.
        OperandError: `indice_key` is not a string; when called, x is no `SparseConvTensor`, its features are not
            floating point, nothing was saved under the key, or a submanifold convolution, one with another kernel_size,
            or one that made other voxels saved it.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d
        >>> indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 4, 4, 4]])  # batch, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6, 6], batch_size=1)
        >>> down = SparseConv3d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")
        >>> up = SparseInverseConv3d(32, 16, kernel_size=3, indice_key="down1")
        >>> y = up(down(x))
        >>> y
        SparseConvTensor(voxels=3, channels=16, spatial_shape=[6, 6, 6], batch_size=1, dtype=torch.float32)
        >>> torch.equal(y.indices, x.indices)
        True
    """

    ndim = 3


class SparseInverseConv4d(_SparseInverseConv):
    """`Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]`: back from a convolution's outputs to its inputs, over four axes.

    As `SparseInverseConv3d`, with four coordinates in each row of the indices [N, 5].

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConv4d, SparseConvTensor, SparseInverseConv4d
        >>> indices = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 2], [0, 4, 4, 4, 4]])  # batch, t, z, y, x
        >>> x = SparseConvTensor(torch.ones(3, 16), indices, spatial_shape=[6, 6, 6, 6], batch_size=1)
        >>> down = SparseConv4d(16, 32, kernel_size=3, stride=2, padding=1, indice_key="down1")
        >>> up = SparseInverseConv4d(32, 16, kernel_size=3, indice_key="down1")
        >>> y = up(down(x))
        >>> y
        SparseConvTensor(voxels=3, channels=16, spatial_shape=[6, 6, 6, 6], batch_size=1, dtype=torch.float32)
        >>> torch.equal(y.indices, x.indices)
        True
    """

    ndim = 4


complete_classes({name: globals()[name] for name in __all__})
