"""A layer's product with its blocks, as one step of autograd: leading dimensions and the bias are inside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiler.autograd import evaluate
from ..compiler.gradients import gradients_of
from ..compiler.ready import find, find_standing, is_free, remember_standing
from ..compiler.ready_call import contiguous
from ..formats import BlockCOO
from ..functional import insum

__all__ = ["EXPR", "product"]

EXPR = "Y[t,o] += X[t,i] * W[o,i]"


def product(x: Tensor, W: BlockCOO, bias: Tensor | None) -> Tensor:
    """x [..., i] by W [o, i] to [..., o], sums starting from the bias [o]."""
    if not is_free() or (bias is not None and bias.dtype != x.dtype):
        return _evaluate(x, W, bias)
    wants_grad = x.requires_grad or W.values.requires_grad or (bias is not None and bias.requires_grad)
    if wants_grad and torch.is_grad_enabled():
        return _Product.apply(x, W.values, bias, W)  # type: ignore[no-any-return]
    return _run(x, W, bias)


def _run(x: Tensor, W: Any, bias: Tensor | None) -> Tensor:
    key, known = find_standing(EXPR, W, (x, bias))
    if known is not None:
        call, final = known
        result = call.standing(W, {"X": x, "Y": bias}, final)
        if result is not None:
            return result
    result = _evaluate(x, W, bias)
    if key is not None and known is None and (x.ndim == 2 or x.is_contiguous()):
        found = find(EXPR, _operands(x, W, bias), None)
        if found is not None:
            remember_standing(key, W, found[0], contiguous(tuple(result.shape)))
    return result


def _evaluate(x: Tensor, W: BlockCOO, bias: Tensor | None) -> Tensor:
    Y = insum(EXPR, **_operands(x, W, bias))
    return Y if x.ndim == 2 else Y.view(*x.shape[:-1], W.shape[0])


def _operands(x: Tensor, W: BlockCOO, bias: Tensor | None) -> dict[str, Any]:
    X = _rows(x)
    return {"X": X, "W": W} if bias is None else {"X": X, "W": W, "Y": bias.expand(X.shape[0], W.shape[0])}


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class _Product(torch.autograd.Function):
    """Its gradients are those of the statement; the bias gets the sum of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, W: BlockCOO) -> Tensor:
        ctx.W = W
        ctx.save_for_backward(x, weight)
        return _run(x, W, bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        W = ctx.W if ctx.W.values is weight else ctx.W.with_values(weight)
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dY = _rows(upstream)
        d_weight, d_x = gradients_of(evaluate, EXPR, "W", W, {"X": _rows(x)}, dY, (wants_weight, wants_x))
        if d_x is not None and x.ndim != 2:
            d_x = d_x.view(x.shape)
        return d_x, d_weight, dY.sum(0) if wants_bias else None, None
