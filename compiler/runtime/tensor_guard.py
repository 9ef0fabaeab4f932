"""Whether tensors are laid out like others, asked in one call: of the guards that compiled graphs ask too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Recognises", "recogniser"]

Recognises = Callable[..., bool]


def recogniser(tensors: Sequence[Tensor]) -> Recognises | None:
    """What says of as many tensors whether they are like these; None: this torch can't, or two of these are one.

    Compared are types, shapes, strides, dtypes, devices, negated and conjugated memory, whether gradients are wanted;
    that all of them are different tensors; and by whom torch has operations on them handled: autocast of their device,
    the transforms of torch.func and inference mode are or are not active, as they were for these.

    >>> recognises = recogniser([torch.zeros(2, 3)])
    >>> recognises is None or (recognises(torch.ones(2, 3)), recognises(torch.ones(3, 2)))
    (True, False)
    """
    if not _tells_apart():
        return None
    recognises = _guard(tensors)
    return recognises if recognises(*tensors) else None


def _guard(tensors: Sequence[Any]) -> Recognises:
    guards: Any = torch._C._dynamo.guards
    # without a size or stride that may be another
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


def _when_handled(recognises: Recognises, tensor: Tensor) -> list[bool]:
    """Whether a tensor is recognised by each who could handle operations on it otherwise."""
    seen: list[bool] = []

    def look(given: Tensor) -> Tensor:
        seen.append(recognises(tensor))
        return given.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        look(tensor)
    torch.func.vmap(look)(tensor)
    torch.func.functionalize(look)(tensor)  # not `grad`, on the same way, whose first call takes a second
    return seen


@cache
def _tells_apart() -> bool:
    """Torch promises nothing about its guards, so that they are tried on all that has to be told apart."""
    if not hasattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards"):
        return False
    with torch.inference_mode(False):
        like, other = (torch.zeros(2, 3, dtype=torch.float32, device="cpu") for _ in range(2))
        wide = torch.zeros(2, 4, dtype=torch.float32, device="cpu")
        unlike: list[Any] = [wide, wide[:, :3], wide[:, 0], other.T, other[None], other.double(), other.to("meta")]
        unlike += [torch._neg_view(other), torch.nn.Parameter(other), other.clone().requires_grad_(), [[0.0]], None]
        try:
            one, two = _guard([like]), _guard([like, wide])
            is_right = one(other) and two(other, wide) and not two(other, other.T) and not two(wide, wide)
            return bool(is_right) and not any([one(tensor) for tensor in unlike]) and not any(_when_handled(one, other))
        except (TypeError, RuntimeError):
            return False
