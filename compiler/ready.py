"""A call like one before goes straight to its plan: all that it depends on is compared, nothing is worked out again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .pipeline import Plan, plan_for
from .sparse import Recipe, SparseFormat

__all__ = [
    "PLAIN",
    "Found",
    "SparseCall",
    "find",
    "find_values_gradient",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "may_autocast",
    "outside_transforms",
    "remember",
    "remember_sparse",
    "remember_values_gradient",
    "run_found",
]

CALLS = 4096  # kept before starting afresh, so that a new nnz every call does not fill memory
PLAIN = (Tensor, torch.nn.Parameter)

# asked at every call, so without the Python functions around them
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by one of them
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
_precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
_is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

Found = tuple[Any, "SparseFormat | None", bool]  # what runs the call, its format, whether a gradient is wanted

_plans: dict[object, Plan] = {}


def is_watched() -> bool:
    """Somebody follows what happens (a tracer, a mode, a transform), so it must happen through a torch operator."""
    return torch.compiler.is_compiling() or _modes() > 0 or _transforms() is not None


def is_transformed() -> bool:
    """A transform of torch.func is active, or derivatives are carried forward."""
    if torch.compiler.is_compiling():
        return False
    return _transforms() is not None or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


@contextmanager
def outside_transforms() -> Iterator[None]:
    """What is made here outlives the call: it is no part of a transform, and good for training too."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def find(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Found | None:
    """A call like one that is remembered; None: there is none, or somebody watches."""
    if torch.compiler.is_compiling() or _modes() or _transforms() is not None or may_autocast():
        return None
    if forward_ad._current_level >= 0:  # a tensor may have a tangent, which its plan would lose
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
    fixed, moving = _sorted_out(how, tensors, operands)
    fixed[list(tensors).index(how.values)] = None
    is_whole = math.prod(how.size) == math.prod(how.final)
    final = _contiguous(how.final) if is_whole else None
    values_at = list(tensors).index(how.values)
    _keep(form, key, SparseCall(plan, how, group_dim, values_at, fixed, moving, facts, final))


def find_values_gradient(
    expr: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor
) -> tuple[object, ValuesGradient | None]:
    """What the gradient of the values is remembered by, None where somebody watches, and what is remembered."""
    if torch.compiler.is_compiling() or _modes() or _transforms() is not None or may_autocast():
        return None, None
    if forward_ad._current_level >= 0:
        return None, None
    parts: list[Any] = ["values", expr, _precision(), _is_deterministic()]
    for tensor in (upstream, form.values, *dense.values()):
        if type(tensor) not in PLAIN or (tensor.requires_grad and torch.is_grad_enabled()) or tensor.is_neg():
            return None, None
        parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    key = tuple(parts)
    return key, form.memory.get(key)


def remember_values_gradient(
    key: object,
    form: SparseFormat,
    derived: str,
    how: Recipe,
    needed: Mapping[str, Tensor],
    upstream_as: str,
    operands: Mapping[str, Tensor],
) -> None:
    """`derived` over `needed` is the gradient of the values; `operands` are dense ones and the upstream gradient."""
    views = (*how.views, (upstream_as, upstream_as, how.output_splits))
    fixed, moving = _sorted_out(replace(how, views=views), needed, operands)
    plan = plan_for(derived, ",".join(needed), tuple(form.values.shape), list(needed.values()), "")
    final = _contiguous(tuple(form.values.shape))
    _keep(form, key, ValuesGradient(plan, how, upstream_as, fixed, moving, final))


def _keep(form: SparseFormat, key: object, call: object) -> None:
    if len(form.memory) >= CALLS:
        form.memory.clear()
    form.memory[key] = call


Moving = tuple[tuple[int, str, Any, "tuple[int, ...] | None"], ...]  # (place, the user's name, splits, shape if a view)


def _sorted_out(
    how: Recipe, tensors: Mapping[str, Tensor], operands: Mapping[str, Any]
) -> tuple[list[Tensor | None], Moving]:
    """A statement's tensors: those that belong to the pattern, and those that come anew with each call."""
    views = {name: (original, splits) for name, original, splits in how.views}
    fixed: list[Tensor | None] = []
    moving = []
    for at, (name, tensor) in enumerate(tensors.items()):
        fixed.append(None if name in views else tensor)
        if name in views:
            original, splits = views[name]
            given = operands[original]
            is_view = tensor.data_ptr() == given.data_ptr() and tensor.numel() == given.numel()
            moving.append((at, original, splits, tuple(tensor.shape) if splits and is_view else None))
    return fixed, tuple(moving)


def _run(
    plan: Plan,
    how: Recipe,
    tensors: list[Any],
    moving: Moving,
    operands: Mapping[str, Any],
    facts: list[Tensor],
    final: Final | None,
) -> Tensor:
    """Give each moving tensor its place and run, without making views where a kernel would not notice."""
    for at, name, _, _ in moving:
        tensors[at] = operands[name]
    launcher = plan.launcher(tensors) if final is not None else None
    if launcher is not None and final is not None and all([shape is not None or not s for _, _, s, shape in moving]):
        return launcher.into(*final, tensors, facts)
    for at, _, splits, shape in moving:
        if shape is not None:
            tensors[at] = tensors[at].view(shape)
        elif splits:
            tensors[at] = how.split(tensors[at], splits)
    output: Any = plan(tensors, facts)  # a plan without winners returns one tensor
    return output if final is None else output.view(final[0])  # type: ignore[no-any-return]


Final = tuple[tuple[int, ...], tuple[int, ...]]  # an output's shape and strides


def _contiguous(size: tuple[int, ...]) -> Final:
    return size, torch.empty(size, device="meta").stride()


@dataclass(frozen=True, eq=False)
class SparseCall:
    """A format-agnostic statement over one pattern, ready for values and dense tensors."""

    plan: Plan
    how: Recipe
    group_dim: int
    values_at: int
    fixed: list[Tensor | None]  # the format's coordinates, in the order of the plan's tensors
    moving: Moving
    facts: list[Tensor]
    final: Final | None  # None: blocks are to be cropped

    @property
    def is_sum(self) -> bool:
        return self.plan.is_sum

    def __call__(self, form: SparseFormat, operands: Mapping[str, Any]) -> Tensor:
        tensors: list[Any] = self.fixed.copy()
        if form.group_dim == self.group_dim:
            tensors[self.values_at] = form.values
        else:
            tensors[self.values_at] = form.flat_values if self.how.source else form.regroup(self.group_dim).values
        output = _run(self.plan, self.how, tensors, self.moving, operands, self.facts, self.final)
        return output if self.final is not None else self.how.finish(output)


@dataclass(frozen=True, eq=False)
class ValuesGradient:
    """The gradient of a format's values in one statement, ready for dense tensors and the upstream gradient."""

    plan: Plan
    how: Recipe
    upstream: str  # its name among the operands
    fixed: list[Tensor | None]
    moving: Moving
    final: Final

    def __call__(self, operands: Mapping[str, Tensor]) -> Tensor:
        return _run(self.plan, self.how, self.fixed.copy(), self.moving, operands, [], self.final)


def _key(
    expr: str, operands: Mapping[str, Any], size: Sequence[int] | None
) -> tuple[tuple[Any, ...] | None, SparseFormat | None, bool]:
    """What decides how a call runs, the format among its operands, and whether one of them requires a gradient."""
    form, wants_grad = None, False
    parts = [expr, None if size is None else tuple(size), _precision(), _is_deterministic()]
    for name, operand in operands.items():
        if type(operand) not in PLAIN:
            # the values are asked each time: a Parameter stays the same object when its dtype or device changes
            form, operand = operand, operand.values
            if type(operand) not in PLAIN:
                return None, None, False
            parts.append(type(form))
        shape, strides = operand.shape, operand.stride()
        # memory may hold the negatives of values, as under the imaginary part of a conjugate, but with gaps between
        if (not strides or strides[-1] != 1 or shape[-1] == 1) and operand.is_neg():
            return None, None, False
        wants_grad = wants_grad or operand.requires_grad
        parts += (name, shape, strides, operand.dtype, operand.device)
    return tuple(parts), form, wants_grad
