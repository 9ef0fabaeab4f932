"""torch.func and forward mode: statements as functions that `grad`, `vjp`, `jvp` and `vmap` see through.

The gradient of a statement, its tangent and a batch of it are statements, so each rule below is one more call. These
functions cost more for each call than those of functions.py, and are for calls inside a transform alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ...formats.facts import Fact
from ...formats.torch_state import forward_mode, is_compiling, is_wrapped, primal_of, transform_kinds, uncompiled
from ..binding import SparseFormat, is_sparse
from ..runtime import outside_transforms, owned
from .gradients import gradient_of, gradients_of, is_sum, tangent_of, winner_places
from .legacy_vmap import unbatch_tangents
from .operators import batch_call, run_plain, run_plain_with_winners

__all__ = ["transformed", "transformed_sparse"]

Size = Sequence[int] | None
EvaluatePlain = Callable[..., Tensor]  # (expr, tensors, size, fact)
Evaluate = Callable[..., Tensor]  # (expr, operands, size)
FormOf = Callable[[Tensor], SparseFormat]  # a pattern with these values
PARAMETERS, SPARSE_PARAMETERS = 5, 6  # before the tensors, without and with a format


@uncompiled  # where a graph has broken inside a transform, torch.compile would compile its parts
def transformed(
    evaluate: EvaluatePlain, expr: str, names: str, size: Size, tensors: list[Tensor], fact: Fact | None
) -> Tensor:
    """Return the value of a statement over plain tensors, inside a transform."""
    if is_sum(expr):
        return _Sum.apply(evaluate, expr, names, size, fact, *tensors)  # type: ignore[no-any-return]
    return _Extremum.apply(evaluate, expr, names, size, fact, *tensors)[0]  # type: ignore[no-any-return]


@uncompiled
def transformed_sparse(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    size: Size,
    dense: Mapping[str, Tensor],
    group_dim: int,
) -> Tensor | None:
    """Return a sum with one format in it, inside a transform; None if the format has to be rewritten away.

    A format holds one set of values, so it must be rewritten away if some vmap gives every example its own.
    """
    _settle(form, group_dim)
    if any([is_sparse(operand) for operand in dense.values()]) or not is_sum(expr) or _has_batched_values(form):
        return None
    # not the format itself: transforms look into arguments that are pytree nodes and would wrap its coordinates
    return _Sparse.apply(evaluate, expr, name, form.with_values, size, tuple(dense), form.values, *dense.values())  # type: ignore[no-any-return]


def _has_batched_values(form: SparseFormat) -> bool:
    """Return True if some vmap gives every example values of its own."""
    values = form.values
    while is_wrapped(values):
        if functorch.is_batchedtensor(values):
            return True
        values = functorch.get_unwrapped(values)
    return False


def _settle(form: SparseFormat, group_dim: int) -> None:
    """Fill the pattern's cache now, outside of every transform: what is made inside one ends with it."""
    with outside_transforms():
        zero = torch.zeros((), dtype=form.dtype, device=form.device)
        pattern = form.with_values(zero.expand(form.values.shape))
        _ = pattern.facts, pattern.regroup(group_dim).facts, pattern.has_padding


def _nested(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `jvp` whose result has the tangents that transforms around this one carry.

    torch turns forward mode off while the rule of an autograd.Function runs: the second `jvp` of a product of two
    tensors would be 0. Where it is on, what was saved must come without the tangents of this transform.
    """

    @wraps(jvp)
    def called(ctx: Any, *tangents: Any) -> Any:
        with forward_mode() if _is_nested() else nullcontext():
            return jvp(ctx, *tangents)

    return called


def _is_nested() -> bool:
    """Return whether tangents of tangents are carried."""
    return transform_kinds().count("Jvp") > 1


class _Sum(torch.autograd.Function):
    """An indirect statement over plain tensors."""

    @staticmethod
    def forward(evaluate: Any, expr: str, names: str, size: Size, fact: Fact | None, *tensors: Tensor) -> Tensor:
        return owned(run_plain(expr, names, size, list(tensors), fact))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output, ())

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _gradients(ctx, _with_winners(ctx, _saved(ctx)), grad_output)

    @staticmethod
    @_nested
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent(ctx, _with_winners(ctx, _saved_primals(ctx)), *tangents)

    @staticmethod
    def vmap(
        info: Any, dims: Any, evaluate: Any, expr: str, names: str, size: Size, fact: Fact | None, *tensors: Tensor
    ) -> Any:
        expr, names, size, batched_tensors, fact = batch_call(
            info.batch_size, dims[PARAMETERS:], expr, names, size, tensors, fact
        )
        return evaluate(expr, dict(zip(names.split(","), batched_tensors)), size, fact), 0


class _Extremum(torch.autograd.Function):
    """A `max` or `min` over plain tensors, with its winners' positions as a second output."""

    @staticmethod
    def forward(
        evaluate: Any, expr: str, names: str, size: Size, fact: Fact | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        result, won = run_plain_with_winners(expr, names, size, list(tensors), fact)
        return owned(result), owned(won)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        result, won = output
        ctx.mark_non_differentiable(won)
        _save(ctx, inputs, result, (won,))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad_output: Tensor, _: Any) -> Any:
        return _gradients(ctx, _with_winners(ctx, _saved(ctx)), grad_output)

    @staticmethod
    @_nested
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent(ctx, _with_winners(ctx, _saved_primals(ctx)), *tangents), None

    @staticmethod
    def vmap(
        info: Any, dims: Any, evaluate: Any, expr: str, names: str, size: Size, fact: Fact | None, *tensors: Tensor
    ) -> Any:
        expr, names, size, batched_tensors, fact = batch_call(
            info.batch_size, dims[PARAMETERS:], expr, names, size, tensors, fact
        )
        return _Extremum.apply(evaluate, expr, names, size, fact, *batched_tensors), (0, 0)


def _save(ctx: Any, inputs: Any, output: Tensor, won: tuple[Tensor, ...]) -> None:
    """Save what gradients and tangents need; `won` holds the winners' positions of a `max` or `min`, or nothing."""
    ctx.evaluate, ctx.expr, names, *_ = inputs[:PARAMETERS]
    ctx.names, ctx.wins = names.split(","), len(won)
    ctx.size, ctx.dtype, ctx.device = tuple(output.shape), output.dtype, output.device
    ctx.save_for_backward(*won, *inputs[PARAMETERS:])
    ctx.save_for_forward(*won, *inputs[PARAMETERS:])


def _saved(ctx: Any) -> list[Tensor]:
    """Return what the forward pass saved, without what transforms that have ended wrapped it in.

    What `vjp` returns is called after it: nothing has memory inside a wrapper whose transform is over.
    """
    tensors = list(ctx.saved_tensors)
    if is_compiling():  # a tracer's tensors are its own
        return tensors
    for at, tensor in enumerate(tensors):
        while (inside := functorch.unwrap_if_dead(tensor)) is not tensor:
            tensor = inside
        tensors[at] = tensor
    return tensors


def _saved_primals(ctx: Any) -> list[Tensor]:
    """Return what the forward pass saved, for a `jvp`, without the tangents that it is given."""
    tensors = _saved(ctx)
    if not _is_nested():
        return tensors
    return [primal_of(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]


def _with_winners(ctx: Any, saved: list[Tensor]) -> dict[str, Tensor]:
    """Return the operands that were saved, and for a `max` or `min` the index tensors of its winners."""
    tensors = dict(zip(ctx.names, saved[ctx.wins :]))
    return {**tensors, **winner_places(ctx.expr, saved[0], tensors)} if ctx.wins else tensors


def _gradients(ctx: Any, operands: dict[str, Tensor], grad_output: Tensor) -> Any:
    """Return the gradients for `backward`: None for each parameter, and for each tensor that needs none."""
    needs_grads = ctx.needs_input_grad[PARAMETERS:]
    grads = [
        gradient_of(ctx.evaluate, ctx.expr, name, operands, grad_output) if needs_grads[at] else None
        for at, name in enumerate(ctx.names)
    ]
    return *(None,) * PARAMETERS, *grads


@unbatch_tangents
def _tangent(ctx: Any, operands: dict[str, Tensor], *tangents: Tensor | None) -> Tensor:
    """Return the output's tangent for `jvp`, given those of all arguments."""
    total = None
    for name, tangent in zip(ctx.names, tangents[PARAMETERS:]):
        if tangent is not None and operands[name].is_floating_point():
            total = _added(total, tangent_of(ctx.evaluate, ctx.expr, name, operands, tangent, ctx.size))
    return _of_output(ctx, total)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Return the sum of two tensors, of which None stands for zero."""
    if total is None or part is None:
        return part if total is None else total
    return total + part


def _of_output(ctx: Any, tangent: Tensor | None) -> Tensor:
    """Return a tangent in the output's dtype, zeros for None."""
    if tangent is None:
        return torch.zeros(ctx.size, dtype=ctx.dtype, device=ctx.device)
    return tangent.to(ctx.dtype)


class _Sparse(torch.autograd.Function):
    """A format-agnostic statement; differentiated and batched before the format is rewritten away."""

    @staticmethod
    def forward(
        evaluate: Any, expr: str, name: str, form_of: FormOf, size: Size, names: tuple[str, ...], *tensors: Tensor
    ) -> Tensor:
        operands = {name: form_of(tensors[0]), **dict(zip(names, tensors[1:]))}
        return owned(evaluate(expr, operands, size))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.evaluate, ctx.expr, ctx.name, ctx.form_of, _, ctx.names = inputs[:SPARSE_PARAMETERS]
        ctx.size, ctx.dtype, ctx.device = tuple(output.shape), output.dtype, output.device
        ctx.save_for_backward(*inputs[SPARSE_PARAMETERS:])
        ctx.save_for_forward(*inputs[SPARSE_PARAMETERS:])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        values, *dense_tensors = _saved(ctx)
        form, dense = ctx.form_of(values), dict(zip(ctx.names, dense_tensors))
        statement, needs_grads = (ctx.evaluate, ctx.expr, ctx.name), ctx.needs_input_grad[SPARSE_PARAMETERS:]
        return *(None,) * SPARSE_PARAMETERS, *gradients_of(*statement, form, dense, grad_output, needs_grads)

    @staticmethod
    @_nested
    @unbatch_tangents
    def jvp(ctx: Any, *tangents: Any) -> Any:
        values, *dense_tensors = _saved_primals(ctx)
        form = ctx.form_of(values)
        operands = {ctx.name: form, **dict(zip(ctx.names, dense_tensors))}
        total = None
        for name, tangent in zip(operands, tangents[SPARSE_PARAMETERS:]):
            if tangent is not None and operands[name].dtype.is_floating_point:
                changed = ctx.form_of(tangent) if name == ctx.name else tangent
                total = _added(total, tangent_of(ctx.evaluate, ctx.expr, name, operands, changed, ctx.size))
        return _of_output(ctx, total)

    @staticmethod
    def vmap(
        info: Any, dims: Any, evaluate: Any, expr: str, name: str, form_of: FormOf, size: Size,
        names: tuple[str, ...], values: Tensor, *dense: Tensor,
    ) -> Any:  # fmt: skip
        batch = batch_call(info.batch_size, dims[SPARSE_PARAMETERS + 1 :], expr, ",".join(names), size, dense, None)
        operands = {name: form_of(values), **dict(zip(names, batch[3]))}
        return evaluate(batch[0], operands, batch[2]), 0
