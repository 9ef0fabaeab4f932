"""One opaque torch operator for several gradients of a sum over plain tensors: a tracer sees a single node.

They are computed as those of an ordinary call are, by one launch plan, and in one kernel where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...formats.torch_state import is_exporting, transforms
from ..language import terms
from ..runtime import PLAIN_CALLS, owned, planned, replayed
from .flop_formula import flops
from .gradients import all_gradients, gradient_of, is_read, joint_gradients
from .operators import below_autograd, library, refuse_transforms, replay_first
from .operators import call as call_plain

__all__ = ["implement_gradients", "owned_gradients", "separate_gradients", "traced_gradients"]

# `tensors` are the output's gradient, then those called `names`; `wanted` names those that have one, commas between
library.define(
    "run_gradients(str expr, str names, str wanted, Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_gradients = torch.ops.insum_ops.run_gradients.default

Evaluate = Callable[..., Tensor]
_evaluate: Evaluate


def implement_gradients(evaluate: Evaluate) -> None:
    """Make `evaluate` what the operator calls when it runs."""
    global _evaluate
    _evaluate = evaluate


def traced_gradients(
    expr: str, wanted: Sequence[str], operands: Mapping[str, Tensor], grad_output: Tensor
) -> dict[str, Tensor]:
    """Return gradients of a sum for a tracer, by the tensors' names: those that one operator computes.

    There are none where fewer than two are statements, since one by itself reads fewer tensors; inside a transform; and
    in torch.export, which records what needs nothing of ours.
    """
    read = [name for name in operands if is_read(expr, name)]
    joint = [name for name in wanted if name in read]
    if len(joint) < 2 or is_exporting() or transforms() is not None:
        return {}
    needed = [name for name in operands if any([name in others for key in joint for _, _, others in terms(expr, key)])]
    names = list(dict.fromkeys([*needed, *joint]))
    tensors = [grad_output, *[operands[name] for name in names]]
    return dict(zip(joint, _gradients(expr, ",".join(names), ",".join(joint), tensors)))


def _key(expr: str, names: str, wanted: str) -> tuple[str, ...]:
    return "gradients as an operator", expr, names, wanted


def _replayed(expr: str, names: str, wanted: str, tensors: list[Tensor]) -> list[Tensor] | None:
    """Return the gradients by their launch plan: all that a warm call of a compiled graph does. None without one."""
    grads = replayed(PLAIN_CALLS, _key(expr, names, wanted), tensors)
    return None if grads is None else owned_gradients(grads)


def owned_gradients(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return those gradients that there are, as an operator returns them: each is no view."""
    return [owned(grad) for grad in grads if grad is not None]


def _run(expr: str, names: str, wanted: str, tensors: list[Tensor]) -> list[Tensor]:
    """Compute the gradients of a call without a plan, of which one may be made."""

    def gradients(grad_output: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        operands, keys = dict(zip(names.split(","), tensors)), wanted.split(",")
        joint = joint_gradients(expr, keys, operands, grad_output)
        return tuple(all_gradients(_evaluate, expr, keys, operands, grad_output, joint).values())

    with torch.no_grad():
        return owned_gradients(planned(PLAIN_CALLS, _key(expr, names, wanted), gradients, tensors, varies=True))


def separate_gradients(expr: str, names: str, wanted: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, each as an operator of its own."""
    grad_output, *values = tensors
    operands = dict(zip(names.split(","), values))

    def evaluate(expr: str, operands: Mapping[str, Tensor], size: Sequence[int] | None) -> Tensor:
        return call_plain(expr, ",".join(operands), size, list(operands.values()), "", [])  # type: ignore[no-any-return]

    return [gradient_of(evaluate, expr, key, operands, grad_output) for key in wanted.split(",")]


def _differentiable(expr: str, names: str, wanted: str, tensors: list[Tensor]) -> list[Tensor]:
    """The gradients for autograd: where theirs are wanted in turn, each is a statement of its own."""
    if refuse_transforms(expr, tensors):
        return separate_gradients(expr, names, wanted, tensors)
    return below_autograd(_gradients, _run, tensors, expr, names, wanted, tensors)  # type: ignore[no-any-return]


def _flops(expr: str, names: str, wanted: str, tensors: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Return the multiplications and additions of the statements of all gradients."""
    grad_output, *values = tensors
    operands, total = dict(zip(names.split(","), values)), 0
    for key in wanted.split(","):
        for derived, grad_name, others in terms(expr, key):
            needed = [grad_output, *[operands[other] for other in others]]
            total += flops(derived, ",".join([grad_name, *others]), tuple(operands[key].shape), needed)
    return total


@torch.library.register_fake("insum_ops::run_gradients", lib=library)
def _fake(expr: str, names: str, wanted: str, tensors: list[Tensor]) -> list[Tensor]:
    operands = dict(zip(names.split(","), tensors[1:]))
    kinds = [operands[key] for key in wanted.split(",")]
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in kinds]


for _device in ("CPU", "CUDA"):
    library.impl("run_gradients", _run, _device)
library.impl("run_gradients", _differentiable, "Autograd")
register_flop_formula(_gradients.overloadpacket, get_raw=True)(_flops)
replay_first(_gradients, _replayed)
