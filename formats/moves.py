"""The methods by which torch tensors are moved and cast, for formats and sparse tensors: each of them is a `to`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Moves", "Target", "destination", "pinned"]

Target = torch.device | torch.dtype | str | int | Tensor | None

Movable = TypeVar("Movable", bound="Moves")


def destination(
    target: Target, dtype: torch.dtype | None
) -> tuple[torch.device | str | int | None, torch.dtype | None]:
    """Return the device and the dtype that a `to` is given: its first argument may be either, or a tensor of both."""
    if isinstance(target, torch.dtype):
        return None, target
    if isinstance(target, Tensor):
        return target.device, target.dtype
    return target, dtype


def pinned(tensor: Tensor) -> Tensor:
    """Return a tensor in pinned memory; refuse it where there is nothing to pin it for."""
    if not torch.accelerator.is_available():
        raise RuntimeError(
            "memory is pinned for copies to an accelerator, but torch finds none here; leave pin_memory out, or ask "
            "torch.accelerator.is_available() first"
        )
    return tensor.pin_memory()


class Moves:
    """The names that torch has for single moves and casts, over the `to` of the class that has this base.

    Example:
        >>> import torch
        >>> from insum_ops.formats import COO
        >>> COO.from_dense(torch.eye(2)).half().cpu().dtype
        torch.float16
    """

    to: Any

    def cuda(self: Movable, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Movable:
        """Return the object on a GPU, as `to("cuda")` does.

        Args:
            device: which GPU; None for the current one.
            non_blocking: whether to copy without waiting, as `Tensor.to` does.

        Returns:
            The object itself if it is there, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> A = COO.from_dense(torch.eye(2))
            >>> moved = A.cuda() if torch.cuda.is_available() else A
        """
        place = "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        return self.to(place, non_blocking=non_blocking)  # type: ignore[no-any-return]

    def cpu(self: Movable) -> Movable:
        """Return the object in the host's memory, as `to("cpu")` does.

        Returns:
            The object itself if it is there, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).cpu().device
            device(type='cpu')
        """
        return self.to("cpu")  # type: ignore[no-any-return]

    def half(self: Movable) -> Movable:
        """Return the object with float16 values, as `to(torch.float16)` does.

        Returns:
            The object itself if its values are so, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).half().dtype
            torch.float16
        """
        return self.to(torch.float16)  # type: ignore[no-any-return]

    def bfloat16(self: Movable) -> Movable:
        """Return the object with bfloat16 values, as `to(torch.bfloat16)` does.

        Returns:
            The object itself if its values are so, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).bfloat16().dtype
            torch.bfloat16
        """
        return self.to(torch.bfloat16)  # type: ignore[no-any-return]

    def float(self: Movable) -> Movable:
        """Return the object with float32 values, as `to(torch.float32)` does.

        Returns:
            The object itself if its values are so, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).float().dtype
            torch.float32
        """
        return self.to(torch.float32)  # type: ignore[no-any-return]

    def double(self: Movable) -> Movable:
        """Return the object with float64 values, as `to(torch.float64)` does.

        Returns:
            The object itself if its values are so, otherwise another one.

        Example:
            >>> import torch
            >>> from insum_ops.formats import COO
            >>> COO.from_dense(torch.eye(2)).double().dtype
            torch.float64
        """
        return self.to(torch.float64)  # type: ignore[no-any-return]
