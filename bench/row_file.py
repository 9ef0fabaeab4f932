"""Rows on disk as soon as they are measured, of however many processes: what a run that is cut short has, is kept.

A line of JSON for each: `head` says what machine and commit it was, once for each process; `row` is one of a results
file; `left_out` names a row that a peer has not, and why; `spent` has the seconds of a case by stage.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROWS", "SUFFIX", "append", "as_results", "commit_of", "finished", "lines", "rows_path", "time_table"]

ROWS = "INSUM_BENCH_ROWS"  # the file; rows that it has are not measured again
SUFFIX = ".jsonl"
# stages without the GPU in hand
WITHOUT = ("waiting", "warming up", "building", "torch.compile", "reading")


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, whole whatever other processes add at the same time."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; one that was cut off at the end is no line."""
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield json.loads(line)


def finished(path: Path) -> set[str]:
    """The names of rows that were measured, or that a peer has not."""
    known = lines(path) if path.exists() else iter(())
    return {line["row"]["fullname"] if "row" in line else line["left_out"] for line in known if _is_row(line)}


def _is_row(line: Mapping[str, Any]) -> bool:
    return "row" in line or "left_out" in line


def as_results(path: Path) -> dict[str, Any]:
    """What a results file would hold of it; a row that was measured twice is the later one, and each has its commit."""
    head: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for line in lines(path):
        head |= line.get("head", {})
        if "row" in line:
            row = line["row"]
            info = {"commit": commit_of(head), **row["extra_info"]} if head else row["extra_info"]
            rows[row["fullname"]] = {**row, "extra_info": info}
    return {**head, "benchmarks": list(rows.values())}


def commit_of(data: Mapping[str, Any]) -> str:
    """The commit that a results file is of, in short."""
    known = data["commit_info"]
    return str(known.get("id") or "unknown")[:7] + (", changed" if known.get("dirty") else "")


def time_table(path: Path) -> list[str]:
    """How long the GPU was waited for and used, by stage, and the cases that took most of it."""
    stages: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for line in lines(path) if path.suffix == SUFFIX else ():
        for stage, seconds in line.get("spent", {}).items():
            stages[stage] += seconds
            cases[line["of"]] += seconds * (stage not in WITHOUT)
    if not cases:
        return []
    found = [f"seconds of all processes: {', '.join(f'{stage} {spent:.0f}' for stage, spent in stages.most_common())}"]
    longest = ", ".join(f"{name.rpartition('::')[2]} {spent:.1f}" for name, spent in cases.most_common(12))
    return [*found, f"of the GPU {sum(cases.values()):.0f}, most by: {longest}"]


def rows_path() -> Path | None:
    """Where rows are to be added, if anywhere; ValueError if its name is not that of a file of rows."""
    path = Path(os.environ[ROWS]) if os.environ.get(ROWS) else None
    if path is not None and path.suffix != SUFFIX:
        raise ValueError(f"{ROWS} is {str(path)!r}, but a file of rows has a name that ends in {SUFFIX}")
    return path
