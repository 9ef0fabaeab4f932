"""What a tensor may carry besides its memory: a sign that is not applied yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["as_memory"]


def as_memory(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """The operands, each with its values in memory as they are."""
    return {name: _resolved(operand) for name, operand in operands.items()}


def _resolved(operand: Any) -> Any:
    if isinstance(operand, Tensor):
        return operand.resolve_neg() if operand.is_neg() else operand
    return operand.with_values(operand.values.resolve_neg()) if operand.values.is_neg() else operand
