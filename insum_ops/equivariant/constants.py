"""What never changes from call to call, and its copies in each device's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compiler import outside_transforms
from ..formats import ELL
from ..formats.guard import may_keep

__all__ = ["Constants", "Memory", "cast_from", "format_on"]

HALF = (torch.float16, torch.bfloat16)


class Memory(dict[Any, Any]):
    """What can be made again: a copy or a pickle has none of it."""

    def __reduce__(self) -> Any:
        return Memory, ()


def cast_from(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The type and those that autocast makes of it: what a tracer wants has to be there when it comes."""
    return (dtype, *HALF) if dtype == torch.float32 else (dtype,)


@dataclass(frozen=True)
class Constants:
    """Tensors that never change, kept in float64, and their copies on each device and of each dtype, made once."""

    tensors: dict[str, Tensor]
    copies: dict[tuple[torch.device, torch.dtype | None], dict[str, Tensor]] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        found = self.copies.get((device, dtype))
        if found is None:
            with outside_transforms():
                found = {
                    name: tensor.to(device, dtype if tensor.is_floating_point() else None)
                    for name, tensor in self.tensors.items()
                }
            if may_keep(*found.values()):
                self.copies[device, dtype] = found
        return found


def format_on(
    device: torch.device, dtype: torch.dtype, form: ELL, copies: dict[tuple[torch.device, torch.dtype], ELL]
) -> ELL:
    """A format's copy on a device, made once and kept in `copies`."""
    found = copies.get((device, dtype))
    if found is None:
        with outside_transforms():
            found = form.to(device, dtype)
        if may_keep(found.values, *found.coords):
            copies[device, dtype] = found
    return found
