"""Where index tensors are built by fixed Triton kernels; elsewhere torch's operations do the same."""

from __future__ import annotations

from .fixed_kernel import compiles_for, runs_kernels

try:
    from . import layouts
except ImportError:  # no Triton, not on Linux
    layouts = None  # type: ignore[assignment]

__all__ = ["compiles_for", "layouts", "runs_kernels"]
