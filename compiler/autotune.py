"""Which strategy, schedule and config runs a statement fastest: time a few on scratch outputs and remember the best."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor
from tqdm import tqdm

from .bind import Bound
from .cache import Entry, Key, TuningCache, bucket
from .codegen import CODEGEN_VERSION, Config, Flags, emit
from .configs import configs
from .errors import UnsupportedError
from .launch import INTERPRETED, Launcher, launcher
from .schedule import Schedule, Strides, schedules, strategies

__all__ = ["Candidate", "Problem", "Timing", "candidates", "choose", "time_all", "tuning_mode"]


def tuning_mode() -> str:
    """INSUM_TUNE: `default` times a handful of configs, `full` a grid of them, `off` none."""
    mode = os.environ.get("INSUM_TUNE", "default")
    if mode not in ("default", "full", "off"):
        raise UnsupportedError(f"INSUM_TUNE is {mode!r}; it must be one of default, full, off")
    return mode


@dataclass(frozen=True)
class Problem:
    """Everything that decides which kernel is best, and the tensors to time it on."""

    bound: Bound
    strides: Strides
    names: tuple[str, ...]
    fact: str
    flags: Flags
    deterministic: bool

    def launcher(self, candidate: Candidate) -> Launcher:
        kernel = emit(candidate.schedule, self.strides, candidate.config, self.flags)
        sum_dtype = self.flags.sum_dtype or self.bound.dtype
        return launcher(self.bound, candidate.schedule, kernel, self.strides, self.names, sum_dtype)


@dataclass(frozen=True)
class Candidate:
    """One way to run a statement."""

    schedule: Schedule
    config: Config

    def __str__(self) -> str:
        product = "dot" if self.schedule.uses_dot else "fma"
        return f"{self.schedule.strategy} {product} {self.config}"


@dataclass(frozen=True)
class Timing:
    """A candidate and its time; None: it did not compile or does not fit the GPU."""

    candidate: Candidate
    milliseconds: float | None


def candidates(problem: Problem, full: bool = False) -> tuple[Candidate, ...]:
    """Ways to run the problem, the most promising first."""
    ways = [
        [Candidate(schedule, config) for config in configs(schedule, full)]
        for strategy in strategies(problem.bound, problem.fact, problem.deterministic)
        for schedule in schedules(problem.bound, problem.strides, strategy, problem.fact, problem.deterministic)
    ]
    return tuple(candidate for way in ways for candidate in way)


def choose(problem: Problem, tensors: Sequence[Tensor], facts: Sequence[Tensor]) -> Launcher:
    """The best launcher known for a problem, measured now if need be and allowed."""
    ways = candidates(problem)
    return problem.launcher(ways[0])
