"""The value and the gradients of a statement that is evaluated in steps, with what lies on the way shared by both.

Otherwise each gradient is a statement by itself, in which the products of the other factors are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...formats.torch_state import PLAIN
from ..language import parse
from ..planning import device_of, split
from ..prepared import prepare
from ..steps import Step, evaluated, may_be_kept, split_of, steps_of

__all__ = ["gradients_in_steps", "may_have_steps", "steps_for", "value_in_steps"]

STATEMENTS = 4096  # of which it is kept whether they may be evaluated in steps

Evaluate = Callable[..., Tensor]
# of a statement, by its text, the names of its tensors, whether each needs one, the tensors and the output's gradient
Gradients = Callable[[str, Sequence[str], Sequence[bool], Mapping[str, Tensor], Tensor], tuple[Tensor | None, ...]]


@lru_cache(maxsize=STATEMENTS)
def may_have_steps(expr: str) -> bool:
    """Return whether a statement is a sum of three or more factors, whose products of fewer may be kept."""
    statement = parse(expr)
    return statement.is_sum and len(statement.accesses) > 2


def value_in_steps(
    evaluate: Evaluate,
    expr: str,
    tensors: Mapping[str, Tensor],
    size: Sequence[int] | None,
    whole: Callable[[], Tensor],
) -> tuple[Tensor, ...]:
    """Return the value of a statement over plain tensors, and then what lies on the way to it and is to be kept.

    Nothing is kept if the statement is evaluated by `whole`: where steps save nothing, would keep too much, or multiply
    what is not in the statement.
    """
    values = list(tensors.values())
    if any([type(tensor) not in PLAIN or tensor.layout is not torch.strided for tensor in values]):
        return (whole(),)
    statement = prepare(expr, ",".join(tensors), size, values, None)
    parts = split_of(statement.bound, statement.padding(statement.variant(values)))
    steps = () if parts is None or parts.gathers_products else steps_of(statement.bound, parts)
    if not steps or not may_be_kept(statement.bound, steps):
        return (whole(),)
    run = lambda step, values: evaluate(step.text, dict(zip(step.names, values)), step.size)
    *kept, value = evaluated(steps, tensors, run, keeps=True)
    return (value, *kept)


def steps_for(
    expr: str, tensors: Mapping[str, Tensor], size: tuple[int, ...], rounds: bool, kept: Sequence[Tensor]
) -> tuple[Step, ...]:
    """Return the steps in which `value_in_steps` has kept these tensors, none if it took others.

    `rounds` is whether it was called where products use Tensor Cores.
    """
    bound = prepare(expr, ",".join(tensors), size, list(tensors.values()), None).bound
    parts = split(bound, device_of(bound.device), rounds)
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
