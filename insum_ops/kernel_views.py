"""A convolution's weight and bias as its statements read them: views, which a layer makes once."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiler.errors import OperandError

__all__ = [
    "DENSE",
    "IN_GROUPS",
    "ONE_BY_ONE",
    "CallKey",
    "KeptViews",
    "KernelViews",
    "as_weight",
    "call_key",
    "channel_kind",
    "refuse_freed",
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
    """What one layer's statements read of its weight and bias: an immutable record, made again once it is outdated.

    A view follows its tensor through every change in place. It is outdated if the parameter was replaced, moved, cast
    or laid out otherwise, or if its memory was given back: wrappers that shard parameters free a storage and fill it
    again, perhaps elsewhere, and another tensor may get its address meanwhile. So both the parameter and the view must
    still lie where they lay. The view holds its storage, and two storages that live at one address are one memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, groups: int) -> None:
        refuse_freed("weight", weight)
        self.weight, self.bias = weight, bias
        self.at, self.shape, self.strides = weight.data_ptr(), weight.shape, weight.stride()
        if bias is not None:
            refuse_freed("bias", bias)
            self.bias_at, self.bias_dtype, self.bias_shape = bias.data_ptr(), bias.dtype, bias.shape
        with torch.inference_mode(False), torch.no_grad():  # they outlive this call
            self.plain = statement_weight(weight, groups)
            self.swapped = statement_weight(weight, groups, is_swapped=True)
        self.plain_key, self.swapped_key = call_key(self.plain), call_key(self.swapped)

    def has(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the record is of these parameters, as they are now."""
        if bias is not self.bias or not self.is_of(weight):
            return False
        if bias is None:
            return True
        return bias.data_ptr() == self.bias_at and bias.dtype is self.bias_dtype and bias.shape == self.bias_shape

    def is_of(self, weight: Tensor) -> bool:
        """Return whether the views are of this weight, as it is now.

        They never are if the weight's axes have no such view: then they are copies, for one call.
        """
        if weight is not self.weight or weight.dtype is not self.plain.dtype:
            return False
        if not self.plain.data_ptr() == self.at == weight.data_ptr():
            return False
        return weight.shape == self.shape and weight.stride() == self.strides


class KeptViews:
    """The views that a layer keeps from call to call; threads see those before a change or those after it."""

    def __init__(self) -> None:
        self.views: KernelViews | None = None

    def get(self, weight: Tensor, bias: Tensor | None) -> KernelViews | None:
        """Return the views of these parameters, or None if they have to be made."""
        views = self.views
        return views if views is not None and views.has(weight, bias) else None

    def make(self, weight: Tensor, bias: Tensor | None, groups: int) -> KernelViews:
        views = KernelViews(weight, bias, groups)
        self.views = views if views.is_of(weight) else None  # copies of a weight are not worth their memory
        return views


def refuse_freed(name: str, parameter: Tensor) -> None:
    """Raise OperandError if the storage of a parameter was given back, which kernels would read all the same."""
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise OperandError(
            f"{name} {list(parameter.shape)} has no memory: it was freed by who shards the model's parameters, such as "
            "fully_shard, which gathers them for the forward and backward passes of the modules it was called on; "
            "call those modules, and let them return tensors where torch finds them"
        )
