"""A layer's product with its blocks, as one step of autograd: leading dimensions and the bias are inside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiler.autograd import evaluate
from ..compiler.carried import owned
from ..compiler.express import again, is_free, look_up
from ..compiler.gradients import gradients_of
from ..compiler.one_by_one import one_by_one
from ..compiler.ready import find, remember_call
from ..compiler.ready_call import Standing, contiguous
from ..formats import BlockCOO
from ..functional import insum

__all__ = ["EXPR", "known_product", "product"]

EXPR = "Y[t,o] += X[t,i] * W[o,i]"
STANDING = ("standing", EXPR)  # marks calls to which tensors stand for the rows and the matrix that are views of them


def known_product(x: Tensor, W: BlockCOO, bias: Tensor | None) -> Tensor | None:
    """`product` without gradients, if one like it has run before: then nothing about it needs to be checked."""
    if torch.compiler.is_compiling() or _wants_gradient(x, W, bias):  # a tracer can't even ask for the memory
        return None
    tensors = (x, W.values) if bias is None else (x, W.values, bias)
    return again(W.memory, STANDING, tensors, tensors)[2]


def product(x: Tensor, W: BlockCOO, bias: Tensor | None) -> Tensor:
    """x [..., i] by W [o, i] to [..., o], sums starting from the bias [o]."""
    if not is_free() or (bias is not None and bias.dtype != x.dtype):
        return _evaluate(x, W, bias)
    if _wants_gradient(x, W, bias):
        return _Product.apply(x, W.values, bias, W)  # type: ignore[no-any-return]
    return _run(x, W, bias)


def _wants_gradient(x: Tensor, W: BlockCOO, bias: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or W.values.requires_grad or (bias is not None and bias.requires_grad)


def _run(x: Tensor, W: Any, bias: Tensor | None) -> Tensor:
    tensors = (x, W.values) if bias is None else (x, W.values, bias)
    key, known = look_up(W.memory, STANDING, tensors)
    if known is not None:
        standing: Tensor | None = known(W, tensors)
        if standing is not None:
            return standing
    result = _evaluate(x, W, bias)
    if key is not None and known is None and (x.ndim == 2 or x.is_contiguous()):
        found = find(EXPR, _operands(x, W, bias), None)
        if found is not None and found[0].is_direct:  # a kernel reads memory, whatever the shape of what stands there
            remember_call(W.memory, key, Standing(found[0], contiguous(tuple(result.shape))))
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
        return owned(_run(x, W, bias))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        W = ctx.W if ctx.W.values is weight else ctx.W.with_values(weight)
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        dY = _rows(upstream)
        d_weight, d_x = gradients_of(evaluate, EXPR, "W", W, {"X": _rows(x)}, dY, (wants_weight, wants_x))
        if d_x is not None and x.ndim != 2:
            d_x = d_x.view(x.shape)
        return d_x, d_weight, dY.sum(0) if wants_bias else None, None
