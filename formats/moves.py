"""The methods by which torch tensors are moved and cast, for formats: each of them is a `to`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

import torch

__all__ = ["Moves"]

Movable = TypeVar("Movable", bound="Moves")


class Moves:
    """The names that torch has for single moves and casts, over `to`."""

    @abstractmethod
    def to(
        self: Movable, device: Any = None, dtype: torch.dtype | None = None, *, non_blocking: bool = False
    ) -> Movable:
        """Return the object on another device, or of another dtype."""

    def cuda(self: Movable, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Movable:
        """Return the object on a GPU, as `to("cuda")` does; `device` is which one."""
        place = "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        return self.to(place, non_blocking=non_blocking)

    def cpu(self: Movable) -> Movable:
        """Return the object in the host's memory, as `to("cpu")` does."""
        return self.to("cpu")

    def half(self: Movable) -> Movable:
        """Return the object with float16 values, as `to(torch.float16)` does."""
        return self.to(torch.float16)

    def bfloat16(self: Movable) -> Movable:
        """Return the object with bfloat16 values, as `to(torch.bfloat16)` does."""
        return self.to(torch.bfloat16)

    def float(self: Movable) -> Movable:
        """Return the object with float32 values, as `to(torch.float32)` does."""
        return self.to(torch.float32)

    def double(self: Movable) -> Movable:
        """Return the object with float64 values, as `to(torch.float64)` does."""
        return self.to(torch.float64)
