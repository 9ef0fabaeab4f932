"""Whether calls may be timed, and how many ways to run them are: by the environment, and by what torch is doing."""

from __future__ import annotations

import os

import torch

from ...formats.torch_state import INTERPRETED, is_captured
from ..language import SettingError

__all__ = ["is_tuning_on", "may_be_timed", "tuning_mode"]

MODES = ("default", "full", "off")


def tuning_mode() -> str:
    """Return INSUM_TUNE: `default` times a handful of configs, `full` a grid of them, `off` none.

    Raises SettingError for any other value.
    """
    mode = os.environ.get("INSUM_TUNE", "default")
    if mode not in MODES:
        raise SettingError(f"INSUM_TUNE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def is_tuning_on() -> bool:
    """Return whether measured times decide between kernels: not if they are interpreted, whose times say nothing."""
    return not INTERPRETED and tuning_mode() != "off"


def may_be_timed(device: torch.device) -> bool:
    """Return whether calls on a device may be timed now: not while a CUDA graph is captured."""
    return is_tuning_on() and not is_captured(device)
