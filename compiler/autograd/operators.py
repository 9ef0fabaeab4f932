"""Two opaque torch operators, `insum_ops::run` and `insum_ops::run_with_winners`: tracers see a single node.

All planning happens inside them. The second is for a `max` or `min` whose gradient is wanted. Here, and nowhere
else, facts are text and tensors.

A program that is exported holds neither: on a CPU torch's own operations, on a GPU `insum_ops::kernel`, which is a
Triton operator: AOTInductor sees the emitted kernel in it, and compiles that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from ...formats.facts import Fact
from ...formats.torch_state import (
    PLAIN,
    is_exporting,
    is_forward_mode,
    is_grad_enabled,
    is_watched,
    may_change_operands,
    modes,
    transforms,
    uncompiled,
)
from ..binding import bind
from ..language import UnsupportedError, batched, parse
from ..reference import lowered
from ..routes import JointCall, has_kernels, plan_for, run_exported, run_jointly, sum_jointly
from ..runtime import PLAIN_CALLS, on_device, owned, planned, replayed, resolved
from .breaks_graph import breaks_graph

__all__ = [
    "batch_call",
    "below_autograd",
    "call",
    "call_with_winners",
    "differentiate",
    "implement",
    "library",
    "refuse_transforms",
    "replay_first",
    "run_plain",
    "run_plain_with_winners",
    "run_several",
    "run_summed",
    "traced",
]

_ARGUMENTS = "(str expr, str names, SymInt[]? size, Tensor[] tensors, str fact, Tensor[] facts)"

library = torch.library.Library("insum_ops", "DEF")
library.define(f"run{_ARGUMENTS} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"run_with_winners{_ARGUMENTS} -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    "kernel(str expr, str names, SymInt[] size, Tensor[] tensors, str plan) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


Run = Callable[..., Any]  # (expr, names, size, tensors, fact, wants_winners), which the pipeline gives
_run: Run
_run_value: Callable[..., Tensor]  # what the operator does below autograd


def _plan_key(expr: str, names: str, size: Sequence[int] | None, fact: str) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return (key, numbers) of the launch plan of a call, which ordinary calls share if there is no fact."""
    operands, facts = names.split(",") if names else (), (fact,) if fact else ()
    return (expr, size is None, *operands, *facts), () if size is None else tuple(size)


def _replayed(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> Tensor | None:
    if facts:
        return None
    key, lengths = _plan_key(expr, names, size, fact)
    value: Tensor | None = replayed(PLAIN_CALLS, key, tensors, lengths)
    return None if value is None else owned(value)


def replay_first(operator: Any, replay: Callable[..., Any]) -> None:
    """Let `replay` answer calls of an operator from Python, as compiled graphs make them, in which nothing is recorded.

    It takes the operator's arguments, and returns None where no launch plan serves them. Torch's dispatcher, which it
    spares, takes as long as a plan: it turns each text, number and list into its own kind and back. Of a torch in which
    `operator(...)` calls something else than `operator._op`, which is private, operators stay as they are.
    """
    dispatch = getattr(operator, "_op", None)
    if dispatch is None:
        return

    def call(*arguments: Any, **named: Any) -> Any:
        if not (named or is_grad_enabled() or modes()):
            result = replay(*arguments)
            if result is not None:
                return result
        return dispatch(*arguments, **named)

    # at such a one a graph may break, and torch.compile would read what is called there
    operator._op = uncompiled(call) if torch.Tag.dynamic_output_shape in operator.tags else call


def implement(run: Run) -> Run:
    """Make `run` the implementation of both operators, and return it; a decorator."""

    def value(expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: list[Tensor]) -> Any:
        typed_fact = Fact.from_text(fact, facts)
        if facts:  # a plan is for any tensors of one layout, and these are known to hold certain numbers
            return run(expr, names, size, tensors, typed_fact, False)
        key, lengths = _plan_key(expr, names, size, fact)
        anew = lambda *tensors: run(expr, names, size, list(tensors), typed_fact, False)
        return owned(planned(PLAIN_CALLS, key, anew, tensors, lengths, True))

    def value_and_winners(expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: Any) -> Any:
        return run(expr, names, size, tensors, Fact.from_text(fact, facts), True)

    global _run, _run_value
    _run, _run_value = run, value
    for key in ("CPU", "CUDA"):
        library.impl("run", value, key)
        library.impl("run_with_winners", value_and_winners, key)
    return run


def refuse_transforms(expr: str, tensors: Sequence[Tensor]) -> bool:
    """Return whether one of an operator's tensors wants a gradient, which it has outside of torch.func alone.

    Raises:
        UnsupportedError: one is differentiated by torch.func or has a tangent, which a tracer hid from us.
    """
    wants_grad = is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    if (wants_grad and transforms() is not None) or _has_tangent(tensors):
        raise UnsupportedError(
            f"{expr!r} is to be differentiated as an operator, which torch.func inside torch.compile does, and forward "
            "mode; compile what is inside the transform"
        )
    return wants_grad


def below_autograd(operator: Any, run: Callable[..., Any], tensors: Sequence[Tensor], *arguments: Any) -> Any:
    """Return the value of an operator whose `tensors` want no gradient.

    Where nobody watches it is called as `run`, its implementation, for which the dispatcher would look.
    """
    if not is_watched() and all([type(each) in PLAIN and each.device.type in ("cpu", "cuda") for each in tensors]):
        return run(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def differentiate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make `function` what is called in the place of `run` where a gradient is wanted, and return it; a decorator.

    It takes the arguments of `run_plain`.
    """

    def value(expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: list[Tensor]) -> Any:
        if refuse_transforms(expr, tensors):
            return function(expr, names, size, tensors, Fact.from_text(fact, facts))
        return below_autograd(call, _run_value, tensors, expr, names, size, tensors, fact, facts)

    def kernel(expr: str, names: str, size: Sequence[int], tensors: list[Tensor], plan: str) -> Any:
        if refuse_transforms(expr, tensors):
            return function(expr, names, size, tensors, None)
        with torch._C._AutoDispatchBelowAutograd():
            return call_kernel(expr, names, size, tensors, plan)

    library.impl("run", value, "Autograd")
    library.impl("kernel", kernel, "Autograd")
    return function


def _below_autograd(expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: list[Tensor]) -> Any:
    """The winners of a `max`, which are asked for inside of its autograd function alone."""
    refuse_transforms(expr, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return call_with_winners(expr, names, size, tensors, fact, facts)


def _has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Return True if one of the tensors has a tangent, as in forward mode."""
    if not is_forward_mode():
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


@torch.library.register_fake("insum_ops::run", lib=library)
@breaks_graph
def _fake(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> Tensor:
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    return torch.empty(bound.size, dtype=bound.dtype, device=bound.device)


@torch.library.register_fake("insum_ops::kernel", lib=library)
def _fake_kernel(expr: str, names: str, size: Sequence[int], tensors: list[Tensor], plan: str) -> Tensor:
    value: Tensor = _fake(expr, names, size, tensors, "", [])
    return value


@torch.library.register_fake("insum_ops::run_with_winners", lib=library)
def _fake_with_winners(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: str, facts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    value = torch.empty(bound.size, dtype=bound.dtype, device=bound.device)
    return value, torch.empty(bound.size, dtype=bound.winner_dtype, device=bound.device)


def _batch(
    info: Any, dims: Sequence[Any], expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: Any
) -> tuple[Tensor, int]:
    """Evaluate one statement for the whole batch, under vmap."""
    *batch, batch_fact = batch_call(info.batch_size, dims[3], expr, names, size, tensors, Fact.from_text(fact, facts))
    return call(*batch, *_as_text(batch_fact)), 0


def _batch_with_winners(
    info: Any, dims: Sequence[Any], expr: str, names: str, size: Any, tensors: list[Tensor], fact: str, facts: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    *batch, batch_fact = batch_call(info.batch_size, dims[3], expr, names, size, tensors, Fact.from_text(fact, facts))
    return call_with_winners(*batch, *_as_text(batch_fact)), (0, 0)


torch.library.register_vmap("insum_ops::run", _batch, lib=library)
torch.library.register_vmap("insum_ops::run_with_winners", _batch_with_winners, lib=library)


def batch_call(
    count: int,
    dims: Sequence[int | None],
    expr: str,
    names: str,
    size: Sequence[int] | None,
    tensors: Sequence[Tensor],
    fact: Fact | None,
) -> tuple[str, str, Sequence[int] | None, list[Tensor], Fact | None]:
    """Return the call for `count` examples at once, which lie along dimension `dims` of each tensor.

    A dimension of None says that all examples share the tensor. A fact about a tensor that differs from example to
    example is dropped.
    """
    output, batch_tensors, batch_names = parse(expr).output.name, list[Tensor](), list[str]()
    for name, tensor, dim in zip(names.split(","), tensors, dims):
        if dim is not None:
            tensor = tensor.movedim(dim, 0)
        elif name == output:
            tensor = tensor.expand(count, *tensor.shape)
        if dim is not None or name == output:
            batch_names.append(name)
        batch_tensors.append(tensor)
    batch_size = None if size is None else (count, *size)
    batch_fact = None if fact is not None and set(fact.names) & set(batch_names) else fact
    return batched(expr, tuple(batch_names)), names, batch_size, batch_tensors, batch_fact


def _as_text(fact: Fact | None) -> tuple[str, list[Tensor]]:
    """Return a fact as the operators take it."""
    return ("", []) if fact is None else (fact.to_text(), list(fact.tensors))


call_kernel = torch.ops.insum_ops.kernel.default


def _launch(expr: str, names: str, size: Sequence[int], tensors: list[Tensor], plan: str) -> Tensor:
    """The operator on tensors with memory: the kernel, or the statement as any other where nothing is computed."""
    if 0 in size or any([0 in tensor.shape for tensor in tensors]):
        return _run(expr, names, size, tensors, None, False)  # type: ignore[no-any-return]
    with on_device(tensors[0].device), set_wrap_triton_enabled(False):
        return run_exported(expr, names, size, tensors, plan)


def _decompose(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What `torch.library.triton_op` does: show the kernel to compilers, but leave an exported program as it is."""
    tracing = getattr(torch.export, "_trace", None)  # not imported where nothing was exported
    if tracing is not None and tracing.custom_triton_ops_decomposition_disabled():
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    with mode:
        return run_exported(*args, **kwargs)


library.impl("kernel", _launch, "CUDA")
torch.library.register_torch_dispatch("insum_ops::kernel", FunctionalTensorMode, _decompose, lib=library)

call = torch.ops.insum_ops.run.default
replay_first(call, _replayed)
call_with_winners = torch.ops.insum_ops.run_with_winners.default
library.impl("run_with_winners", _below_autograd, "Autograd")


def run_plain(expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: Fact | None) -> Tensor:
    """Return the value of a statement over plain tensors; if a tracer or mode watches, the torch operator is called.

    torch.export records torch's own operations or an emitted kernel instead, so that a package needs nothing of ours.
    """
    if is_exporting():
        return _exported(expr, names, size, tensors)
    if _is_watched(tensors):
        return call(expr, names, size, tensors, *_as_text(fact))  # type: ignore[no-any-return]
    return _run(expr, names, size, [resolved(tensor) for tensor in tensors], fact, False)  # type: ignore[no-any-return]


def traced(anew: Callable[..., Tensor], expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Tensor:
    """Return the value of a statement whose caller torch.compile reads; `anew` follows formats, casts and transforms.

    The tracer makes guards of all functions and modules that it reads, and a compiled graph asks them at every call:
    over plain tensors it comes to the operator from here.
    """
    if not may_change_operands():
        for operand in operands.values():
            if not isinstance(operand, Tensor):
                break
        else:
            return call(expr, ",".join(operands), size, list(operands.values()), "", [])  # type: ignore[no-any-return]
    return anew(expr, operands, size)


def _exported(expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor]) -> Tensor:
    """Return the value of a statement by what an exported program may hold.

    Torch differentiates its own operations. That of a kernel is of sums alone; a `max` on a GPU whose gradient is
    wanted is torch's operations too.
    """
    statement, wants_grad = parse(expr), is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    bound = bind(statement, dict(zip(names.split(","), tensors)), size)
    if _exports_kernels(bound.device) and (statement.is_sum or not wants_grad):
        plan = plan_for(expr, names, bound.size, tensors)
        if plan is not None:
            return call_kernel(expr, names, bound.size, tensors, plan)  # type: ignore[no-any-return]
    return lowered(bound, names.split(","), tensors)  # type: ignore[no-any-return]


def _exports_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_kernels(device)


def run_plain_with_winners(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: Fact | None
) -> tuple[Tensor, Tensor]:
    """Return the value of a `max` or `min` and the positions of its winners."""
    if _is_watched(tensors):
        return call_with_winners(expr, names, size, tensors, *_as_text(fact))  # type: ignore[no-any-return]
    return _run(expr, names, size, [resolved(tensor) for tensor in tensors], fact, True)  # type: ignore[no-any-return]


def run_several(calls: Sequence[JointCall]) -> list[Tensor]:
    """Return the values of several statements over plain tensors; one kernel computes them where that is faster.

    Each is written to its place, if the call has one.
    """
    if any([_is_watched(call.tensors) for call in calls]):
        return [call.placed(run_plain(*call.statement)) for call in calls]
    return run_jointly(_resolved(calls), _run)


def run_summed(calls: Sequence[JointCall], in_turn: Callable[[], Tensor]) -> Tensor:
    """Return the sum of several statements' values, which have one output: its name, its indices and its size.

    One kernel adds them up where that is faster than `in_turn`, which returns the sum in whatever other way there is.
    The sum is written to the place that all of them have, if there is one.
    """
    if any([_is_watched(call.tensors) for call in calls]):
        return calls[0].placed(in_turn())
    return sum_jointly(_resolved(calls), in_turn)


def _resolved(calls: Sequence[JointCall]) -> list[JointCall]:
    return [call._replace(tensors=[resolved(tensor) for tensor in call.tensors]) for call in calls]


def _is_watched(tensors: Sequence[Tensor]) -> bool:
    return is_watched() or any([type(tensor) not in PLAIN for tensor in tensors])
