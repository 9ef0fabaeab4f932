"""Batches that are older than `torch.func`, one gradient or tangent at a time.

`torch.autograd.grad(..., is_grads_batched=True)` makes batches of gradients, `torch.autograd.functional.jacobian` with
`vectorize=True` those or, with `strategy="forward-mode"`, batches of tangents. They have no rule for most operators,
nor data that a kernel could read.
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

__all__ = ["is_batched", "unbatch_gradients", "unbatch_tangents"]

MOST_LEVELS = 64  # that torch counts

Backward = Callable[..., Any]

is_batched = functorch.is_legacy_batchedtensor  # of a tensor: asked in every pass backward


def unbatch_gradients(backward: Backward) -> Backward:
    """Return the `backward` of an autograd.Function so that a batch of gradients calls it once for each of them."""

    @wraps(backward)
    def called(ctx: Any, *grad_outputs: Any) -> Any:
        if is_compiling() or not any([_is_batch(grad_output) for grad_output in grad_outputs]):
            return backward(ctx, *grad_outputs)
        return _one_by_one(backward, ctx, grad_outputs)

    return called


def unbatch_tangents(jvp: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return a function of (ctx, tangents) so that a batch of tangents calls it once for each of them."""

    @wraps(jvp)
    def called(ctx: Any, *tangents: Any) -> Tensor | None:
        if is_compiling() or not any([_is_batch(tangent) for tangent in tangents]):
            return jvp(ctx, *tangents)
        (tangent,) = _one_by_one(jvp, ctx, tangents)
        return tangent

    return called


def _one_by_one(function: Callable[..., Any], ctx: Any, arguments: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return what `function(ctx, *arguments)` would for a batch, calling it once for each part; of none, for sizes."""
    level = next(_level(argument) for argument in arguments if _is_batch(argument))
    rows = [torch._remove_batch_dim(argument, level, 1, 0) if _is_batch(argument) else None for argument in arguments]
    count = next(len(row) for row in rows if row is not None)
    if not count:  # a Jacobian for a tensor without elements
        rows = [None if row is None else row.new_zeros(1, *row.shape[1:]) for row in rows]
    results = []
    for at in range(max(count, 1)):
        parts = function(ctx, *[argument if row is None else row[at] for row, argument in zip(rows, arguments)])
        results.append(parts if isinstance(parts, tuple) else (parts,))
    return tuple([_joined(parts, level, count) for parts in zip(*results)])


def _is_batch(part: object) -> bool:
    """Whether an argument is one of those batches."""
    return isinstance(part, Tensor) and is_batched(part)


def _level(tensor: Tensor) -> int:
    """Return the level of a batch, by which torch takes it apart and puts it together.

    It is read off the tensor: the count of nested batches belongs to the thread that asked for the gradients, and the
    backward of a GPU's tensors runs in a thread of its own. A tensor stays a batch unless its own level is removed.

    Raises:
        UnsupportedError: batches are nested.
    """
    for level in range(1, MOST_LEVELS + 1):
        if not _is_batch(torch._remove_batch_dim(tensor, level, 1, 0)):
            return level
    raise UnsupportedError("batches of gradients are nested, as is_grads_batched=True inside another; ask for one")


def _joined(parts: Sequence[Tensor | None], level: int, count: int) -> Tensor | None:
    """Return the first `count` gradients or tangents of one tensor as a batch; None if it has none."""
    present = [part for part in parts if part is not None]
    return torch._add_batch_dim(torch.stack(present)[:count], 0, level) if present else None
