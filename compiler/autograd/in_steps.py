"""The value and the gradients of a statement that is evaluated in steps, with what lies on the way shared by both.

Otherwise each gradient is a statement by itself, in which the products of the other factors are made again. On a GPU
the clock decides between the two where an estimate does not, by the value and its gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...formats.torch_state import PLAIN, uses_tensor_cores
from ..language import parse
from ..planning import device_of, split
from ..routes import (
    CLEAR,
    LEAST_GAIN,
    PreparedStatement,
    Step,
    evaluated,
    has_kernels,
    may_be_kept,
    prepare,
    split_of,
    steps_of,
)
from ..runtime import on_device, paused
from ..tuning import fastest, may_be_timed
from .operators import run_plain

__all__ = ["gradients_in_steps", "may_have_steps", "steps_for", "value_in_steps"]

STATEMENTS = 4096  # of which it is kept whether they may be evaluated in steps
IN_STEPS, WHOLE = "in steps", "whole"

Evaluate = Callable[..., Tensor]
# of a statement, by its text, the names of its tensors, whether each needs one, the tensors and the output's gradient;
# and, if it was evaluated in steps, what lies on the way and whether products use Tensor Cores
Gradients = Callable[..., tuple[Tensor | None, ...]]


@lru_cache(maxsize=STATEMENTS)
def may_have_steps(expr: str) -> bool:
    """Return whether a statement is a sum of three or more factors, whose products of fewer may be kept."""
    statement = parse(expr)
    return statement.is_sum and len(statement.accesses) > 2


def value_in_steps(
    evaluate: Evaluate,
    gradients: Gradients,
    expr: str,
    tensors: Mapping[str, Tensor],
    size: Sequence[int] | None,
    whole: Callable[[], Tensor],
) -> tuple[Tensor, ...]:
    """Return the value of a statement over plain tensors, and then what lies on the way to it and is to be kept.

    Nothing is kept if the statement is evaluated by `whole`: where steps save nothing, would keep too much, or multiply
    what is not in the statement. `gradients`, of a function that evaluates statements and then as `Gradients`, are
    those that the call will be asked for.
    """
    values = list(tensors.values())
    if any([type(tensor) not in PLAIN or tensor.layout is not torch.strided for tensor in values]):
        return (whole(),)
    statement = prepare(expr, ",".join(tensors), size, values, None)
    bound = statement.bound
    parts = split_of(bound, statement.padding(statement.variant(values)), LEAST_GAIN)
    steps = () if parts is None or parts.gathers_products else steps_of(bound, parts)
    if parts is None or not steps or not may_be_kept(bound, steps):
        return (whole(),)
    if parts.gain <= CLEAR and has_kernels(bound.device) and may_be_timed(bound.device):
        is_faster = _is_faster(statement, expr, steps, tensors, partial(gradients, _evaluate))
    else:
        is_faster = parts.gain > 1
    if not is_faster:
        return (whole(),)
    *kept, value = _evaluated(evaluate, steps, tensors)
    return (value, *kept)


def _evaluate(expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None) -> Tensor:
    """Return the value of a statement that is only timed: no plan is made of it."""
    return run_plain(expr, ",".join(tensors), size, list(tensors.values()), None)


def _evaluated(evaluate: Evaluate, steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    run = lambda step, values: evaluate(step.text, dict(zip(step.names, values)), step.size)
    return evaluated(steps, tensors, run, keeps=True)


def _is_faster(
    statement: PreparedStatement, expr: str, steps: Sequence[Step], tensors: Mapping[str, Tensor], gradients: Gradients
) -> bool:
    """Return whether a value and its gradients take less in steps, measured now unless it is remembered."""
    bound, names = statement.bound, tuple(tensors)
    needs_grads = [tensor.requires_grad for tensor in tensors.values()]

    def run(way: str) -> object:
        if way == WHOLE:
            value, kept = _evaluate(expr, tensors, bound.size), list[Tensor]()
        else:
            *kept, value = _evaluated(_evaluate, steps, tensors)
        # the value is as good a gradient as another of its size
        return gradients(expr, names, needs_grads, tensors, value, kept, uses_tensor_cores(bound.dtype))

    ways = {IN_STEPS: 3 * len(steps), WHOLE: 1 + sum(needs_grads)}  # and about how many operations each has
    start = lambda way: (lambda: run(way), device_of(bound.device).host_milliseconds(ways[way]))
    problem = statement.problem(list(tensors.values()), None)
    wanted = ",".join(name for name, needs_grad in zip(names, needs_grads) if needs_grad)
    key = replace(problem.key, statement=f"gradients for {wanted} of {problem.key.statement}")
    with on_device(bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        return fastest(key, list(ways), list(ways), start) == IN_STEPS


def steps_for(
    expr: str, tensors: Mapping[str, Tensor], size: tuple[int, ...], rounds: bool, kept: Sequence[Tensor]
) -> tuple[Step, ...]:
    """Return the steps in which `value_in_steps` has kept these tensors, none if it took others.

    `rounds` is whether it was called where products use Tensor Cores.
    """
    bound = prepare(expr, ",".join(tensors), size, list(tensors.values()), None).bound
    parts = split(bound, device_of(bound.device), rounds, LEAST_GAIN)
    if parts is None or [tuple(tensor.shape) for tensor in kept] != list(parts.sizes):
        return ()
    return steps_of(bound, parts)


def gradients_in_steps(
    gradients: Gradients, steps: Sequence[Step], tensors: Mapping[str, Tensor], wanted: Sequence[str], grad: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the tensors that are `wanted`, where `tensors` has what lies on the way as well.

    They are made step by step, from the last to the first. `gradients` are those of one step.
    """
    needed = {*wanted}
    for step in steps[:-1]:
        if needed & {*step.names}:
            needed.add(step.output)
    totals = dict[str, Tensor]()
    for step in reversed(steps):
        if step is not steps[-1]:
            if step.output not in totals:
                continue
            grad = totals.pop(step.output)
        own = {name: tensors[name] for name in step.names}
        grads = gradients(step.text, step.names, [name in needed for name in step.names], own, grad)
        for name, part in zip(step.names, grads):
            if part is not None:
                totals[name] = totals[name] + part if name in totals else part
    return {name: totals[name] if name in totals else torch.zeros_like(tensors[name]) for name in wanted}
