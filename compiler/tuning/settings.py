"""Settings of tuning, read from the environment."""

from __future__ import annotations

import os

from ..language import SettingError

__all__ = ["tuning_mode"]

MODES = ("default", "full", "off")


def tuning_mode() -> str:
    """Return INSUM_TUNE: `default` times a handful of configs, `full` a grid of them, `off` none.

    Raises SettingError for any other value.
    """
    mode = os.environ.get("INSUM_TUNE", "default")
    if mode not in MODES:
        raise SettingError(f"INSUM_TUNE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode
