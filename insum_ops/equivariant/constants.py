"""Tensors that never change from call to call, and their copies in each device's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compiler import outside_transforms
from ..formats import ELL
from ..formats.guard import may_keep
from ..formats.torch_state import HALF

__all__ = ["Constants", "Memory", "cast_from", "format_on"]


class Memory(dict[Any, Any]):
    """A cache that is empty in a copy and in a pickle, since its entries can be computed again."""

    def __reduce__(self) -> Any:
        return Memory, ()


def cast_from(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return a dtype and those that autocast casts it to.

    Copies are made for all of them at once: a tracer that needs one can't make it.
    """
    return (dtype, *HALF) if dtype == torch.float32 else (dtype,)


@dataclass(frozen=True)
class Constants:
    """Tensors that never change, kept in float64, and their copies on each device and of each dtype, made once."""

    tensors: dict[str, Tensor]
    copies: dict[tuple[torch.device, torch.dtype | None], dict[str, Tensor]] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors on a device, those of floating point in a dtype; None for the dtype that they have."""
        copy = self.copies.get((device, dtype))
        if copy is None:
            with outside_transforms():
                copy = {
                    name: tensor.to(device, dtype if tensor.is_floating_point() else None)
                    for name, tensor in self.tensors.items()
                }
            if may_keep(*copy.values()):
                self.copies[device, dtype] = copy
        return copy


def format_on(
    device: torch.device, dtype: torch.dtype, form: ELL, copies: dict[tuple[torch.device, torch.dtype], ELL]
) -> ELL:
    """Return a format on a device. The copy is made once and kept in `copies`, unless torch traces the call."""
    copy = copies.get((device, dtype))
    if copy is None:
        with outside_transforms():
            copy = form.to(device, dtype)
        if may_keep(copy.values, *copy.coords):
            copies[device, dtype] = copy
    return copy
