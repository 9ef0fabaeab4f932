"""Whether tensors are laid out like others, asked in one call: of the guards that compiled graphs ask too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TensorGuard", "layout_guard"]

TensorGuard = Callable[..., bool]
TRIALS = 8  # before guards are given up


def layout_guard(tensors: Sequence[Tensor], varying: Collection[int] = ()) -> TensorGuard | None:
    """Return a guard that says of as many tensors whether they are laid out like these.

    The first dimensions of those at the places `varying` may have any length. The guard is None if this torch has none
    that can be relied on, or if one tensor is given twice.

    Compared are types, shapes, strides, dtypes, devices, negated and conjugated memory, whether gradients are wanted;
    that all of them are different tensors; and by whom torch has operations on them handled: autocast of their device,
    the transforms of torch.func, the tracer of TorchScript and inference mode are or are not active, as they were for
    these.

    >>> guard = layout_guard([torch.zeros(2, 3)])
    >>> guard is None or (guard(torch.ones(2, 3)), guard(torch.ones(3, 2)))
    (True, False)
    >>> guard = layout_guard([torch.zeros(2, 3)], {0})
    >>> guard is None or (guard(torch.ones(5, 3)), guard(torch.ones(5, 4)))
    (True, False)
    """
    if not _Trial.has_passed and _Trial.count < TRIALS:
        _Trial.count, _Trial.has_passed = _Trial.count + 1, _tells_apart()
    if not _Trial.has_passed:
        return None
    guard = _guard(tensors, varying)
    return guard if guard(*tensors) else None


def _guard(tensors: Sequence[Any], varying: Collection[int] = ()) -> TensorGuard:
    """Return torch's own guard on the layouts of these tensors, of which some may have any length."""
    sizes = strides = None  # none is dynamic
    if varying:
        sizes = [[None, *each.shape[1:]] if at in varying else [*each.shape] for at, each in enumerate(tensors)]
        strides = [[*tensor.stride()] for tensor in tensors]
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]


def _when_handled(guard: TensorGuard, tensor: Tensor) -> list[bool]:
    """Return whether a guard accepts a tensor under autocast, vmap, functionalize and the tracer: it must not."""
    seen: list[bool] = []

    def look(batch: Tensor) -> Tensor:
        seen.append(guard(tensor))
        return batch.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        look(tensor)
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse("Tracer")):  # as torch.jit.trace does
        seen.append(guard(tensor))
    torch.func.vmap(look)(tensor)
    torch.func.functionalize(look)(tensor)  # not `grad`, on the same way, whose first call takes a second
    return seen


class _Trial:
    """Whether torch's guards have told apart all that they must, and how often they were tried."""

    count, has_passed = 0, False


def _tells_apart() -> bool:
    """Return True if torch's guards tell apart all that they must: torch promises nothing, so they are tried.

    Guards that are good fail where torch handles an operation for somebody else, as in `torch.library.opcheck`.
    """
    if not hasattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards"):
        return False
    with torch.inference_mode(False):
        first, alike = (torch.zeros(2, 3, dtype=torch.float32, device="cpu") for _ in range(2))
        wide, longer = (torch.zeros(*shape, dtype=torch.float32, device="cpu") for shape in ((2, 4), (5, 3)))
        unlike: list[Any] = [wide, wide[:, :3], wide[:, 0], alike.T, alike[None], alike.double(), alike.to("meta")]
        unlike += [torch._neg_view(alike), torch.nn.Parameter(alike), alike.clone().requires_grad_(), [[0.0]], None]
        try:
            pair_guard, long_guard = _guard([first, wide]), _guard([first, wide], {0})
            if not pair_guard(alike, wide) or pair_guard(alike, alike.T) or pair_guard(wide, wide):
                return False
            if not long_guard(longer, wide) or pair_guard(longer, wide) or long_guard(alike, longer):
                return False
            for guard in (_guard([first]), _guard([first], {0})):
                if not guard(alike) or any([guard(tensor) for tensor in unlike]) or any(_when_handled(guard, alike)):
                    return False
            return True
        except (AttributeError, TypeError, RuntimeError):
            return False
