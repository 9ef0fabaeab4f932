"""Gradients of any order: backward evaluates the gradient statements through the same function as forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .bind import Meta, TensorLike, bind
from .carried import as_memory
from .differentiate import Term, terms, winners
from .op import call, call_with_winners
from .parse import parse
from .pipeline import has_kernels, run, run_with_winners
from .ranges import remember_range
from .ready import (
    PLAIN,
    SparseCall,
    find,
    find_values_gradient,
    is_watched,
    remember,
    remember_sparse,
    remember_values_gradient,
    run_found,
)
from .rewrite import sparse_factor
from .sparse import Kind, Recipe, SparseFormat, best_group_dim, is_sparse, recipe

__all__ = ["evaluate", "gradient_of", "grouped", "recall", "values_gradient"]

# whether any device's autocast is on, at a tenth of the cost of asking for one device
_may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

Operand = Any  # a Tensor or a SparseFormat


def evaluate(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None = None) -> Tensor:
    """A statement over tensors and at most one sparse format, differentiable in all of them."""
    known = recall(expr, operands, size)
    return _evaluate(expr, operands, size) if known is None else known


def recall(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Tensor | None:
    """The result of a call like one before, without a second look at it; None: it has to be worked out."""
    found = find(expr, operands, size)
    if found is None:
        return None
    call, form, wants_grad = found
    if not wants_grad:
        return run_found(found, operands)
    if not call.is_sum:
        return None
    if form is None:
        return _Plain.apply(expr, ",".join(operands), size, "", [], *operands.values())  # type: ignore[no-any-return]
    dense = {name: operand for name, operand in operands.items() if operand is not form}
    if not any([tensor.requires_grad for tensor in dense.values()]):
        return None
    name = next(name for name in operands if name not in dense)
    return _Sparse.apply(expr, name, form, size, tuple(dense), call, form.values, *dense.values())  # type: ignore[no-any-return]


def _evaluate(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Tensor:
    if (torch.compiler.is_compiling() or _may_autocast()) and operands:
        kind = next(iter(operands.values())).device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            with torch.autocast(kind, enabled=False):
                return evaluate(expr, {name: _cast(operand, dtype) for name, operand in operands.items()}, size)
    if not torch.compiler.is_compiling():
        operands = as_memory(operands)
    sparse = [name for name, operand in operands.items() if is_sparse(operand)]
    if sparse:
        return _evaluate_sparse(expr, operands, sparse, size)
    result = _evaluate_plain(expr, operands, size, "", [])
    if not is_watched():
        remember(expr, operands, size)
    return result


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    """Under autocast float32 operands take its type, as a matrix product's do."""
    if operand.dtype != torch.float32:
        return operand
    return operand.with_values(operand.values.to(dtype)) if is_sparse(operand) else operand.to(dtype)


def _evaluate_plain(
    expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None, fact: str, facts: list[Tensor]
) -> Tensor:
    names = ",".join(tensors)
    values = list(tensors.values())
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in values]):
        function = _Plain if _is_sum(expr) else _Extremum
        return function.apply(expr, names, size, fact, facts, *values)  # type: ignore[no-any-return]
    return _call(expr, names, size, values, fact, facts)


def _call(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> Tensor:
    if _is_watched(tensors):
        return call(expr, names, size, tensors, fact, facts)  # type: ignore[no-any-return]
    return run(expr, names, size, tensors, fact, facts)


def _is_watched(tensors: Sequence[Tensor]) -> bool:
    """By a tracer, a mode or a transform: a call goes through the operator then, else straight to the pipeline."""
    return is_watched() or any([type(tensor) not in PLAIN for tensor in tensors])


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
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        ctx.save_for_backward(*tensors)
        return _call(expr, names, size, list(tensors), fact, facts)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        tensors = dict(zip(ctx.names.split(","), ctx.saved_tensors))
        wanted = ctx.needs_input_grad[5:]
        grads = [
            gradient_of(ctx.expr, name, tensors, upstream) if wanted[at] else None for at, name in enumerate(tensors)
        ]
        return None, None, None, None, None, *grads


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
        *tensors: Tensor,
    ) -> Tensor:
        ctx.expr, ctx.names = expr, names
        function = call_with_winners if _is_watched(tensors) else run_with_winners
        result, won = function(expr, names, size, list(tensors), fact, facts)
        ctx.save_for_backward(won, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        won, *saved = ctx.saved_tensors
        tensors = dict(zip(ctx.names.split(","), saved))
        wanted = ctx.needs_input_grad[5:]
        operands = {**tensors, **_split(ctx.expr, won, tensors)} if any(wanted) else tensors
        grads = [
            gradient_of(ctx.expr, name, operands, upstream) if wanted[at] else None for at, name in enumerate(tensors)
        ]
        return None, None, None, None, None, *grads


def _split(expr: str, won: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The positions of winners as one index tensor for each name that was reduced, and ones along the first name."""
    sources, ones = _winners(expr)
    extents = [tensors[source].shape[dim] for _, source, dim in sources]
    found, stride = {}, 1
    for at in reversed(range(len(sources))):
        place = won if stride == 1 else won.div(max(stride, 1), rounding_mode="floor")  # -1 stays -1
        if at > 0:
            place = torch.where(won < 0, -1, place.remainder(max(extents[at], 1)))
        if not torch.compiler.is_compiling():
            remember_range(place, -1, extents[at] - 1)
        found[sources[at][0]] = place
        stride *= extents[at]
    if sources:
        values = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        found[ones] = torch.ones((), dtype=values.dtype, device=values.device).expand(extents[0])
    return found


def _winners(expr: str) -> Any:
    return winners(expr)


def _is_sum(expr: str) -> bool:
    return parse(expr).is_sum


def _terms(expr: str, name: str) -> tuple[tuple[Term, ...], bool]:
    """The gradient's terms, and whether the upstream gradient is one itself (of the output that sums start from)."""
    statement = parse(expr)
    return terms(expr, name), name == statement.output.name and statement.op == "+="


def gradient_of(expr: str, name: str, operands: Mapping[str, Operand], upstream: Tensor) -> Tensor:
    """d loss / d operands[name], for a dense tensor: a sum over the places where it stands."""
    tensor = operands[name]
    parts, is_seed = _terms(expr, name)
    total = _as_type(upstream, tensor.dtype) if is_seed else None
    for derived, upstream_as, others in parts:
        needed = {upstream_as: upstream, **{key: operands[key] for key in others}}
        part = _as_type(evaluate(derived, needed, tuple(tensor.shape)), tensor.dtype)
        total = part if total is None else total + part
    return torch.zeros_like(tensor) if total is None else total


def _evaluate_sparse(
    expr: str, operands: Mapping[str, Operand], sparse: list[str], size: Sequence[int] | None
) -> Tensor:
    form = operands[sparse[0]]
    has_groups = form.coords[form.group_dim] is not None
    name, group_dim = _grouping(expr, tuple(sparse), form.group_dim, has_groups)
    dense = {key: operand for key, operand in operands.items() if key != name}
    wants_grad = torch.is_grad_enabled() and len(sparse) == 1
    if wants_grad and any([tensor.requires_grad for tensor in dense.values()]) and _is_sum(expr):
        return _Sparse.apply(expr, name, form, size, tuple(dense), None, form.values, *dense.values())  # type: ignore[no-any-return]
    if form.group_dim != group_dim:
        form = grouped(form, group_dim, _is_sum(expr))
    how = recipe_for(expr, size, name, form, dense)
    tensors, facts = how.tensors(form, dense), _facts_of(form) if how.fact else []
    result = how.finish(_evaluate_plain(how.text, tensors, how.size, how.fact, facts))
    if not is_watched():
        remember_sparse(expr, operands, size, form.group_dim, how, tensors, facts)
    return result


def grouped(form: SparseFormat, group_dim: int, is_sum: bool) -> SparseFormat:
    """Grouped along another dimension: a kernel reads the values where they are, anything else gets a copy of them."""
    wants_grad = torch.is_grad_enabled() and form.values.requires_grad
    if is_watched() or wants_grad or not is_sum or not has_kernels(form.device):
        return form.regroup(group_dim)
    return form.along(group_dim)


def _facts_of(form: SparseFormat) -> list[Tensor]:
    facts = form.facts
    return [] if facts is None else [facts.pointers, facts.is_shared, facts.rows_to_zero]


def _is_odd(tensor: Tensor) -> bool:
    """Not a plain dense tensor; a tracer does not let itself be asked."""
    return not torch.compiler.is_compiling() and (tensor.layout is not torch.strided or tensor.is_nested)


def recipe_for(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, dense: Mapping[str, Operand]
) -> Recipe:
    """How to evaluate a statement in which `form` stands as `name`."""
    is_odd = [isinstance(o, Tensor) and _is_odd(o) for o in dense.values()]
    if any(is_odd):
        bind(parse(expr), {name: form, **dense}, size)  # says what is wrong with it
    others = [(key, tuple(o.shape), o.dtype, o.device, is_sparse(o)) for key, o in dense.items()]
    return Recipe(*_recipe(expr, None if size is None else tuple(size), name, Kind.of(form), tuple(others)))


@lru_cache(maxsize=4096)
def _known_recipe(expr: str, size: Any, name: str, kind: Any, others: Any) -> tuple[Any, ...]:
    statement, own = parse(expr), Kind(*kind)
    tensors: dict[str, TensorLike] = {key: Meta(shape, dtype, device) for key, shape, dtype, device, _ in others}
    bound = bind(statement, {name: own, **tensors}, size)
    sparse = [name, *(key for key, _, _, _, is_also_sparse in others if is_also_sparse)]
    return recipe(bound, sparse_factor(statement, sparse), own)


def _recipe(*key: Any) -> tuple[Any, ...]:
    return _known_recipe(*key)


@lru_cache(maxsize=4096)
def _known_grouping(expr: str, sparse: tuple[str, ...], group_dim: int, has_groups: bool) -> tuple[str, int]:
    statement = parse(expr)
    found = [access for access in statement.accesses if access.name in sparse]
    if len(sparse) != 1 or len(found) != 1:
        return sparse[0], group_dim  # a mistake, of which the recipe will say more
    return sparse[0], best_group_dim(statement, found[0], group_dim, has_groups)


def _grouping(*key: Any) -> tuple[str, int]:
    return _known_grouping(*key)


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
        ctx.expr, ctx.name, ctx.form, ctx.names = expr, name, form, names
        ctx.save_for_backward(*tensors)
        dense = dict(zip(names, tensors[1:]))
        return evaluate(expr, {name: form, **dense}, size) if call is None else call(form, dense)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        values, *rest = ctx.saved_tensors
        form = ctx.form if ctx.form.values is values else ctx.form.with_values(values)
        dense = dict(zip(ctx.names, rest))
        wants_values, *wanted = ctx.needs_input_grad[6:]
        d_values = values_gradient(ctx.expr, ctx.name, form, dense, upstream) if wants_values else None
        operands = {ctx.name: form, **dense}
        grads = [
            gradient_of(ctx.expr, name, operands, upstream) if wanted[at] else None for at, name in enumerate(dense)
        ]
        return None, None, None, None, None, None, d_values, *grads


def values_gradient(expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor) -> Tensor:
    """d loss / d values, only where the format stores an entry: a sampled product, stored without any scatter."""
    key, known = find_values_gradient(expr, form, dense, upstream)
    if known is not None:
        return _as_type(known({**dense, known.upstream: upstream}), form.values.dtype)
    how = recipe_for(expr, tuple(upstream.shape), name, form, dense)
    tensors = how.tensors(form, dense)
    ((derived, upstream_as, others),), _ = _terms(how.text, how.values)
    needed = {upstream_as: how.split_output(upstream), **{key: tensors[key] for key in others}}
    result = _as_type(evaluate(derived, needed, tuple(form.values.shape)), form.values.dtype)
    if key is not None:
        remember_values_gradient(key, form, derived, how, needed, upstream_as, {**dense, upstream_as: upstream})
    return result


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # `to` takes microseconds to find out


# What torch.compiler.assume_constant_result does, without importing all of torch._dynamo (over a second) to do it:
# a tracer calls these once and keeps what they return.
for _constant in (_terms, _winners, _is_sum, _recipe, _grouping):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker
