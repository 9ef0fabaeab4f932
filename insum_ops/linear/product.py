"""A layer's product with its blocks as one autograd function, leading dimensions and bias included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compiler import (
    OperandError,
    ShapeError,
    composite,
    direct_apply,
    evaluate,
    gradients_of,
    keep_learning,
    owned,
    planned,
    planned_backward,
    replayed,
)
from ..formats import BlockCOO
from ..formats.parts import FormatParts
from ..formats.torch_state import (
    autocast_dtype,
    is_autocast_enabled,
    is_compiling,
    is_free,
    wants_gradient,
)
from ..functional import insum
from .weight_format import check_blocks

__all__ = ["EXPR", "padded_product", "product", "product_of_parts", "replayed_product", "traced_layer"]

EXPR = "Y[t,o] += X[t,i] * W[o,i]"
BIAS_GRADIENT = "dBias[o] += dY[t,o]"


def replayed_product(x: Tensor, W: BlockCOO, bias: Tensor | None, is_padded: bool) -> Tensor | None:
    """Return what `product` does, by the launch plan of calls like this one; None if there is none."""
    tensors = (x, W.values) if bias is None else (x, W.values, bias)
    return replayed(W.memory, (EXPR, is_padded), tensors, (), W)  # type: ignore[no-any-return]


def product(
    x: Tensor,
    W: BlockCOO | FormatParts,
    bias: Tensor | None,
    run: Callable[[], Tensor] | None = None,
    is_padded: bool = False,
) -> Tensor:
    """Return x [..., i] by W [o, i] as [..., o], sums starting from the bias [o].

    A call that has no launch plan yet calls `run` instead, in which a layer checks x; what is more, it pads x and cuts
    the product if `is_padded`. With a `run` no tracer may read the code.
    """
    if run is None and (isinstance(W, FormatParts) or is_compiling()):
        return _evaluate(x, W, bias)
    assert not isinstance(W, FormatParts)
    value = replayed_product(x, W, bias, is_padded)
    if value is not None:
        return value
    cache, marks, tensors = W.memory, (EXPR, is_padded), (x, W.values) if bias is None else (x, W.values, bias)
    if not wants_gradient(tensors):
        anew = run or (lambda: _evaluate(x, W, bias))
        return planned(cache, marks, lambda *_: anew(), tensors, owned=W)
    if run is not None:
        return run()
    if not is_free() or (bias is not None and bias.dtype != x.dtype):
        return _evaluate(x, W, bias)
    with torch.no_grad():
        value = planned(cache, marks, lambda *_: _evaluate(x, W, bias), tensors, owned=W)
    result = _Product.apply((W, value), *tensors)
    keep_learning(cache, marks, tensors, _learn)
    return result  # type: ignore[no-any-return]


def padded_product(
    x: Tensor,
    W: BlockCOO | FormatParts,
    bias: Tensor | None,
    coords: Tensor,
    features: Sequence[int],
    block_size: Sequence[int],
) -> Tensor:
    """Check x, and multiply it by blocks that may reach beyond a layer's features (out, in)."""
    out_features, in_features = features
    if x.layout is not torch.strided:
        raise OperandError(f"x is a {x.layout} tensor; pass a dense one, as x.to_dense()")
    if x.ndim == 0 or x.shape[-1] != in_features:
        raise ShapeError(
            f"x is {list(x.shape)} but in_features is {in_features}; its last dimension must be in_features"
        )
    if x.device != W.device:
        raise OperandError(f"x is on {x.device} but the layer is on {W.device}; move one with .to()")
    if is_autocast_enabled(x.device.type):
        if bias is not None and bias.dtype == torch.float32:
            bias = bias.to(autocast_dtype(x.device.type))  # here: expanded, it would be copied in full
    elif x.dtype != W.dtype:
        raise OperandError(f"x is {x.dtype} but the weight is {W.dtype}; convert one with .to(), or use autocast")
    check_blocks(W.values, coords, block_size)
    if bias is not None and bias.shape != (out_features,):
        raise ShapeError(f"bias is {list(bias.shape)} but out_features is {out_features}; it has a number for each")
    height, width = W.shape
    if width != in_features:
        x = pad(x, (0, width - in_features))
    rest = height - out_features
    y = product(x, W, pad(bias, (0, rest)) if rest and bias is not None else bias)
    return y.narrow(-1, 0, out_features) if rest else y


def product_of_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, coords: Tensor, features: Sequence[int], block_size: Sequence[int]
) -> Tensor:
    """Return `padded_product` for a tracer: the pattern is read when the compiled call runs."""
    height, width = block_size
    shape = -(-features[0] // height) * height, -(-features[1] // width) * width
    W = FormatParts(f"BlockCOO;0;{height},{width};*", shape, weight, [coords])
    return padded_product(x, W, bias, coords, features, block_size)


traced_layer = composite(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor coords, int[] features, int[] block_size) -> Tensor",
    product_of_parts,
)


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


def _plans(ctx: Any, saved: tuple[Tensor, ...], _: Tensor) -> Any:
    W = ctx.W
    return W.memory, EXPR, saved, False, W


def _gradients(ctx: Any, wanted: tuple[bool, ...], upstream: Tensor, x: Tensor, weight: Tensor) -> Any:
    """Return None, d_x, d_weight and, if there is a bias, d_bias, those that are wanted."""
    W = ctx.W if ctx.W.values is weight else ctx.W.with_values(weight)
    dY = _rows(upstream)
    d_weight, d_x = gradients_of(evaluate, EXPR, "W", W, {"X": _rows(x)}, dY, (wanted[2], wanted[1]))
    if d_x is not None and x.ndim != 2:
        d_x = d_x.view(x.shape)
    return None, d_x, d_weight, *[insum(BIAS_GRADIENT, dY=dY) if wants_bias else None for wants_bias in wanted[3:]]


class _Product(torch.autograd.Function):
    """The product. Its gradients are those of the statement, and the bias gets the sum over all rows."""

    @staticmethod
    def forward(
        ctx: Any, planned_product: tuple[BlockCOO, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        ctx.W, value = planned_product
        ctx.save_for_backward(x, weight)
        return owned(value)

    backward = staticmethod(planned_backward(_plans, _gradients))


_apply = direct_apply(_Product)


def _learn(value: Tensor, tensors: Sequence[Tensor], W: BlockCOO) -> Any:
    """Return a planned product with its gradients recorded."""
    return _apply((W, value), *tensors)
