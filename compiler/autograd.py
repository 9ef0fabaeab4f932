"""Gradients of any order: backward evaluates the gradient statements through the same function as forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .carried import as_memory, owned
from .express import again, look_up
from .gradients import gradient_of, gradients_of, is_sum, winner_places
from .one_by_one import one_by_one
from .op import run_plain, run_plain_with_winners
from .pipeline import has_kernels
from .ready import (
    as_autocast,
    followed,
    in_order,
    is_free,
    is_transformed,
    is_watched,
    may_autocast,
    remember,
    remember_sparse,
    wants_gradient,
)
from .ready_call import PlainCall, SparseCall
from .recipes import grouping, recipe_for
from .sparse import SparseFormat, check_pattern, fact_tensors, is_sparse, pattern_of
from .transforms import has_batched_values, settle, transformed, transformed_sparse
from .walks import walked

__all__ = ["evaluate", "evaluate_anew", "grouped", "recall"]

Operand = Any  # a Tensor or a SparseFormat


def evaluate(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None = None) -> Tensor:
    """A statement over tensors and at most one sparse format, differentiable in all of them."""
    known = recall(expr, operands, size)
    return evaluate_anew(expr, operands, size) if known is None else known


def recall(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Tensor | None:
    """The result of a call like one before, without a second look at it; None: it has to be worked out."""
    if torch.compiler.is_compiling() or not isinstance(expr, str):
        return None
    try:
        memory, marks, form, tensors = in_order(expr, operands, size)
        learns = wants_gradient(tensors)
    except (AttributeError, TypeError):  # no tensor, no size: others say so
        return None
    if not learns:
        _, call, result = again(memory, marks, tensors, tensors)
        if result is not None or call is None:
            return result
        return call.anew(tensors) if form is None else call.anew(form, tensors)  # type: ignore[no-any-return]
    call = look_up(memory, marks, tensors)[1] if is_free() else None
    if call is None or not call.is_sum:
        return None
    if form is None:
        return _Plain.apply(expr, ",".join(operands), size, "", [], call, *tensors)  # type: ignore[no-any-return]
    dense = {name: operand for name, operand in operands.items() if operand is not form}
    return _Sparse.apply(expr, call.name, form, size, tuple(operands), call, form.values, *dense.values())  # type: ignore[no-any-return]


def evaluate_anew(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Tensor:
    """`evaluate` for a call that is not remembered."""
    if (torch.compiler.is_compiling() or may_autocast()) and operands:
        kind = next(iter(operands.values())).device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):
                return evaluate(expr, {name: _cast(operand, dtype) for name, operand in operands.items()}, size)
    if not torch.compiler.is_compiling():
        operands = as_memory(operands)
    else:
        operands = {name: _followed(operand) for name, operand in operands.items()}
    sparse = [name for name, operand in operands.items() if is_sparse(operand)]
    if sparse:
        return _evaluate_sparse(expr, operands, sparse, size)
    result = _evaluate_plain(expr, operands, size)
    if not is_watched():
        remember(expr, operands, size)
    return result


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    """Under autocast operands take its type as a matrix product's do."""
    if not is_sparse(operand):
        return as_autocast(operand, dtype)
    return operand.with_values(operand.values.to(dtype)) if operand.dtype == torch.float32 else operand


def _followed(operand: Operand) -> Operand:
    return operand.with_values(followed(operand.values)) if is_sparse(operand) else followed(operand)


def _evaluate_plain(
    expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None, fact: str = "", facts: Sequence[Tensor] = ()
) -> Tensor:
    names = ",".join(tensors)
    values = list(tensors.values())
    if is_transformed():
        return transformed(_evaluate_plain, expr, names, size, values, fact, list(facts))
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in values]):
        function = _Plain if is_sum(expr) else _Extremum
        return function.apply(expr, names, size, fact, list(facts), None, *values)  # type: ignore[no-any-return]
    return run_plain(expr, names, size, values, fact, list(facts))


class _Plain(torch.autograd.Function):
    """An indirect statement over plain tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        expr: str,
        names: str,
        size: Sequence[int] | None,
        fact: str,
        facts: list[Tensor],
        call: PlainCall | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        ctx.save_for_backward(*tensors)
        return owned(run_plain(expr, names, size, list(tensors), fact, facts) if call is None else call(tensors))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return _gradients(ctx, dict(zip(ctx.names.split(","), ctx.saved_tensors)), upstream)


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors: where its winners are is kept, and the gradients are read there."""

    @staticmethod
    def forward(
        ctx: Any,
        expr: str,
        names: str,
        size: Sequence[int] | None,
        fact: str,
        facts: list[Tensor],
        call: PlainCall | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        result, won = run_plain_with_winners(expr, names, size, list(tensors), fact, facts)
        ctx.save_for_backward(won, *tensors)
        return owned(result)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        won, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.names.split(","), saved))
        return _gradients(ctx, {**tensors, **winner_places(ctx.expr, won, tensors)}, upstream)


def _gradients(ctx: Any, operands: Mapping[str, Tensor], upstream: Tensor) -> Any:
    wanted = ctx.needs_input_grad[6:]
    grads = [
        gradient_of(evaluate, ctx.expr, name, operands, upstream) if wanted[at] else None
        for at, name in enumerate(ctx.names.split(","))
    ]
    return None, None, None, None, None, None, *grads


def _evaluate_sparse(
    expr: str, operands: Mapping[str, Operand], sparse: list[str], size: Sequence[int] | None
) -> Tensor:
    form = operands[sparse[0]]
    has_groups = form.coords[form.group_dim] is not None
    name, group_dim = grouping(expr, tuple(sparse), form.group_dim, has_groups)
    dense = {key: operand for key, operand in operands.items() if key != name}
    if is_transformed():
        settle(form, group_dim)
        if len(sparse) == 1 and is_sum(expr) and not has_batched_values(form):
            return transformed_sparse(evaluate, expr, name, form, size, dense)
    wants_grad = torch.is_grad_enabled() and len(sparse) == 1 and not is_transformed()
    if wants_grad and any([tensor.requires_grad for tensor in dense.values()]) and is_sum(expr):
        return _Sparse.apply(expr, name, form, size, tuple(operands), None, form.values, *dense.values())  # type: ignore[no-any-return]
    form = grouped(expr, size, name, form, group_dim, dense)
    how = recipe_for(expr, size, name, form, dense)
    tensors, facts = how.tensors(form, dense), fact_tensors(form.facts) if how.fact else []
    result = how.finish(_evaluate_plain(how.text, tensors, how.size, how.fact, facts))
    if not is_watched():
        remember_sparse(expr, operands, size, form.group_dim, how, tensors, facts)
    return result


def grouped(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Operand]
) -> SparseFormat:
    """Grouped along a dimension: a kernel reads the values where they are, anything else gets a copy of them."""
    wants_grad = torch.is_grad_enabled() and form.values.requires_grad
    is_read = not is_watched() and not wants_grad and is_sum(expr) and has_kernels(form.device)
    shared = walked(expr, size, name, form, group_dim, dense) if is_read else None
    if shared is not None:
        return shared
    if form.group_dim == group_dim:
        return form
    return form.along(group_dim) if is_read else form.regroup(group_dim)


class _Sparse(torch.autograd.Function):
    """A format-agnostic statement; differentiated before the format is rewritten away, so that gradients regroup it."""

    @staticmethod
    def forward(
        ctx: Any,
        expr: str,
        name: str,
        form: SparseFormat,
        size: Sequence[int] | None,
        names: tuple[str, ...],
        call: SparseCall | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.name, ctx.form, ctx.pattern = expr, name, form, pattern_of(form)
        ctx.names = [other for other in names if other != name]
        ctx.save_for_backward(*tensors)
        dense = dict(zip(ctx.names, tensors[1:]))
        known = None if call is None else call(form, [dense.get(other, tensors[0]) for other in names])
        if known is None:  # in the caller's order, by which the call is remembered
            known = evaluate(expr, {other: dense.get(other, form) for other in names}, size)
        return owned(known)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        check_pattern(ctx.form, ctx.pattern, ctx.name)
        values, *rest = ctx.saved_tensors
        form = ctx.form if ctx.form.values is values else ctx.form.with_values(values)
        wanted = ctx.needs_input_grad[6:]
        grads = gradients_of(evaluate, ctx.expr, ctx.name, form, dict(zip(ctx.names, rest)), upstream, wanted)
        return None, None, None, None, None, None, *grads
