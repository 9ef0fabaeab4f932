"""What torch and the environment say about how statements run."""

from __future__ import annotations

import os
from functools import partial

import torch

from .errors import SettingError

__all__ = ["rounds_float32", "tuning_mode"]

MODES = ("default", "full", "off")

# torch's word for products of float32 matrices on a GPU: `none` and `ieee` for full precision, `tf32`. It follows the
# older setting too, whose own function raises once the newer one was used. Asked at every call.
_getter = getattr(torch._C, "_get_fp32_precision_getter", None)
_float32 = partial(_getter, "cuda", "matmul") if _getter is not None else torch.get_float32_matmul_precision


def rounds_float32() -> bool:
    """Products of float32 may be rounded to tf32."""
    return _float32() not in ("none", "ieee", "highest")


def tuning_mode() -> str:
    """INSUM_TUNE: `default` times a handful of configs, `full` a grid of them, `off` none."""
    mode = os.environ.get("INSUM_TUNE", "default")
    if mode not in MODES:
        raise SettingError(f"INSUM_TUNE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode
