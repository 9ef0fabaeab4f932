"""A call like one before goes straight to its plan: all that it depends on is compared, nothing is worked out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pipeline import Plan, plan_for
from .sparse import Recipe, SparseFormat

__all__ = ["Found", "find", "is_watched", "remember", "remember_sparse", "run_found"]

CALLS = 4096  # kept before starting afresh, so that a new nnz every call does not fill memory
PLAIN = (Tensor, torch.nn.Parameter)

# asked at every call, so without the Python functions around them
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
_may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # on any device
_precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
_is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

Found = tuple[Any, "SparseFormat | None", bool]  # what runs the call, its format, whether a gradient is wanted

_plans: dict[object, Plan] = {}


def is_watched() -> bool:
    """Somebody follows what happens (a tracer, a mode, a transform), so it must happen through a torch operator."""
    return torch.compiler.is_compiling() or _modes() > 0 or _transforms() is not None


def find(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Found | None:
    """A call like one that is remembered; None: there is none, or somebody watches."""
    if torch.compiler.is_compiling() or _modes() or _transforms() is not None or _may_autocast():
        return None
    try:
        key, form, wants_grad = _key(expr, operands, size)
        call = None if key is None else (_plans if form is None else form.memory).get(key)
    except (RuntimeError, AttributeError, TypeError):  # a tensor without strides, no tensor, no size: others say so
        return None
    return None if call is None else (call, form, wants_grad and torch.is_grad_enabled())


def run_found(found: Found, operands: Mapping[str, Any]) -> Tensor:
    call, form, _ = found
    return call(list(operands.values()), []) if form is None else call(form, operands)  # type: ignore[no-any-return]


def remember(expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None) -> None:
    """Calls over plain tensors like these need no second look."""
    key, form, _ = _key(expr, tensors, size)
    if key is not None and form is None:
        if len(_plans) >= CALLS:
            _plans.clear()
        _plans[key] = plan_for(expr, ",".join(tensors), size, list(tensors.values()), "")


def remember_sparse(
    expr: str,
    operands: Mapping[str, Any],
    size: Sequence[int] | None,
    group_dim: int,
    how: Recipe,
    tensors: Mapping[str, Tensor],
    facts: list[Tensor],
) -> None:
    """Calls over this format's pattern and dense tensors like these are `how` over `tensors`."""
    key, form, _ = _key(expr, operands, size)
    if key is None or form is None:
        return
    plan = plan_for(how.text, ",".join(tensors), how.size, list(tensors.values()), how.fact)
    views = {name: (original, splits) for name, original, splits in how.views}
    fixed: list[Tensor | None] = []
    moving: list[tuple[int, str, Any]] = []
    for at, (name, tensor) in enumerate(tensors.items()):
        moves = name == how.values or name in views
        fixed.append(None if moves else tensor)
        if name in views:
            moving.append((at, *views[name]))
    call = SparseCall(plan, how, group_dim, list(tensors).index(how.values), fixed, tuple(moving), facts)
    if len(form.memory) >= CALLS:
        form.memory.clear()
    form.memory[key] = call


@dataclass(frozen=True, eq=False)
class SparseCall:
    """A format-agnostic statement over one pattern, ready for values and dense tensors."""

    plan: Plan
    how: Recipe
    group_dim: int
    values_at: int
    fixed: list[Tensor | None]  # the format's coordinates, in the order of the plan's tensors
    moving: tuple[tuple[int, str, Any], ...]  # (place, the user's name, splits)
    facts: list[Tensor]

    def __call__(self, form: SparseFormat, operands: Mapping[str, Any]) -> Tensor:
        if form.group_dim != self.group_dim:
            form = form.regroup(self.group_dim)
        tensors: list[Any] = self.fixed.copy()
        tensors[self.values_at] = form.values
        for at, name, splits in self.moving:
            tensors[at] = self.how.split(operands[name], splits) if splits else operands[name]
        output: Any = self.plan(tensors, self.facts)  # a plan without winners returns one tensor
        return self.how.finish(output) if self.how.output_splits else output


def _key(
    expr: str, operands: Mapping[str, Any], size: Sequence[int] | None
) -> tuple[tuple[Any, ...] | None, SparseFormat | None, bool]:
    """What decides how a call runs, the format among its operands, and whether one of them requires a gradient."""
    form, wants_grad = None, False
    parts = [expr, None if size is None else tuple(size), _precision(), _is_deterministic()]
    for name, operand in operands.items():
        if type(operand) in PLAIN:
            parts += (name, operand.shape, operand.stride(), operand.dtype, operand.device)
        else:
            # the values are asked each time: a Parameter stays the same object when its dtype or device changes
            form, operand = operand, operand.values
            if type(operand) not in PLAIN:
                return None, None, False
            parts += (name, type(form), operand.shape, operand.stride(), operand.dtype, operand.device)
        wants_grad = wants_grad or operand.requires_grad
    return tuple(parts), form, wants_grad
