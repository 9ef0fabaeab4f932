"""Two opaque torch operators, for a statement with a format in it and for its gradients: tracers call them with parts.

Whatever depends on the coordinates (their check, other groupings, facts, launch plans) happens inside of them when
they run, as in an ordinary call. A tracer needs none of it, so that its first call is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...formats.parts import (
    GROUPS,
    STACKED,
    FormatParts,
    from_parts,
    in_own_groups,
    memory_of,
    parts_of,
    regrouped,
    regrouped_before,
    traced_from_parts,
)
from ...formats.torch_state import (
    PLAIN,
    UNSAFE_IN_GRAPHS,
    is_captured,
    is_dynamo,
    is_exporting,
    is_traced,
    is_transformed,
    transform_kinds,
)
from ..binding import Meta, SparseFormat, bind, recipe_for
from ..language import parse
from ..runtime import owned, planned, replayed
from .breaks_graph import breaks_graph
from .flop_formula import flops
from .functorch_rules import transformed_sparse
from .gradients import gradient_of, gradients_of, is_read, is_sum, values_gradient
from .operators import below_autograd, library, refuse_transforms, replay_first, run_plain
from .operators import call as call_plain
from .operators import implement as implement_plain
from .planned_backward import format_key, gradients_key
from .run_gradients import implement_gradients, owned_gradients

__all__ = ["followed_sparse", "implement"]

_ARGUMENTS = (
    "str expr, str names, SymInt[]? size, Tensor[] tensors, "
    "str name, str form, SymInt[] shape, Tensor values, Tensor[] coords"
)
# Torch keeps compiled graphs on disk, by the operators that a model calls: whoever changes what one of these is
# differentiated into gives it another name, or graphs of an older version would be found.
_TAGS = (torch.Tag.pt2_compliant_tag, *UNSAFE_IN_GRAPHS)
library.define(f"format_value({_ARGUMENTS}) -> Tensor", tags=_TAGS)
# of the values and the tensors, those that are wanted: one operator, which may compute them together
library.define(f"format_gradients({_ARGUMENTS}, Tensor grad_output, bool[] wanted) -> Tensor[]", tags=_TAGS)
_value = torch.ops.insum_ops.format_value.default
_gradients = torch.ops.insum_ops.format_gradients.default

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
    def keys(self) -> list[str]:
        return self.names.split(",") if self.names else []

    @property
    def dense(self) -> dict[str, Tensor]:
        return dict(zip(self.keys, self.tensors))

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
    form: Any,  # or its parts
    size: Sequence[int] | None,
    dense: Mapping[str, Any],
    group_dim: int,
) -> Tensor | None:
    """Return the value of a statement with one format in it, inside a transform or as an operator under a tracer.

    None where neither follows the call, or where the format has to be rewritten away. It is here where torch.compile
    reads a transform, inside of which the operator has no gradient, and nothing can be worked out of coordinates.
    """
    is_both = is_dynamo() and bool(transform_kinds())
    if is_both or isinstance(form, FormatParts) or is_traced([form.values, *dense.values()]):
        parts = parts_of(form)
        if parts is not None and is_both:
            run = lambda text, names, size, tensors: evaluate(text, dict(zip(names.split(","), tensors)), size)
            return _rewritten(expr, size, name, traced_from_parts(parts), dense, run)
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
    implement_gradients(evaluate)
    return implement_plain


def _plans_over(form: str, shape: Sequence[int], values: Tensor, coords: list[Tensor]) -> dict[Any, Any] | None:
    """Return the launch plans over a pattern, without making its format; None if there are none yet."""
    return memory_of(form, tuple(shape), values.dtype, coords) if type(values) in PLAIN else None


def _replayed_value(
    expr: str,
    names: str,
    size: Sequence[int] | None,
    tensors: list[Tensor],
    name: str,
    form: str,
    shape: Sequence[int],
    values: Tensor,
    coords: list[Tensor],
) -> Tensor | None:
    """Return the value by its launch plan: all that a warm call of a compiled graph does. None if there is none yet."""
    if GROUPS in form and type(values) in PLAIN:
        own = regrouped_before(form, shape, values, coords)
        plans, values = (None, values) if own is None else (own.memory, own.values)
    else:
        plans = _plans_over(form, shape, values, coords)
    if plans is None:
        return None
    key = _value_key(expr, names, size, name, form)
    value: Tensor | None = replayed(plans, key, (values, *tensors), () if size is None else tuple(size))
    return None if value is None else owned(value)


def _value_key(expr: str, names: str, size: Sequence[int] | None, name: str, form: str) -> tuple[Any, ...]:
    """Return the key of the plan of a value, which ordinary calls share unless the plan gathers the values."""
    operands = names.split(",") if names else ()
    return expr, size is None, form if form.endswith(STACKED) else 0, name, *operands


def _replayed_gradients(*arguments: Any) -> list[Tensor] | None:
    """Return the gradients by the plan that ordinary calls share, unless the plan gathers the values."""
    expr, names, _, tensors, name, form, shape, values, coords, grad_output, wanted = arguments
    plans = _plans_over(form, shape, values, coords)
    if plans is None:
        return None
    key = _gradients_key(expr, names, name, form, wanted)
    grads = replayed(plans, key, (grad_output, values, *tensors))
    return None if grads is None else owned_gradients(grads)


def _gradients_key(expr: str, names: str, name: str, form: str, wanted: Sequence[bool]) -> tuple[Any, ...]:
    key = gradients_key(format_key(expr, name, names.split(",") if names else ()), (False, *wanted))
    return (*key, form) if form.endswith(STACKED) else key


def _is_unread(call: _Call) -> bool:
    """Return whether nothing is known of a format's coordinates, and nothing can be read while a graph is captured.

    `mode="reduce-overhead"` copies all that a function is given into a graph's own memory, before each replay: such
    coordinates may change, so that the statement takes them as they are, and leaves out what lies outside.
    """
    return is_captured(call.values.device) and _plans_over(call.form, call.shape, call.values, call.coords) is None


def _run(*arguments: Any) -> Tensor:
    """Compute the value of a call without a plan, of which one may be made."""
    call = _Call(*arguments)
    with torch.no_grad():
        if _is_unread(call):
            form = traced_from_parts(call.parts)
            return owned(_rewritten(call.expr, call.size, call.name, form, call.dense, _run_unfactual))
        form, kind = from_parts(call.parts)
        if GROUPS in call.form and not is_captured(call.values.device):  # other groups may have to be laid out
            own = regrouped(call.parts, form)
            return owned(_evaluate(call.expr, call.over(own), call.size))

        def value(values: Tensor, *tensors: Tensor) -> Tensor:
            own = kind.fill(call.parts, form, values)
            return _evaluate(call.expr, {call.name: own, **dict(zip(call.keys, tensors))}, call.size)

        tensors = call.values, *call.tensors
        if not call.form.endswith(STACKED):  # the plan of `_evaluate` itself will do
            return owned(value(*tensors))
        key = _value_key(call.expr, call.names, call.size, call.name, call.form)
        numbers = () if call.size is None else tuple(call.size)
        return owned(planned(form.memory, key, value, tensors, numbers, owned=form))


def _run_gradients(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of a call without a plan, of which one may be made."""
    *parts, grad_output, wanted = arguments
    call = _Call(*parts)
    with torch.no_grad():
        if _is_unread(call):
            return owned_gradients(_separate_gradients(call, grad_output, wanted))
        form, kind = from_parts(call.parts)

        def gradients(grad_output: Tensor, values: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            own, dense = kind.fill(call.parts, form, values), dict(zip(call.keys, tensors))
            d_slots, *grads = gradients_of(_evaluate, call.expr, call.name, own, dense, grad_output, tuple(wanted))
            return None, None if d_slots is None else kind.listed(call.parts, form, d_slots), *grads

        tensors = grad_output, call.values, *call.tensors
        key = _gradients_key(call.expr, call.names, call.name, call.form, wanted)
        return owned_gradients(planned(form.memory, key, gradients, tensors, owned=form))


for _key in ("CPU", "CUDA"):
    library.impl("format_value", _run, _key)
    library.impl("format_gradients", _run_gradients, _key)


@torch.library.register_fake("insum_ops::format_value", lib=library)
@breaks_graph
def _fake(*arguments: Any) -> Tensor:
    call = _Call(*arguments)
    whole = Meta(tuple(call.shape), call.values.dtype, call.values.device)
    bound = bind(parse(call.expr), {call.name: whole, **call.dense}, call.size)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device)


@torch.library.register_fake("insum_ops::format_gradients", lib=library)
def _fake_gradients(*arguments: Any) -> list[Tensor]:
    *parts, _, wanted = arguments
    call = _Call(*parts)
    inputs = [tensor for tensor, is_wanted in zip([call.values, *call.tensors], wanted) if is_wanted]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs]


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
        # gradients are not grouped as values are
        text = in_own_groups(ctx.call.form)
        call = ctx.call._replace(form=text, values=values, coords=rest[:count], tensors=rest[count:])
        wants_values, *wanted = ctx.needs_input_grad[1:]
        output = parse(call.expr).output.name  # of which a gradient reads nothing, unless it is a factor too
        read = {key: tensor for key, tensor in call.dense.items() if key != output or is_read(call.expr, key)}
        joint = [wants_values, *[is_wanted for key, is_wanted in zip(call.keys, wanted) if key in read]]
        grads = dict[str, Tensor | None]()
        if wants_values or sum(joint) > 1:  # a gradient by itself reads less than all of the tensors
            jointly = call._replace(names=",".join(read), tensors=list(read.values()), size=None)
            computed = _gradients(*jointly, grad_output, joint)
            names = [key for key, is_computed in zip([call.name, *read], joint) if is_computed]
            grads.update(zip(names, computed))
        operands = call.over(call.parts)
        for key, is_wanted in zip(call.keys, wanted):
            if is_wanted and key not in grads:
                grads[key] = gradient_of(_evaluate_parts, call.expr, key, operands, grad_output)
        return None, *[grads.get(key) for key in (call.name, *call.keys)]


def _differentiable(*arguments: Any) -> Tensor:
    """The value for autograd: a sum has gradients that are statements, anything else has its format rewritten away."""
    call = _Call(*arguments)
    inputs = [call.values, *call.tensors]
    if not refuse_transforms(call.expr, inputs):
        return below_autograd(_value, _run, inputs, *arguments)  # type: ignore[no-any-return]
    if is_sum(call.expr):
        return _Format.apply(call, *inputs)  # type: ignore[no-any-return]
    form = traced_from_parts(call.parts)
    return _rewritten(call.expr, call.size, call.name, form, call.dense, lambda *plain: call_plain(*plain, "", []))


def _differentiable_gradients(*arguments: Any) -> list[Tensor]:
    """The gradients for autograd: where theirs are wanted in turn, each is a statement of its own."""
    *parts, grad_output, wanted = arguments
    call = _Call(*parts)
    inputs = [call.values, *call.tensors, grad_output]
    if not refuse_transforms(call.expr, inputs):
        return below_autograd(_gradients, _run_gradients, inputs, *arguments)  # type: ignore[no-any-return]
    return _separate_gradients(call, grad_output, wanted)


def _separate_gradients(call: _Call, grad_output: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients, each as a statement of its own, which reads no coordinates before it runs."""
    grads = list[Tensor]()
    if wanted[0]:
        form = traced_from_parts(call.parts)
        grads.append(values_gradient(_evaluate, call.expr, call.name, form, call.dense, grad_output, may_read=False))
    for key, is_wanted in zip(call.dense, wanted[1:]):
        if is_wanted:
            grads.append(gradient_of(_evaluate_parts, call.expr, key, call.over(call.parts), grad_output))
    return grads


def _flops(*arguments: Any, **_: Any) -> int:
    """Return the multiplications and additions of a statement over a format's entries, or of each of its gradients."""
    call, others = _Call(*arguments[: len(_Call._fields)]), arguments[len(_Call._fields) :]
    form = traced_from_parts(call.parts)
    recipe = recipe_for(call.expr, call.size, call.name, form, call.dense)
    tensors = recipe.tensors(form, call.dense)
    count = sum(others[1]) if others else 1
    return count * flops(recipe.text, ",".join(tensors), recipe.size, list(tensors.values()))


register_flop_formula([_value.overloadpacket, _gradients.overloadpacket], get_raw=True)(_flops)
library.impl("format_value", _differentiable, "Autograd")
library.impl("format_gradients", _differentiable_gradients, "Autograd")
replay_first(_value, _replayed_value)
replay_first(_gradients, _replayed_gradients)
