"""A call like one before goes straight to its plan: all that it depends on is compared, nothing is worked out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .pipeline import Plan, plan_for
from .ready_call import Backward, Final, PlainCall, SparseCall, ValuesGradient
from .sparse import Recipe, SparseFormat

__all__ = [
    "PLAIN",
    "Found",
    "as_autocast",
    "find",
    "find_backward",
    "find_kept",
    "find_pinned",
    "find_standing",
    "find_values_gradient",
    "is_free",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "may_autocast",
    "outside_transforms",
    "remember",
    "remember_backward",
    "remember_pinned",
    "remember_sparse",
    "remember_standing",
    "remember_values_gradient",
]

CALLS = 4096  # kept before starting afresh, so that a new nnz every call does not fill memory
PLAIN = (Tensor, torch.nn.Parameter)

# asked at every call, so without the Python functions around them
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack  # vmap, grad, ... that are active
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by one of them
may_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # whether any device's is on
_precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)
_dtype = torch.get_default_dtype  # of a statement without a factor
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


def is_free() -> bool:
    """Nobody watches, casts or carries derivatives forward: a call like one before may go straight to its plan."""
    if torch.compiler.is_compiling() or _modes() or _transforms() is not None or may_autocast():
        return False
    return forward_ad._current_level < 0  # else a tensor may have a tangent, which its plan would lose


@contextmanager
def outside_transforms() -> Iterator[None]:
    """What is made here outlives the call: it is no part of a transform, and good for training too."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Under autocast float32 takes its type, before gradients are recorded: backward runs outside of it."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def find(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Found | None:
    """A call like one that is remembered; None: there is none, or somebody watches."""
    if not is_free():
        return None
    try:
        key, form, wants_grad = _key(expr, operands, size)
        call = None if key is None else (_plans if form is None else form.memory).get(key)
    except (RuntimeError, AttributeError, TypeError):  # a tensor without strides, no tensor, no size: others say so
        return None
    return None if call is None else (call, form, wants_grad and torch.is_grad_enabled())


def remember(expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None) -> None:
    """Calls over plain tensors like these need no second look."""
    key, form, _ = _key(expr, tensors, size)
    if key is not None and form is None:
        _keep(_plans, key, plan_for(expr, ",".join(tensors), size, list(tensors.values()), ""))


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
    _keep(form.memory, key, SparseCall(plan, how, group_dim, tensors, operands, facts))


def find_values_gradient(
    expr: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor
) -> tuple[object, ValuesGradient | None]:
    """What the gradient of the values is remembered by, None where somebody watches, and what is remembered."""
    if not is_free() or torch.is_grad_enabled():
        return None, None
    key = _layouts(("values", expr), (upstream, form.values, *dense.values()))
    return key, None if key is None else form.memory.get(key)


def remember_values_gradient(
    key: object,
    form: SparseFormat,
    derived: str,
    how: Recipe,
    needed: Mapping[str, Tensor],
    upstream_as: str,
    operands: Mapping[str, Tensor],
    fact: str,
) -> None:
    """`derived` over `needed` is the gradient of the values; `operands` are dense ones and the upstream gradient."""
    size = tuple(form.values.shape)
    plan = plan_for(derived, ",".join(needed), size, list(needed.values()), fact)
    _keep(form.memory, key, ValuesGradient(plan, how, upstream_as, needed, operands, size))


def find_backward(
    expr: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor, wanted: tuple[bool, ...]
) -> tuple[object, Backward | None]:
    """The same for all gradients that are `wanted` at once: of the values, then of each dense tensor."""
    if not is_free() or torch.is_grad_enabled():
        return None, None
    key = _layouts(("backward", expr, wanted), (upstream, form.values, *dense.values()))
    return key, None if key is None else form.memory.get(key)


def remember_backward(key: object, form: SparseFormat, backward: Backward) -> None:
    _keep(form.memory, key, backward)


def find_standing(
    expr: str, form: SparseFormat, tensors: Sequence[Tensor | None]
) -> tuple[object, tuple[SparseCall, Final] | None]:
    """A call to which `tensors` stand for views of them, as a vector for the matrix that it is expanded to."""
    if not is_free():
        return None, None
    key = _layouts(("standing", expr), (form.values, *tensors))
    return key, None if key is None else form.memory.get(key)


def remember_standing(key: object, form: SparseFormat, call: SparseCall, final: Final) -> None:
    if call.is_direct:  # a kernel reads the memory of what stands there, whatever its shape
        _keep(form.memory, key, (call, final))


def find_pinned(memory: Mapping[Any, Any], expr: str, moving: Mapping[str, Tensor]) -> tuple[object, PlainCall | None]:
    """A call over plain tensors of which all but the `moving` ones stay as long as `memory`."""
    if not is_free() or (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in moving.values()])):
        return None, None
    key = _layouts(("pinned", expr), moving.values())
    return key, None if key is None else memory.get(key)


def find_kept(memory: Mapping[Any, Any], marks: Sequence[Any], tensors: Iterable[Tensor | None]) -> tuple[object, Any]:
    """What tensors like these are remembered by, None: no kernel can read one of them; and what is remembered."""
    key = _layouts(("kept", *marks), tensors)
    return key, None if key is None else memory.get(key)


def remember_pinned(
    memory: dict[Any, Any],
    key: object,
    expr: str,
    moving: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    size: Sequence[int] | None,
    fact: str = "",
    facts: list[Tensor] | None = None,
) -> PlainCall:
    tensors = {**moving, **fixed}
    plan = plan_for(expr, ",".join(tensors), size, list(tensors.values()), fact)
    call = PlainCall(plan, [*[None] * len(moving), *fixed.values()], facts or [])
    _keep(memory, key, call)
    return call


def _keep(memory: dict[Any, Any], key: object, call: object) -> None:
    if len(memory) >= CALLS:
        memory.clear()
    memory[key] = call


def _layouts(marks: tuple[Any, ...], tensors: Iterable[Tensor | None]) -> tuple[Any, ...] | None:
    """`marks`, the settings, and all of the tensors that decides how a kernel reads them; None: it can't read one."""
    parts: list[Any] = [*marks, _precision(), _is_deterministic()]
    try:
        for tensor in tensors:
            if tensor is None:
                parts.append(None)
                continue
            shape, strides = tensor.shape, tensor.stride()
            if type(tensor) not in PLAIN or ((not strides or strides[-1] != 1 or shape[-1] == 1) and tensor.is_neg()):
                return None
            parts += (shape, strides, tensor.dtype, tensor.device)
    except (RuntimeError, AttributeError):  # a tensor without strides, no tensor: others say so
        return None
    return tuple(parts)


def _key(
    expr: str, operands: Mapping[str, Any], size: Sequence[int] | None
) -> tuple[tuple[Any, ...] | None, SparseFormat | None, bool]:
    """What decides how a call runs, the format among its operands, and whether one of them requires a gradient."""
    form, wants_grad = None, False
    parts = [expr, None if size is None else tuple(size), _precision(), _is_deterministic(), _dtype(), *operands]
    for operand in operands.values():
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
        parts += (shape, strides, operand.dtype, operand.device)
    return tuple(parts), form, wants_grad
