"""`torch.autograd.grad(..., is_grads_batched=True)`, by which `jacobian(vectorize=True)` works: one gradient at a time.

Its batches are older than `torch.func` and have no rule for most operators, nor data that a kernel could read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ...formats.torch_state import is_compiling
from ..language import UnsupportedError

__all__ = ["one_by_one"]

MOST_LEVELS = 64  # that torch counts

Backward = Callable[..., Any]


def one_by_one(backward: Backward) -> Backward:
    """The `backward` of an autograd.Function, called once for each gradient of a batch."""

    @wraps(backward)
    def called(ctx: Any, *upstream: Any) -> Any:
        if is_compiling() or not any([_is_batch(own) for own in upstream]):
            return backward(ctx, *upstream)
        level = next(_level(own) for own in upstream if _is_batch(own))
        rows = [torch._remove_batch_dim(own, level, 1, 0) if _is_batch(own) else None for own in upstream]
        found = []
        for at in range(max([0 if row is None else len(row) for row in rows])):
            grads = backward(ctx, *[own if row is None else row[at] for row, own in zip(rows, upstream)])
            found.append(grads if isinstance(grads, tuple) else (grads,))
        return tuple([_joined(grads, level) for grads in zip(*found)])

    return called


def _is_batch(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and functorch.is_legacy_batchedtensor(tensor)


def _level(tensor: Tensor) -> int:
    """The level of a batch, by which torch takes it apart and puts it together: torch nests none of them in another.

    It is asked of the tensor: the count of nested batches belongs to the thread that asked for the gradients, and the
    backward of a GPU's tensors runs in a thread of its own. What is not of the level that is taken away stays a batch.
    """
    for level in range(1, MOST_LEVELS + 1):
        if not _is_batch(torch._remove_batch_dim(tensor, level, 1, 0)):
            return level
    raise UnsupportedError("batches of gradients are nested, as is_grads_batched=True inside another; ask for one")


def _joined(grads: Sequence[Tensor | None], level: int) -> Tensor | None:
    known = [grad for grad in grads if grad is not None]
    return torch._add_batch_dim(torch.stack(known), 0, level) if known else None
