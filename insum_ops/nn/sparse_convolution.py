"""What every sparse convolution layer is: parameters, a kernel map and one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..compiler.errors import OperandError, ShapeError
from ..formats.geometry import per_axis
from ..formats.kernel_map import KernelMap
from ..formats.torch_state import is_autocast_enabled
from ..functional import insum
from ..sparse_conv import convolve
from .sparse_conv_tensor import Layout, SparseConvTensor, Voxels

__all__ = ["Size", "SparseConvolution", "SparseModule", "check_input", "check_kind"]

Size = int | Sequence[int]
NOT_OURS = "max_num_voxels_during_training"  # a buffer that spconv's layers may carry


class SparseModule(nn.Module):
    """A module that takes a `SparseConvTensor`; others in a `SparseSequential` get its features."""


def check_kind(layer: nn.Module, x: SparseConvTensor) -> None:
    if not isinstance(x, SparseConvTensor):
        raise OperandError(
            f"{type(layer).__name__} takes a SparseConvTensor of insum_ops.nn, but got a {type(x).__name__}"
        )


def check_input(layer: nn.Module, x: SparseConvTensor, ndim: int) -> None:
    """What every convolution and pool asks of the tensor it gets."""
    check_kind(layer, x)
    if len(x.voxels.grid.spatial_shape) != ndim:
        raise ShapeError(f"{type(layer).__name__} takes {ndim} axes but spatial_shape is {x.spatial_shape}")
    if not x.features.is_floating_point():
        raise OperandError(
            f"{type(layer).__name__} takes features of a floating-point type, but they are {x.features.dtype}; "
            "write x = x.replace_feature(x.features.float())"
        )


def _of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """In the type that torch promotes them to, as a statement's factors; autocast has its own, but for float64."""
    dtypes = {tensor.dtype for tensor in tensors}
    if is_autocast_enabled(tensors[0].device.type) and torch.float64 not in dtypes:
        return tensors
    dtype = reduce(torch.promote_types, dtypes)
    return [tensor.to(dtype) for tensor in tensors]


class SparseConvolution(SparseModule):
    """What all convolutions share: `weight` [out, *kernel_size, in / groups] and `bias` [out], as spconv stores them.

    A pointwise convolution (kernel 1, stride 1) is a matrix product; `weight` then holds the matrix [in, out] in its
    memory, as spconv's does, and `kernel` is the one that its shape promises. `algo`, `fp32_accum`,
    `large_kernel_fast_algo`, `record_voxel_count` and `name` choose among spconv's own kernels; they are accepted
    and change nothing here.
    """

    ndim: ClassVar[int]
    kind: ClassVar[str]
    POINTWISE = "Out[x,g,m] += In[x,g,c] * Weight[g,c,m]"
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: object = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        output_padding: Size = 0,
    ) -> None:
        super().__init__()
        if in_channels < 1 or out_channels < 1:
            raise ShapeError(f"in_channels is {in_channels} and out_channels {out_channels}; both are at least 1")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ShapeError(
                f"groups is {groups} but the channels are {in_channels} in and {out_channels} out; "
                "groups must divide both"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = per_axis("kernel_size", kernel_size, self.ndim, 1)
        self.stride = per_axis("stride", stride, self.ndim, 1)
        self.padding = per_axis("padding", padding, self.ndim, 0)
        self.dilation = per_axis("dilation", dilation, self.ndim, 1)
        self.output_padding = per_axis("output_padding", output_padding, self.ndim, 0)
        self.indice_key, self.name = indice_key, name
        self.layout = Layout(self.kind, self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding)
        is_one = prod(self.kernel_size) == 1 and prod(self.stride) == 1 and not any(self.output_padding)
        self.is_pointwise = is_one and self.kind != "inverse"
        if self.is_pointwise and any(self.padding) and self.kind != "subm":
            raise ShapeError(
                f"padding is {list(self.padding)} but the kernel is 1 and so is the stride; such a layer takes none"
            )
        self.weight = nn.Parameter(torch.empty(out_channels, *self.kernel_size, in_channels // groups))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(in channels x taps), as `nn.Conv3d` starts."""
        limit = 1 / sqrt(prod(self.weight.shape[1:]))
        nn.init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -limit, limit)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        self.check(x)
        if self.is_pointwise:
            return x.replace_feature(self.pointwise(x.features))
        kernel_map, voxels = self.map(x)
        try:  # at a tenth of the cost of asking the module for them
            weight: Any = self._parameters["weight"]
            bias = self._parameters["bias"]
        except KeyError:  # parametrized
            weight, bias = self.weight, self.bias
        return x.at(convolve(x.features, weight, kernel_map, bias, self.groups), voxels)

    def map(self, x: SparseConvTensor) -> tuple[KernelMap, Voxels]:
        return x.map(self.layout, self.indice_key)

    @property
    def kernel(self) -> Tensor:
        """[out, *kernel_size, in / groups] whatever the layer: `F.conv3d` takes `kernel.movedim(-1, 1)`."""
        if not self.is_pointwise:
            return self.weight
        return self.matrices.transpose(1, 2).reshape(self.weight.shape)

    @property
    def matrices(self) -> Tensor:
        """[groups, in / groups, out / groups], of a pointwise layer."""
        return self.weight.view(self.groups, self.in_channels // self.groups, self.out_channels // self.groups)

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor) -> None:
        """Take over the numbers of a kernel [out, *kernel_size, in / groups]."""
        if kernel.shape != self.weight.shape:
            raise ShapeError(
                f"kernel is {list(kernel.shape)} but {type(self).__name__} takes {list(self.weight.shape)}, "
                "[out channels, *kernel_size, in channels / groups]"
            )
        if self.is_pointwise:
            self.matrices.copy_(kernel.reshape(self.groups, -1, kernel.shape[-1]).transpose(1, 2))
        else:
            self.weight.copy_(kernel)

    def pointwise(self, features: Tensor) -> Tensor:
        """A product with a dense matrix, which is torch's to compute; by a statement where it falls into groups."""
        if self.groups == 1:
            matrix, bias = self.matrices[0].T, self.bias
            if features.dtype is matrix.dtype and (bias is None or bias.dtype is matrix.dtype):
                return nn.functional.linear(features, matrix, bias)
            return nn.functional.linear(*_of_one_type([features, matrix, *([] if bias is None else [bias])]))
        In = features.unflatten(1, (self.groups, -1))
        Out = insum(self.POINTWISE, In=In, Weight=self.matrices).flatten(1)
        return Out if self.bias is None else Out + self.bias.to(Out.dtype)  # autocast's, as of all layers

    def check(self, x: SparseConvTensor) -> None:
        check_input(self, x, self.ndim)
        if x.features.shape[1] != self.in_channels:
            channels = x.features.shape[1]
            raise ShapeError(f"{type(self).__name__} takes {self.in_channels} channels but features have {channels}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Weights of every spconv: [out, *kernel, in] of today's, [*kernel, in, out] of 1.x and early 2.x.

        Layouts are told by their shapes. Where both have the same, the version tells: frameworks that read older
        weights, as mmdet3d, raise that of `SparseModule`. They also set a `_load_from_state_dict` there, which would
        permute once more what is permuted here: it is passed over.
        """
        state_dict.pop(f"{prefix}{NOT_OURS}", None)
        found, own = state_dict.get(f"{prefix}weight"), self.weight
        older = (*self.kernel_size, own.shape[-1], own.shape[0])
        if isinstance(found, Tensor) and tuple(found.shape) == older:
            is_old_version = self._version != nn.Module._version and local_metadata.get("version") != self._version
            if found.shape != own.shape or is_old_version:
                newer = found.reshape(own.shape) if self.is_pointwise else found.movedim(-1, 0)
                state_dict[f"{prefix}weight"] = newer
        super(SparseModule, self)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={list(self.kernel_size)}"]
        defaults: Mapping[str, int] = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        for name, default in defaults.items():
            value = getattr(self, name)
            words += [f"{name}={list(value)}"] if set(value) != {default} else []
        words += [f"groups={self.groups}"] if self.groups > 1 else []
        words += ["bias=False"] if self.bias is None else []
        words += [f"indice_key={self.indice_key!r}"] if self.indice_key is not None else []
        return ", ".join(words)
