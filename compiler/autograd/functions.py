"""Autograd functions of statements: their gradients are statements, evaluated as any other, so they have any order.

Each takes first the function that evaluates a statement, `evaluate(expr, operands, size, check)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats.facts import Fact
from ...formats.torch_state import is_compiling, is_grad_enabled
from ..binding import SparseFormat, check_pattern, is_sparse, pattern_of
from ..runtime import PLAIN_CALLS, owned, planned
from .gradients import gradient_of, gradients_of, is_sum, winner_places
from .legacy_vmap import one_by_one
from .operators import run_plain, run_plain_with_winners

__all__ = ["differentiable", "unchecked"]

PARAMETERS, SPARSE_PARAMETERS = 6, 7  # of these functions before the tensors, without and with a format
NONE = (None,) * PARAMETERS  # their gradients

Evaluate = Callable[..., Tensor]
Check = Callable[..., Any]


def unchecked(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Sequence[int] | None:
    """The check of a call whose operands were checked before."""
    return size


def differentiable(
    evaluate: Evaluate,
    expr: str,
    operands: Mapping[str, Any],
    size: Sequence[int] | None,
    fact: Fact | None = None,
    check: Check = unchecked,
) -> Tensor:
    """Return the value of a statement, with a gradient for each of its tensors and the values of its format."""
    whole, names = None if size is None else tuple(size), tuple(operands)
    for name, form in operands.items():
        if is_sparse(form):
            dense = [operand for key, operand in operands.items() if key != name]
            return _SparseSum.apply(evaluate, expr, name, form, whole, names, check, form.values, *dense)  # type: ignore[no-any-return]
    function = _Sum if is_sum(expr) else _Extremum
    return function.apply(evaluate, expr, names, whole, fact, check, *operands.values())  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """A sum over plain tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        evaluate: Evaluate,
        expr: str,
        names: tuple[str, ...],
        size: tuple[int, ...] | None,
        fact: Fact | None,
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.evaluate, ctx.expr, ctx.names = evaluate, expr, names
        ctx.save_for_backward(*tensors)
        if fact is not None or is_compiling():
            return owned(run_plain(expr, ",".join(names), size, list(tensors), fact))

        return owned(evaluate(expr, dict(zip(names, tensors)), size, check))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        evaluate, expr, names, wanted = ctx.evaluate, ctx.expr, ctx.names, ctx.needs_input_grad[PARAMETERS:]

        def run(upstream: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            return _gradients(evaluate, expr, names, wanted, dict(zip(names, tensors)), upstream)

        tensors = (upstream, *ctx.saved_tensors)
        if is_compiling() or is_grad_enabled():
            return *NONE, *run(*tensors)
        return *NONE, *planned(PLAIN_CALLS, ("gradients", expr, names, wanted), run, tensors, varies=True)


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors: where its winners are is kept, and the gradients are read there."""

    @staticmethod
    def forward(
        ctx: Any,
        evaluate: Evaluate,
        expr: str,
        names: tuple[str, ...],
        size: tuple[int, ...] | None,
        fact: Fact | None,
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.evaluate, ctx.expr, ctx.names = evaluate, expr, names
        result, won = run_plain_with_winners(expr, ",".join(names), size, list(tensors), fact)
        ctx.save_for_backward(won, *tensors)
        return owned(result)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        won, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.names, saved))
        operands = {**tensors, **winner_places(ctx.expr, won, tensors)}
        wanted = ctx.needs_input_grad[PARAMETERS:]
        return *NONE, *_gradients(ctx.evaluate, ctx.expr, ctx.names, wanted, operands, upstream)


def _gradients(
    evaluate: Evaluate,
    expr: str,
    names: Sequence[str],
    wanted: Sequence[bool],
    operands: Mapping[str, Tensor],
    upstream: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor that is wanted; None for the others."""
    return tuple(
        [
            gradient_of(evaluate, expr, name, operands, upstream) if is_wanted else None
            for name, is_wanted in zip(names, wanted)
        ]
    )


class _SparseSum(torch.autograd.Function):
    """A sum with a format in it, differentiated before the format is rewritten away, so that gradients regroup it."""

    @staticmethod
    def forward(
        ctx: Any,
        evaluate: Evaluate,
        expr: str,
        name: str,
        form: SparseFormat,
        size: tuple[int, ...] | None,
        names: tuple[str, ...],
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.evaluate = evaluate
        ctx.expr, ctx.name, ctx.form, ctx.pattern = expr, name, form, pattern_of(form)
        ctx.names = [other for other in names if other != name]
        ctx.save_for_backward(*tensors)
        dense = dict(zip(ctx.names, tensors[1:]))
        return owned(evaluate(expr, {other: dense.get(other, form) for other in names}, size, check))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        check_pattern(ctx.form, ctx.pattern, ctx.name)
        given, wanted = (ctx.evaluate, ctx.expr, ctx.name, ctx.form), ctx.needs_input_grad[SPARSE_PARAMETERS:]
        grads = _sparse_gradients(*given, ctx.names, ctx.saved_tensors, upstream, wanted)
        return *(None,) * SPARSE_PARAMETERS, *grads


def _sparse_gradients(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    names: Sequence[str],
    saved: Sequence[Tensor],
    upstream: Tensor,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of a format's values and of the dense tensors `names`, those that are wanted.

    `saved` are the values and the tensors. Gradients that are not differentiated in turn are replayed from a plan.
    """

    def run(upstream: Tensor, values: Tensor, *dense: Tensor) -> tuple[Tensor | None, ...]:
        own = form if form.values is values else form.with_values(values)
        return tuple(gradients_of(evaluate, expr, name, own, dict(zip(names, dense)), upstream, tuple(wanted)))

    if is_compiling() or is_grad_enabled():
        return run(upstream, *saved)
    marks = "gradients", expr, name, *names, *wanted
    return planned(form.memory, marks, run, (upstream, *saved), owned=form.coords)  # type: ignore[no-any-return]
