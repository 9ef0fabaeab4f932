"""A whole tensor product as one node of autograd: its terms run without a graph, forward and backward.

Between the statements of a plan stand splits, views and gathers; recorded one by one they take the host longer than
the products take a GPU. Here they are made once for each layout of the tensors. Where gradients are to be
differentiated in turn, backward asks the plan for its composition of statements, which has gradients of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..compiler.carried import owned
from ..compiler.one_by_one import one_by_one
from ..compiler.ready import find_kept, is_free, may_autocast, outside_transforms, remember_call
from .format_steps import shared_step, single_step
from .shared import SharedTerm
from .singles import SingleTerm
from .slots import Slots
from .steps import Step, column_step, path_step, table_step
from .tables import ColumnTerm, TableTerm
from .terms import PathTerm
from .whole import Whole, Work, writes_parts

__all__ = ["evaluate_whole", "find_whole"]


class Composition(Protocol):
    """A plan whose result records a graph of its statements."""

    @property
    def slots(self) -> tuple[Slots, Slots | None, Slots]: ...

    @property
    def memory(self) -> dict[Any, Any]: ...

    def work(self, weight: Tensor | None) -> Work: ...

    def prepare(self, weight: Tensor | None, device: torch.device, dtype: torch.dtype) -> None: ...

    def composed(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
    ) -> Tensor: ...


def find_whole(
    plan: Composition,
    given: Sequence[Any],  # x, y, weight, src, dst
    num_rows: int,
) -> Whole | None:
    """The plan for tensors like these; None: somebody watches, or a term can't do without a graph of its own."""
    if not is_free():
        return None
    memory = plan.memory
    key, found = find_kept(memory, (num_rows,), given)
    if key is None or found is not None:
        return found or None
    x, _, weight, src, _ = given
    (first, second, out), work = plan.slots, plan.work(weight)
    steps = _steps(memory, work, x, weight, src is not None)
    if second is None or any(step is None for step in steps):
        remember_call(memory, key, False)
        return None
    plan.prepare(weight, x.device, x.dtype)
    with torch.no_grad():
        whole = Whole((first, second, out), work, steps, given, num_rows)  # type: ignore[arg-type]
    remember_call(memory, key, whole)
    return whole


def evaluate_whole(plan: Composition, whole: Whole, given: Sequence[Any]) -> Tensor:
    """The product of x, y and weights, with rows as `src` and `dst` say."""
    x, y, weight, _, _ = given
    learns = x.requires_grad or y.requires_grad or (weight is not None and weight.requires_grad)
    if learns and torch.is_grad_enabled():
        return _Product.apply(plan, whole, *given)  # type: ignore[no-any-return]
    return whole.forward(*given)[0]


class _Product(torch.autograd.Function):
    """x, y and weights to z, and all of their gradients at once."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Composition,
        whole: Whole,
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        src: Tensor | None,
        dst: Tensor | None,
    ) -> Tensor:
        z, kept = whole.forward(x, y, weight, src, dst)
        ctx.plan, ctx.whole = plan, whole
        ctx.save_for_backward(x, y, weight, src, dst, *kept)
        return owned(z)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        x, y, weight, src, dst, *kept = ctx.saved_tensors
        wanted, whole = ctx.needs_input_grad[2:5], ctx.whole
        if is_free() and not torch.is_grad_enabled() and whole.kept_as_made(kept):
            key, calls = find_kept(whole.backwards, wanted, (upstream,))
            if key is not None:
                if calls is None:
                    calls = {}
                    remember_call(whole.backwards, key, calls)
                return None, None, *whole.backward(calls, kept, (src, dst), upstream, wanted), None, None
        grads = _composed(ctx.plan, (x, y, weight), wanted, (src, dst, whole.num_rows), upstream)
        return None, None, *grads, None, None


def _composed(
    plan: Composition, given: Sequence[Any], wanted: Sequence[bool], rest: Sequence[Any], upstream: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated: those of the statements, recorded now and, as in forward, not cast."""
    keeps_graph = torch.is_grad_enabled()
    with torch.autocast(upstream.device.type, enabled=False) if may_autocast() else nullcontext():
        with outside_transforms(), temporarily_clear_interpreter_stack(), torch.enable_grad():
            if keeps_graph:  # of aliases, so that what one input owes to another is not counted twice
                own: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in given]
            else:
                learns = zip(given, wanted)
                own = [None if tensor is None else tensor.detach().requires_grad_(learn) for tensor, learn in learns]
            z = plan.composed(*own, *rest)
        asked = [tensor for tensor, is_wanted in zip(own, wanted) if is_wanted]
        found = iter(torch.autograd.grad(z, asked, upstream, create_graph=keeps_graph))
    return [next(found) if is_wanted else None for is_wanted in wanted]


def _steps(
    memory: dict[Any, Any], work: Work, x: Tensor, weight: Tensor | None, is_gathered: bool
) -> list[Step | None]:
    """The same for any number of rows."""
    is_merged, dims = writes_parts(weight), 0 if weight is None else weight.dim()
    key = ("steps", x.device, x.dtype, is_merged, dims, is_gathered)
    steps: list[Step | None] | None = memory.get(key)
    if steps is None:
        _, pieces = work.pieces[is_merged]
        steps = [_step(piece.term, number, x, weight, is_gathered) for number, piece in enumerate(pieces)]
        memory[key] = steps
    return steps


def _step(term: object, number: int, x: Tensor, weight: Tensor | None, is_gathered: bool) -> Step | None:
    """The term for tensors like these; None: it can do no better than `insum` call by call."""
    if isinstance(term, ColumnTerm):
        return column_step(term, number, x, is_gathered)
    if isinstance(term, TableTerm):
        if weight is not None and weight.dim() == 2 and term.runs_on(x.device):
            return table_step(term, number, x, is_gathered)
        term = term.plain
    if isinstance(term, SingleTerm):
        if weight is not None and weight.dim() == 2 and term.runs_on(x.device):
            return None if is_gathered else single_step(term, number, x)
        term = term.plain
    if isinstance(term, SharedTerm):
        return shared_step(term, number, x, is_gathered)
    if isinstance(term, PathTerm) and term.key[0] != "uvuv":
        return path_step(term, number, x, weight, is_gathered)
    return None
