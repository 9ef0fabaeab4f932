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

__all__ = ["one_by_one"]

Backward = Callable[..., Any]


def one_by_one(backward: Backward) -> Backward:
    """The `backward` of an autograd.Function, called once for each gradient of a batch."""

    @wraps(backward)
    def called(ctx: Any, *upstream: Any) -> Any:
        if torch.compiler.is_compiling() or not any([_is_batch(own) for own in upstream]):
            return backward(ctx, *upstream)
        return _called(backward, ctx, upstream, _level())

    return called


def _called(backward: Backward, ctx: Any, upstream: Sequence[Any], level: int) -> Any:
    """Apart at one level, then at those around it."""
    if level == 0:
        return backward(ctx, *upstream)
    rows = [torch._remove_batch_dim(own, level, 0, 0) if _is_batch(own) else None for own in upstream]
    size = max([0 if row is None else len(row) for row in rows])
    if size == 0:  # a batch of another level
        return _called(backward, ctx, upstream, level - 1)
    found = []
    for at in range(size):
        given = [row[at] if row is not None and len(row) else own for row, own in zip(rows, upstream)]
        grads = _called(backward, ctx, given, level - 1)
        found.append(grads if isinstance(grads, tuple) else (grads,))
    return tuple([_joined(grads, level) for grads in zip(*found)])


def _is_batch(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and functorch.is_legacy_batchedtensor(tensor)


def _level() -> int:
    """Of the innermost batch."""
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _joined(grads: Sequence[Tensor | None], level: int) -> Tensor | None:
    known = [grad for grad in grads if grad is not None]
    return torch._add_batch_dim(torch.stack(known), 0, level) if known else None
