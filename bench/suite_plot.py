"""The suite of statements in one figure for each pass: a line for each family, with every case's speed and share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from .case import OURS
from .drawing import LOSES, SMALL, TALLEST, Plot, colour, literal, logarithmic, one
from .harness import geomean
from .results import Run, better, is_positive

__all__ = ["suite_plots"]

EXPERIMENT = "statements"
LINE = 0.19  # inches: a family


class Standing(NamedTuple):
    """How many times ours is as fast as the best other on one case, and which part of our time the floor is."""

    ratio: float
    share: float | None


def suite_plots(run: Run, title: str) -> Iterator[Plot]:
    """One figure for each pass: speed beside the best other, and share of the floor, of every case by its family."""
    for series in dict.fromkeys(row.series for row in run.of(EXPERIMENT)):
        found = _standings(run, series)
        if found:
            yield _plot(found, series, title)


def _standings(run: Run, series: str) -> dict[str, list[Standing]]:
    """Every case of a pass beside the best other, by its family."""
    found: dict[str, list[Standing]] = {}
    for case in run.cases(EXPERIMENT):
        ours = case.get(OURS)
        if ours is None or ours.series != series:
            continue
        others = [better(ours, row) for name, row in case.items() if name != OURS and row.is_comparable(ours)]
        if not others:
            continue
        floor = ours.facts.get("floor_ms")
        share = floor / ours.value if isinstance(floor, float) and is_positive(floor) else None
        found.setdefault(ours.case.split(", ")[0], []).append(Standing(min(others), share))
    return found


def _plot(found: Mapping[str, Sequence[Standing]], series: str, title: str) -> Plot:
    every = [each for group in found.values() for each in group]
    shares = [each.share for each in every if each.share is not None]

    def draw(figure: Figure) -> None:
        speed, floor = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        logarithmic(speed.xaxis)
        for number, group in enumerate(found.values()):
            for ratio, share in group:
                shade = LOSES if ratio < 1 else colour(OURS, [OURS])
                speed.plot(ratio, number, "o", ms=4, alpha=0.6, mew=0, color=shade)
                if share is not None:
                    floor.plot(min(share, 1), number, "o", ms=4, alpha=0.6, mew=0, color=colour(OURS, [OURS]))
        one(speed, vertical=True)
        speed.set_xlabel("times as fast\nas the best other", fontsize=SMALL)
        floor.set_xlabel("share of\nthe floor", fontsize=SMALL)
        floor.set_xlim(0, 1.05)
        floor.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        speed.set_ylim(len(found) - 0.4, -0.6)
        speed.set_yticks(range(len(found)), [literal(family) for family in found])
        for axes in (speed, floor):
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            axes.grid(axis="x", alpha=0.5)

    ratios = [each.ratio for each in every]
    behind = sum(ratio < 1 for ratio in ratios)
    caption = (
        f"{len(ratios)} cases: {geomean(ratios):.2f} times as fast as the best of torch, torch.compile and torch's own "
        f"routine, as geometric mean; {behind} are slower (red), the least at {min(ratios):.2f}."
    )
    if shares:
        caption += f" Share of the floor: {geomean(shares):.2f} as geometric mean."
    height = min(0.75 + LINE * len(found), TALLEST)
    return Plot(f"statements-{series}", EXPERIMENT, f"{title}, {series}", caption, height, draw)
