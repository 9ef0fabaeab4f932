"""What torch's profiler sees of a call."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["sorts"]


def sorts(call: Callable[[], object]) -> int:
    """Return how often torch sorts in a call: what a pattern or a kernel map that is read anew needs on a CPU."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return sum(event.name in ("aten::sort", "aten::argsort") for event in profile.function_events)
