"""What a tensor may carry besides its memory: a sign that is not applied yet, a base that it is a view of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.torch_state import is_compiling

__all__ = ["as_memory", "owned", "resolved"]

_without_base = torch.ops.aten._unsafe_view.default


def as_memory(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """The operands, each with its values in memory as they are."""
    return {name: resolved(operand) for name, operand in operands.items()}


def resolved(operand: Any) -> Any:
    """Return a tensor or a format with its values in memory as they are: without a sign that is still to be applied."""
    if isinstance(operand, Tensor):
        return operand.resolve_neg() if operand.is_neg() else operand
    return operand.with_values(operand.values.resolve_neg()) if operand.values.is_neg() else operand


def owned(result: Tensor) -> Tensor:
    """The same memory, and no view.

    One that a step of autograd made could not be changed in place by its caller, and forward mode would look for the
    tangent of what it is a view of.
    """
    if is_compiling() or result._base is None:
        return result
    return _without_base(result, result.shape)  # type: ignore[no-any-return]
