"""Gradients of any order: backward evaluates the gradient statements through the same function as forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import (
    PLAIN,
    as_autocast,
    autocast_dtype,
    default_dtype,
    is_autocast_enabled,
    is_compiling,
    is_free,
    is_grad_enabled,
    is_transformed,
    is_watched,
    may_autocast,
    wants_gradient,
)
from ..lru_cache import LRUCache
from .carried import as_memory, owned
from .gradients import gradient_of, gradients_of, is_sum, winner_places
from .one_by_one import one_by_one
from .op import run_plain, run_plain_with_winners
from .pipeline import has_kernels
from .recipes import grouping, recipe_for
from .runtime.plan_cache import planned
from .runtime.torch_state import followed
from .sparse import SparseFormat, check_pattern, is_sparse, pattern_of
from .transforms import has_batched_values, settle, transformed, transformed_sparse
from .walks import walked

__all__ = ["evaluate", "evaluate_anew", "gradients", "grouped"]

Operand = Any  # a Tensor or a SparseFormat
PARAMETERS, SPARSE_PARAMETERS = 5, 6  # of autograd functions before the tensors, without and with a format
NONE = (None,) * PARAMETERS  # their gradients
PLANS = 4096  # of calls over plain tensors that are kept, with what tells that a call came once; of about 4 kB each

Check = Callable[[str, Mapping[str, Operand], "Sequence[int] | None"], "Sequence[int] | None"]

_plans: LRUCache[Any] = LRUCache(PLANS)


def _unchecked(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Sequence[int] | None:
    return size


def evaluate(
    expr: str,
    operands: Mapping[str, Operand],
    size: Sequence[int] | None = None,
    check: Check = _unchecked,
) -> Tensor:
    """Return the value of a statement over tensors and at most one sparse format, differentiable in all of them.

    A call like one before is replayed from its launch plan. Any other goes to `evaluate_anew`; `check` looks at its
    operands first, and returns the size as whole numbers.
    """
    if is_compiling():
        return evaluate_anew(expr, operands, check(expr, operands, size))
    try:
        cache, marks, form, tensors, numbers = _arguments(expr, operands, size)
        learns = wants_gradient(tensors)
    except (AttributeError, TypeError):  # no tensor, no size: `check` says so
        return evaluate_anew(expr, operands, check(expr, operands, size))
    whole = None if size is None else numbers
    if learns:
        if not is_free() or not is_sum(expr):
            return evaluate_anew(expr, operands, check(expr, operands, size))
        if form is None:
            return _Plain.apply(expr, tuple(operands), whole, None, check, *tensors)  # type: ignore[no-any-return]
        name = next(name for name, operand in operands.items() if operand is form)
        dense = [tensor for tensor, operand in zip(tensors, operands.values()) if operand is not form]
        return _Sparse.apply(expr, name, form, whole, tuple(operands), check, form.values, *dense)  # type: ignore[no-any-return]

    def anew(*_: Tensor) -> Tensor:
        return evaluate_anew(expr, operands, check(expr, operands, size))

    if form is None:
        return planned(cache, marks, anew, tensors, numbers, varies=True)  # type: ignore[no-any-return]
    return planned(cache, marks, anew, tensors, numbers, owned=form.coords)  # type: ignore[no-any-return]


def _arguments(
    expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None
) -> tuple[dict[Any, Any], object, SparseFormat | None, list[Tensor], tuple[int, ...]]:
    """Return where the plans of a call are kept and by what; its format, its tensors and its size.

    The tensors are the operands in the caller's order, a format's values in its place.
    """
    form: SparseFormat | None = None
    place = -1
    tensors: list[Tensor] = []
    for operand in operands.values():
        if type(operand) not in PLAIN and form is None and not isinstance(operand, Tensor):
            # the values are asked each time: a Parameter stays the same object when its dtype or device changes
            form, place, operand = operand, len(tensors), operand.values
        tensors.append(operand)
    numbers = None if size is None else _whole_numbers(size)
    if form is None:
        return _plans, _marks(expr, tuple(operands), numbers), None, tensors, numbers or ()
    return form.memory, (expr, numbers is None, place, *operands), form, tensors, numbers or ()


def _marks(expr: str, names: tuple[str, ...], size: tuple[int, ...] | None) -> tuple[Any, ...]:
    """Return what calls over plain tensors are told apart by; a statement of numbers alone has the default dtype."""
    return expr, size is None, default_dtype(), *names


def _whole_numbers(size: object) -> tuple[int, ...]:
    """Return a size as integers: what equals one, such as 3.0 or True, is refused all the same."""
    if type(size) is tuple:
        for extent in size:
            if type(extent) is not int:
                break
        else:
            return size
    if not isinstance(size, (tuple, list)):
        raise TypeError
    return tuple(map(index, size))


def evaluate_anew(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Tensor:
    """Evaluate a statement without a plan, however torch follows, casts or transforms the call."""
    if (is_compiling() or may_autocast()) and operands:
        kind = next(iter(operands.values())).device.type
        if is_autocast_enabled(kind):
            dtype = autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):
                return evaluate(expr, {name: _cast(operand, dtype) for name, operand in operands.items()}, size)
    if not is_compiling():
        operands = as_memory(operands)
    else:
        operands = {name: _followed(operand) for name, operand in operands.items()}
    sparse = [name for name, operand in operands.items() if is_sparse(operand)]
    if sparse:
        return _evaluate_sparse(expr, operands, sparse, size)
    return _evaluate_plain(expr, operands, size)


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    """Under autocast operands take its type as a matrix product's do."""
    if not is_sparse(operand):
        return as_autocast(operand, dtype)
    return operand.with_values(operand.values.to(dtype)) if operand.dtype == torch.float32 else operand


def _followed(operand: Operand) -> Operand:
    return operand.with_values(followed(operand.values)) if is_sparse(operand) else followed(operand)


def _evaluate_plain(
    expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None, fact: Fact | None = None
) -> Tensor:
    names = ",".join(tensors)
    values = list(tensors.values())
    if is_transformed():
        return transformed(_evaluate_plain, expr, names, size, values, fact)
    if is_grad_enabled() and any([tensor.requires_grad for tensor in values]):
        function = _Plain if is_sum(expr) else _Extremum
        given = expr, tuple(tensors), None if size is None else tuple(size), fact, _unchecked
        return function.apply(*given, *values)  # type: ignore[no-any-return]
    return run_plain(expr, names, size, values, fact)


class _Plain(torch.autograd.Function):
    """An indirect statement over plain tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        expr: str,
        names: tuple[str, ...],
        size: tuple[int, ...] | None,
        fact: Fact | None,
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        ctx.save_for_backward(*tensors)
        if fact is not None or is_compiling():
            return owned(run_plain(expr, ",".join(names), size, list(tensors), fact))

        def anew(*tensors: Tensor) -> Tensor:
            operands = dict(zip(names, tensors))
            return evaluate_anew(expr, operands, check(expr, operands, size))

        return owned(planned(_plans, _marks(expr, names, size), anew, tensors, size or (), varies=True))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        expr, names, wanted = ctx.expr, ctx.names, ctx.needs_input_grad[PARAMETERS:]

        def run(upstream: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            return _gradients(expr, names, wanted, dict(zip(names, tensors)), upstream)

        tensors = (upstream, *ctx.saved_tensors)
        if is_compiling() or is_grad_enabled():
            return *NONE, *run(*tensors)
        return *NONE, *planned(_plans, ("gradients", expr, names, wanted), run, tensors, varies=True)


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors: where its winners are is kept, and the gradients are read there."""

    @staticmethod
    def forward(
        ctx: Any,
        expr: str,
        names: tuple[str, ...],
        size: tuple[int, ...] | None,
        fact: Fact | None,
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        result, won = run_plain_with_winners(expr, ",".join(names), size, list(tensors), fact)
        ctx.save_for_backward(won, *tensors)
        return owned(result)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        won, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.names, saved))
        operands = {**tensors, **winner_places(ctx.expr, won, tensors)}
        return *NONE, *_gradients(ctx.expr, ctx.names, ctx.needs_input_grad[PARAMETERS:], operands, upstream)


def _gradients(
    expr: str, names: Sequence[str], wanted: Sequence[bool], operands: Mapping[str, Tensor], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor that is wanted; None for the others."""
    return tuple(
        [
            gradient_of(evaluate, expr, name, operands, upstream) if is_wanted else None
            for name, is_wanted in zip(names, wanted)
        ]
    )


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
    wants_grad = is_grad_enabled() and len(sparse) == 1 and not is_transformed()
    if wants_grad and any([tensor.requires_grad for tensor in dense.values()]) and is_sum(expr):
        whole = None if size is None else tuple(size)
        given = expr, name, form, whole, tuple(operands), _unchecked
        return _Sparse.apply(*given, form.values, *dense.values())  # type: ignore[no-any-return]
    form = grouped(expr, size, name, form, group_dim, dense)
    how = recipe_for(expr, size, name, form, dense)
    return how.finish(_evaluate_plain(how.text, how.tensors(form, dense), how.size, how.fact(form)))


def grouped(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Operand]
) -> SparseFormat:
    """Grouped along a dimension: a kernel reads the values where they are, anything else gets a copy of them."""
    wants_grad = is_grad_enabled() and form.values.requires_grad
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
        size: tuple[int, ...] | None,
        names: tuple[str, ...],
        check: Check,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.name, ctx.form, ctx.pattern = expr, name, form, pattern_of(form)
        ctx.names = [other for other in names if other != name]
        ctx.save_for_backward(*tensors)
        dense = dict(zip(ctx.names, tensors[1:]))
        return owned(evaluate(expr, {other: dense.get(other, form) for other in names}, size, check))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        check_pattern(ctx.form, ctx.pattern, ctx.name)
        form, wanted = ctx.form, ctx.needs_input_grad[SPARSE_PARAMETERS:]
        grads = gradients(ctx.expr, ctx.name, form, ctx.names, ctx.saved_tensors, upstream, wanted)
        return *(None,) * SPARSE_PARAMETERS, *grads


def gradients(
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
