"""Opaque torch operators for a convolution and its gradients, which tracers call with a map's parts.

Whatever depends on the voxels (their map, the form of the statement, its launch plan) is worked out inside of them when
they run, as in an ordinary call. Their gradients are these operators again, so that they have any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..compiler import (
    OperandError,
    below_autograd,
    bind,
    gradients_key,
    owned,
    parse,
    planned,
    refuse_transforms,
    replay_first,
)
from ..formats.torch_state import PLAIN, UNSAFE_IN_GRAPHS, is_exporting, transforms, uncompiled
from ..formats.voxels.kernel_map import KernelMap, map_of
from ..formats.voxels.map_operators import voxel_library
from ..formats.voxels.map_parts import MapParts, cached_map
from ..lru_cache import LRUCache
from .forms import STATIONARY
from .weight_views import IN_GROUPS, channel_kind, statement_weight

__all__ = ["OVER", "PLANS", "Backward", "implement", "same_rows", "traced_convolution"]

PLANS: LRUCache[Any] = LRUCache(4096)  # launch plans of convolutions and their gradients, whatever the voxels

OVER = "Tensor source, Tensor target, str geometry, SymInt[] sizes, int groups, int side"
_TAGS = (torch.Tag.pt2_compliant_tag, *UNSAFE_IN_GRAPHS)
voxel_library.define(
    f"voxel_convolution(Tensor features, Tensor weight, Tensor? bias, {OVER}, bool is_swapped) -> Tensor", tags=_TAGS
)
# of the features and the weight, those that are wanted: one operator, by one launch plan
voxel_library.define(
    f"voxel_convolution_gradients(Tensor dOut, Tensor features, Tensor weight, {OVER}, bool is_swapped, bool[] wanted)"
    " -> Tensor[]",
    tags=_TAGS,
)
voxel_library.define("same_rows(Tensor indices, Tensor other, str refusal) -> Tensor", tags=_TAGS)
_convolve = torch.ops.insum_ops.voxel_convolution.default
_gradients = torch.ops.insum_ops.voxel_convolution_gradients.default

_value: Callable[..., Tensor]
_computed_gradients: Callable[..., Sequence[Tensor | None]]
_gradient_call: Callable[[Backward], Any]


class Backward(NamedTuple):
    """A pass backward through a convolution: the gradient of its result, what it is a convolution of, what is wanted.

    If `is_swapped`, it leads from the weight's output channels to its input channels.
    """

    dOut: Tensor
    features: Tensor
    weight: Tensor
    wanted: tuple[bool, ...]  # the gradients of the features, the weight and, if it is asked for, the bias
    kernel_map: KernelMap
    groups: int
    is_swapped: bool

    @property
    def sides(self) -> tuple[Tensor, Tensor, KernelMap]:
        """What has the weight's input channels, what has its output channels, and the map from one to the other."""
        if self.is_swapped:
            return self.dOut, self.features, self.kernel_map.inverse
        return self.features, self.dOut, self.kernel_map


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
    def cached_map(self) -> KernelMap | None:
        """The map, if it was made before and its voxels are unchanged."""
        kernel_map = cached_map(self.source, self.target, (self.geometry, tuple(self.sizes)))
        return kernel_map.inverse if kernel_map is not None and self.side else kernel_map

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


def implement(
    value: Callable[..., Tensor],
    gradients: Callable[..., Sequence[Tensor | None]],
    gradient_call: Callable[[Backward], Any],
) -> None:
    """Make these functions over a `KernelMap` what the operators call when they run."""
    global _value, _computed_gradients, _gradient_call
    _value, _computed_gradients, _gradient_call = value, gradients, gradient_call


def _cached_map(over: _Over, tensors: Sequence[Tensor]) -> KernelMap | None:
    """Return the map of a call that can run as it is; None if it was not made yet."""
    is_plain = transforms() is None and all([type(tensor) in PLAIN for tensor in (over.source, *tensors)])
    return over.cached_map if is_plain else None


def _replayed(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
    """Return a convolution over a map that was made before: all that a warm call of a compiled graph does."""
    *parts, is_swapped = rest
    over = _Over(*parts)
    kernel_map = _cached_map(over, (features, weight) if bias is None else (features, weight, bias))
    return None if kernel_map is None else owned(_value(features, weight, bias, kernel_map, over.groups, is_swapped))


def _replayed_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor] | None:
    *parts, is_swapped, wanted = rest
    over = _Over(*parts)
    kernel_map = _cached_map(over, (dOut, features, weight))
    if kernel_map is None:
        return None
    return _gradients_on(Backward(dOut, features, weight, tuple(wanted), kernel_map, over.groups, is_swapped))


def _owned(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [owned(tensor) for tensor in tensors if tensor is not None]


@uncompiled
def _run(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = _Over(*parts)
    with torch.no_grad():
        return owned(_value(features, weight, bias, over.map, over.groups, is_swapped))


@uncompiled
def _run_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    *parts, is_swapped, wanted = rest
    over = _Over(*parts)
    with torch.no_grad():
        return _gradients_on(Backward(dOut, features, weight, tuple(wanted), over.map, over.groups, is_swapped))


def _gradients_on(backward: Backward) -> list[Tensor]:
    """Return the gradients that are wanted, by the launch plans that ordinary calls share."""
    call = _gradient_call(backward)
    gradients = lambda *_: (None, *_computed_gradients(backward, call)[:2])
    plan_key, tensors = gradients_key((*call.key, None), (False, *backward.wanted)), (*backward[:3], *call.tensors)
    return _owned(planned(PLANS, plan_key, gradients, tensors, varies=True, owned=None))


@torch.library.register_fake("insum_ops::voxel_convolution", lib=voxel_library)
def _fake(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = _Over(*parts)
    Weight, kind = statement_weight(weight, over.groups, is_swapped), channel_kind(weight, over.groups)
    In = features.unflatten(1, (over.groups, -1)) if kind == IN_GROUPS else features
    NBR = features.new_empty((over.rows, Weight.shape[0]), dtype=torch.int32)
    bound = bind(parse(STATIONARY[kind]), {"In": In, "Weight": Weight, "NBR": NBR}, None)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device).flatten(1)


@torch.library.register_fake("insum_ops::voxel_convolution_gradients", lib=voxel_library)
def _fake_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    wanted = rest[-1]
    learning = [tensor for tensor, is_wanted in zip((features, weight), wanted) if is_wanted]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in learning]


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
        over, wanted = _Over(source, target, *ctx.rest), list(ctx.needs_input_grad[:2])
        d_features = d_weight = None
        if wanted[1]:
            *grads, d_weight = _gradients(grad_output, features, weight, *over, ctx.is_swapped, wanted)
            d_features = grads[0] if wanted[0] else None
        elif wanted[0]:  # by itself it does not read the features
            d_features = _convolve(grad_output, weight, None, *over.backwards, not ctx.is_swapped).to(features.dtype)
        d_bias = grad_output.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return d_features, d_weight, d_bias, None, None


class _WeightGradient(torch.autograd.Function):
    """The gradient of a convolution's weight as an operator."""

    @staticmethod
    def forward(ctx: Any, In: Tensor, dOut: Tensor, weight: Tensor, over: _Over) -> Any:
        ctx.save_for_backward(In, dOut, over.source, over.target)
        ctx.rest = over[2:]
        return _gradients(dOut, In, weight, *over, False, [False, True])[0]

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
    over, tensors = _Over(*parts), (features, weight) if bias is None else (features, weight, bias)
    if not refuse_transforms("a convolution", tensors):
        return below_autograd(_convolve, _run, tensors, features, weight, bias, *rest)  # type: ignore[no-any-return]
    return _Convolution.apply(features, weight, bias, over, is_swapped)  # type: ignore[no-any-return]


def _differentiable_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients for autograd: where theirs are wanted in turn, each is an operator of its own."""
    *parts, is_swapped, wanted = rest
    over = _Over(*parts)
    tensors = dOut, features, weight
    if not refuse_transforms("the gradient of a convolution", tensors):
        return below_autograd(_gradients, _run_gradients, tensors, *tensors, *rest)  # type: ignore[no-any-return]
    grads = list[Tensor]()
    if wanted[0]:
        grads.append(_convolve(dOut, weight, None, *over.backwards, not is_swapped).to(features.dtype))
    if wanted[1] and is_swapped:  # the features have the weight's output channels
        grads.append(_WeightGradient.apply(dOut, features, weight, over.backwards))
    elif wanted[1]:
        grads.append(_WeightGradient.apply(features, dOut, weight, over))
    return grads


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
    voxel_library.impl("voxel_convolution", _run, _key)
    voxel_library.impl("voxel_convolution_gradients", _run_gradients, _key)
    voxel_library.impl("same_rows", uncompiled(_same), _key)
voxel_library.impl("voxel_convolution", _differentiable, "Autograd")
voxel_library.impl("voxel_convolution_gradients", _differentiable_gradients, "Autograd")
replay_first(_convolve, _replayed)
replay_first(_gradients, _replayed_gradients)


@register_flop_formula(_convolve.overloadpacket, get_raw=True)
def _flops(features: Tensor, weight: Tensor, bias: Any, *rest: Any, **_: Any) -> int:
    """Return the multiplications and additions of a convolution, over the table of its map: absent pairs included."""
    return 2 * _Over(*rest[:6]).rows * weight.numel()


@register_flop_formula(_gradients.overloadpacket, get_raw=True)
def _gradient_flops(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    gradients: int = sum(rest[7])
    return gradients * 2 * _Over(*rest[:6]).rows * weight.numel()
