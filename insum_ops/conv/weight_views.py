"""A convolution's weight as its statements read it."""

from __future__ import annotations

from torch import Tensor

__all__ = [
    "DENSE",
    "IN_GROUPS",
    "ONE_BY_ONE",
    "channel_kind",
    "statement_weight",
]

DENSE, IN_GROUPS, ONE_BY_ONE = range(3)  # how the channels are connected


def channel_kind(weight: Tensor, groups: int) -> int:
    """Return how a weight [M, *kernel_size, C / groups] connects the channels."""
    if groups == 1:
        return DENSE
    return ONE_BY_ONE if groups == weight.shape[0] and weight.shape[-1] == 1 else IN_GROUPS


def statement_weight(weight: Tensor, groups: int, is_swapped: bool = False) -> Tensor:
    """Return a view of a weight [V, C, M], [V, g, C / g, M / g] or [V, g], as statements read it.

    If `is_swapped`, input and output channels are swapped.
    """
    flat = weight.flatten(1, -2)  # [M, V, C / groups]
    kind = channel_kind(weight, groups)
    if kind == ONE_BY_ONE:
        return flat.squeeze(2).T
    view = flat.permute(1, 2, 0) if kind == DENSE else flat.unflatten(0, (groups, -1)).permute(2, 0, 3, 1)
    return view.transpose(-1, -2) if is_swapped else view
