"""The path of a call, from its text to a launched kernel, warm and cold. Read this file first.

A cold call is recorded, and its launch plan serves those to come. Gradients are statements, and go the same way:
    insum(expr, **operands)
      evaluate           warm: a call like an earlier one is replayed from its launch plan, its gradients recorded
        evaluate_anew    cold: autocast applied, formats rewritten away, autograd functions around statements
          run            one statement over plain tensors:
            prepare        parse, bind
            runner_of      ranges of index tensors; then lower; or split, schedule, emit, tune and load
            runner(...)    the FX graph, or the kernel's launch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import (
    PLAIN,
    is_compiling,
    is_deterministic,
    is_dynamo,
    is_free,
    is_transformed,
    wants_gradient,
)
from .any_pattern import evaluate_rewritten
from .autograd import differentiable, followed_sparse, implement, is_sum, run_plain, traced, transformed
from .binding import is_sparse, recipe_for, suited_group_dim
from .language import UnsupportedError
from .planning import strategies
from .routes import PreparedStatement, Result, Runner, fastest_program, fastest_route, has_kernels, prepare
from .row_order import with_row_order
from .runtime import (
    PLAIN_CALLS,
    as_memory,
    as_traced,
    cast_operands,
    integers,
    plan_arguments,
    planned,
    replayed,
    unchecked,
)
from .tuning import cached_launcher, choose

__all__ = ["evaluate", "runner_of"]

Operands = Mapping[str, Any]  # tensors, and at most one format
Size = Sequence[int] | None
Times = dict[str, float] | None  # of the routes that are timed, to be filled in


def evaluate(expr: str, operands: Operands, size: Size = None, check: Callable[..., Size] = unchecked) -> Tensor:
    """Return the value of a statement, differentiable; `check` refuses wrong operands of a call without a plan.

    All that a warm call over tensors does is here and in `replayed`: each function that is entered costs a microsecond
    and more where other work has used the caches of the processor.
    """
    if is_dynamo():
        return traced(evaluate_anew, expr, operands, check(expr, operands, size))
    tensors: Sequence[Tensor] = (*operands.values(),)
    numbers = () if size is None else integers(size)
    # as `plan_arguments` has them, which is asked where an operand may be a format
    cache, key = PLAIN_CALLS, (expr, size is None, *operands) if isinstance(expr, str) else None
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            cache, key, tensors, numbers, _, _ = plan_arguments(expr, operands, size)
            break
    if key is not None and numbers is not None:
        value: Tensor | None = replayed(cache, key, tensors, numbers, (operands, cache))
        if value is not None:
            return value  # warm
    return _without_plan(expr, operands, size, check)


def _without_plan(expr: str, operands: Operands, size: Size, check: Callable[..., Size]) -> Tensor:
    """Return the value of a statement that is recorded for the next call, if a plan can hold it."""
    cache, key, tensors, numbers, varies, pattern = plan_arguments(expr, operands, size)
    cold = lambda *_: evaluate_anew(expr, operands, check(expr, operands, size))
    if key is None or is_compiling():  # no plan holds what a tracer makes, nor an operand that `check` refuses
        return cold()
    plan = cache, key, cold, tensors, numbers, varies, pattern
    if not wants_gradient(tensors):
        return planned(*plan)
    if is_free() and (is_sum(expr) or not pattern):
        return differentiable(evaluate, expr, operands, size, None, plan)  # the same, with its gradients
    return cold()  # a transform or autocast follows it, or a max or min reads a format


def evaluate_anew(expr: str, operands: Operands, size: Size) -> Tensor:
    """Return the value of a statement without a plan, however torch traces, casts or transforms the call."""
    cast = cast_operands(operands)
    if cast is not None:
        with torch.autocast(cast[0], enabled=False):
            return evaluate(expr, cast[1], size)
    operands = as_traced(operands) if is_compiling() else as_memory(operands)
    sparse = [name for name, operand in operands.items() if is_sparse(operand)]
    if not sparse:
        return _evaluate_plain(expr, operands, size)
    name, form = sparse[0], operands[sparse[0]]
    dim = index(form.group_dim)  # a number to a tracer with dynamic=True, too
    group_dim = suited_group_dim(expr, tuple(sparse), dim, form.coords[dim] is not None)
    dense = {key: operand for key, operand in operands.items() if key != name}
    if len(sparse) == 1:  # `recipe_for` refuses several
        value = followed_sparse(evaluate, expr, name, form, size, dense, group_dim)
        if value is not None:  # by a transform, or as a torch operator if a tracer watches
            return value
        if is_sum(expr) and wants_gradient(list(dense.values())) and not is_transformed():
            return differentiable(evaluate, expr, operands, size)
    form = with_row_order(expr, size, name, form, group_dim, dense)
    return evaluate_rewritten(recipe_for(expr, size, name, form, dense), form, dense, _evaluate_plain)


def _evaluate_plain(expr: str, tensors: Mapping[str, Tensor], size: Size, fact: Fact | None = None) -> Tensor:
    """Return the value of a statement over plain tensors, of whose numbers the fact is known."""
    names, values = ",".join(tensors), list(tensors.values())
    if is_transformed():
        return transformed(_evaluate_plain, expr, names, size, values, fact)
    if wants_gradient(values):
        return differentiable(evaluate, expr, tensors, size, fact)
    return run_plain(expr, names, size, values, fact)  # `run`, as a torch operator if a tracer watches


@implement(evaluate)  # as a torch operator, which tracers see instead of all that is below
def run(expr: str, names: str, size: Size, tensors: list[Tensor], fact: Fact | None, wants_winners: bool) -> Result:
    """Return the value of one statement over plain tensors and, if wanted, the positions of a max's winners."""
    return runner_of(prepare(expr, names, size, tensors, fact, wants_winners), tensors, fact)(tensors, fact)


def runner_of(statement: PreparedStatement, tensors: list[Tensor], fact: Fact | None, times: Times = None) -> Runner:
    """Return the runner of a prepared statement on these tensors; raise IndexRangeError if an index is out of range."""
    bound, variant = statement.bound, statement.variant(tensors)
    if bound.is_empty or not has_kernels(bound.device):
        return fastest_program(statement, variant, tensors)  # lower
    # one kernel; or several statements or torch operations, where those are faster
    find = lambda: fastest_route(statement, variant, tensors, fact, run, _kernel, times)
    return statement.runner((variant, wants_gradient(tensors)), find)


def _kernel(statement: PreparedStatement, variant: Any, tensors: list[Tensor], fact: Fact | None, ms: float) -> Runner:
    """Return the fastest kernel's launcher, or the FX graph if none can be built; another route takes `ms`, or 0."""
    try:
        bound, key = statement.bound, statement.kernel_key(variant, fact)
        launcher = cached_launcher(key, bound, fact)
        if launcher is None:
            if not strategies(bound, statement.fact, is_deterministic()):
                return statement.ordered(variant, run)
            launcher = choose(statement.problem(tensors, fact), tensors, fact, key, ms)  # schedule, emit, tune
        launcher.build(tensors, fact)  # load
        return launcher
    except UnsupportedError as error:
        return statement.graph_instead(variant, error)
