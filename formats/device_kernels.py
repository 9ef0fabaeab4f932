"""Where index tensors are built by fixed Triton kernels; elsewhere torch's operations do the same."""

from __future__ import annotations

import torch
from torch import Tensor

from .guard import may_keep
from .torch_state import OLDEST_GPU

try:
    from . import layouts
except ImportError:  # no Triton, not on Linux
    layouts = None  # type: ignore[assignment]

__all__ = ["compiles_for", "layouts", "runs_kernels"]

_young: dict[torch.device, bool] = {}  # not functools.cache, about which a tracer warns


def compiles_for(device: torch.device) -> bool:
    """Return whether Triton compiles for a GPU, asked once for each."""
    if device.type != "cuda" or layouts is None:
        return False
    is_young = _young.get(device)
    if is_young is None:
        is_young = _young[device] = torch.cuda.get_device_capability(device) >= OLDEST_GPU
    return is_young


def runs_kernels(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors: their GPU runs them, and nobody traces or transforms the call."""
    return compiles_for(tensors[0].device) and may_keep(*tensors)
