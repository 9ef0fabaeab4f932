"""Which candidates are built and timed, and when it is enough: most of tuning's time goes into building kernels.

Candidates are built in batches, those first for which the cost model predicts the least. The search ends where what was
found is near the floor of the statement, or where none of the rest is likely to be faster: a prediction counts as many
times as the luckiest of those that were measured, or fewer where they differ much from their predictions, so that a
model that is wrong about a statement ends nothing; and as many as make a first batch are measured, however many can't
run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, log
from statistics import fmean, pstdev

from ...formats.facts import ConstantTables, OwnedRows
from ...formats.torch_state import uses_tensor_cores
from ..planning import device_of
from .cost import NEAR, Cost, floor_milliseconds
from .problem import Candidate, Problem

__all__ = ["BUILDERS", "FIRST", "Search", "next_batch"]

BUILDERS = 8  # threads that compile at once; Triton's passes release the interpreter lock
# Kernels of the first batch. Of 22 statements of the suite at odd sizes the best of the first six by prediction took at
# most 1.02 times the best of all, of the first four 1.16 times (one H200, `python -m bench rank --seed 9`).
FIRST = 6
# Times what another way takes, from which least prediction on it seems lost, and so many kernels say whether it is. The
# least prediction was over 3 times the best measured one in 20 of 556 searches of the suite, of convolutions and of
# their gradients (one H200); groupings of a weight's gradient that lose take 3 to 4 times the best one.
UNLIKELY, PROBES = 3.0, 2
# Times the least prediction, from which on a candidate waits until another was measured: loops that read constant
# tables are predicted to take 4 to 40 times as long as code that holds them.
FAR = 4.0
DEVIATIONS = 2.5  # from the mean of the others, of a candidate that is lucky: one in a hundred
FEW_CORES_BUILD = 8  # kernels at most on a machine of fewer cores than builders


@cache
def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Search:
    """The candidates of a problem and how many milliseconds another route takes; None: all of them are timed."""

    problem: Problem
    ways: tuple[Candidate, ...]
    goal: float | None

    @cached_property
    def costs(self) -> list[Cost]:
        return [self.problem.cost(way.schedule, way.config) for way in self.ways]

    @cached_property
    def predicted(self) -> list[float]:
        """The milliseconds that each candidate is predicted to take."""
        return [cost.milliseconds for cost in self.costs]

    @cached_property
    def order(self) -> list[int]:
        """The candidates by number: the tables' first choice that does not seem to spill, then by prediction."""
        first = next((at for at, cost in enumerate(self.costs) if not cost.spills), 0)
        return sorted(range(len(self.ways)), key=lambda at: (at != first, self.predicted[at]))

    @property
    def is_known(self) -> bool:
        """Whether the model knows all lengths: of rows whose groups one program takes, it has the mean."""
        fact = self.problem.fact
        return fact is None or isinstance(fact, ConstantTables) or (isinstance(fact, OwnedRows) and fact.is_whole)

    @cached_property
    def enough(self) -> float:
        """Milliseconds than which no candidate takes clearly fewer."""
        bound = self.problem.bound
        return floor_milliseconds(bound, device_of(bound.device), uses_tensor_cores(bound.dtype)) / NEAR

    def batch(self, times: Mapping[int, float | None]) -> list[int]:
        """Return the candidates to build next; `times` has those that were built, None for one that can't run."""
        if self.goal is None or not self.is_known:
            return [at for at in range(len(self.ways)) if at not in times]
        batch = next_batch(self.order, self.predicted, times, self.goal, self.enough)
        return batch if times else [*batch, *self._first_of_other_strategies(batch)]

    def _first_of_other_strategies(self, batch: Sequence[int]) -> list[int]:
        """Return the first candidate of each strategy that a first batch has none of, where rows may differ in length.

        A program that has a long row may take many times what is predicted of a mean one, and so may all like it.
        """
        if not isinstance(self.problem.fact, OwnedRows):
            return []
        others = {self.ways[at].schedule.strategy: at for at in reversed(self.order)}
        return [
            at for strategy, at in others.items() if all(self.ways[of].schedule.strategy != strategy for of in batch)
        ]


def next_batch(
    order: Sequence[int],
    predicted: Sequence[float],
    times: Mapping[int, float | None],
    goal: float = 0.0,
    enough: float = 0.0,
) -> list[int]:
    """Return which of several ways to build next, by the milliseconds that each is predicted to take.

    `times` has those that were built, None for one that can't run. Another way takes `goal` milliseconds, if it is not
    0, and none takes clearly fewer than `enough`.
    """
    timed = {at: ms for at, ms in times.items() if ms is not None}
    rest = [at for at in order if at not in times]
    near = FAR * min([predicted[at] for at in order if at in timed or at in rest], default=0.0)
    least = min([predicted[at] for at in order], default=0.0)
    first = PROBES if 0 < goal * UNLIKELY < least else FIRST
    more = [at for at in rest if predicted[at] <= near][: max(0, first - len(timed))]
    if not timed:
        return more
    best = min([*timed.values(), *([goal] if goal else [])])
    most = FEW_CORES_BUILD if _cores() < BUILDERS else len(order)
    luck = _luck([ms / predicted[at] for at, ms in timed.items()])
    hopeful = [at for at in rest if predicted[at] * luck < best]
    return [] if best <= enough else (hopeful or more)[: max(0, min(BUILDERS, most - len(times)))]


def _luck(ratios: Sequence[float]) -> float:
    """Return the least ratio of measured to predicted time that a further candidate may have, by the ratios of others.

    It is the smallest of them, or what lies DEVIATIONS standard deviations below their mean, if that is less.
    A mixture of experts took 2 to 8 times as long as predicted with the first six tiles and as long as predicted with
    the 16th, which was the fastest (bench/cases/test_one_liners.py, one H200).
    """
    logs = [log(ratio) for ratio in ratios]
    return min(min(ratios), exp(fmean(logs) - DEVIATIONS * pstdev(logs)))
