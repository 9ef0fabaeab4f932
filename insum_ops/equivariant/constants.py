"""Tensors that never change from call to call, and their copies in each device's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..compiler import outside_transforms
from ..formats.guard import may_keep
from ..formats.torch_state import HALF

__all__ = ["Constants", "Memory", "copy_on"]

T = TypeVar("T")


class Memory(dict[Any, Any]):
    """A cache that is empty in a copy and in a pickle, since its entries can be computed again."""

    def __reduce__(self) -> Any:
        return Memory, ()


def copy_on(
    copies: dict[tuple[torch.device, Any], T],
    device: torch.device,
    dtype: torch.dtype | None,
    copied: Callable[[torch.device, Any], T],
) -> T:
    """Return what `copied` makes for a device and a dtype, once: `copies` keep it unless torch traces the call.

    With it come those for what autocast casts the dtype to: a tracer that needs one can't make it.
    """
    copy = copies.get((device, dtype))
    if copy is None:
        with outside_transforms():
            copy = copied(device, dtype)
        if may_keep():
            copy = copies.setdefault((device, dtype), copy)
            for cast_dtype in HALF if dtype == torch.float32 else ():
                copy_on(copies, device, cast_dtype, copied)
    return copy


@dataclass(frozen=True)
class Constants:
    """Tensors that never change, kept in float64, and their copies on each device and of each dtype, made once."""

    tensors: dict[str, Tensor]
    copies: dict[tuple[torch.device, torch.dtype | None], dict[str, Tensor]] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tensors on a device, those of floating point in a dtype; None for the dtype that they have."""
        return self.copies.get((device, dtype)) or copy_on(self.copies, device, dtype, self.copied)

    def copied(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the tensors on a device, copied there now."""
        return {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
