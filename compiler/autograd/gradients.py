"""The gradients and tangents of a statement, evaluated; whoever asks says how a statement is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import WrittenOnce
from ...formats.torch_state import is_compiling, is_grad_enabled, is_watched
from ..binding import Recipe, SparseFormat, recipe_for
from ..language import Term, parse, tangent_terms, terms, winners
from ..planning import beside_each_other, device_of
from ..prepared import has_kernels, ways_of
from ..runtime import remember_range
from .operators import run_plain

__all__ = ["gradient_of", "gradients_of", "is_sum", "tangent_of", "values_gradient", "winner_places"]

Operand = Any  # a Tensor or a SparseFormat

Evaluate = Callable[[str, Mapping[str, Operand], tuple[int, ...]], Tensor]


def winner_places(expr: str, won: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The positions of winners as one index tensor for each name that was reduced, and ones along the first name."""
    sources, ones = _winners(expr)
    extents = [tensors[source].shape[dim] for _, source, dim in sources]
    found, stride = {}, 1
    for at in reversed(range(len(sources))):
        place = won if stride == 1 else won.div(max(stride, 1), rounding_mode="floor")  # -1 stays -1
        if at > 0:
            place = torch.where(won < 0, -1, place.remainder(max(extents[at], 1)))
        if not is_compiling():
            remember_range(place, -1, extents[at] - 1)
        found[sources[at][0]] = place
        stride *= extents[at]
    if sources:
        values = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        found[ones] = torch.ones((), dtype=values.dtype, device=values.device).expand(extents[0])
    return found


def _winners(expr: str) -> Any:
    return winners(expr)


def is_sum(expr: str) -> bool:
    return parse(expr).is_sum


def _tangent_terms(expr: str, name: str) -> tuple[tuple[Term, ...], bool]:
    statement = parse(expr)
    return tangent_terms(expr, name), name == statement.output.name and statement.op == "+="


def _terms(expr: str, name: str) -> tuple[tuple[Term, ...], bool]:
    """The gradient's terms, and whether the upstream gradient is one itself (of the output that sums start from)."""
    statement = parse(expr)
    return terms(expr, name), name == statement.output.name and statement.op == "+="


def gradient_of(evaluate: Evaluate, expr: str, name: str, operands: Mapping[str, Operand], upstream: Tensor) -> Tensor:
    """d loss / d operands[name], for a dense tensor: a sum over the places where it stands."""
    tensor = operands[name]
    parts, is_seed = _terms(expr, name)
    total = _as_type(upstream, tensor.dtype) if is_seed else None
    for derived, upstream_as, others in parts:
        needed = {upstream_as: upstream, **{key: operands[key] for key in others}}
        part = _as_type(evaluate(derived, needed, tuple(tensor.shape)), tensor.dtype)
        total = part if total is None else total + part
    return torch.zeros_like(tensor) if total is None else total


def tangent_of(
    evaluate: Evaluate, expr: str, name: str, operands: Mapping[str, Operand], moved: Operand, size: tuple[int, ...]
) -> Tensor | None:
    """How the output changes when operands[name] changes by `moved`: a sum over the places where it stands.

    None: it stands nowhere, as an output that `=` takes only the size from.
    """
    parts, is_seed = _tangent_terms(expr, name)
    total = moved if is_seed else None
    for derived, moved_as, others in parts:
        part = evaluate(derived, {moved_as: moved, **{key: operands[key] for key in others}}, size)
        total = part if total is None else total + part
    return total


def values_gradient(
    evaluate: Evaluate, expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor
) -> Tensor:
    """d loss / d values, only where the format stores an entry: a sampled product, stored without any scatter."""
    size = tuple(form.values.shape)
    may_run = not is_watched() and not is_grad_enabled()
    sampled = _side_by_side(expr, name, form, dense, upstream) if may_run else None
    if sampled is None:
        sampled = _sampled(expr, name, form, dense, upstream)
        return _as_type(evaluate(sampled.text, sampled.tensors, size), form.values.dtype)
    names, tensors = ",".join(sampled.tensors), list(sampled.tensors.values())
    return _as_type(run_plain(sampled.text, names, size, tensors, sampled.fact), form.values.dtype)


class _Sampled(NamedTuple):
    """The statement of a gradient of values, and what it reads."""

    text: str
    how: Recipe
    tensors: dict[str, Tensor]
    upstream: str  # the name of the upstream gradient
    fact: WrittenOnce | None


def _sampled(expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor) -> _Sampled:
    """`dAV[p,i,j] += dC[AM[p],i,n] * B[AK[p],j,n]`, or `dAV[AS[p,q],i,j] += ...` where values stay in place."""
    how = recipe_for(expr, tuple(upstream.shape), name, form, dense)
    tensors = how.tensors(form, dense)
    ((derived, upstream_as, others),), _ = _terms(how.text, how.values)
    needed = {upstream_as: how.split_output(upstream), **{other: tensors[other] for other in others}}
    return _Sampled(derived, how, needed, upstream_as, WrittenOnce(how.source) if how.source else None)


def _side_by_side(
    expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor
) -> _Sampled | None:
    """The same over narrow blocks of a row in groups, if a kernel holds a group in one tile: its row is read once."""
    blocks = form.block_size
    if blocks is None or len(form.value_axes) > 1 or not has_kernels(form.device):
        return None
    rows, count = -(-form.shape[form.group_dim] // blocks[form.group_dim]), form.values.shape[0]
    size = beside_each_other(blocks, form.values.element_size(), count, rows, device_of(form.device))
    if size == 0:
        return None
    sampled = _sampled(expr, name, form.in_groups(size), dense, upstream)
    ways = ways_of(sampled.text, sampled.tensors, tuple(form.values.shape), sampled.fact)
    return sampled if any(way.schedule.merged is not None for way in ways) else None


def gradients_of(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    dense: Mapping[str, Tensor],
    upstream: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """d loss / d values of the format `name`, then d loss / d each dense tensor; None where it is not wanted."""
    d_values = values_gradient(evaluate, expr, name, form, dense, upstream) if wanted[0] else None
    operands = {name: form, **dense}
    grads = [
        gradient_of(evaluate, expr, other, operands, upstream) if is_wanted else None
        for other, is_wanted in zip(dense, wanted[1:])
    ]
    return [d_values, *grads]


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # `to` takes microseconds to find out


# a tracer calls these once and keeps what they return; see recipes.py
for _constant in (_terms, _tangent_terms, _winners, is_sum):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker
