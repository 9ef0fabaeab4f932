"""What a tensor may carry besides its memory: a sign not yet applied, a tangent, a transform of torch.func."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import UnsupportedError
from .sparse import is_sparse

__all__ = ["as_memory"]

_functorch = torch._C._functorch


def as_memory(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """The operands, each with its values in memory; refuses derivatives and batches that would get lost on the way."""
    if forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None:
        for name, operand in operands.items():
            _refuse(name, operand.values if is_sparse(operand) else operand)
    return {name: _resolved(operand) for name, operand in operands.items()}


def _resolved(operand: Any) -> Any:
    if isinstance(operand, Tensor):
        return operand.resolve_neg() if operand.is_neg() else operand
    return operand.with_values(operand.values.resolve_neg()) if operand.values.is_neg() else operand


def _refuse(name: str, tensor: Tensor) -> None:
    if _functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedError(
            f"{name} is inside a transform of torch.func or torch.vmap, which a statement can't take part in; "
            "write a batch as one more index, and differentiate with torch.autograd"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise UnsupportedError(
            f"{name} has a forward-mode tangent, which a statement can't pass on; "
            "differentiate with torch.autograd.grad"
        )
