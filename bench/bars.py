"""Speed-ups as bars, or dots where there are many: right of 1 ours is faster; a halving is as long as a doubling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure

from .case import OURS
from .drawing import LEGEND_LINE, LOSES, SMALL, TALLEST, Plot, colour, literal, logarithmic, one
from .harness import geomean
from .results import Row, Run

__all__ = ["bars", "slug"]

MOST = 60  # comparisons in one figure
MOST_BARS = 26  # more of them are drawn as dots, a line for each input
MOST_LINES = 14  # of dots
LINE = 0.155  # inches: a bar, or a line of a label
GAP = 0.09  # between two cases
WRAPPED = 22  # letters of a label's line
Ratio = tuple[Row, Row, float]


def slug(words: str) -> str:
    """
    >>> slug("speedup-spmm-float32, N = 128")
    'speedup-spmm-float32-n-128'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def bars(run: Run, experiment: str, title: str) -> Iterator[Plot]:
    """One figure, or one for each series if there would be too many bars in it."""
    ratios = list(run.ratios(experiment))
    if not ratios:
        return
    if len(ratios) <= MOST:
        yield from _figures(ratios, experiment, f"speedup-{experiment}", title)
        return
    for series in dict.fromkeys(ours.series for ours, _, _ in ratios):
        some = [entry for entry in ratios if entry[0].series == series]
        yield from _figures(some, experiment, slug(f"speedup-{experiment}-{series}"), f"{title}, {series}")


def _figures(ratios: Sequence[Ratio], experiment: str, name: str, title: str) -> Iterator[Plot]:
    """A figure that is not too tall: bars if there are few, else dots; else bars in several figures."""
    if len(ratios) <= MOST_BARS:
        yield _bars(ratios, experiment, name, title)
        return
    lines = dict.fromkeys(_input(ours.case) for ours, _, _ in ratios)
    if len(lines) <= MOST_LINES:
        yield _dots(ratios, experiment, name, title)
        return
    cases = list(dict.fromkeys(ours.case for ours, _, _ in ratios))
    parts = -(-len(ratios) // MOST_BARS)
    for part in range(parts):
        taken = cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]
        some = [entry for entry in ratios if entry[0].case in taken]
        yield _bars(some, experiment, name, f"{title}, part {part + 1} of {parts}")


def _input(case: str) -> str:
    """
    >>> _input("s3dis_room, 5 cm, 64 channels")
    's3dis_room'
    """
    return case.split(", ")[0]


def _dots(ratios: Sequence[Ratio], experiment: str, name: str, title: str) -> Plot:
    """A line for each input, a dot for each of its cases, a stroke for their geometric mean."""
    peers = list(dict.fromkeys(peer.provider for _, peer, _ in ratios))
    found: dict[str, dict[str, list[float]]] = {}
    for ours, peer, ratio in ratios:
        found.setdefault(_input(ours.case), {}).setdefault(peer.provider, []).append(ratio)
    labels = {line: _lines(line) for line in found}
    step = LINE * max(1.4 * len(peers), *map(len, labels.values()))
    least, most = (bound(ratio for _, _, ratio in ratios) for bound in (min, max))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        logarithmic(axes.xaxis)
        for number, own in enumerate(found.values()):
            for peer, values in own.items():
                place = number * (step + GAP) + step * (peers.index(peer) + 0.5) / len(peers)
                shade = colour(peer, [OURS, *peers])
                axes.plot(values, [place] * len(values), "o", ms=4, alpha=0.55, mew=0, color=shade)
                mean = geomean(values)
                axes.plot([mean, mean], [place - LINE / 2, place + LINE / 2], lw=1.6, color=shade)
                worst = min(values)
                if worst < 1:
                    axes.annotate(
                        _times(worst),
                        (worst, place),
                        (-4, 0),
                        textcoords="offset points",
                        va="center",
                        ha="right",
                        color=LOSES,
                        weight="bold",
                    )
        one(axes, vertical=True)
        room = (max(most, 2) / min(least, 0.8)) ** 0.12
        axes.set_xlim(min(0.8, least / room**2 if least < 1 else 1), max(most, 2) * room)
        axes.set_ylim(len(found) * (step + GAP), -GAP)
        middles = [number * (step + GAP) + step / 2 for number in range(len(found))]
        axes.set_yticks(middles, [literal("\n".join(label)) for label in labels.values()], linespacing=1.0)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.supxlabel("times faster than the peer; below 1: slower", fontsize=SMALL)
        for peer in peers:
            axes.plot([], [], "o", ms=4, color=colour(peer, [OURS, *peers]), label=literal(f"over {peer}"))
        figure.legend(loc="outside upper left", ncols=_columns(peers))

    legend = LEGEND_LINE * -(-len(peers) // _columns(peers))
    words = (
        f"{_measured(ratios)}. A dot is a case, a stroke the geometric mean; the least is written where it is below 1."
    )
    height = 0.62 + legend + len(found) * (step + GAP)
    return Plot(name, experiment, title, words, min(height, TALLEST), draw)


def _bars(ratios: Sequence[Ratio], experiment: str, name: str, title: str) -> Plot:
    peers = list(dict.fromkeys(peer.provider for _, peer, _ in ratios))
    labels, common = _labels(list(dict.fromkeys(ours.case for ours, _, _ in ratios)))
    at: list[float] = []  # of each bar, in inches from the top
    middles: dict[str, float] = {}
    end = 0.0
    for case, label in labels.items():
        lines = [ratio for ratio in ratios if ratio[0].case == case]
        height = LINE * max(len(lines), len(label))
        middles[case] = end + height / 2
        at += [middles[case] + LINE * (number - (len(lines) - 1) / 2) for number in range(len(lines))]
        end += height + GAP
    least, most = (bound(ratio for _, _, ratio in ratios) for bound in (min, max))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        logarithmic(axes.xaxis)
        plain: dict[str, Any] = {}
        for place, (_, peer, ratio) in zip(at, ratios):
            axes.barh(place, ratio - 1, LINE * 0.88, left=1, color=colour(peer.provider, [OURS, *peers]))
            side, marked = (1, plain) if ratio >= 1 else (-1, {"color": LOSES, "weight": "bold"})
            axes.annotate(
                _times(ratio),
                (ratio, place),
                (2 * side, 0),
                textcoords="offset points",
                va="center",
                ha="left" if side > 0 else "right",
                **marked,
            )
        one(axes, vertical=True)
        room = (max(most, 2) / min(least, 0.8)) ** 0.2  # for the numbers beside the bars
        axes.set_xlim(min(0.8, least / room if least < 1 else 1), max(most, 2) * room)
        axes.set_ylim(end, -GAP)
        axes.set_yticks([*middles.values()], [literal("\n".join(label)) for label in labels.values()], linespacing=1.0)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        figure.supxlabel("times faster than the peer; below 1: slower", fontsize=SMALL)
        for name in peers:
            axes.barh(0, 0, color=colour(name, [OURS, *peers]), label=literal(f"over {name}"))
        figure.legend(loc="outside upper left", ncols=_columns(peers))

    legend = LEGEND_LINE * -(-len(peers) // _columns(peers))
    told = [part for part in common if part not in title.split(", ")]
    shared = f" In every case: {', '.join(told)}." if told else ""
    return Plot(name, experiment, title, f"{_measured(ratios)}.{shared}", min(0.62 + legend + end, TALLEST), draw)


def _labels(cases: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """What tells cases apart, in short lines, and what they have in common."""
    first, *rest = (case.split(", ") for case in cases)
    common = [part for part in first if rest and all(part in parts for parts in rest)]
    own = {case: ", ".join(part for part in case.split(", ") if part not in common) or case for case in cases}
    return {case: _lines(words) for case, words in own.items()}, common


def _lines(words: str) -> list[str]:
    """
    >>> _lines("scannet_scene0000, 5 cm, the map alone")
    ['scannet_scene0000,', '5 cm, the map alone']
    """
    held = [part.replace(" ", "\N{NO-BREAK SPACE}") if len(part) < WRAPPED else part for part in words.split(", ")]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap(", ".join(held), WRAPPED)]


def _columns(peers: Sequence[str]) -> int:
    return 2 if max(map(len, peers)) < 16 else 1


def _times(ratio: float) -> str:
    """
    >>> _times(0.567), _times(9.996), _times(38.41)
    ('0.57', '10.0', '38.4')
    """
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def _measured(ratios: Sequence[Ratio]) -> str:
    """What was compared, in words."""
    kinds = dict.fromkeys(_kind(ours, peer) for ours, peer, _ in ratios)
    words = " and ".join(kinds)
    if {"device time", "time as called"} == set(kinds):
        words = "device time, or as called where a peer can't be captured in a CUDA graph"
    return f"Speed-up of ours over each peer, by {words}"


def _kind(ours: Row, peer: Row) -> str:
    if ours.unit != "ms":
        return {"us": "time on the host", "s": "seconds", "MiB": "memory"}.get(ours.unit, ours.unit)
    if ours.timing == peer.timing == "graph":
        return "device time"
    return "wall time" if ours.timing == peer.timing == "wall" else "time as called"
