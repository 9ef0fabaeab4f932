"""Autograd functions of statements: their gradients are statements, evaluated as any other, so they have any order.

Each takes first the function that evaluates a statement, `evaluate(expr, operands, size, check)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import Fact
from ...formats.torch_state import PLAIN, is_compiling, is_grad_enabled
from ..binding import SparseFormat, check_pattern, is_sparse, pattern_of
from ..runtime import PLAIN_CALLS, owned, planned
from .gradients import gradient_of, gradients_of, is_sum, winner_places
from .legacy_vmap import one_by_one
from .operators import run_plain, run_plain_with_winners

__all__ = ["differentiable", "unchecked"]

Evaluate = Callable[..., Tensor]


class _Call(NamedTuple):
    """A differentiable call without its tensors, as one argument: each argument of an autograd function costs time."""

    evaluate: Evaluate
    expr: str
    names: tuple[str, ...]
    size: tuple[int, ...] | None
    fact: Fact | None
    forward: Callable[[], Tensor] | None  # evaluates it without gradients; None: as any other statement
    form: SparseFormat | None = None  # what stands for `name`
    name: str = ""


def unchecked(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Sequence[int] | None:
    """Return the size: the check of a call whose operands were checked before."""
    return size


def differentiable(
    evaluate: Evaluate,
    expr: str,
    operands: Mapping[str, Any],
    size: Sequence[int] | None,
    fact: Fact | None = None,
    forward: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return the value of a statement, with a gradient for each of its tensors and the values of its format.

    `forward` evaluates it without gradients, if the caller knows a quicker way than `evaluate`.
    """
    shape, names = None if size is None else tuple(size), tuple(operands)
    for name, form in operands.items():
        if type(form) not in PLAIN and is_sparse(form):
            call = _Call(evaluate, expr, names, shape, fact, forward, form, name)
            dense = [operand for key, operand in operands.items() if key != name]
            return _SparseSum.apply(call, form.values, *dense)  # type: ignore[no-any-return]
    function = _Sum if is_sum(expr) else _Extremum
    return function.apply(_Call(evaluate, expr, names, shape, fact, forward), *operands.values())  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """A sum over plain tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        if call.forward is not None:
            return owned(call.forward())
        evaluate, expr, names, size, fact, *_ = call
        if fact is not None or is_compiling():
            return owned(run_plain(expr, ",".join(names), size, list(tensors), fact))
        return owned(evaluate(expr, dict(zip(names, tensors)), size))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        evaluate, expr, names, *_ = ctx.call
        needs_grads = ctx.needs_input_grad[1:]

        def run(grad_output: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            return _gradients(evaluate, expr, names, needs_grads, dict(zip(names, tensors)), grad_output)

        tensors = (grad_output, *ctx.saved_tensors)
        if is_compiling() or is_grad_enabled():
            return None, *run(*tensors)
        return None, *planned(PLAIN_CALLS, ("gradients", expr, names, needs_grads), run, tensors, varies=True)


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors: where its winners are is kept, and the gradients are read there."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call = call
        result, won = run_plain_with_winners(call.expr, ",".join(call.names), call.size, list(tensors), call.fact)
        ctx.save_for_backward(won, *tensors)
        return owned(result)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        evaluate, expr, names, *_ = ctx.call
        won, *saved = ctx.saved_tensors
        tensors = dict(zip(names, saved))
        operands = {**tensors, **winner_places(expr, won, tensors)}
        return None, *_gradients(evaluate, expr, names, ctx.needs_input_grad[1:], operands, grad_output)


def _gradients(
    evaluate: Evaluate,
    expr: str,
    names: Sequence[str],
    needs_grads: Sequence[bool],
    operands: Mapping[str, Tensor],
    grad_output: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor that needs one; None for the others."""
    return tuple(
        [
            gradient_of(evaluate, expr, name, operands, grad_output) if needs_grad else None
            for name, needs_grad in zip(names, needs_grads)
        ]
    )


class _SparseSum(torch.autograd.Function):
    """A sum with a format in it, differentiated before the format is rewritten away, so that gradients regroup it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        assert call.form is not None
        ctx.call, ctx.pattern = call, pattern_of(call.form)
        ctx.names = [name for name in call.names if name != call.name]
        ctx.save_for_backward(*tensors)
        if call.forward is not None:
            return owned(call.forward())
        dense = dict(zip(ctx.names, tensors[1:]))
        return owned(call.evaluate(call.expr, {name: dense.get(name, call.form) for name in call.names}, call.size))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        call = ctx.call
        check_pattern(call.form, ctx.pattern, call.name)
        statement, needs_grads = (call.evaluate, call.expr, call.name, call.form), ctx.needs_input_grad[1:]
        return None, *_sparse_gradients(*statement, ctx.names, ctx.saved_tensors, grad_output, needs_grads)


def _sparse_gradients(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    names: Sequence[str],
    saved: Sequence[Tensor],
    grad_output: Tensor,
    needs_grads: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of a format's values and of the dense tensors `names`; None for those that need none.

    `saved` are the values and the tensors. Gradients that are not differentiated in turn are replayed from a plan.
    """

    def run(grad_output: Tensor, values: Tensor, *dense: Tensor) -> tuple[Tensor | None, ...]:
        current = form if form.values is values else form.with_values(values)
        return tuple(
            gradients_of(evaluate, expr, name, current, dict(zip(names, dense)), grad_output, tuple(needs_grads))
        )

    if is_compiling() or is_grad_enabled():
        return run(grad_output, *saved)
    call_key = "gradients", expr, name, *names, *needs_grads
    return planned(form.memory, call_key, run, (grad_output, *saved), owned=form.coords)  # type: ignore[no-any-return]
