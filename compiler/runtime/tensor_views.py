"""Operands as kernels and tracers take them: cast as autocast asks, with pending signs applied, and no views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats.torch_state import (
    PLAIN,
    as_autocast,
    autocast_dtype,
    is_autocast_enabled,
    is_compiling,
    is_forward_mode,
    may_autocast,
    modes,
    transforms,
)
from ..binding import is_sparse
from .tracing import followed

__all__ = ["as_memory", "as_traced", "cast_operands", "owned", "resolved"]

_without_base = torch.ops.aten._unsafe_view.default


def cast_operands(operands: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the kind of device and the operands in autocast's type, as a matrix product has them.

    None if autocast is not active on their device.
    """
    if not operands or not (is_compiling() or may_autocast()):
        return None
    kind = next(iter(operands.values())).device.type
    if not is_autocast_enabled(kind):
        return None
    dtype = autocast_dtype(kind)
    return kind, {name: _cast(operand, dtype) for name, operand in operands.items()}


def _cast(operand: Any, dtype: torch.dtype) -> Any:
    if not is_sparse(operand):
        return as_autocast(operand, dtype)
    return operand.with_values(operand.values.to(dtype)) if operand.dtype == torch.float32 else operand


def as_traced(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the operands as a tracer follows them."""
    return {
        name: operand.with_values(followed(operand.values)) if is_sparse(operand) else followed(operand)
        for name, operand in operands.items()
    }


def as_memory(operands: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the operands, each with its values in memory as they are."""
    return {name: resolved(operand) for name, operand in operands.items()}


def resolved(operand: Any) -> Any:
    """Return a tensor or a format with its values in memory as they are: without a sign that is still to be applied."""
    if isinstance(operand, Tensor):
        return operand.resolve_neg() if operand.is_neg() else operand
    return operand.with_values(operand.values.resolve_neg()) if operand.values.is_neg() else operand


def owned(result: Tensor) -> Tensor:
    """Return a result as a tensor over the same memory that is no view.

    A caller could not change a view in place that an autograd function made, and forward mode would look for the
    tangent of its base.
    """
    if result._base is None or is_compiling():
        return result
    if not (result.requires_grad or modes() or transforms() is not None or is_forward_mode()) and type(result) in PLAIN:
        return result.data  # of a tensor in memory, of which nothing is recorded: a tenth of the cost of the operator
    return _without_base(result, result.shape)  # type: ignore[no-any-return]
