"""What the operators of convolutions compute where they run: an ordinary call, over a map that is found by its voxels.

Their gradients are these operators again, so that they have any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compiler import below_autograd, gradients_key, owned, planned, refuse_transforms, replay_first
from ..formats.torch_state import PLAIN, transforms, uncompiled
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_operators import reached_again, voxel_library
from ..formats.voxels.map_parts import cached_map
from .functional import convolution_gradients, gradient_call, planned_convolution
from .operators import PLANS, Backward, Over, voxel_convolution, voxel_gradients

__all__: list[str] = []


def _cached_map(source: Tensor, target: Tensor, geometry: str, sizes: Sequence[int], side: int) -> KernelMap | None:
    """Return the map of a call that can run as it is; None if it was not made yet, or a transform is active."""
    kernel_map = cached_map(source, target, (geometry, tuple(sizes)))  # only of tensors that are plain themselves
    if kernel_map is None or transforms() is not None:
        return None
    return kernel_map.inverse if side else kernel_map


def _replayed(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    geometry: str,
    sizes: Sequence[int],
    groups: int,
    side: int,
    is_swapped: bool,
) -> Tensor | None:
    """Return a convolution over a map that was made before: all that a warm call of a compiled graph does."""
    if type(features) not in PLAIN or type(weight) not in PLAIN or not (bias is None or type(bias) in PLAIN):
        return None
    kernel_map = _cached_map(source, target, geometry, sizes, side)
    if kernel_map is None:
        return None
    return owned(planned_convolution(features, weight, bias, kernel_map, groups, is_swapped))


def _replayed_gradients(
    dOut: Tensor,
    features: Tensor,
    weight: Tensor,
    source: Tensor,
    target: Tensor,
    geometry: str,
    sizes: Sequence[int],
    groups: int,
    side: int,
    is_swapped: bool,
    wanted: Sequence[bool],
) -> list[Tensor] | None:
    if type(dOut) not in PLAIN or type(features) not in PLAIN or type(weight) not in PLAIN:
        return None
    kernel_map = _cached_map(source, target, geometry, sizes, side)
    if kernel_map is None:
        return None
    return _gradients_on(Backward(dOut, features, weight, tuple(wanted), kernel_map, groups, is_swapped))


def _reached(source: Tensor, geometry: str, sizes: Sequence[int]) -> Tensor | None:
    """Return the voxels that a convolution leads to, whose map was made before."""
    is_plain = transforms() is None and type(source) in PLAIN
    return reached_again(source, geometry, tuple(sizes)) if is_plain else None


@uncompiled
def _run(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over = Over(*parts)
    with torch.no_grad():
        return owned(planned_convolution(features, weight, bias, over.map, over.groups, is_swapped))


@uncompiled
def _run_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    *parts, is_swapped, wanted = rest
    over = Over(*parts)
    with torch.no_grad():
        return _gradients_on(Backward(dOut, features, weight, tuple(wanted), over.map, over.groups, is_swapped))


def _gradients_on(backward: Backward) -> list[Tensor]:
    """Return the gradients that are wanted, by the launch plans that ordinary calls share."""
    call = gradient_call(backward)
    # the bias's comes in the type of dOut, of which a graph makes the bias's own
    bias_dtype = backward.dOut.dtype if backward.wanted[2:] == (True,) else None
    count = len(backward.wanted)
    gradients = lambda *_: (None, *convolution_gradients(backward, call, bias_dtype)[:count])
    plan_key = gradients_key((*call.key, bias_dtype), (False, *backward.wanted))
    tensors = *backward[:3], *call.tensors
    grads = planned(PLANS, plan_key, gradients, tensors, varies=True, owned=None)
    return [owned(grad) for grad in grads if grad is not None]


class _Convolution(torch.autograd.Function):
    """A convolution as an operator."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, over: Over, is_swapped: bool) -> Any:
        ctx.save_for_backward(features, weight, over.source, over.target)
        ctx.rest, ctx.is_swapped = over[2:], is_swapped
        ctx.bias_dtype = None if bias is None else bias.dtype
        return voxel_convolution(features, weight, bias, *over, is_swapped)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        features, weight, source, target = ctx.saved_tensors
        over, wanted = Over(source, target, *ctx.rest), list(ctx.needs_input_grad[:3])
        d_features = d_weight = d_bias = None
        if wanted[1]:
            asked = wanted if wanted[2] else wanted[:2]
            grads = iter(voxel_gradients(grad_output, features, weight, *over, ctx.is_swapped, asked))
            d_features, d_weight, d_bias = [next(grads) if is_wanted else None for is_wanted in wanted]
        else:
            if wanted[0]:  # by itself it does not read the features
                d_features = voxel_convolution(grad_output, weight, None, *over.backwards, not ctx.is_swapped)
                d_features = d_features.to(features.dtype)
            d_bias = grad_output.sum(0) if wanted[2] else None
        return d_features, d_weight, None if d_bias is None else d_bias.to(ctx.bias_dtype), None, None


class _WeightGradient(torch.autograd.Function):
    """The gradient of a convolution's weight as an operator."""

    @staticmethod
    def forward(ctx: Any, In: Tensor, dOut: Tensor, weight: Tensor, over: Over) -> Any:
        ctx.save_for_backward(In, dOut, over.source, over.target)
        ctx.rest = over[2:]
        return voxel_gradients(dOut, In, weight, *over, False, [False, True])[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        In, dOut, source, target = ctx.saved_tensors
        over = Over(source, target, *ctx.rest)
        d_In = d_dOut = None
        if ctx.needs_input_grad[0]:
            d_In = voxel_convolution(dOut, grad_output, None, *over.backwards, True).to(In.dtype)
        if ctx.needs_input_grad[1]:
            d_dOut = voxel_convolution(In, grad_output, None, *over, False).to(dOut.dtype)
        return d_In, d_dOut, None, None


def _differentiable(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *parts, is_swapped = rest
    over, tensors = Over(*parts), (features, weight) if bias is None else (features, weight, bias)
    if not refuse_transforms("a convolution", tensors):
        arguments = features, weight, bias, *rest
        return below_autograd(voxel_convolution, _run, tensors, *arguments)  # type: ignore[no-any-return]
    return _Convolution.apply(features, weight, bias, over, is_swapped)  # type: ignore[no-any-return]


def _differentiable_gradients(dOut: Tensor, features: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    """The gradients for autograd: where theirs are wanted in turn, each is an operator of its own."""
    *parts, is_swapped, wanted = rest
    over = Over(*parts)
    tensors = dOut, features, weight
    if not refuse_transforms("the gradient of a convolution", tensors):
        return below_autograd(voxel_gradients, _run_gradients, tensors, *tensors, *rest)  # type: ignore[no-any-return]
    grads = list[Tensor]()
    if wanted[0]:
        grads.append(voxel_convolution(dOut, weight, None, *over.backwards, not is_swapped).to(features.dtype))
    if wanted[1] and is_swapped:  # the features have the weight's output channels
        grads.append(_WeightGradient.apply(dOut, features, weight, over.backwards))
    elif wanted[1]:
        grads.append(_WeightGradient.apply(features, dOut, weight, over))
    if wanted[2:] == [True]:
        grads.append(dOut.sum(0))
    return grads


for _key in ("CPU", "CUDA"):
    voxel_library.impl("convolved_voxels", _run, _key)
    voxel_library.impl("voxel_convolution_gradients", _run_gradients, _key)
voxel_library.impl("convolved_voxels", _differentiable, "Autograd")
voxel_library.impl("voxel_convolution_gradients", _differentiable_gradients, "Autograd")
replay_first(voxel_convolution, _replayed)
replay_first(voxel_gradients, _replayed_gradients)
replay_first(torch.ops.insum_ops.reached_voxels.default, _reached)
