"""The path of a call, from its text to a launched kernel, warm and cold. Read this file first.

    insum(expr, **operands)
      evaluate           warm: a call like an earlier one is replayed from its launch plan
        evaluate_anew    cold: autocast applied, formats rewritten away, autograd functions around what learns
          run            one statement over plain tensors:
            prepare        parse, bind
            runner_of      ranges of index tensors; then lower, or schedule, emit, tune and load
            runner(...)    the FX graph, or the kernel's launch

A cold call is recorded, and its launch plan serves those to come. Gradients are statements, and go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import is_capturing, is_compiling, is_deterministic, is_free, is_transformed, wants_gradient
from .autograd import differentiable, implement, is_sum, run_plain, transformed, transformed_sparse, unchecked
from .binding import grouping, is_sparse, recipe_for
from .language import UnsupportedError
from .planning import strategies
from .prepared import PreparedStatement, Result, Runner, has_kernels, prepare
from .row_order import grouped
from .runtime import arguments, as_memory, as_traced, cast_operands, planned
from .tuning import choose, known_launcher

__all__ = ["evaluate", "runner_of"]

Operands = Mapping[str, Any]  # tensors, and at most one format
Size = Sequence[int] | None


def evaluate(expr: str, operands: Operands, size: Size = None, check: Callable[..., Size] = unchecked) -> Tensor:
    """Return the value of a statement, differentiable; `check` looks at the operands of a call without a plan."""
    anew = lambda *_: evaluate_anew(expr, operands, check(expr, operands, size))
    call = None if is_compiling() else arguments(expr, operands, size)
    if call is None:  # a tracer; or no tensor, no size, of which `check` says so
        return anew()
    cache, marks, owned, tensors, numbers, learns = call
    if not learns:
        return planned(cache, marks, anew, tensors, numbers, owned is None, owned or ())  # type: ignore[no-any-return]
    if is_free() and is_sum(expr):
        forward = lambda: planned(cache, marks, anew, tensors, numbers, owned is None, owned or ())
        return differentiable(evaluate, expr, operands, None if size is None else numbers, forward=forward)
    return anew()


def evaluate_anew(expr: str, operands: Operands, size: Size) -> Tensor:
    """Evaluate a statement without a plan, however torch follows, casts or transforms the call."""
    cast = cast_operands(operands)
    if cast is not None:
        with torch.autocast(cast[0], enabled=False):
            return evaluate(expr, cast[1], size)
    operands = as_traced(operands) if is_compiling() else as_memory(operands)
    sparse = [name for name, operand in operands.items() if is_sparse(operand)]
    if not sparse:
        return _evaluate_plain(expr, operands, size)
    form = operands[sparse[0]]
    name, group_dim = grouping(expr, tuple(sparse), form.group_dim, form.coords[form.group_dim] is not None)
    dense = {key: operand for key, operand in operands.items() if key != name}
    if is_transformed():
        value = transformed_sparse(evaluate, expr, name, form, size, dense, group_dim)
        if value is not None:
            return value
    elif len(sparse) == 1 and is_sum(expr) and wants_gradient(list(dense.values())):
        return differentiable(evaluate, expr, operands, size)
    form = grouped(expr, size, name, form, group_dim, dense)
    recipe = recipe_for(expr, size, name, form, dense)
    return recipe.finish(_evaluate_plain(recipe.text, recipe.tensors(form, dense), recipe.size, recipe.fact(form)))


def _evaluate_plain(expr: str, tensors: Mapping[str, Tensor], size: Size, fact: Fact | None = None) -> Tensor:
    values = list(tensors.values())
    if is_transformed():
        return transformed(_evaluate_plain, expr, ",".join(tensors), size, values, fact)
    if wants_gradient(values):
        return differentiable(evaluate, expr, tensors, size, fact)
    return run_plain(expr, ",".join(tensors), size, values, fact)  # `run`, as a torch operator where somebody watches


def run(expr: str, names: str, size: Size, tensors: list[Tensor], fact: Fact | None, wants_winners: bool) -> Result:
    """Evaluate one statement over plain tensors; with the positions of what won, where those of a max are wanted."""
    return runner_of(prepare(expr, names, size, tensors, fact, wants_winners), tensors, fact)(tensors, fact)


implement(run)  # the torch operator, which tracers see in the place of all that is below


def runner_of(statement: PreparedStatement, tensors: list[Tensor], fact: Fact | None) -> Runner:
    """Return what runs a prepared statement on these tensors; raise IndexRangeError if an index is out of range."""
    variant = statement.variant(tensors)
    runner = statement.runners.get(variant) or _new_runner(statement, variant, tensors, fact)
    if statement.bound.device.type != "cuda" or not is_capturing():  # what capture finds untuned is for it alone
        statement.runners[variant] = runner
    return runner


def _new_runner(statement: PreparedStatement, variant: Any, tensors: list[Tensor], fact: Fact | None) -> Runner:
    """Choose what runs a variant: the fastest kernel, or the FX graph on a CPU and where no kernel can be built."""
    bound = statement.bound
    if bound.is_empty or not has_kernels(bound.device):
        return statement.graph(variant)  # lower
    try:
        key = statement.kernel_key(variant, fact)
        launcher = known_launcher(key, bound, fact)
        if launcher is None:
            if not strategies(bound, statement.fact, is_deterministic()):
                return statement.ordered(variant, run)
            launcher = choose(statement.problem(tensors, fact), tensors, fact, key)  # schedule, emit, tune
        launcher.build(tensors, fact)  # load
        return launcher
    except UnsupportedError as error:
        statement.warn(f"{error}; running it as separate torch operations instead")
        return statement.graph(variant)
