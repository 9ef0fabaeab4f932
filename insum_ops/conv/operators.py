"""Opaque torch operators for a convolution and the gradient of its weight, which tracers call with a map's parts.

Whatever depends on the voxels (their map, the form of the statement, its launch plan) is worked out inside of them when
they run, as in an ordinary call. Their gradients are these operators again, so that they have any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..compiler import OperandError, bind, owned, parse, refuse_transforms
from ..formats.torch_state import is_exporting, uncompiled
from ..formats.voxels.kernel_map import KernelMap, map_of
from ..formats.voxels.map_operators import UNSAFE_IN_GRAPHS, voxel_library
from ..formats.voxels.map_parts import MapParts
from .forms import STATIONARY
from .weight_views import IN_GROUPS, as_weight, channel_kind, statement_weight

__all__ = ["implement", "same_rows", "traced_convolution"]

_OVER = "Tensor source, Tensor target, str geometry, SymInt[] sizes, int groups, int side"
_TAGS = (torch.Tag.pt2_compliant_tag, *UNSAFE_IN_GRAPHS)
voxel_library.define(
    f"convolve(Tensor features, Tensor weight, Tensor? bias, {_OVER}, bool is_swapped) -> Tensor", tags=_TAGS
)
voxel_library.define(f"convolution_weight(Tensor In, Tensor dOut, Tensor weight, {_OVER}) -> Tensor", tags=_TAGS)
voxel_library.define("same_rows(Tensor indices, Tensor other, str refusal) -> Tensor", tags=_TAGS)
_convolve = torch.ops.insum_ops.convolve.default
_weight = torch.ops.insum_ops.convolution_weight.default

_value: Callable[..., Tensor]
_gradient: Callable[..., Tensor]


class _Over(NamedTuple):
    """What both operators go over, as they take it."""

    source: Tensor
    target: Tensor
    geometry: str
    sizes: Sequence[int]
    groups: int
    side: int

    @property
    def map(self) -> KernelMap:
        kernel_map = map_of(self.source, self.target, self.geometry, tuple(self.sizes))
        return kernel_map.inverse if self.side else kernel_map

    @property
    def backwards(self) -> _Over:
        return self._replace(side=1 - self.side)

    @property
    def rows(self) -> int:
        return (self.source if self.side else self.target).shape[0]


def traced_convolution(features: Tensor, weight: Tensor, bias: Tensor | None, parts: MapParts, groups: int) -> Tensor:
    """Return a convolution over a map in its parts, as one operator."""
    over = parts.source, parts.target, parts.geometry, list(parts.sizes), groups, parts.side
    return _convolve(features, weight, bias, *over, False)  # type: ignore[no-any-return]


def implement(value: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> None:
    """Make these two functions over a `KernelMap` what the operators call when they run."""
    global _value, _gradient
    _value, _gradient = value, gradient


def _run(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = _Over(*parts)
    with torch.no_grad():
        return owned(_value(features, weight, bias, over.map, over.groups, is_swapped))


def _run_gradient(In: Tensor, dOut: Tensor, weight: Tensor, *parts: Any) -> Tensor:
    over = _Over(*parts)
    with torch.no_grad():
        return owned(_gradient(In, dOut, over.map, weight, over.groups))


@torch.library.register_fake("insum_ops::convolve", lib=voxel_library)
def _fake(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = _Over(*parts)
    Weight, kind = statement_weight(weight, over.groups, is_swapped), channel_kind(weight, over.groups)
    In = features.unflatten(1, (over.groups, -1)) if kind == IN_GROUPS else features
    NBR = features.new_empty((over.rows, Weight.shape[0]), dtype=torch.int32)
    bound = bind(parse(STATIONARY[kind]), {"In": In, "Weight": Weight, "NBR": NBR}, None)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device).flatten(1)


@torch.library.register_fake("insum_ops::convolution_weight", lib=voxel_library)
def _fake_gradient(In: Tensor, dOut: Tensor, weight: Tensor, *parts: Any) -> Tensor:
    Weight = statement_weight(weight, _Over(*parts).groups)
    lies = as_weight(torch.empty(Weight.shape, dtype=weight.dtype, device=weight.device), weight, _Over(*parts).groups)
    return torch.empty_strided(lies.shape, lies.stride(), dtype=lies.dtype, device=lies.device)


class _Convolution(torch.autograd.Function):
    """A convolution as an operator."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, over: _Over, is_swapped: bool) -> Any:
        ctx.save_for_backward(features, weight, over.source, over.target)
        ctx.rest, ctx.is_swapped = over[2:], is_swapped
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _convolve(features, weight, bias, *over, is_swapped)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        features, weight, source, target = ctx.saved_tensors
        over, is_swapped = _Over(source, target, *ctx.rest), ctx.is_swapped
        d_features = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_features = _convolve(grad_output, weight, None, *over.backwards, not is_swapped).to(features.dtype)
        if ctx.needs_input_grad[1] and is_swapped:  # the features have the weight's output channels
            d_weight = _weight(grad_output, features, weight, *over.backwards)
        elif ctx.needs_input_grad[1]:
            d_weight = _weight(features, grad_output, weight, *over)
        if ctx.needs_input_grad[2]:
            d_bias = grad_output.sum(0).to(ctx.bias_dtype)
        return d_features, d_weight, d_bias, None, None


class _WeightGradient(torch.autograd.Function):
    """The gradient of a convolution's weight as an operator."""

    @staticmethod
    def forward(ctx: Any, In: Tensor, dOut: Tensor, weight: Tensor, over: _Over) -> Any:
        ctx.save_for_backward(In, dOut, over.source, over.target)
        ctx.rest = over[2:]
        return _weight(In, dOut, weight, *over)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        In, dOut, source, target = ctx.saved_tensors
        over = _Over(source, target, *ctx.rest)
        d_In = d_dOut = None
        if ctx.needs_input_grad[0]:
            d_In = _convolve(dOut, grad_output, None, *over.backwards, True).to(In.dtype)
        if ctx.needs_input_grad[1]:
            d_dOut = _convolve(In, grad_output, None, *over, False).to(dOut.dtype)
        return d_In, d_dOut, None, None


def _differentiable(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    if not refuse_transforms("a convolution", [features, weight, *([] if bias is None else [bias])]):
        with torch._C._AutoDispatchBelowAutograd():
            return _convolve(features, weight, bias, *rest)  # type: ignore[no-any-return]
    return _Convolution.apply(features, weight, bias, _Over(*parts), is_swapped)  # type: ignore[no-any-return]


def _differentiable_gradient(In: Tensor, dOut: Tensor, weight: Tensor, *parts: Any) -> Tensor:
    if not refuse_transforms("the gradient of a convolution", [In, dOut]):
        with torch._C._AutoDispatchBelowAutograd():
            return _weight(In, dOut, weight, *parts)  # type: ignore[no-any-return]
    return _WeightGradient.apply(In, dOut, weight, _Over(*parts))  # type: ignore[no-any-return]


def same_rows(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    """Return the rows of `other` that equal those of `indices`, which are all in their order, int64 [N], for a tracer.

    Where the call runs it raises OperandError unless they are. What is gathered by these rows depends on that.
    """
    if not is_exporting():
        return torch.ops.insum_ops.same_rows.default(indices, other, refusal)  # type: ignore[no-any-return]
    torch._assert_async((indices == other).all(), refusal)
    return torch.arange(indices.shape[0], device=indices.device)


def _same(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    if not torch.equal(indices, other):
        raise OperandError(refusal)
    return torch.arange(indices.shape[0], device=indices.device)


@torch.library.register_fake("insum_ops::same_rows", lib=voxel_library)
def _fake_same(indices: Tensor, other: Tensor, refusal: str) -> Tensor:
    return indices.new_empty(indices.shape[:1], dtype=torch.int64)


for _key in ("CPU", "CUDA"):
    voxel_library.impl("convolve", uncompiled(_run), _key)
    voxel_library.impl("convolution_weight", uncompiled(_run_gradient), _key)
    voxel_library.impl("same_rows", uncompiled(_same), _key)
voxel_library.impl("convolve", _differentiable, "Autograd")
voxel_library.impl("convolution_weight", _differentiable_gradient, "Autograd")


@register_flop_formula(_convolve.overloadpacket, get_raw=True)
def _flops(features: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> int:
    """Return the multiplications and additions of a convolution, over the table of its map: absent pairs included."""
    return 2 * _Over(*rest[:6]).rows * weight.numel()


@register_flop_formula(_weight.overloadpacket, get_raw=True)
def _gradient_flops(In: Tensor, dOut: Tensor, weight: Tensor, *parts: Any, **_: Any) -> int:
    return 2 * _Over(*parts[:6]).rows * weight.numel()
