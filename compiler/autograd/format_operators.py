"""Two opaque torch operators for a statement with a format in it, which tracers call with the format's parts.

Whatever depends on the coordinates (their check, other groupings, facts, launch plans) happens inside of them when
they run, as in an ordinary call. A tracer needs none of it, so that its first call is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...formats.parts import FormatParts, from_parts, parts_of, traced_from_parts
from ...formats.torch_state import is_exporting, is_traced, is_transformed
from ..binding import Meta, SparseFormat, bind, recipe_for
from ..language import parse
from ..runtime import owned, planned
from .flop_formula import flops
from .functorch_rules import transformed_sparse
from .gradients import gradient_of, is_sum, values_gradient
from .operators import call as call_plain
from .operators import implement as implement_plain
from .operators import library, refuse_transforms, run_plain, runs_at_once

__all__ = ["followed_sparse", "implement"]

_ARGUMENTS = (
    "str expr, str names, SymInt[]? size, Tensor[] tensors, "
    "str name, str form, SymInt[] shape, Tensor values, Tensor[] coords"
)
library.define(f"run_format({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"format_gradient({_ARGUMENTS}, Tensor grad_output) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_value = torch.ops.insum_ops.run_format.default
_gradient = torch.ops.insum_ops.format_gradient.default

Evaluate = Callable[..., Tensor]
_evaluate: Evaluate


class _Call(NamedTuple):
    """The arguments of both operators."""

    expr: str
    names: str
    size: Sequence[int] | None
    tensors: list[Tensor]
    name: str
    form: str
    shape: Sequence[int]
    values: Tensor
    coords: list[Tensor]

    @property
    def dense(self) -> dict[str, Tensor]:
        return dict(zip(self.names.split(","), self.tensors))

    @property
    def parts(self) -> FormatParts:
        return FormatParts(self.form, tuple(self.shape), self.values, self.coords)

    def over(self, form: Any) -> dict[str, Any]:
        """Return the operands, with a format in its place."""
        return {self.name: form, **self.dense}


def followed_sparse(
    evaluate: Evaluate,
    expr: str,
    name: str,
    form: SparseFormat,
    size: Sequence[int] | None,
    dense: Mapping[str, Any],
    group_dim: int,
) -> Tensor | None:
    """Return the value of a statement with one format in it, inside a transform or as an operator under a tracer.

    None where neither follows the call, or where the format has to be rewritten away.
    """
    if is_traced([form.values, *dense.values()]):
        parts = parts_of(form)
        if parts is not None and is_exporting():
            return _rewritten(expr, size, name, traced_from_parts(parts), dense, _run_unfactual)
        return None if parts is None else _apply(expr, size, name, parts, dense)
    return transformed_sparse(evaluate, expr, name, form, size, dense, group_dim) if is_transformed() else None


def _run_unfactual(expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor]) -> Tensor:
    return run_plain(expr, names, size, tensors, None)


def _rewritten(
    expr: str,
    size: Sequence[int] | None,
    name: str,
    form: SparseFormat,
    dense: Mapping[str, Tensor],
    run: Callable[..., Tensor],
) -> Tensor:
    """Return the value of the statement with its format rewritten away, which `run` evaluates."""
    recipe = recipe_for(expr, size, name, form, dense)
    tensors = recipe.tensors(form, dense)
    return recipe.finish(run(recipe.text, ",".join(tensors), recipe.size, list(tensors.values())))


def _apply(expr: str, size: Sequence[int] | None, name: str, parts: FormatParts, dense: Mapping[str, Tensor]) -> Tensor:
    tensors, shape = list(dense.values()), list(parts.shape)
    return _value(expr, ",".join(dense), size, tensors, name, parts.text, shape, parts.values, parts.coords)  # type: ignore[no-any-return]


def implement(evaluate: Evaluate) -> Callable[..., Any]:
    """Make `evaluate` what these operators call when they run, and return the decorator for that of the plain ones."""
    global _evaluate
    _evaluate = evaluate
    return implement_plain


def _run(*arguments: Any) -> Tensor:
    call = _Call(*arguments)
    with torch.no_grad():
        form, _ = from_parts(call.parts)
        return owned(_evaluate(call.expr, call.over(form), call.size))


def _run_gradient(*arguments: Any) -> Tensor:
    *parts, grad_output = arguments
    call = _Call(*parts)
    with torch.no_grad():
        form, listed = from_parts(call.parts)

        def gradient(values: Tensor, grad_output: Tensor, *tensors: Tensor) -> Tensor:
            own = form if form.values is values else form.with_values(values)
            dense = dict(zip(call.names.split(","), tensors))
            return values_gradient(_evaluate, call.expr, call.name, own, dense, grad_output)

        marks = "gradient of values", call.expr, call.names, call.name
        tensors = form.values, grad_output, *call.tensors
        return owned(listed(call.parts, form, planned(form.memory, marks, gradient, tensors, owned=form.coords)))


for _key in ("CPU", "CUDA"):
    library.impl("run_format", _run, _key)
    library.impl("format_gradient", _run_gradient, _key)


@torch.library.register_fake("insum_ops::run_format", lib=library)
def _fake(*arguments: Any) -> Tensor:
    call = _Call(*arguments)
    whole = Meta(tuple(call.shape), call.values.dtype, call.values.device)
    bound = bind(parse(call.expr), {call.name: whole, **call.dense}, call.size)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device)


@torch.library.register_fake("insum_ops::format_gradient", lib=library)
def _fake_gradient(*arguments: Any) -> Tensor:
    return torch.empty_like(_Call(*arguments[:-1]).values, memory_format=torch.contiguous_format)


def _evaluate_parts(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Tensor:
    """Return the value of a gradient's statement, in which a format in its parts may stand."""
    for name, operand in operands.items():
        if isinstance(operand, FormatParts):
            dense = {key: tensor for key, tensor in operands.items() if key != name}
            return _apply(expr, size, name, operand, dense)
    return call_plain(expr, ",".join(operands), size, list(operands.values()), "", [])  # type: ignore[no-any-return]


class _Format(torch.autograd.Function):
    """A sum with a format in it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, values: Tensor, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(values, *call.coords, *tensors)
        return _value(*call)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        values, *rest = ctx.saved_tensors
        count = len(ctx.call.coords)
        call = ctx.call._replace(values=values, coords=rest[:count], tensors=rest[count:])
        wants_values, *wanted = ctx.needs_input_grad[1:]
        d_values = _gradient(*call, grad_output) if wants_values else None
        operands = call.over(call.parts)
        grads = [
            gradient_of(_evaluate_parts, call.expr, key, operands, grad_output) if is_wanted else None
            for key, is_wanted in zip(call.names.split(","), wanted)
        ]
        return None, d_values, *grads


def _differentiable(*arguments: Any) -> Tensor:
    """The value for autograd: a sum has gradients that are statements, anything else has its format rewritten away."""
    call = _Call(*arguments)
    inputs = [call.values, *call.tensors]
    if not refuse_transforms(call.expr, inputs):
        if runs_at_once(inputs):
            return _run(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return _value(*call)  # type: ignore[no-any-return]
    if is_sum(call.expr):
        return _Format.apply(call, *inputs)  # type: ignore[no-any-return]
    form = traced_from_parts(call.parts)
    return _rewritten(call.expr, call.size, call.name, form, call.dense, lambda *plain: call_plain(*plain, "", []))


def _differentiable_gradient(*arguments: Any) -> Tensor:
    *parts, grad_output = arguments
    call = _Call(*parts)
    inputs = [call.values, *call.tensors, grad_output]
    if not refuse_transforms(call.expr, inputs):
        if runs_at_once(inputs):
            return _run_gradient(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return _gradient(*arguments)  # type: ignore[no-any-return]
    return values_gradient(_evaluate, call.expr, call.name, traced_from_parts(call.parts), call.dense, grad_output)


def _flops(*arguments: Any, **_: Any) -> int:
    """Return what `flops` does of the statement with its format rewritten away; a gradient has as many."""
    call = _Call(*arguments[: len(_Call._fields)])
    form = traced_from_parts(call.parts)
    recipe = recipe_for(call.expr, call.size, call.name, form, call.dense)
    tensors = recipe.tensors(form, call.dense)
    return flops(recipe.text, ",".join(tensors), recipe.size, list(tensors.values()))


register_flop_formula([_value.overloadpacket, _gradient.overloadpacket], get_raw=True)(_flops)
library.impl("run_format", _differentiable, "Autograd")
library.impl("format_gradient", _differentiable_gradient, "Autograd")
