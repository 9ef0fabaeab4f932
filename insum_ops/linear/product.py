"""A layer's product with its blocks as one autograd function, leading dimensions and bias included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compiler import evaluate, gradients_of, one_by_one, owned, planned
from ..formats import BlockCOO
from ..formats.parts import FormatParts
from ..formats.torch_state import is_compiling, is_free, is_grad_enabled, wants_gradient
from ..functional import insum

__all__ = ["EXPR", "product"]

EXPR = "Y[t,o] += X[t,i] * W[o,i]"


def product(
    x: Tensor, W: BlockCOO | FormatParts, bias: Tensor | None, run: Callable[[], Tensor] | None = None
) -> Tensor:
    """Return x [..., i] by W [o, i] as [..., o], sums starting from the bias [o].

    A call without gradients that has no launch plan yet calls `run` instead, in which a layer checks x.
    """
    tensors = (x, W.values) if bias is None else (x, W.values, bias)
    if not isinstance(W, FormatParts) and not is_compiling() and not wants_gradient(tensors):
        anew = run or (lambda: _evaluate(x, W, bias))
        marks = EXPR, run is None
        return planned(W.memory, marks, lambda *_: anew(), tensors, owned=W.coords)  # type: ignore[no-any-return]
    if run is not None:
        return run()
    if isinstance(W, FormatParts) or not is_free() or (bias is not None and bias.dtype != x.dtype):
        return _evaluate(x, W, bias)
    return _Product.apply(x, W.values, bias, W)  # type: ignore[no-any-return]


def _evaluate(x: Tensor, W: BlockCOO | FormatParts, bias: Tensor | None) -> Tensor:
    """Evaluate the statement over x with its leading dimensions flattened."""
    X = _rows(x)
    operands: dict[str, Any] = {"X": X, "W": W}
    if bias is not None:
        operands["Y"] = bias.expand(X.shape[0], W.shape[0])
    Y = insum(EXPR, **operands)
    return Y if x.ndim == 2 else Y.view(*x.shape[:-1], W.shape[0])


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


class _Product(torch.autograd.Function):
    """The product. Its gradients are those of the statement, and the bias gets the sum over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, W: BlockCOO) -> Tensor:
        ctx.W = W
        ctx.save_for_backward(x, weight)
        return owned(product(x, W, bias))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        tensors, wanted = (upstream, *ctx.saved_tensors), ctx.needs_input_grad[:3]

        def gradients(upstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
            """Return d_x, d_weight and d_bias, those that are wanted."""
            W = ctx.W if ctx.W.values is weight else ctx.W.with_values(weight)
            dY = _rows(upstream)
            d_weight, d_x = gradients_of(evaluate, EXPR, "W", W, {"X": _rows(x)}, dY, (wanted[1], wanted[0]))
            if d_x is not None and x.ndim != 2:
                d_x = d_x.view(x.shape)
            return d_x, d_weight, dY.sum(0) if wanted[2] else None

        if is_grad_enabled():
            return *gradients(*tensors), None
        return *planned(ctx.W.memory, ("gradients", EXPR, *wanted), gradients, tensors, owned=ctx.W.coords), None
