"""How well the cost model ranks kernels: predicted beside measured times of all candidates of the suite."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from insum_ops.compiler.routes.prepared import prepare
from insum_ops.compiler.tuning import FIRST, tune

from .results import ResultsError
from .suite import SUITE
from .workload import Workload

__all__ = ["correlation", "rank_statements", "table_of"]

FEWEST = 3  # candidates with a time, of which an order says something


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists, where equal numbers share their ranks; nan if one is constant.

    >>> correlation([1, 2, 3, 4], [10, 30, 20, 40])
    0.8
    """
    ranks = [_ranks(numbers) for numbers in (first, second)]
    mean = (len(first) - 1) / 2
    deviations = [[rank - mean for rank in own] for own in ranks]
    spread = [sum(each**2 for each in own) for own in deviations]
    if not all(spread):
        return float("nan")
    return float(round(sum(a * b for a, b in zip(*deviations)) / (spread[0] * spread[1]) ** 0.5, 6))


def _ranks(numbers: Sequence[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(number) + (ordered.count(number) - 1) / 2 for number in numbers]


def rank_statements(target: Path, seed: int, match: str = "") -> list[dict[str, Any]]:
    """Time every candidate of each statement at odd sizes, write predicted and measured times, and return the rows.

    Raises:
        ResultsError: if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ResultsError("ranking kernels needs a GPU that torch can use")
    rows = []
    for workload in SUITE:
        if match in workload.id and workload.as_formats is None and not workload.is_changing:
            rows += list(_rows(workload, seed))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    return rows


def _rows(workload: Workload, seed: int) -> Iterator[dict[str, Any]]:
    given = workload.make(workload.drawn(seed, "odd", "full"), seed, "cuda")
    tensors = list(given.operands.values())
    statement = prepare(workload.expr, ",".join(given.operands), given.size, tensors, None)
    problem = statement.problem(tensors, None)
    if not problem.ways or len(statement.bound.statement.accesses) > 2:  # of more factors all products are too many
        return
    timings, _ = tune(problem, tensors, None)
    pairs = [
        (problem.cost(way.schedule, way.config).milliseconds, timing.milliseconds)
        for timing in timings
        if (way := timing.candidate) and not isinstance(way, str) and timing.milliseconds is not None
    ]
    predicted, measured = ([pair[at] for pair in pairs] for at in (0, 1))
    print(f"{workload.id}: {correlation(predicted, measured):.2f} of {len(pairs)}", file=sys.stderr, flush=True)
    yield {"statement": workload.id, "seed": seed, "predicted": predicted, "measured": measured}


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each statement with enough candidates, and one of their mean.

    `first` is how many times the best the candidate took that was predicted to be the fastest, the last column the
    best of as many as are built at first.
    """
    lines, known = [f"{'statement':32} {'count':>5} {'rank':>6} {'first':>6} {f'of {FIRST}':>6}"], []
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        if len(measured) < FEWEST:
            continue
        by_prediction = [ms for _, ms in sorted(zip(predicted, measured))]
        found = (
            correlation(predicted, measured),
            by_prediction[0] / min(measured),
            min(by_prediction[:FIRST]) / min(measured),
        )
        known.append(found)
        lines.append(f"{row['statement']:32} {len(measured):5} {found[0]:6.2f} {found[1]:6.2f} {found[2]:6.2f}")
    if known:
        lines.append(f"{'mean':32} {len(known):5} " + " ".join(f"{fmean(column):6.2f}" for column in zip(*known)))
    return lines
