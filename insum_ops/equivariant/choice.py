"""The choice between ways to one result: timed once for each size, and remembered as tuned configs are.

Coefficients in a kernel's source save loads of tables, and take registers; tables in memory leave products to tensor
cores. Which is faster depends on the sizes, the precision and the machine, so both are timed. Where nothing may be
timed, the caller's guess holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compiler import (
    INTERPRETED,
    Key,
    bucket,
    choice_key,
    fastest,
    host_milliseconds,
    on_device,
    paused,
    tuning_mode,
)
from ..formats.torch_state import is_capturing, is_deterministic, is_forward_mode, is_watched, uses_tensor_cores

__all__ = ["fastest_way"]


def fastest_way(
    memory: MutableMapping[Any, Any],
    what: tuple[object, ...],
    ways: Sequence[str],
    run: Callable[[str], object],
    tensors: Mapping[str, Tensor],
) -> str:
    """Return the name of the fastest of several ways to the same result of these tensors; the first one is a guess.

    `run` takes one of the names. `memory` keeps the choice by the tensors' lengths, rounded to a power of two; it
    belongs to what has such `ways`, and `what` tells its choices apart. The guess is returned, and not kept, where
    nothing may be timed: without a GPU, while torch traces or transforms the call, or while a graph is captured.
    """
    first = next(iter(tensors.values()))
    if len(ways) == 1 or not _may_time(first):
        return ways[0]
    lengths = tuple([bucket(len(tensor)) for tensor in tensors.values()])
    mark = (*what, first.device, first.dtype, uses_tensor_cores(first.dtype), lengths)
    name: str | None = memory.get(mark)
    if name is None:
        name = memory[mark] = _timed(what, ways, run, tensors)
    return name


def _may_time(tensor: Tensor) -> bool:
    """Whether calls over tensors like this one may be timed now; a result that must not vary is never chosen so."""
    if INTERPRETED or not tensor.is_cuda or is_watched() or is_forward_mode():
        return False
    return not is_deterministic() and tuning_mode() != "off" and not is_capturing()


@torch.inference_mode(False)  # what is made here is kept, and training reads it too
@torch.no_grad()
def _timed(
    what: tuple[object, ...], ways: Sequence[str], run: Callable[[str], object], tensors: Mapping[str, Tensor]
) -> str:
    device = next(iter(tensors.values())).device
    host = host_milliseconds(device, "")
    start: Callable[[str], tuple[Callable[[], object], float]] = lambda name: (partial(run, name), host)
    with on_device(device), paused():  # a launch plan of the caller must not record the timed launches
        return fastest(_key(what, ways, tensors), ways, ways, start)


def _key(what: tuple[object, ...], ways: Sequence[str], tensors: Mapping[str, Tensor]) -> Key:
    """Return the tuning key of a choice: first dimensions vary and count by their power of two, others as they are."""
    first = next(iter(tensors.values()))
    lengths = [
        (f"{name}{at}", length if at else bucket(length))
        for name, tensor in tensors.items()
        for at, length in enumerate(tensor.shape)
    ]
    text = f"{' or '.join(sorted(ways))}: {' '.join(map(str, what))}"
    return choice_key(text, tensors, lengths, f"{first.dtype} {uses_tensor_cores(first.dtype)}", False)
