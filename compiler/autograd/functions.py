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
    is_batched_by_dynamo,
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
from ..runtime import PLAIN_CALLS, CacheOwner, keep_learning, owned, planned, replayed
from .direct_apply import direct_apply
from .gradients import all_gradients, gradients_of, is_sum, joint_gradients, remember_winners, winner_places
from .in_steps import gradients_in_steps, may_have_steps, steps_for, value_in_steps
from .operators import call as call_plain
from .operators import differentiate, run_plain, run_plain_with_winners
from .planned_backward import Plans, format_key, planned_backward
from .run_gradients import traced_gradients
from .torch_gradients import BY_TORCH, by_torch, evaluated_for_torch, is_faster_by_torch

__all__ = ["differentiable"]

Evaluate = Callable[..., Tensor]
# of `planned`: cache, key, function, tensors, numbers, whether lengths may vary, and the format that owns the cache
PlanArguments = tuple[
    dict[Any, Any], object, Callable[..., Any], Sequence[Tensor], tuple[int, ...], bool, CacheOwner | tuple[()]
]


class _Call(NamedTuple):
    """A differentiable call without its tensors, as one argument: each argument of an autograd function costs time."""

    evaluate: Evaluate
    expr: str
    names: tuple[str, ...]
    size: tuple[int, ...] | None
    fact: Fact | None
    form: SparseFormat | None = None  # what stands for `name`
    name: str = ""
    dense: tuple[str, ...] = ()  # the other names
    pattern: object = None  # what `check_pattern` identifies the format's pattern by, if the caller has asked for it


def differentiable(
    evaluate: Evaluate,
    expr: str,
    operands: Mapping[str, Any],
    size: Sequence[int] | None,
    fact: Fact | None = None,
    plan: PlanArguments | None = None,
) -> Tensor:
    """Return the value of a statement, with a gradient for each of its tensors and the values of its format.

    `plan` holds the arguments of `planned` by which it is evaluated without gradients, if the caller knows them. It has
    asked then whether a tracer watches, and whether a statement with a format in it is a sum.
    """
    shape, names = None if size is None else tuple(size), tuple(operands)
    call = _Call(evaluate, expr, names, shape, fact)
    if plan is not None:
        if by_torch(expr, operands, size):  # torch records the gradients of what it runs
            return planned(*plan, "learns")  # type: ignore[no-any-return]
        _, key, _, tensors, *_ = plan
        # what is timed has plans of its own, which no later call comes to
        if is_faster_by_torch(expr, operands, size, lambda way: _way(call, plan, way, ("timed", way, key))):
            return _way(call, plan, BY_TORCH, key)(tensors)
        return _learned(call, operands, *plan)
    is_watching = is_compiling() or modes()
    if is_watching and (
        is_traced([each for each in operands.values() if isinstance(each, Tensor)]) or is_batched_by_dynamo()
    ):
        # the operator that a tracer sees is differentiable itself
        return run_plain(expr, ",".join(names), shape, list(operands.values()), fact)
    if fact is None and is_free() and by_torch(expr, operands, size):
        return run_plain(expr, ",".join(names), shape, list(operands.values()), None)
    for name, form in operands.items():
        if type(form) not in PLAIN and is_sparse(form):
            dense = {key: operand for key, operand in operands.items() if key != name}
            call = call._replace(form=form, name=name, dense=tuple(dense))
            return _SparseSum.apply((call, None), form.values, *dense.values())  # type: ignore[no-any-return]
    function = _Sum if is_sum(expr) else _Extremum
    return function.apply((call, None), *operands.values())  # type: ignore[no-any-return]


def _way(call: _Call, plan: PlanArguments, way: str, key: object) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return what evaluates a sum over tensors like those of a call, with its gradients recorded in one of two ways."""
    cache, _, cold, _, numbers, varies, _ = plan
    if way == BY_TORCH:
        run = lambda *tensors: evaluated_for_torch(call.expr, ",".join(call.names), call.size, tensors)
        return lambda tensors: planned(cache, key, run, tensors, numbers, varies, (), "learns")

    def as_statements(tensors: Sequence[Tensor]) -> Tensor:
        operands = dict(zip(call.names, tensors))
        value: Tensor | None = replayed(cache, key, tensors, numbers, (operands, cache))
        return _learned(call, operands, cache, key, cold, tensors, numbers, varies, ()) if value is None else value

    return as_statements


def _learned(
    call: _Call,
    operands: Mapping[str, Any],
    cache: dict[Any, Any],
    key: object,
    run: Callable[..., Any],
    tensors: Sequence[Tensor],
    numbers: tuple[int, ...],
    varies: bool,
    pattern: CacheOwner | tuple[()],
) -> Tensor:
    """Return the value of a statement with its gradients recorded; the next call like it is replayed."""
    place = next((at for at, name in enumerate(call.names) if operands[name] is not tensors[at]), None)
    learn: Callable[..., Tensor] = partial(_learn, _apply_sum, call)
    apply, plan_key = _Sum.apply, key
    if not is_sum(call.expr):
        learn, apply, plan_key = partial(_learn, _apply_extremum, call), _Extremum.apply, ("winners", key)
        run, varies = partial(_with_winners, call), False  # of what type winners are depends on the lengths
    elif place is not None:
        name, dense = call.names[place], call.names[:place] + call.names[place + 1 :]
        learn, apply = partial(_learn_sparse, call._replace(name=name, dense=dense), place), _SparseSum.apply
    elif may_have_steps(call.expr):
        plan_key, cold = ("in steps", rounds_float32(), key), run
        run = lambda *_: value_in_steps(call.evaluate, _gradients, call.expr, operands, call.size, cold)
    with torch.no_grad():
        value = planned(cache, plan_key, run, tensors, numbers, varies, pattern)
    result = learn(value, tensors, (operands, cache), apply)
    keep_learning(cache, key, tensors, learn, numbers, plan_key)
    return result


def _learn(
    direct: Callable[..., Any],
    call: _Call,
    value: Any,
    tensors: Sequence[Tensor],
    _: object,
    apply: Callable[..., Any] | None = None,
) -> Any:
    """Return the value of a statement over plain tensors with its gradients recorded."""
    return (apply or direct)((call, value), *tensors)


def _learn_sparse(
    call: _Call,
    place: int,
    value: Tensor,
    tensors: Sequence[Tensor],
    given: tuple[Mapping[str, Any], dict[Any, Any]],
    apply: Callable[..., Any] | None = None,
) -> Any:
    """Return the value of a sum with a format, whose values are at a place among the tensors, and its gradients."""
    operands, cache = given  # not in `call`: the cache is a part of the format
    filled = _Call(*call[:5], operands[call.name], call.name, call.dense, cache)
    return (apply or _apply_sparse_sum)((filled, value), tensors[place], *tensors[:place], *tensors[place + 1 :])


@differentiate
def _as_operator(
    expr: str, names: str, size: Sequence[int] | None, tensors: Sequence[Tensor], fact: Fact | None
) -> Tensor:
    """Return the value of the operator that tracers see, with gradients."""
    function = _Sum if is_sum(expr) else _Extremum
    call = _Call(_as_operators, expr, tuple(names.split(",")), None if size is None else tuple(size), fact)
    return function.apply((call, None), *tensors)  # type: ignore[no-any-return]


def _as_operators(expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None) -> Tensor:
    if is_exporting():
        return run_plain(expr, ",".join(operands), size, list(operands.values()), None)
    return call_plain(expr, ",".join(operands), size, list(operands.values()), "", [])  # type: ignore[no-any-return]


def _plans_of_sum(ctx: Any, saved: tuple[Any, ...], _: Tensor) -> Plans:
    call = ctx.call
    return PLAIN_CALLS, (call.expr, call.names, ctx.rounds), saved, True, ()


def _gradients_of_sum(ctx: Any, wanted: tuple[bool, ...], grad_output: Tensor, *saved: Tensor) -> Any:
    evaluate, expr, names, *_ = ctx.call
    tensors, kept = dict(zip(names, saved)), saved[len(names) :]
    if is_watched() or is_grad_enabled():  # what is kept has no gradient: they are statements of their own
        if evaluate is _as_operators:
            return None, *_traced_gradients(expr, names, wanted[1:], tensors, grad_output)
        kept = ()
    return None, *_gradients(evaluate, expr, names, wanted[1:], tensors, grad_output, kept, ctx.rounds)


class _Sum(torch.autograd.Function):
    """A sum over plain tensors.

    With the call comes its value if it has been planned, be it in a tuple with what is to be kept; else None.
    """

    @staticmethod
    def forward(ctx: Any, planned_call: tuple[_Call, Any], *tensors: Tensor) -> Tensor:
        call, value = planned_call
        ctx.call, ctx.rounds = call, False
        if value is None:
            ctx.save_for_backward(*tensors)
            return owned(_value(call, tensors))
        if isinstance(value, tuple):
            value, *kept = value
            ctx.rounds = bool(kept) and uses_tensor_cores(value.dtype)
            ctx.save_for_backward(*tensors, *kept)
        else:
            ctx.save_for_backward(*tensors)
        return owned(value)

    backward = staticmethod(planned_backward(_plans_of_sum, _gradients_of_sum))


def _value(call: _Call, tensors: Sequence[Tensor]) -> Tensor:
    """Return the value of a sum that has no plan."""
    evaluate, expr, names, size, fact, *_ = call
    if fact is not None or is_watched():
        return run_plain(expr, ",".join(names), size, list(tensors), fact)
    return evaluate(expr, dict(zip(names, tensors)), size)


def _traced_gradients(
    expr: str, names: Sequence[str], needs_grads: Sequence[bool], operands: Mapping[str, Tensor], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor that needs one, else None, for a tracer: it sees one operator for several."""
    wanted = [name for name, needs_grad in zip(names, needs_grads) if needs_grad]
    computed = traced_gradients(expr, wanted, operands, grad_output)
    grads = all_gradients(_as_operators, expr, wanted, operands, grad_output, computed)
    return tuple([grads.get(name) for name in names])


_apply_sum = direct_apply(_Sum)


def _with_winners(call: _Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a `max` or `min` and the positions of its winners."""
    return run_plain_with_winners(call.expr, ",".join(call.names), call.size, list(tensors), call.fact)


def _plans_of_extremum(ctx: Any, saved: tuple[Any, ...], _: Tensor) -> Plans:
    return PLAIN_CALLS, ("winners", ctx.call.expr, ctx.call.names), saved, False, ()


def _gradients_of_extremum(ctx: Any, wanted: tuple[bool, ...], grad_output: Tensor, won: Tensor, *saved: Tensor) -> Any:
    evaluate, expr, names, *_ = ctx.call
    tensors = dict(zip(names, saved))
    operands = {**tensors, **winner_places(expr, won, tensors)}
    return None, *_gradients(evaluate, expr, names, wanted[1:], operands, grad_output)


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors: where its winners are is kept, and the gradients are read there.

    With the call come its value and the winners if they have been planned; else None.
    """

    @staticmethod
    def forward(ctx: Any, planned_call: tuple[_Call, tuple[Tensor, Tensor] | None], *tensors: Tensor) -> Tensor:
        ctx.call, value = planned_call
        result, won = _with_winners(ctx.call, *tensors) if value is None else value
        if value is not None:  # of which a plan of gradients asks
            remember_winners(ctx.call.expr, won, dict(zip(ctx.call.names, tensors)))
        ctx.save_for_backward(won, *tensors)
        return owned(result)

    backward = staticmethod(planned_backward(_plans_of_extremum, _gradients_of_extremum))


_apply_extremum = direct_apply(_Extremum)


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
    joint = joint_gradients(expr, wanted, operands, grad_output)
    grads = all_gradients(evaluate, expr, wanted, operands, grad_output, joint)
    return tuple([grads.get(name) for name in names])


def _plans_of_sparse_sum(ctx: Any, saved: tuple[Any, ...], _: Tensor) -> Plans:
    call = ctx.call
    memory = check_pattern(call.form, ctx.pattern, call.name)
    return memory, format_key(call.expr, call.name, call.dense), saved, False, call.form


def _gradients_of_sparse_sum(
    ctx: Any, wanted: tuple[bool, ...], grad_output: Tensor, values: Tensor, *dense: Tensor
) -> Any:
    """Return None, then the gradients of a format's values and of the dense tensors, None for those not wanted."""
    call, form = ctx.call, ctx.call.form
    current = form if form.values is values else form.with_values(values)
    tensors = dict(zip(call.dense, dense))
    return None, *gradients_of(call.evaluate, call.expr, call.name, current, tensors, grad_output, wanted[1:])


class _SparseSum(torch.autograd.Function):
    """A sum with a format in it, differentiated before the format is rewritten away, so that gradients regroup it."""

    @staticmethod
    def forward(ctx: Any, planned_call: tuple[_Call, Tensor | None], *tensors: Tensor) -> Tensor:
        call, value = planned_call
        ctx.save_for_backward(*tensors)
        if value is not None:
            ctx.call, ctx.pattern = call, call.pattern
            return owned(value)
        assert call.form is not None
        ctx.call, ctx.pattern = call, pattern_of(call.form)
        dense = dict(zip(call.dense, tensors[1:]))
        return owned(call.evaluate(call.expr, {name: dense.get(name, call.form) for name in call.names}, call.size))

    backward = staticmethod(planned_backward(_plans_of_sparse_sum, _gradients_of_sparse_sum))


_apply_sparse_sum = direct_apply(_SparseSum)
