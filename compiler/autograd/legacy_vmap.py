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

__all__ = ["is_batched", "unbatch_gradients"]

MOST_LEVELS = 64  # that torch counts

Backward = Callable[..., Any]

is_batched = functorch.is_legacy_batchedtensor  # of a tensor: asked in every pass backward


def unbatch_gradients(backward: Backward) -> Backward:
    """Return the `backward` of an autograd.Function so that a batch of gradients calls it once for each of them."""

    @wraps(backward)
    def called(ctx: Any, *grad_outputs: Any) -> Any:
        if is_compiling() or not any([_is_batch(grad_output) for grad_output in grad_outputs]):
            return backward(ctx, *grad_outputs)
        level = next(_level(grad_output) for grad_output in grad_outputs if _is_batch(grad_output))
        rows = [
            torch._remove_batch_dim(grad_output, level, 1, 0) if _is_batch(grad_output) else None
            for grad_output in grad_outputs
        ]
        results = []
        for at in range(max([0 if row is None else len(row) for row in rows])):
            grads = backward(
                ctx, *[grad_output if row is None else row[at] for row, grad_output in zip(rows, grad_outputs)]
            )
            results.append(grads if isinstance(grads, tuple) else (grads,))
        return tuple([_joined(grads, level) for grads in zip(*results)])

    return called


def _is_batch(part: object) -> bool:
    """Whether an argument of `backward` is one of those batches."""
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


def _joined(grads: Sequence[Tensor | None], level: int) -> Tensor | None:
    """Return the gradients of one tensor as a batch; None if it has none."""
    present = [grad for grad in grads if grad is not None]
    return torch._add_batch_dim(torch.stack(present), 0, level) if present else None
