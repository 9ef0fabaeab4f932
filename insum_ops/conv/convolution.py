"""What every sparse convolution layer is: parameters, a kernel map and one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod, sqrt
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..close_names import with_article
from ..compiler import InsumError, OperandError, ShapeError, shortened
from ..formats.errors import FormatError
from ..formats.torch_state import is_autocast_enabled
from ..formats.voxels.geometry import MapLayout, per_axis
from ..formats.voxels.kernel_map import KernelMap
from ..functional import insum, on_refusal
from ..not_scripted import NotScripted
from .functional import convolve
from .tensor import SparseConvTensor
from .voxels import Voxels

__all__ = ["Size", "SparseConvolution", "SparseModule", "check_input", "check_kind", "complete_classes"]

Size = int | Sequence[int]
NOT_OURS = "max_num_voxels_during_training"  # a buffer that spconv's layers may carry


class SparseModule(NotScripted, nn.Module):
    """A module that takes a `SparseConvTensor`; other modules in a `SparseSequential` get its features.

    Derive blocks of your own from it, as from spconv's class of this name. It adds nothing else to `nn.Module`.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseModule, SparseSequential, SubMConv1d
        >>> class Residual(SparseModule):
        ...     def __init__(self, channels):
        ...         super().__init__()
        ...         self.layer = SubMConv1d(channels, channels, 3)
        ...     def forward(self, x):
        ...         return x + self.layer(x)
        >>> x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0], [0, 1]]), [3], batch_size=1)
        >>> SparseSequential(Residual(4), torch.nn.ReLU())(x)
        SparseConvTensor(voxels=2, channels=4, spatial_shape=[3], batch_size=1, dtype=torch.float32)
    """


def complete_classes(layers: Mapping[str, type]) -> None:
    """Give each layer a constructor of its own, and what its docstring leaves to that of the layer over three axes.

    Python's message on a missing argument names the class of the constructor. A docstring without `Args:` gets the
    arguments and errors of the layer over three axes before its example.
    """
    for name, layer in layers.items():
        shared = layer.__init__  # type: ignore[misc]
        code, names = shared.__code__, shared.__globals__
        constructor = FunctionType(code, names, "__init__", shared.__defaults__, shared.__closure__)
        constructor.__annotations__, constructor.__doc__ = shared.__annotations__, shared.__doc__
        constructor.__module__, constructor.__qualname__ = layer.__module__, f"{name}.__init__"
        layer.__init__ = constructor  # type: ignore[misc]
        text, model = layer.__doc__, layers[f"{name[:-2]}3d"].__doc__
        if text and model and "Args:" not in text:  # none of them has a docstring under `python -OO`
            arguments = model[model.index("Args:") : model.index("Example:")].replace("3d", name[-2:])
            layer.__doc__ = text.replace("Example:", arguments + "Example:")


def check_kind(layer: nn.Module, x: SparseConvTensor) -> None:
    """Refuse an input that is no `SparseConvTensor`."""
    if not isinstance(x, SparseConvTensor):
        raise OperandError(
            f"{type(layer).__name__} takes a SparseConvTensor of insum_ops.nn, but got "
            f"{with_article(type(x).__name__)}; make one of features and voxels, "
            "SparseConvTensor(features, indices, spatial_shape, batch_size)"
        )


def check_input(layer: nn.Module, x: SparseConvTensor, ndim: int) -> None:
    """Refuse an input that is no `SparseConvTensor`, has another number of axes, or is not floating point."""
    check_kind(layer, x)
    if len(x.voxels.grid.spatial_shape) != ndim:
        raise ShapeError(f"{type(layer).__name__} takes {ndim} axes but spatial_shape is {x.spatial_shape}")
    if not x.features.is_floating_point():
        is_complex = x.features.is_complex()  # of which float() would drop the imaginary part
        remedy = "torch.view_as_real(x.features).flatten(1)" if is_complex else "x.features.float()"
        raise OperandError(
            f"{type(layer).__name__} takes features of a floating-point type, but they are {x.features.dtype}; "
            f"write x = x.replace_feature({remedy})"
        )


def _of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors in the dtype that torch promotes them to, as `insum` does with a statement's factors.

    Under autocast they are returned as they are, unless one is float64, which autocast does not cast.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if is_autocast_enabled(tensors[0].device.type) and torch.float64 not in dtypes:
        return tensors
    dtype = reduce(torch.promote_types, dtypes)
    return [tensor.to(dtype) for tensor in tensors]


class SparseConvolution(SparseModule):
    """What all sparse convolution layers share: parameters as spconv stores them, a kernel map and one statement.

    A layer for use is one of the classes derived from it, such as `SubMConv3d`; they name the number of axes (`ndim`)
    and how outputs come from inputs (`kind`). `weight` is [out_channels, *kernel_size, in_channels / groups] and `bias`
    [out_channels]. With a kernel and a stride of 1 the layer is a matrix product, and the memory of `weight` holds the
    matrix [in_channels, out_channels], as spconv's does; `kernel` has it in the order that its shape says.

    Checkpoints of spconv load, those of 1.x and early 2.x, [*kernel_size, in_channels, out_channels], too.

    Args:
        in_channels: channels of the input features, at least 1.
        out_channels: channels of the output features, at least 1.
        kernel_size: taps on each axis, one number or one for each axis.
        stride: cells from one output to the next, one number or one for each axis.
        padding: cells added on both sides of each axis, one number or one for each axis.
        dilation: cells from one tap to the next, one number or one for each axis.
        groups: how many groups of channels are convolved apart; divides both numbers of channels.
        bias: whether a trained bias [out_channels] is added to every output voxel.
        indice_key: name under which the tensor keeps the kernel map, for an inverse convolution and for layers of the
            same geometry on the same voxels; None for no name.
        algo: accepted for code written for spconv, and ignored.
        fp32_accum: accepted for code written for spconv, and ignored.
        record_voxel_count: accepted for code written for spconv, and ignored.
        large_kernel_fast_algo: accepted for code written for spconv, and ignored.
        name: kept as the attribute `name`, and not used.
        output_padding: cells added to the end of each axis of a transposed convolution's output; 0 for all others.

    Raises:
        ShapeError: channels below 1, `groups` that does not divide them, or padding around a kernel of 1 with a stride
            of 1.
        FormatError: a size is no whole number, too small, or given for another number of axes.

    Example:
        >>> from insum_ops.nn import SparseConvolution, SubMConv3d
        >>> layer = SubMConv3d(4, 8, kernel_size=3)
        >>> isinstance(layer, SparseConvolution), layer.ndim, layer.kind, list(layer.kernel.shape)
        (True, 3, 'subm', [8, 3, 3, 3, 4])
        >>> pointwise = SubMConv3d(4, 8, kernel_size=1)
        >>> list(pointwise.weight.shape), list(pointwise.matrices.shape)
        ([8, 1, 1, 1, 4], [1, 4, 8])
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
        sizes = self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding
        self.layout = MapLayout(self.kind, *sizes)
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
        """Draw new weights, uniform within 1 / sqrt(input channels x taps), as `nn.Conv3d` starts.

        Example:
            >>> from insum_ops.nn import SubMConv1d
            >>> layer = SubMConv1d(4, 8, kernel_size=3)
            >>> layer.reset_parameters()
            >>> bool(layer.weight.abs().max() <= 1 / 12**0.5)
            True
        """
        limit = 1 / sqrt(prod(self.weight.shape[1:]))
        nn.init.uniform_(self.weight, -limit, limit)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -limit, limit)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Convolve the features of a tensor.

        Args:
            x: features [N, in_channels] on voxels.

        Returns:
            Features [X, out_channels] on the voxels that the layer leads to, with their spatial_shape.

        Raises:
            OperandError: x is no `SparseConvTensor`, its features are not floating point, or `indice_key` does not fit.
            ShapeError: x has another number of axes or channels.
            FormatError: when a kernel map is made, a voxel is given twice or lies outside `spatial_shape`, or no cell
                is left of it.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SubMConv1d
            >>> layer = SubMConv1d(1, 1, kernel_size=3, bias=False)
            >>> layer.load_kernel(torch.tensor([[[2.0], [3.0], [4.0]]]))
            >>> x = SparseConvTensor(torch.tensor([[1.0], [10.0]]), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
            >>> layer(x).features
            tensor([[43.],
                    [32.]], grad_fn=<_ConvolutionBackward>)
        """
        try:
            self.check(x)
            if self.is_pointwise:
                x.voxels.check()
                return x.replace_feature(self.pointwise(x.features))
            kernel_map, voxels = self.map(x)
        except (InsumError, FormatError) as error:
            for tell in on_refusal:
                tell(error, self._parameters)
            raise shortened(error) from error.__cause__
        try:  # a tenth of the cost of `self.weight`, which goes through `nn.Module.__getattr__`
            weight: Any = self._parameters["weight"]
            bias = self._parameters["bias"]
        except KeyError:  # parametrized
            weight, bias = self.weight, self.bias
        return x.at(convolve(x.features, weight, kernel_map, bias, self.groups), voxels)

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: SparseConvTensor) -> SparseConvTensor: ...

    def map(self, x: SparseConvTensor) -> tuple[KernelMap, Voxels]:
        """Return the kernel map of this layer over a tensor's voxels, and the voxels that it leads to.

        Args:
            x: the tensor that the layer is called with.

        Returns:
            (kernel map, voxels), as `SparseConvTensor.map` gives them.

        Raises:
            OperandError: `indice_key` was saved by a layer of another geometry or for other voxels.
            FormatError: a voxel is given twice or lies outside `spatial_shape`, or no cell is left of it.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SubMConv1d
            >>> x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
            >>> kernel_map, voxels = SubMConv1d(1, 1, kernel_size=3).map(x)
            >>> kernel_map.neighbours.tolist()
            [[-1, 0, 1], [0, 1, -1]]
        """
        return x.map(self.layout, self.indice_key)

    @property
    def kernel(self) -> Tensor:
        """The kernel [out_channels, *kernel_size, in_channels / groups]; `F.conv3d` takes `kernel.movedim(-1, 1)`."""
        if not self.is_pointwise:
            return self.weight
        return self.matrices.transpose(1, 2).reshape(self.weight.shape)

    @property
    def matrices(self) -> Tensor:
        """The matrices [groups, in_channels / groups, out_channels / groups] of a layer with a kernel of 1."""
        return self.weight.view(self.groups, self.in_channels // self.groups, self.out_channels // self.groups)

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor) -> None:
        """Copy the numbers of a kernel into `weight`, whatever order of memory the layer has.

        `insum_ops.nn.weight_from_conv` and its siblings bring weights of other libraries into this shape.

        Args:
            kernel: the kernel [out_channels, *kernel_size, in_channels / groups].

        Raises:
            ShapeError: the kernel has another shape.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SubMConv3d, weight_from_conv
            >>> dense, layer = torch.nn.Conv3d(4, 8, 3, padding=1), SubMConv3d(4, 8, 3)
            >>> layer.load_kernel(weight_from_conv(dense.weight))
            >>> torch.equal(layer.kernel.movedim(-1, 1), dense.weight)
            True
        """
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
        """`Out[x,g,m] += In[x,g,c] * Weight[g,c,m]`: what a layer with a kernel of 1 computes, at each voxel by itself.

        Args:
            features: features [N, in_channels].

        Returns:
            Features [N, out_channels], bias included.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SubMConv3d
            >>> SubMConv3d(4, 8, kernel_size=1).pointwise(torch.ones(5, 4)).shape
            torch.Size([5, 8])
        """
        if self.groups == 1:
            matrix, bias = self.matrices[0].T, self.bias
            if features.dtype is matrix.dtype and (bias is None or bias.dtype is matrix.dtype):
                return nn.functional.linear(features, matrix, bias)
            return nn.functional.linear(*_of_one_type([features, matrix, *([] if bias is None else [bias])]))
        In = features.unflatten(1, (self.groups, -1))
        Out = insum(self.POINTWISE, In=In, Weight=self.matrices).flatten(1)
        return Out if self.bias is None else Out + self.bias.to(Out.dtype)  # autocast's, as of all layers

    def check(self, x: SparseConvTensor) -> None:
        """Raise unless a tensor is one that this layer takes.

        Args:
            x: the tensor that the layer is called with.

        Raises:
            OperandError: x is no `SparseConvTensor`, or its features are not floating point.
            ShapeError: x has another number of axes or channels.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SubMConv1d
            >>> x = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1)
            >>> SubMConv1d(16, 32, kernel_size=3).check(x)
            Traceback (most recent call last):
                ...
            insum_ops.compiler.language.errors.ShapeError: SubMConv1d takes 16 channels but features have 1
        """
        features = x.features if type(x) is SparseConvTensor else None
        if features is None or len(x.voxels.grid.spatial_shape) != self.ndim or not features.is_floating_point():
            check_input(self, x, self.ndim)
            features = x.features
        channels = features.shape[1]
        if channels != self.in_channels:
            raise ShapeError(f"{type(self).__name__} takes {self.in_channels} channels but features have {channels}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load weights of every spconv: [out, *kernel, in] of today's, [*kernel, in, out] of 1.x and early 2.x.

        Layouts are told apart by their shapes. If both have the same shape, the version decides: frameworks that read
        older weights, as mmdet3d, raise that of `SparseModule`. They also set a `_load_from_state_dict` there, which
        would permute a second time: it is not called.
        """
        state_dict.pop(f"{prefix}{NOT_OURS}", None)
        loaded, weight = state_dict.get(f"{prefix}weight"), self.weight
        older = (*self.kernel_size, weight.shape[-1], weight.shape[0])
        if isinstance(loaded, Tensor) and tuple(loaded.shape) == older:
            is_old_version = self._version != nn.Module._version and local_metadata.get("version") != self._version
            if loaded.shape != weight.shape or is_old_version:
                newer = loaded.reshape(weight.shape) if self.is_pointwise else loaded.movedim(-1, 0)
                state_dict[f"{prefix}weight"] = newer
        super(SparseModule, self)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={list(self.kernel_size)}"]
        defaults: Mapping[str, int] = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        for name, default in defaults.items():
            value = getattr(self, name)
            words += [f"{name}={list(value)}"] if set(value) != {default} else []
        words += [f"groups={self.groups}"] if self.groups > 1 else []
        words += ["bias=False"] if self.bias is None else []
        words += [f"indice_key={self.indice_key!r}"] if self.indice_key is not None else []
        return ", ".join(words)
