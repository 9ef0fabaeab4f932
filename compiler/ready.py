"""A call like one before goes straight to its plan: all that it depends on is compared, nothing is worked out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator, ExitStack
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from ..lru_cache import LRUCache
from .errors import UnsupportedError
from .express import PLAIN, Key, is_free, look_up, may_autocast, modes, remember_call, transforms
from .pipeline import plan_for, run_alike
from .ranges import is_wrapped
from .ready_call import Backward, PlainCall, SparseCall, ValuesGradient
from .sparse import Recipe, SparseFormat

__all__ = [
    "PLAIN",
    "Found",
    "as_autocast",
    "find",
    "find_backward",
    "find_kept",
    "find_like",
    "find_pinned",
    "find_values_gradient",
    "followed",
    "in_order",
    "is_free",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "may_autocast",
    "outside_transforms",
    "pinned",
    "remember",
    "remember_backward",
    "remember_call",
    "remember_pinned",
    "remember_sparse",
    "remember_values_gradient",
    "run_like",
    "wants_gradient",
]

CALLS = 2048  # over plain tensors that are kept, of about 7 kB each with their plans
CALLS_ONCE = 1024  # that are known to have come once, by a number each

_dtype = torch.get_default_dtype  # of a statement without a factor

# what runs the call, its format, and the tensors that it takes in the caller's order
Found = tuple[Any, "SparseFormat | None", list[Tensor]]

_plans: LRUCache[PlainCall] = LRUCache(CALLS)
_once: LRUCache[bool] = LRUCache(CALLS_ONCE)  # hashes of calls that came once, by who expects no second one


def is_watched() -> bool:
    """Somebody follows what happens (a tracer, a mode, a transform), so it must happen through a torch operator."""
    return torch.compiler.is_compiling() or modes() > 0 or transforms() is not None


def is_transformed() -> bool:
    """A transform of torch.func is active, or derivatives are carried forward."""
    if torch.compiler.is_compiling():
        return False
    return transforms() is not None or (forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


def _transforms() -> str:
    """What torch.func or forward mode does, as in "Vmap of Grad"; a tracer asks once and keeps the answer."""
    kinds = [interpreter.key().name for interpreter in functorch.get_interpreter_stack() or ()]
    if forward_ad._current_level >= 0 and "Jvp" not in kinds:
        kinds.append("Jvp")
    return " of ".join(kinds)


setattr(_transforms, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker


FOLLOWS_FUNCTIONS = torch.__version__ >= "2.11"  # of autograd inside a transform: an older tracer fails at them


def followed(tensor: Any) -> Any:
    """The same tensor, or None, for a tracer inside a transform: a first gradient and batches are all it can follow.

    Whether one of the transform's own inputs wants a gradient it does not know, and would take it for a constant, but
    it knows of what it has made itself.
    """
    kinds = _transforms()
    if "Grad" not in kinds and "Jvp" not in kinds:
        return tensor
    if kinds != "Grad":
        raise UnsupportedError(
            f"{kinds} is inside torch.compile, which can follow a single Grad of torch.func; "
            "leave out torch.compile, or compile what is inside the transform"
        )
    if not FOLLOWS_FUNCTIONS:
        torch._dynamo.graph_break(
            f"torch {torch.__version__} can't follow the gradient of a statement inside torch.compile, so that it runs "
            "uncompiled; leave out fullgraph=True, or use torch 2.11 or newer"
        )
    return tensor.view_as(tensor) if tensor is not None and tensor.is_floating_point() else tensor


class outside_transforms(ContextDecorator):
    """What is made here outlives the call: it is no part of a transform, and good for training too.

    Every first call over new voxels or a new pattern passes here, so that it costs next to nothing where there is
    nothing to leave.
    """

    def _recreate_cm(self) -> outside_transforms:
        return outside_transforms()  # of a decorated function each call has its own

    def __enter__(self) -> None:
        self.left: ExitStack | None = None
        if torch.compiler.is_compiling():  # a tracer sees to that itself
            return
        if torch.is_inference_mode_enabled() or transforms() is not None:
            self.left = ExitStack()
            self.left.enter_context(torch.inference_mode(False))
            self.left.enter_context(torch._C._DisableFuncTorch())

    def __exit__(self, *given: Any) -> None:
        if self.left is not None:
            self.left.close()


def as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Under autocast float32 takes its type, before gradients are recorded: backward runs outside of it."""
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor


def find(expr: str, operands: Mapping[str, Any], size: Sequence[int] | None) -> Found | None:
    """A call like one that is remembered; None: there is none, or somebody watches."""
    if not is_free():
        return None
    try:
        memory, marks, form, tensors = in_order(expr, operands, size)
        call = look_up(memory, marks, tensors)[1]
    except (AttributeError, TypeError):  # no tensor, no size: others say so
        return None
    return None if call is None else (call, form, tensors)


def find_like(
    expr: str, tensors: Mapping[str, Tensor], size: tuple[int, ...]
) -> tuple[Key | None, PlainCall | None, list[Tensor]]:
    """A call over plain tensors like one that is remembered, of which no gradient is asked."""
    given = list(tensors.values())
    if not is_free() or wants_gradient(given):
        return None, None, given
    return *look_up(_plans, (expr, size, _dtype(), *tensors), given), given


def run_like(key: Key, expr: str, tensors: Mapping[str, Tensor], size: tuple[int, ...], given: list[Tensor]) -> Tensor:
    """A call that `find_like` did not find, remembered when its sizes come a second time: most never do."""
    names = ",".join(tensors)
    if not _once.get(hash(key)):
        _once[hash(key)] = True
        made = run_alike(expr, names, size, given)
        if made is not None:
            return made
        return plan_for(expr, names, size, given, "")(given, [])  # type: ignore[return-value]
    plan = plan_for(expr, names, size, given, "")
    remember_call(_plans, key, PlainCall(plan, [None] * len(given), []))
    return plan(given, [])  # type: ignore[return-value]


def remember(expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None) -> None:
    """Calls over plain tensors like these need no second look."""
    memory, marks, form, given = in_order(expr, tensors, size)
    key, _ = look_up(memory, marks, given)
    if key is not None and form is None:
        plan = plan_for(expr, ",".join(tensors), size, given, "")
        remember_call(memory, key, PlainCall(plan, [None] * len(given), []))


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
    memory, marks, form, given = in_order(expr, operands, size)
    key, _ = look_up(memory, marks, given)
    if key is None or form is None:
        return
    plan = plan_for(how.text, ",".join(tensors), how.size, list(tensors.values()), how.fact)
    remember_call(memory, key, SparseCall(plan, how, group_dim, tensors, operands, facts))


def find_values_gradient(
    expr: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor
) -> tuple[Key | None, ValuesGradient | None]:
    """What the gradient of the values is remembered by, None where somebody watches, and what is remembered."""
    if not is_free() or torch.is_grad_enabled():
        return None, None
    return look_up(form.memory, ("values", expr), (upstream, form.values, *dense.values()))


def remember_values_gradient(
    key: Key,
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
    remember_call(form.memory, key, ValuesGradient(plan, how, upstream_as, needed, operands, size))


def find_backward(
    expr: str, form: SparseFormat, dense: Mapping[str, Tensor], upstream: Tensor, wanted: tuple[bool, ...]
) -> tuple[Key | None, Backward | None]:
    """The same for all gradients that are `wanted` at once: of the values, then of each dense tensor."""
    if not is_free() or torch.is_grad_enabled():
        return None, None
    return look_up(form.memory, ("backward", expr, wanted), (upstream, form.values, *dense.values()))


def remember_backward(key: Key, form: SparseFormat, backward: Backward) -> None:
    remember_call(form.memory, key, backward)


def find_pinned(
    memory: dict[Any, Any], expr: str, moving: Mapping[str, Tensor]
) -> tuple[Key | None, PlainCall | None, list[Tensor]]:
    """A call over plain tensors of which all but the `moving` ones stay as long as `memory`."""
    tensors = list(moving.values())
    if not is_free() or wants_gradient(tensors):
        return None, None, tensors
    return *look_up(memory, ("pinned", expr), tensors), tensors


def find_kept(memory: dict[Any, Any], marks: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Key | None, Any]:
    """What tensors like these are remembered by, None: no kernel can read one of them; and what is remembered."""
    given = [tensor for tensor in tensors if tensor is not None]
    return look_up(memory, ("kept", *marks, *[tensor is None for tensor in tensors]), given)


def remember_pinned(
    memory: dict[Any, Any],
    key: Key,
    expr: str,
    moving: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    size: Sequence[int] | None,
    fact: str = "",
    facts: list[Tensor] | None = None,
) -> PlainCall:
    call = pinned(expr, moving, fixed, size, fact, facts)
    remember_call(memory, key, call)
    return call


def pinned(
    expr: str,
    moving: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    size: Sequence[int] | None,
    fact: str = "",
    facts: list[Tensor] | None = None,
) -> PlainCall:
    """A call in which the `fixed` tensors stay and those like the `moving` ones come anew."""
    tensors = {**moving, **fixed}
    plan = plan_for(expr, ",".join(tensors), size, list(tensors.values()), fact)
    return PlainCall(plan, [*[None] * len(moving), *fixed.values()], facts or [])


def wants_gradient(tensors: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def in_order(
    expr: str, operands: Mapping[str, Any], size: Sequence[int] | None
) -> tuple[dict[Any, Any], object, SparseFormat | None, list[Tensor]]:
    """Where a call is remembered and by what; its format, and its operands' tensors, the format's values among them."""
    form: SparseFormat | None = None
    place = -1
    tensors: list[Tensor] = []
    for operand in operands.values():
        if type(operand) not in PLAIN and form is None and not isinstance(operand, Tensor):
            # the values are asked each time: a Parameter stays the same object when its dtype or device changes
            form, place, operand = operand, len(tensors), operand.values
        tensors.append(operand)
    extents = None if size is None else _extents(size)
    if form is None:
        return _plans, (expr, extents, _dtype(), *operands), None, tensors
    return form.memory, (expr, extents, place, *operands), form, tensors


def _extents(size: object) -> tuple[int, ...]:
    """A size in whole numbers: others may equal it, and so what is remembered by it, and are refused all the same."""
    if type(size) is tuple:
        for extent in size:
            if type(extent) is not int:
                break
        else:
            return size
    if not isinstance(size, (tuple, list)):
        raise TypeError
    return tuple(map(index, size))
