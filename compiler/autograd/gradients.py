"""The gradients and tangents of a statement, evaluated by the function `evaluate` that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import WrittenOnce
from ...formats.torch_state import asked_once, is_compiling, is_free, is_grad_enabled, is_watched
from ..binding import Recipe, SparseFormat, recipe_for
from ..language import Term, parse, tangent_terms, terms, winners
from ..planning import blocks_side_by_side, device_of, may_share_kernel
from ..routes import JointCall, has_kernels, prepare, ways_of
from ..runtime import remember_range
from .operators import run_plain, run_several

__all__ = [
    "all_gradients",
    "gradient_of",
    "gradients_of",
    "is_read",
    "is_sum",
    "joint_gradients",
    "remember_winners",
    "tangent_of",
    "values_gradient",
    "winner_places",
]

Operand = Any  # a Tensor or a SparseFormat

Evaluate = Callable[[str, Mapping[str, Operand], tuple[int, ...]], Tensor]


def winner_places(expr: str, won: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the winners as one index tensor for each reduced name, and ones along the first of them if they are read.

    `won` holds the winners' positions over all reduced names together, -1 where no product won.
    """
    sources, ones = _winners(expr)
    extents = [tensors[source].shape[dim] for _, source, dim in sources]
    places, stride = {}, 1
    for at in reversed(range(len(sources))):
        place = won if stride == 1 else won.div(max(stride, 1), rounding_mode="floor")  # -1 stays -1
        if at > 0:
            place = torch.where(won < 0, -1, place.remainder(max(extents[at], 1)))
        if not is_compiling():
            remember_range(place, -1, extents[at] - 1)
        places[sources[at][0]] = place
        stride *= extents[at]
    if ones:
        values = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
        places[ones] = torch.ones((), dtype=values.dtype, device=values.device).expand(extents[0])
    return places


def remember_winners(expr: str, won: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Keep the range of winners' positions with them, as `winner_places` does where these are one index tensor."""
    sources, _ = _winners(expr)
    if len(sources) == 1:
        ((_, source, dim),) = sources
        remember_range(won, -1, tensors[source].shape[dim] - 1)


@asked_once
def _winners(expr: str) -> Any:
    return winners(expr)


@asked_once
def is_sum(expr: str) -> bool:
    return parse(expr).is_sum


def is_read(expr: str, name: str) -> bool:
    """Return whether a factor of a sum reads a tensor, so that its gradient is a statement."""
    return bool(_terms(expr, name)[0])


@asked_once
def _tangent_terms(expr: str, name: str) -> tuple[tuple[Term, ...], bool]:
    """Return the tangent's terms, and whether the tensor's tangent is one itself, as that of the starting output."""
    statement = parse(expr)
    return tangent_terms(expr, name), name == statement.output.name and statement.op == "+="


@asked_once
def _terms(expr: str, name: str) -> tuple[tuple[Term, ...], bool]:
    """Return the gradient's terms, and whether the output's gradient is one itself, as for the starting output."""
    statement = parse(expr)
    return terms(expr, name), name == statement.output.name and statement.op == "+="


def gradient_of(
    evaluate: Evaluate, expr: str, name: str, operands: Mapping[str, Operand], grad_output: Tensor
) -> Tensor:
    """Return d loss / d operands[name] for a dense tensor: a sum over the factors that read it."""
    tensor = operands[name]
    parts, is_seed = _terms(expr, name)
    total = _as_type(grad_output, tensor.dtype) if is_seed else None
    for derived, grad_name, others in parts:
        needed = {grad_name: grad_output, **{key: operands[key] for key in others}}
        part = _as_type(evaluate(derived, needed, tuple(tensor.shape)), tensor.dtype)
        total = part if total is None else total + part
    return torch.zeros_like(tensor) if total is None else total


def all_gradients(
    evaluate: Evaluate,
    expr: str,
    names: Sequence[str],
    operands: Mapping[str, Operand],
    grad_output: Tensor,
    computed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return d loss / d operands[name] for each name; those that are not `computed` are statements by themselves."""
    statement = evaluate, expr
    return {
        name: computed[name] if name in computed else gradient_of(*statement, name, operands, grad_output)
        for name in names
    }


def joint_gradients(
    expr: str, names: Sequence[str], operands: Mapping[str, Tensor], grad_output: Tensor
) -> dict[str, Tensor]:
    """Return those of the gradients that one kernel or program may compute together, by the tensors' names.

    There are none where torch watches, casts or differentiates them: then each is a statement by itself.
    """
    if len(names) < 2 or not is_free() or is_grad_enabled():
        return {}
    by_kernels = has_kernels(grad_output.device)
    if not (by_kernels or grad_output.is_cpu):
        return {}
    calls: dict[str, JointCall] = {}
    for name in names:
        parts, is_seed = _terms(expr, name)
        if len(parts) == 1 and not is_seed:
            ((derived, grad_name, others),) = parts
            size, tensors = tuple(operands[name].shape), [grad_output, *[operands[key] for key in others]]
            call = JointCall(derived, ",".join([grad_name, *others]), size, tensors)
            if not by_kernels or may_share_kernel(prepare(*call.statement).bound):
                calls[name] = call
    if len(calls) < 2:
        return {}
    return {name: _as_type(grad, operands[name].dtype) for name, grad in zip(calls, run_several([*calls.values()]))}


def tangent_of(
    evaluate: Evaluate, expr: str, name: str, operands: Mapping[str, Operand], tangent: Operand, size: tuple[int, ...]
) -> Tensor | None:
    """Return the output's tangent if operands[name] has this tangent: a sum over the factors that read it.

    The result is None if no factor reads it, as for an output of which `=` takes only the size.
    """
    parts, is_seed = _tangent_terms(expr, name)
    total = tangent if is_seed else None
    for derived, tangent_name, others in parts:
        part = evaluate(derived, {tangent_name: tangent, **{key: operands[key] for key in others}}, size)
        total = part if total is None else total + part
    return total


def values_gradient(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    dense: Mapping[str, Tensor],
    grad_output: Tensor,
    may_read: bool = True,
) -> Tensor:
    """Return d loss / d values, computed only at the format's entries: a sampled product, stored without a scatter.

    `may_read` says whether the coordinates may be read first, to put entries in groups.
    """
    size = tuple(form.values.shape)
    may_run = may_read and not is_watched() and not is_grad_enabled()
    sampled = _side_by_side(expr, name, form, dense, grad_output) if may_run else None
    if sampled is None:
        sampled = _sampled(expr, name, form, dense, grad_output)
        return _as_type(evaluate(sampled.text, sampled.tensors, size), form.values.dtype)
    names, tensors = ",".join(sampled.tensors), list(sampled.tensors.values())
    return _as_type(run_plain(sampled.text, names, size, tensors, sampled.fact), form.values.dtype)


class _Sampled(NamedTuple):
    """The statement of a gradient of values, and what it reads."""

    text: str
    how: Recipe
    tensors: dict[str, Tensor]
    upstream: str  # the name of the output's gradient
    fact: WrittenOnce | None


def _sampled(expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], grad_output: Tensor) -> _Sampled:
    """Return `dAV[p,i,j] += dC[AM[p],i,n] * B[AK[p],j,n]`, or `dAV[AS[p,q],i,j] += ...` if values stay in place."""
    how = recipe_for(expr, tuple(grad_output.shape), name, form, dense)
    tensors = how.tensors(form, dense)
    ((derived, grad_name, others),), _ = _terms(how.text, how.values)
    needed = {grad_name: how.split_output(grad_output), **{key: tensors[key] for key in others}}
    return _Sampled(derived, how, needed, grad_name, WrittenOnce(how.source) if how.source else None)


def _side_by_side(
    expr: str, name: str, form: SparseFormat, dense: Mapping[str, Tensor], grad_output: Tensor
) -> _Sampled | None:
    """Return the sampled product over groups of a row's narrow blocks; None if no kernel holds a group in one tile.

    A tile of several blocks reads their common row once.
    """
    blocks = form.block_size
    if blocks is None or len(form.value_axes) > 1 or not has_kernels(form.device):
        return None
    rows, count = -(-form.shape[form.group_dim] // blocks[form.group_dim]), form.values.shape[0]
    size = blocks_side_by_side(blocks, form.values.element_size(), count, rows, device_of(form.device))
    if size == 0:
        return None
    sampled = _sampled(expr, name, form.in_groups(size), dense, grad_output)
    ways = ways_of(sampled.text, sampled.tensors, tuple(form.values.shape), sampled.fact)
    return sampled if any(way.schedule.merged is not None for way in ways) else None


def gradients_of(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    dense: Mapping[str, Tensor],
    grad_output: Tensor,
    needs_grads: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return d loss / d values of the format `name`, then d loss / d each dense tensor; None for those not needed."""
    d_values = values_gradient(evaluate, expr, name, form, dense, grad_output) if needs_grads[0] else None
    operands = {name: form, **dense}
    grads = [
        gradient_of(evaluate, expr, key, operands, grad_output) if needs_grad else None
        for key, needs_grad in zip(dense, needs_grads[1:])
    ]
    return [d_values, *grads]


def _as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # `to` takes microseconds to find out
