"""Times of the twenty statements on a GPU: ours, plain torch and torch.compile, each checked and then timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from insum_ops import explain, insum

from .case import LIMIT, OURS, PEER_FAILURES
from .harness import Times, check, device_times, enough, queued_in_turns
from .machine import machine, slug
from .results import ResultsError
from .statements import EXAMPLES, Draw, Example, Given

__all__ = ["COMPILED", "PROVIDERS", "STORED", "TORCH", "calls", "stored_times", "time_statements", "timed"]

TORCH, COMPILED = "torch", "torch.compile"
PROVIDERS = (OURS, TORCH, COMPILED)
STORED = Path(__file__).parent / "results" / "statements"  # a file for each kind of machine
SECONDS = 210.0  # after which no statement begins
COMMIT = "INSUM_BENCH_COMMIT"  # names the commit where the code is a copy without its history


def time_statements(target: Path | None = None, seconds: float = SECONDS, is_small: bool = False) -> Path:
    """Time every statement on this GPU and write one JSON file; its path, by default `STORED/MACHINE.json`.

    The file is written anew after each statement, so that what was measured is kept whatever happens later.

    Raises:
        ResultsError: if there is no GPU.
        AssertionError: if a result of ours is wrong.
    """
    if not torch.cuda.is_available():
        raise ResultsError("timing the statements needs a GPU that torch can use")
    begin, rows, facts = perf_counter(), [], machine()
    target = target or STORED / f"{slug(facts)}.json"
    head = {"machine": facts, "date": datetime.now(timezone.utc).date().isoformat(), "commit": _commit()}
    for example in EXAMPLES:
        if perf_counter() - begin > seconds:
            print(f"{example.name}: left out, {seconds:g} seconds are over", file=sys.stderr)
            continue
        try:
            for row in _rows(example, is_small):
                rows.append(row)
                what = f"{row['device_ms']:.4f} ms" if "device_ms" in row else row["failure"]
                print(f"{perf_counter() - begin:6.1f} s  {example.name}: {row['provider']} {what}", flush=True)
        except ImportError as error:  # e3nn, of which one of them has its coefficients, is an extra
            print(f"{example.name}: left out: {error}", file=sys.stderr)
        _write(target, {**head, "rows": rows})
        torch.cuda.empty_cache()
    return target


def _rows(example: Example, is_small: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    given = example.make(Draw("cuda", is_small))
    expected = example.plain(*tree_map(_double, given.arguments))
    for provider, call in calls(example, given).items():
        row: dict[str, Any] = {"statement": example.name, "provider": provider}
        try:
            row["error"] = check(call(), expected, LIMIT[example.dtype])
            row |= timed(call)
        except PEER_FAILURES as error:
            if provider == OURS:
                raise
            row["failure"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        if provider == OURS:
            row |= _chosen(example, given)
        yield row


def calls(example: Example, given: Given) -> dict[str, Callable[[], Tensor]]:
    """How each provider computes a statement, by its name."""
    eager, arguments = example.eager or example.plain, given.arguments
    own = given.arguments if given.eager_arguments is None or example.eager is None else given.eager_arguments
    compiled = torch.compile(example.plain, dynamic=False)
    return {
        OURS: lambda: insum(example.expr, size=given.size, **given.operands),
        TORCH: lambda: eager(*own),
        COMPILED: lambda: compiled(*arguments),
    }


def _double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def timed(call: Callable[[], Tensor]) -> dict[str, Any]:
    """The device time of a call by CUDA-graph replay; of one that can't be captured, among queued calls."""
    count, rounds = enough(queued_in_turns([call], calls=1, rounds=3, warm=1)[0].median)
    try:
        times, timing = device_times(call, count, rounds, warm=1), "graph"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        times, timing = queued_in_turns([call], count, rounds, warm=1)[0], "queue"
    return {**_milliseconds(times), "timing": timing}


def _milliseconds(times: Times) -> dict[str, float]:
    names = {"device_ms": times.median, "p20": times.p20, "p80": times.p80}
    return {name: float(f"{value:.5g}") for name, value in names.items()}


def _chosen(example: Example, given: Given) -> dict[str, str]:
    """What tuning has chosen for the kernel that was timed."""
    found = explain(example.expr, size=given.size, **given.operands)
    if found.schedule is None:
        return {"route": found.route}
    return {"scatter": found.schedule.strategy, "config": str(found.config), "tuned": "yes" if found.is_tuned else "no"}


def _commit() -> str:
    if COMMIT in os.environ:
        return os.environ[COMMIT][:7]
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip()[:7] if answer.returncode == 0 else "unknown"


def _write(target: Path, data: Mapping[str, Any]) -> None:
    lines = ",\n".join(json.dumps(row) for row in data["rows"])
    head = json.dumps({**data, "rows": []})
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    unfinished.write_text(head.replace('"rows": []', f'"rows": [\n{lines}\n]') + "\n", encoding="utf-8")
    unfinished.replace(target)


def stored_times(path: Path) -> dict[str, Any]:
    """Read a file of `time_statements`.

    Raises:
        ResultsError: if it is no such file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            row["statement"], row["provider"]
            if "device_ms" in row and not float(row["device_ms"]) > 0:
                raise ValueError(f"{row['statement']}, {row['provider']} took {row['device_ms']} ms")
        data["machine"]["gpu"], data["date"], data["commit"]
    except OSError as error:
        raise ResultsError(f"{path} can't be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} holds no times of statements: {error}") from None
    return dict(data)
