"""A whole tensor product as one autograd function: its terms run without a graph, forward and backward.

Between the statements stand splits, views and gathers. As nodes of autograd they would take the host longer than the
products take a GPU. Here the forward pass is one launch plan and the backward pass another. Where gradients are to be
differentiated in turn, backward asks for the composition of statements, which has gradients of any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..compiler import (
    direct_apply,
    has_kernels,
    keep_learning,
    outside_transforms,
    owned,
    planned,
    planned_backward,
    replayed,
)
from ..formats.torch_state import is_free, is_grad_enabled, may_autocast, wants_gradient
from .in_place import InPlaceProduct, writes_parts
from .shared_weights import SharedTerm
from .single_channel import SingleTerm
from .slots import Slots
from .table_terms import ColumnTerm, TableTerm
from .term_statements import Step, column_step, path_step, shared_step, single_step, table_step
from .terms import PathTerm
from .weight_slices import Terms

__all__ = ["evaluate_product"]


class Composition(Protocol):
    """A decomposition whose result records a graph of its statements."""

    @property
    def slots(self) -> tuple[Slots, Slots | None, Slots]: ...

    @property
    def memory(self) -> dict[Any, Any]: ...

    def work(self, weight: Tensor | None) -> Terms: ...

    def prepare(self, weight: Tensor | None, device: torch.device, dtype: torch.dtype) -> None: ...

    def composed(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None, num_rows: int
    ) -> Tensor: ...


def evaluate_product(composition: Composition, inputs: Sequence[Any], num_rows: int) -> Tensor | None:
    """Return the product of x, y and weights, with rows as `src` and `dst` say, as one autograd function.

    `inputs` is (x, y, weight, src, dst), of which the last three may be None. The result is None if a term can't run
    without a graph of its own, or if torch traces or transforms the call.
    """
    if not is_free():
        return None
    tensors = [tensor for tensor in inputs if tensor is not None]
    cache, absent, rows = composition.memory, tuple([tensor is None for tensor in inputs]), (num_rows,)
    value = replayed(cache, ("product", absent), tensors, rows, (composition, num_rows, inputs))
    if value is not None:
        return value  # type: ignore[no-any-return]
    x, _, weight, src, _ = inputs
    if composition.slots[1] is None or None in _steps(composition, x, weight, src is not None):
        return None
    if not wants_gradient(tensors):
        run = lambda *_: _in_place_product(composition, inputs, num_rows).forward(*inputs)[0]
        return planned(cache, ("product", absent), run, tensors, rows, varies=True)

    def run_to_learn(*_: Tensor) -> tuple[Tensor | None, ...]:
        z, intermediates = _in_place_product(composition, inputs, num_rows).forward(*inputs)
        return z, *intermediates

    plan_key = "product to learn", absent
    with torch.no_grad():
        value = planned(cache, plan_key, run_to_learn, tensors, rows, varies=True)
    result = _Product.apply((composition, num_rows, value), *inputs)
    keep_learning(cache, ("product", absent), tensors, _learn, rows, plan_key)
    return result  # type: ignore[no-any-return]


def _in_place_product(composition: Composition, inputs: Sequence[Any], num_rows: int) -> InPlaceProduct:
    """Return the terms of a product, laid out for these inputs."""
    x, _, weight, src, _ = inputs
    (first, second, out), work = composition.slots, composition.work(weight)
    assert second is not None
    steps = _steps(composition, x, weight, src is not None)
    return InPlaceProduct((first, second, out), work, steps, inputs, num_rows)  # type: ignore[arg-type]


def _plans(ctx: Any, saved: tuple[Tensor | None, ...], _: Tensor) -> Any:
    present = [tensor for tensor in saved if tensor is not None]
    return ctx.composition.memory, ("product", ctx.absent), present, True, ()


def _gradients(ctx: Any, wanted: tuple[bool, ...], upstream: Tensor, *tensors: Tensor) -> Any:
    """Return the gradients of x, y and the weights between None for all else, those that are wanted."""
    following = iter(tensors)
    x, y, weight, src, dst, *intermediates = [None if is_absent else next(following) for is_absent in ctx.absent]
    inputs: list[Any] = [x, y, weight, src, dst]
    if not is_free() or is_grad_enabled():
        rest = *inputs[3:], ctx.num_rows
        return None, *_composed(ctx.composition, inputs[:3], wanted[1:4], rest, upstream), None, None
    product = _in_place_product(ctx.composition, inputs, ctx.num_rows)
    return None, *product.backward(intermediates, inputs[3:], upstream, wanted[1:4]), None, None


class _Product(torch.autograd.Function):
    """The product z of x, y and weights; backward computes all of their gradients at once."""

    @staticmethod
    def forward(
        ctx: Any,
        planned_product: tuple[Composition, int, tuple[Any, ...]],
        x: Tensor,
        y: Tensor,
        weight: Tensor | None,
        src: Tensor | None,
        dst: Tensor | None,
    ) -> Tensor:
        ctx.composition, ctx.num_rows, (z, *intermediates) = planned_product
        saved = x, y, weight, src, dst, *intermediates
        ctx.absent = tuple([tensor is None for tensor in saved])
        ctx.save_for_backward(*saved)
        return owned(z)

    backward = staticmethod(planned_backward(_plans, _gradients))


_apply = direct_apply(_Product)


def _learn(value: tuple[Any, ...], _: object, given: tuple[Composition, int, Sequence[Any]]) -> Any:
    """Return a planned product with its gradients recorded."""
    composition, num_rows, inputs = given
    return _apply((composition, num_rows, value), *inputs)


def _composed(
    composition: Composition, inputs: Sequence[Any], wanted: Sequence[bool], rest: Sequence[Any], upstream: Tensor
) -> list[Tensor | None]:
    """Return gradients that can be differentiated in turn, None for each that is not wanted.

    The statements run again with a graph, under no autocast, as in forward. `rest` is src, dst and num_rows.
    """
    keeps_graph = is_grad_enabled()
    with torch.autocast(upstream.device.type, enabled=False) if may_autocast() else nullcontext():
        with outside_transforms(), temporarily_clear_interpreter_stack(), torch.enable_grad():
            if keeps_graph:  # differentiate views: if one input was computed of another, that path is not counted twice
                leaves: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
            else:
                learns = zip(inputs, wanted)
                leaves = [None if tensor is None else tensor.detach().requires_grad_(learn) for tensor, learn in learns]
            z = composition.composed(*leaves, *rest)
        learning = [tensor for tensor, is_wanted in zip(leaves, wanted) if is_wanted]
        grads = iter(torch.autograd.grad(z, learning, upstream, create_graph=keeps_graph))
    return [next(grads) if is_wanted else None for is_wanted in wanted]


def _steps(composition: Composition, x: Tensor, weight: Tensor | None, is_gathered: bool) -> list[Step | None]:
    """Return the steps of all terms for tensors of this kind, whatever their sizes.

    A step is None if its term needs a graph of its own.
    """
    is_merged, dims = writes_parts(weight), 0 if weight is None else weight.dim()
    key = ("steps", x.device, x.dtype, is_merged, dims, is_gathered)
    steps: list[Step | None] | None = composition.memory.get(key)
    if steps is None:
        _, weight_slices = composition.work(weight).weight_slices[is_merged]
        steps = [_step(part.term, x, weight, is_gathered) for part in weight_slices]
        if None not in steps:
            composition.prepare(weight, x.device, x.dtype)
        composition.memory[key] = steps
    return steps


def _step(term: object, x: Tensor, weight: Tensor | None, is_gathered: bool) -> Step | None:
    """Return the step of a term for tensors like these, or None if the term runs as `insum` calls only."""
    if isinstance(term, ColumnTerm):
        return column_step(term, x, is_gathered)
    if isinstance(term, TableTerm):
        if weight is not None and weight.dim() == 2 and has_kernels(x.device):
            return table_step(term, x, is_gathered)
        term = term.plain
    if isinstance(term, SingleTerm):
        if weight is not None and weight.dim() == 2 and has_kernels(x.device):
            return None if is_gathered else single_step(term, x)
        term = term.plain
    if isinstance(term, SharedTerm):
        return shared_step(term, x, is_gathered)
    if isinstance(term, PathTerm) and term.key[0] != "uvuv":
        return path_step(term, x, weight, is_gathered)
    return None
