"""Where index tensors are built by fixed Triton kernels; elsewhere torch's operations do the same."""

from __future__ import annotations

import torch
from torch import Tensor

from .guard import may_keep
from .torch_state import OLDEST_GPU

try:
    import triton as _triton
except ImportError:  # not on Linux
    _triton = None

__all__ = ["compiles_for", "runs_kernels"]

_young: dict[torch.device, bool] = {}  # not functools.cache, about which a tracer warns


def compiles_for(device: torch.device) -> bool:
    """Return whether Triton compiles for a GPU, asked once for each."""
    if device.type != "cuda" or _triton is None:
        return False
    is_young = _young.get(device)
    if is_young is None:
        is_young = _young[device] = torch.cuda.get_device_capability(device) >= OLDEST_GPU
    return is_young


def runs_kernels(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors: their GPU runs them, and nobody traces or transforms the call."""
    return compiles_for(tensors[0].device) and may_keep(*tensors)
