"""What is measured: one case with the value it must give, and one provider's way to compute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

try:
    from triton.errors import TritonError
except ImportError:  # it has no build for every system
    TritonError = RuntimeError

__all__ = [
    "DEVICE",
    "LIMIT",
    "LIMIT_TF32",
    "OURS",
    "PEER_FAILURES",
    "TF32",
    "Call",
    "Case",
    "forget",
    "held",
    "in_tf32",
    "is_ours",
    "is_tf32",
    "on",
    "ours_beside",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "insum_ops"  # a variant of ours is called so too, with more after it: insum_ops tf32
TF32 = " tf32"  # ends the name of a provider, ours or a peer, that may round float32 factors to it
# the largest relative error, by norm, of a result that gets a time; float16: sums meet in it, as torch's flag allows
LIMIT = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
LIMIT_TF32 = 3e-3
# how a peer breaks, when it is imported or called: a library of its own is missing, a kernel doesn't compile
PEER_FAILURES: tuple[type[Exception], ...] = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError),
    *(ArithmeticError, ImportError, OSError, MemoryError, TritonError),
)

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One workload: what every provider computes, and what its result must be."""

    experiment: str
    name: str
    expected: Tensor | tuple[Tensor, ...] | None = None  # in float64; None: there is no value to check, only a time
    limit: float | tuple[float, ...] = LIMIT[torch.float32]  # of all that is expected, or of one after another
    x: float | None = None  # where the case lies on the axis of its experiment's curve
    flops: float = 0.0  # useful ones
    traffic: float = 0.0  # bytes that any implementation must read or write
    facts: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """How one provider computes a case; whatever it prepares is done, and what it tunes is tuned."""

    run: Callable[[], object]
    result: Callable[[], Tensor | tuple[Tensor, ...]] | None = None  # what is checked, if not what `run` returns
    is_capturable: bool = True  # in a CUDA graph
    limit: float | None = None  # of its own precision, if not the case's
    facts: Mapping[str, float | int | str] = field(default_factory=dict)


def is_ours(provider: str) -> bool:
    return provider.startswith(OURS)


def is_tf32(provider: str) -> bool:
    return provider.endswith(TF32)


def in_tf32(provider: str) -> str:
    """The name of the same provider where tf32 is allowed."""
    return provider + TF32


def ours_beside(provider: str) -> str:
    """Which of ours a provider is timed in turns with: the one that is allowed the same precision."""
    return in_tf32(OURS) if is_tf32(provider) else OURS


def on(gpu: T, cpu: T) -> T:
    """The size for a GPU, or the small one for a CPU."""
    return gpu if DEVICE == "cuda" else cpu


_caches: list[Callable[[], None]] = []


def held(make: Callable[..., T]) -> Callable[..., T]:
    """Keep the operands of the last case, which its next provider shares, until the module's end."""
    kept = lru_cache(maxsize=1)(make)
    _caches.append(kept.cache_clear)
    return kept


def forget() -> None:
    for clear in _caches:
        clear()
