"""The suite of statements in README's and the documentation's words: what it comes to, by family, and what loses."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .case import OURS
from .harness import geomean
from .results import Run
from .statement_times import TORCH
from .suite_times import BEHIND, PASSES, Measured, measured_of

__all__ = ["suite_lines", "suite_rows"]

NEAR = 0.85  # of the floor: a best other below that leaves something to win
NONE = "Not measured yet: `bench/README.md` has the command."


def suite_lines(run: Run) -> str:
    """How many statements, at which sizes, and for each pass how they stand beside the best other and the floor."""
    found = _timed(run)
    if not found:
        return NONE
    families = {each.workload.family for each in found}
    statements = {each.workload.id for each in found}
    sets = ", ".join(sorted({each.sizes for each in found}))
    seeds = sorted({each.seed for each in found})
    drawn = f"seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
    head = (
        f"{len(statements)} statements of {len(families)} families, written down before any work on their speed, at "
        f"sizes drawn from {drawn} (sets: {sets}), beside the best of plain torch, `torch.compile` "
        "(`max-autotune-no-cudagraphs`) and torch's routine for the purpose. Device times; with an index that is new "
        "at each call, and beside what can't be captured in a CUDA graph, times of calls. "
        "The floor is what the machine's memory, cache and arithmetic need at least."
    )
    room_title = f"where the best other is below {NEAR} of the floor"
    titles = "pass", "cases", "times as fast as the best other", "median", "least", f"below {BEHIND}x", room_title
    table = [_line([*titles, "share of the floor"]), _line(["---"] * (len(titles) + 1))]
    for pass_ in PASSES:
        own = [each for each in found if each.pass_ == pass_]
        if own:
            ratios = [each.ratio for each in own]
            open_ = [each.ratio for each in own if each.floor_ms / each.best_other < NEAR]
            behind = sum(ratio < BEHIND for ratio in ratios)
            room = f"{geomean(open_):.2f}x ({len(open_)})" if open_ else ""
            share = geomean([each.share for each in own])
            times = f"**{geomean(ratios):.2f}x**", f"{median(ratios):.2f}x", f"{min(ratios):.2f}x"
            table.append(_line([pass_, len(own), *times, behind, room, f"{share:.2f}"]))
    return "\n".join([head, "", *table])


def suite_rows(run: Run) -> str:
    """A line for each family, and one for each case in which another is faster."""
    found = _timed(run)
    if not found:
        return NONE
    table = [_line(["family", *(f"{pass_}: cases, mean, least, floor" for pass_ in PASSES)]), _line(["---"] * 3)]
    for family in dict.fromkeys(each.workload.family for each in found):
        cells = [family]
        for pass_ in PASSES:
            own = [each for each in found if (each.workload.family, each.pass_) == (family, pass_)]
            cells.append(_standing(own) if own else "")
        table.append(_line(cells))
    slower = sorted((each for each in found if each.ratio < 1), key=lambda each: each.ratio)
    if not slower:
        return "\n".join(table)
    losing = [
        _line(["where others win", "sizes", "ours, ms", "best other, ms", "times as fast", "share of the floor"]),
        _line(["---"] * 6),
    ]
    for each in slower:
        name = "plain torch" if each.rival == TORCH else each.rival
        words = " ".join(f"{size}={extent}" for size, extent in each.extents.items())
        what = f"{each.workload.family}, {each.workload.name}, {each.pass_}"
        times = f"{each.ms[OURS]:.4g}", f"{each.best_other:.4g} ({name})"
        losing.append(_line([what, words, *times, f"{each.ratio:.2f}x", f"{each.share:.2f}"]))
    return "\n".join([*table, "", *losing])


def _timed(run: Run) -> list[Measured]:
    """The cases that have a time of ours and one of another."""
    return [each for each in measured_of(run) if each.ratio > 0 and not each.is_of_host]


def _standing(own: Sequence[Measured]) -> str:
    ratios = [each.ratio for each in own]
    return f"{len(own)}, {geomean(ratios):.2f}x, {min(ratios):.2f}x, {geomean([each.share for each in own]):.2f}"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
