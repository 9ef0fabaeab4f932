"""What this machine can do at most, measured in the same run; how long a workload takes at least."""

from __future__ import annotations

import importlib
import json
from dataclasses import astuple, dataclass
from functools import cache

import torch

from .case import DEVICE, on
from .device_lock import device_lock
from .harness import device_ms, queued_in_turns, wall_in_turns
from .workload import Work

__all__ = ["Roofs", "floor_ms", "roofs"]

COPIED = on(2**30, 2**26)  # bytes of a tensor that is copied: no cache holds it
CACHED = on(2**24, 2**18)  # of one that a cache holds
PROGRAMS, ROUNDS, BLOCK = 132 * 16, 256, 4096
SIDE = on(8192, 96)


@dataclass(frozen=True)
class Roofs:
    """Bytes and operations in a millisecond, and the milliseconds of a launch that does nothing."""

    copied: float
    cached: float
    flops: float
    launch: float


@cache
def roofs(dtype: torch.dtype) -> Roofs:
    """Measure a copy, reads from L2 (a copy in cache on a CPU), a dense product in this dtype and an empty launch."""
    # of several processes that share the GPU the first measures, for all: what is told of one run has one floor
    path = device_lock.path and device_lock.path.with_name(f"{device_lock.path.name}-roof-{str(dtype)[6:]}")
    if path is not None and path.exists():
        return Roofs(*json.loads(path.read_text(encoding="utf-8")))
    found = Roofs(*_memory(), _flops(dtype), _launch())
    if path is not None:
        path.write_text(json.dumps(astuple(found)), encoding="utf-8")
    return found


@cache
def _memory() -> tuple[float, float]:
    source = torch.ones(COPIED // 4, device=DEVICE)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)
    if DEVICE == "cuda":
        return 2 * COPIED / queued_in_turns([copy], calls=4)[0].median, _l2()
    small = torch.ones(CACHED // 4)
    kept = torch.empty_like(small)
    slow, fast = wall_in_turns([copy, lambda: kept.copy_(small)])
    return 2 * COPIED / slow.median, 2 * CACHED / fast.median


def _l2() -> float:
    kernel = importlib.import_module("bench.l2_kernel").read_again
    source, sums = torch.ones(CACHED // 4, device=DEVICE), torch.empty(PROGRAMS, device=DEVICE)
    run = lambda: kernel[(PROGRAMS,)](source, sums, source.numel(), ROUNDS=ROUNDS, BLOCK=BLOCK, num_warps=8)
    return 4.0 * PROGRAMS * ROUNDS * BLOCK / device_ms(run)


@cache
def _flops(dtype: torch.dtype) -> float:
    A, B = (torch.randn(SIDE, SIDE, device=DEVICE).to(dtype) for _ in range(2))
    multiply = lambda: A @ B
    spent = device_ms(multiply, calls=2, replays=5) if DEVICE == "cuda" else wall_in_turns([multiply])[0].median
    return 2.0 * SIDE**3 / spent


@cache
def _launch() -> float:
    one = torch.zeros(1, device=DEVICE)
    run = lambda: one.add_(1)
    return device_ms(run) if DEVICE == "cuda" else wall_in_turns([run])[0].median


def floor_ms(work: Work, machine: Roofs) -> float:
    """The most of four times: of distinct bytes, of gathered bytes, of operations, and of a launch.

    >>> floor_ms(Work(8.0, 4.0, 2.0), Roofs(2.0, 4.0, 1.0, 0.5))
    4.0
    """
    bounds = work.distinct / machine.copied, work.gathered / machine.cached, work.flops / machine.flops
    return max(*bounds, machine.launch)
