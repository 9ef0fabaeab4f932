"""A convolution's weight and bias as its statements read them: views, which a layer makes once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "DENSE",
    "IN_GROUPS",
    "ONE_BY_ONE",
    "CallKey",
    "KernelViews",
    "as_weight",
    "call_key",
    "channel_kind",
    "statement_weight",
]

DENSE, IN_GROUPS, ONE_BY_ONE = range(3)  # how the channels are connected

CallKey = tuple[str | int, ...]


def channel_kind(weight: Tensor, groups: int) -> int:
    """How a weight [M, *kernel_size, C / groups] connects the channels."""
    if groups == 1:
        return DENSE
    return ONE_BY_ONE if groups == weight.shape[0] and weight.shape[-1] == 1 else IN_GROUPS


def statement_weight(weight: Tensor, groups: int, is_swapped: bool = False) -> Tensor:
    """[V, C, M], [V, g, C / g, M / g] or [V, g]; `is_swapped`: with the two kinds of channels swapped."""
    flat = weight.flatten(1, -2)  # [M, V, C / groups]
    kind = channel_kind(weight, groups)
    if kind == ONE_BY_ONE:
        return flat.squeeze(2).T
    view = flat.permute(1, 2, 0) if kind == DENSE else flat.unflatten(0, (groups, -1)).permute(2, 0, 3, 1)
    return view.transpose(-1, -2) if is_swapped else view


def call_key(Weight: Tensor) -> CallKey:
    """Under which a map keeps what it prepared for weights of this shape."""
    return "layer", *Weight.shape


def as_weight(made: Tensor, weight: Tensor, groups: int) -> Tensor:
    """What has the shape of `statement_weight(weight, groups)`, as the weight itself lies."""
    kind = channel_kind(weight, groups)
    if kind == ONE_BY_ONE:
        return made.T.reshape(weight.shape)
    return (
        made.permute(2, 0, 1).reshape(weight.shape) if kind == DENSE else made.permute(1, 3, 0, 2).reshape(weight.shape)
    )


class KernelViews:
    """What one layer's statements read of its weight, and marks of what was checked.

    A view follows its tensor through every change in place. A parameter that was replaced, moved or cast has
    another identity or address, and is viewed anew.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def has(self, weight: Tensor, bias: Tensor | None) -> bool:
        if bias is not self.bias or not self.is_of(weight):
            return False
        if bias is None:
            return True
        return bias.data_ptr() == self.bias_at and bias.dtype is self.bias_dtype and bias.shape == self.bias_shape

    def is_of(self, weight: Tensor) -> bool:
        if weight is not self.weight or weight.data_ptr() != self.at or weight.dtype is not self.plain.dtype:
            return False
        return weight.shape == self.shape and weight.stride() == self.strides

    def take(self, weight: Tensor, bias: Tensor | None, groups: int) -> None:
        self.weight = None  # until all of it is there: another thread may ask
        self.bias = bias
        self.at, self.shape, self.strides = weight.data_ptr(), weight.shape, weight.stride()
        if bias is not None:
            self.bias_at, self.bias_dtype, self.bias_shape = bias.data_ptr(), bias.dtype, bias.shape
        with torch.inference_mode(False), torch.no_grad():  # they outlive this call
            self.plain = statement_weight(weight, groups)
            self.swapped = statement_weight(weight, groups, is_swapped=True)
        self.plain_key, self.swapped_key = call_key(self.plain), call_key(self.swapped)
        if self.plain.data_ptr() == self.at:  # else its axes have no such view: copies, for this call alone
            self.weight = weight
