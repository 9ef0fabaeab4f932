"""Autograd functions of statements: their gradients are statements, evaluated as any other, so they have any order.

Each takes first the function that evaluates a statement, `evaluate(expr, operands, size, check)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import Fact
from ...formats.torch_state import (
    PLAIN,
    is_compiling,
    is_exporting,
    is_free,
    is_grad_enabled,
    is_traced,
    is_watched,
    modes,
    rounds_float32,
    uses_tensor_cores,
)
from ..binding import SparseFormat, check_pattern, is_sparse, pattern_of
from ..runtime import PLAIN_CALLS, owned, planned
from .gradients import gradient_of, gradients_of, is_sum, joint_gradients, winner_places
from .in_steps import gradients_in_steps, may_have_steps, steps_for, value_in_steps
from .legacy_vmap import one_by_one
from .operators import call as call_plain
from .operators import differentiate, run_plain, run_plain_with_winners
from .torch_gradients import by_torch, differentiated, gradients_by_torch, graph_of

__all__ = ["differentiable", "unchecked"]

Evaluate = Callable[..., Tensor]


class _Call(NamedTuple):
    """A differentiable call without its tensors, as one argument: each argument of an autograd function costs time."""

    evaluate: Evaluate
    expr: str
    names: tuple[str, ...]
    size: tuple[int, ...] | None
    fact: Fact | None
    # evaluates it without gradients; its value alone, or with what is to be kept; None: as any other statement
    forward: Callable[[], Any] | None
    form: SparseFormat | None = None  # what stands for `name`
    name: str = ""
    pattern: object = None  # what `check_pattern` identifies the format's pattern by, if the caller has asked for it
    graph: Callable[[list[Tensor]], Tensor] | None = None  # evaluates it so that torch can differentiate the value


def unchecked(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Sequence[int] | None:
    """Return the size: the check of a call whose operands were checked before."""
    return size


def differentiable(
    evaluate: Evaluate,
    expr: str,
    operands: Mapping[str, Any],
    size: Sequence[int] | None,
    fact: Fact | None = None,
    plan: tuple[Any, ...] | None = None,
    pattern: object = None,
) -> Tensor:
    """Return the value of a statement, with a gradient for each of its tensors and the values of its format.

    `plan` holds the arguments of `planned` by which it is evaluated without gradients, and `pattern` is what
    `pattern_of` says of its format, if the caller knows them. A caller with a plan has asked whether the statement is
    a sum, a tracer watches, or torch differentiates the call.
    """
    shape, names = None if size is None else tuple(size), tuple(operands)
    if plan is None:
        is_watching = is_compiling() or modes()
        if is_watching and is_traced([each for each in operands.values() if isinstance(each, Tensor)]):
            # the operator that a tracer sees is differentiable itself
            return run_plain(expr, ",".join(names), shape, list(operands.values()), fact)
        if fact is None and is_free() and by_torch(expr, operands, size):
            return run_plain(expr, ",".join(names), shape, list(operands.values()), None)
    forward = None if plan is None else partial(planned, *plan)
    for name, form in operands.items():
        if type(form) not in PLAIN and is_sparse(form):
            call = _Call(evaluate, expr, names, shape, fact, forward, form, name, pattern)
            dense = [operand for key, operand in operands.items() if key != name]
            return _SparseSum.apply(call, form.values, *dense)  # type: ignore[no-any-return]
    if plan is not None and may_have_steps(expr):
        cache, key, cold, *rest = plan
        in_steps = lambda *_: value_in_steps(evaluate, expr, operands, shape, cold)
        forward = partial(planned, cache, ("in steps", rounds_float32(), key), in_steps, *rest)
    function = _Sum if plan is not None or is_sum(expr) else _Extremum
    call = _Call(evaluate, expr, names, shape, fact, forward)
    if plan is not None:
        summed = lambda graph, *tensors: _Sum.apply(call if graph is None else call._replace(graph=graph), *tensors)
        return summed(graph_of(expr, operands, shape, plan, summed), *operands.values())  # type: ignore[no-any-return]
    return function.apply(call, *operands.values())  # type: ignore[no-any-return]


@differentiate
def _as_operator(
    expr: str, names: str, size: Sequence[int] | None, tensors: Sequence[Tensor], fact: Fact | None
) -> Tensor:
    """Return the value of the operator that tracers see, with gradients."""
    function = _Sum if is_sum(expr) else _Extremum
    call = _Call(_as_operators, expr, tuple(names.split(",")), None if size is None else tuple(size), fact, None)
    return function.apply(call, *tensors)  # type: ignore[no-any-return]


def _as_operators(expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None) -> Tensor:
    if is_exporting():
        return run_plain(expr, ",".join(operands), size, list(operands.values()), None)
    return call_plain(expr, ",".join(operands), size, list(operands.values()), "", [])  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    """A sum over plain tensors."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        evaluate, expr, names, size, fact, forward, *_ = call
        kept: list[Tensor] = []
        if call.graph is not None:
            # released with what is saved; the value has a version of its own, so that it may be changed in place
            *kept, graph = differentiated(call.graph, tensors, ctx.needs_input_grad[1:])
            value, kept = graph.data, [*kept, graph]
        elif forward is not None:
            value = forward()
            if isinstance(value, tuple):
                value, *kept = value
        elif fact is not None or is_watched():
            value = run_plain(expr, ",".join(names), size, list(tensors), fact)
        else:
            value = evaluate(expr, dict(zip(names, tensors)), size)
        ctx.call, ctx.rounds = call, bool(kept) and call.graph is None and uses_tensor_cores(value.dtype)
        ctx.save_for_backward(*tensors, *kept)
        return owned(value)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        evaluate, expr, names, *_ = ctx.call
        needs_grads, rounds = ctx.needs_input_grad[1:], ctx.rounds

        def run(grad_output: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
            tensors, kept = dict(zip(names, saved)), saved[len(names) :]
            return _gradients(evaluate, expr, names, needs_grads, tensors, grad_output, kept, rounds)

        if is_watched() or is_grad_enabled():  # what is kept has no gradient: they are statements of their own
            return None, *run(grad_output, *ctx.saved_tensors[: len(names)])
        if ctx.call.graph is not None:
            return None, *gradients_by_torch(ctx.saved_tensors[len(names) :], needs_grads, grad_output)
        call_key = "gradients", expr, names, needs_grads, rounds
        return None, *planned(PLAIN_CALLS, call_key, run, (grad_output, *ctx.saved_tensors), varies=True)


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
    kept: Sequence[Tensor] = (),
    rounds: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor that needs one; None for the others.

    `kept` is what lies on the way to the value if it was evaluated in steps, and `rounds` whether it was planned for
    Tensor Cores.
    """
    wanted = [name for name, needs_grad in zip(names, needs_grads) if needs_grad]
    steps = steps_for(expr, operands, tuple(grad_output.shape), rounds, kept) if kept else ()
    if steps:
        on_the_way = dict(zip([step.output for step in steps], kept))
        grads = gradients_in_steps(
            partial(_gradients, evaluate), steps, {**operands, **on_the_way}, wanted, grad_output
        )
        return tuple([grads.get(name) for name in names])
    grads = joint_gradients(expr, wanted, operands, grad_output)
    for name in wanted:
        if name not in grads:
            grads[name] = gradient_of(evaluate, expr, name, operands, grad_output)
    return tuple([grads.get(name) for name in names])


class _SparseSum(torch.autograd.Function):
    """A sum with a format in it, differentiated before the format is rewritten away, so that gradients regroup it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        assert call.form is not None
        ctx.call, ctx.pattern = call, pattern_of(call.form) if call.pattern is None else call.pattern
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
        memory = check_pattern(call.form, ctx.pattern, call.name)
        statement, needs_grads = (call.evaluate, call.expr, call.name, call.form), ctx.needs_input_grad[1:]
        return None, *_sparse_gradients(*statement, ctx.names, ctx.saved_tensors, grad_output, needs_grads, memory)


def _sparse_gradients(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    names: Sequence[str],
    saved: Sequence[Tensor],
    grad_output: Tensor,
    needs_grads: Sequence[bool],
    memory: dict[Any, Any] | None,
) -> Sequence[Tensor | None]:
    """Return the gradients of a format's values and of the dense tensors `names`; None for those that need none.

    `saved` are the values and the tensors. Gradients that are not differentiated in turn are replayed from a plan,
    which is in `memory`, or in the format's own if that is None.
    """

    def run(grad_output: Tensor, values: Tensor, *dense: Tensor) -> tuple[Tensor | None, ...]:
        current = form if form.values is values else form.with_values(values)
        return tuple(
            gradients_of(evaluate, expr, name, current, dict(zip(names, dense)), grad_output, tuple(needs_grads))
        )

    if is_compiling() or is_grad_enabled():
        return run(grad_output, *saved)
    call_key = "gradients", expr, name, *names, *needs_grads
    cache = form.memory if memory is None else memory
    return planned(cache, call_key, run, (grad_output, *saved), owned=form.coords)  # type: ignore[no-any-return]
