"""Other libraries' convolution weights as [out, *kernel_size, in / groups], for `layer.load_kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ..compiler import ShapeError

__all__ = ["weight_from_conv", "weight_from_conv_transpose", "weight_from_minkowski", "weight_from_torchsparse"]


def weight_from_torchsparse(kernel: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """Return TorchSparse's convolution kernel as [out, *kernel_size, in], for `layer.load_kernel`.

    Where the number of taps is odd, TorchSparse counts them with the first axis fastest, otherwise with the last.

    Args:
        kernel: TorchSparse's `kernel` [taps, in, out], or [in, out] for one tap.
        kernel_size: taps on each axis.

    Returns:
        A new tensor [out, *kernel_size, in].

    Raises:
        ShapeError: `kernel_size` is one number, or the kernel has another number of taps.

    Example:
        >>> import torch
        >>> from insum_ops.nn import weight_from_torchsparse
        >>> weight_from_torchsparse(torch.randn(27, 4, 8), [3, 3, 3]).shape
        torch.Size([8, 3, 3, 3, 4])
    """
    kernel = _with_taps(kernel, kernel_size)
    if prod(kernel_size) % 2 == 0:
        return kernel.reshape(*kernel_size, *kernel.shape[1:]).movedim(-1, 0).contiguous()
    return _first_axis_fastest(kernel, kernel_size)


def weight_from_minkowski(kernel: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """Return MinkowskiEngine's convolution kernel as [out, *kernel_size, in], for `layer.load_kernel`.

    MinkowskiEngine counts taps with the first axis fastest. Odd kernels are centred there as here. Even ones start at
    the voxel itself, so they equal a strided layer without padding.

    Args:
        kernel: MinkowskiEngine's `kernel` [taps, in, out], or [in, out] for one tap.
        kernel_size: taps on each axis.

    Returns:
        A new tensor [out, *kernel_size, in].

    Raises:
        ShapeError: `kernel_size` is one number, or the kernel has another number of taps.

    Example:
        >>> import torch
        >>> from insum_ops.nn import weight_from_minkowski
        >>> weight_from_minkowski(torch.randn(9, 4, 8), [3, 3]).shape
        torch.Size([8, 3, 3, 4])
    """
    return _first_axis_fastest(_with_taps(kernel, kernel_size), kernel_size)


def weight_from_conv(weight: Tensor) -> Tensor:
    """Return the weight of `nn.Conv1d` to `nn.Conv3d` as [out, *kernel_size, in / groups], for `layer.load_kernel`.

    Args:
        weight: dense convolution's weight [out, in / groups, *kernel_size].

    Returns:
        A new tensor [out, *kernel_size, in / groups].

    Raises:
        ShapeError: the weight has fewer than three dimensions.

    Example:
        >>> import torch
        >>> from insum_ops.nn import weight_from_conv
        >>> weight_from_conv(torch.nn.Conv3d(4, 8, kernel_size=3).weight).shape
        torch.Size([8, 3, 3, 3, 4])
    """
    _check_dense(weight)
    return weight.movedim(1, -1).contiguous()


def weight_from_conv_transpose(weight: Tensor, groups: int = 1) -> Tensor:
    """Return the weight of `nn.ConvTranspose1d` to `nn.ConvTranspose3d` as [out, *kernel_size, in / groups].

    It is for `layer.load_kernel` of a transposed or inverse convolution.

    Args:
        weight: dense transposed convolution's weight [in, out / groups, *kernel_size].
        groups: the groups of that convolution.

    Returns:
        A new tensor [out, *kernel_size, in / groups].

    Raises:
        ShapeError: the weight has fewer than three dimensions, or `groups` does not divide its input channels.

    Example:
        >>> import torch
        >>> from insum_ops.nn import weight_from_conv_transpose
        >>> weight_from_conv_transpose(torch.nn.ConvTranspose3d(4, 8, kernel_size=2).weight).shape
        torch.Size([8, 2, 2, 2, 4])
    """
    _check_dense(weight)
    if groups < 1 or len(weight) % groups:
        raise ShapeError(f"weight has {len(weight)} input channels and groups is {groups}; groups must divide them")
    split = weight.reshape(groups, -1, *weight.shape[1:])  # [g, in / g, out / g, *kernel]
    return split.movedim(1, -1).flatten(0, 1).contiguous()


def _with_taps(kernel: Tensor, kernel_size: Sequence[int]) -> Tensor:
    if isinstance(kernel_size, int):
        raise ShapeError(f"kernel_size is {kernel_size}; give a size for each axis, [{kernel_size}] * 3 in space")
    if kernel.ndim == 2:
        kernel = kernel[None]
    if kernel.ndim != 3 or len(kernel) != prod(kernel_size):
        raise ShapeError(
            f"kernel is {list(kernel.shape)} but kernel_size is {list(kernel_size)}, which has {prod(kernel_size)} "
            "taps; it must be [taps, in, out]"
        )
    return kernel


def _check_dense(weight: Tensor) -> None:
    if weight.ndim < 3:
        raise ShapeError(f"weight is {list(weight.shape)}; a dense convolution's has channels and at least one axis")


def _first_axis_fastest(kernel: Tensor, kernel_size: Sequence[int]) -> Tensor:
    ndim = len(kernel_size)
    taps = kernel.reshape(*reversed(kernel_size), *kernel.shape[1:])
    return taps.permute(ndim + 1, *reversed(range(ndim)), ndim).contiguous()
