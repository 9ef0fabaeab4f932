"""Figures of a run: speed-up bars, crossover curves, a roofline, the ablation, group sizes, scaling; light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .case import OURS
from .results import TITLES, Row, Run

__all__ = ["Plot", "plots", "png"]

WIDTH = 4.6  # inches: text stays readable when a phone shows the plot at its own width
DPI = 160
# Okabe and Ito's colours, which colour-blind readers tell apart; ours is always the first
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999", "#f0e442")
STYLES = {"light": ("#ffffff", "#1b1b1b", "#d9d9d9"), "dark": ("#16181c", "#e6e6e6", "#3a3d44")}
MOST_BARS = 60  # in one figure
BARS = (
    "unstructured_spmm",
    "convolution",
    "kernel_map",
    "tensor_product",
    "tensor_product_training",
    "equivariant",
    "equivariant_training",
    "shared_product",
    "backward",
    "unet",
    "mixture_of_experts",
    "graph_attention",
    "host",
)


@dataclass(frozen=True)
class Plot:
    """One figure, the experiment whose rows it shows, and what draws it."""

    name: str
    experiment: str
    title: str
    caption: str
    height: float
    draw: Callable[[Figure], None]


def png(plot: Plot, style: str) -> bytes:
    """The plot as an image, in a light or a dark style."""
    paper, ink, grid = STYLES[style]
    settings: dict[Any, Any] = {
        "font.size": 8.5,
        "text.color": ink,
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, plot.height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        plot.draw(figure)
        file = BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def plots(run: Run) -> Iterator[Plot]:
    """Every figure that the run has rows for."""
    for experiment in run.experiments:
        title = TITLES.get(experiment, experiment)
        baseline = run.baseline(experiment)
        if experiment in BARS and baseline is not None:
            yield from _all_bars(run, experiment, title)
        elif experiment == "structured_spmm" and baseline is not None:
            yield from _crossovers(run, title, baseline)
        elif experiment == "ablation" and baseline is not None:
            yield _ablation(run, title, baseline)
        elif experiment == "group_size":
            yield _group_sizes(run, title)
        elif experiment == "scaling":
            yield _scaling(run, title)
        elif experiment == "roof" and any(row.flops and row.traffic for row in run.rows):
            yield _roofline(run)


def colour(provider: str, providers: list[str]) -> str:
    return COLOURS[providers.index(provider) % len(COLOURS)]


def _providers(rows: tuple[Row, ...]) -> list[str]:
    found = dict.fromkeys(row.provider for row in rows)
    return sorted(found, key=lambda name: name != OURS)


def _all_bars(run: Run, experiment: str, title: str) -> Iterator[Plot]:
    """One figure, or one for each series if there would be too many bars in it."""
    ratios = list(run.ratios(experiment))
    if len(ratios) <= MOST_BARS:
        yield _bars(ratios, experiment, f"speedup-{experiment}", title)
        return
    for series in dict.fromkeys(ours.series for ours, _, _ in ratios):
        name = re.sub(r"[^a-z0-9]+", "-", f"speedup-{experiment}-{series}".lower().replace("_", " ")).strip("-")
        some = [entry for entry in ratios if entry[0].series == series]
        yield _bars(some, experiment, name, f"{title}, {series}")


def _bars(ratios: list[tuple[Row, Row, float]], experiment: str, name: str, title: str) -> Plot:
    """How many times ours is faster than each peer, a bar for each; below 1 ours loses."""
    peers = list(dict.fromkeys(peer.provider for _, peer, _ in ratios))
    groups: dict[str, list[int]] = {}  # case -> the lines that its bars stand on
    for line, (ours, _, _) in enumerate(ratios):
        groups.setdefault(ours.case, []).append(line)
    gap = 0.5  # lines between two cases
    at = {line: line + gap * number for number, lines in enumerate(groups.values()) for line in lines}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for line, (_, peer, ratio) in enumerate(ratios):
            axes.barh(at[line], ratio, 0.85, color=colour(peer.provider, [OURS, *peers]))
            place = (ratio, at[line])
            axes.annotate(f"{ratio:.2f}", place, (2, 0), textcoords="offset points", va="center", fontsize=6.5)
        _one(axes, vertical=True)
        middles = [sum(at[line] for line in lines) / len(lines) for lines in groups.values()]
        axes.set_yticks(middles, [fill(case, 24) for case in groups], fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        figure.supxlabel("times faster than the peer; below 1 ours is slower", fontsize=7.5)
        for name in peers:
            axes.barh(0, 0, color=colour(name, [OURS, *peers]), label=f"over {name}")
        figure.legend(loc="outside upper left", fontsize=7, ncols=2)

    height = 0.9 + 0.16 * (len(ratios) + gap * len(groups)) + 0.1 * ((len(peers) + 1) // 2)
    height = max(height, 1.0 + 0.24 * len(groups))
    return Plot(name, experiment, title, "Speed-up of ours over each peer.", height, draw)


def _crossovers(run: Run, title: str, baseline: str) -> Iterator[Plot]:
    rows = run.of("structured_spmm")
    providers = _providers(rows)
    for series in dict.fromkeys(row.series for row in rows):

        def draw(figure: Figure, series: str = series) -> None:
            axes = figure.subplots()
            for provider in providers:
                points = []
                for case in run.cases("structured_spmm"):
                    row = case.get(provider)
                    if row is not None and baseline in case and row.series == series and row.x is not None:
                        points.append((row.x, case[baseline].value / row.value))
                if points:
                    xs, ys = zip(*sorted(points))
                    axes.plot(
                        [100 * x for x in xs], ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=provider
                    )
            _one(axes)
            _logarithmic(axes.yaxis)
            axes.set_xlabel("sparsity, %")
            axes.set_ylabel(f"times faster than {baseline}")
            axes.grid(alpha=0.5)
            axes.legend(fontsize=7)

        caption = f"Speed over {baseline} for blocks of {series}; sparse pays where a curve is above 1."
        yield Plot(f"crossover-{series}", "structured_spmm", f"{title}, {series} blocks", caption, 3.0, draw)


def _ablation(run: Run, title: str, baseline: str) -> Plot:
    (case, *_) = run.cases("ablation")
    steps = list(case)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, step in enumerate(steps):
            speed = case[baseline].value / case[step].value
            axes.barh(at, speed, 0.7, color=colour(step, [OURS, *(s for s in steps if s != OURS)]))
            axes.annotate(f"{speed:.3g}x", (speed, at), (2, 0), textcoords="offset points", va="center", fontsize=7)
        axes.set_yticks(range(len(steps)), ["+ lazy broadcasting (all)" if s == OURS else s for s in steps])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        _logarithmic(axes.xaxis)
        axes.set_xlabel(f"times faster than {baseline} without fusion")

    caption = f"{case[baseline].case}: each step adds one idea; the last bars are other implementations."
    return Plot("ablation", "ablation", title, caption, 0.9 + 0.28 * len(steps), draw)


def _group_sizes(run: Run, title: str) -> Plot:
    rows = run.of("group_size")
    graphs = list(dict.fromkeys(row.series for row in rows))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(2, 1)
        for axes, fact, label in (
            (left, "accesses", "indirect accesses F(g)"),
            (right, "bytes", "bytes of the format"),
        ):
            for graph in graphs:
                mine = [row for row in rows if row.series == graph]
                least = min(row.value for row in mine), min(float(str(row.facts[fact])) for row in mine)
                points = sorted(
                    (float(str(row.facts[fact])) / least[1], row.value / least[0], row.x or 0) for row in mine
                )
                shade = colour(graph, graphs)
                axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o", ms=3.5, color=shade, label=graph)
                for x, y, size in points:
                    axes.annotate(f"{size:g}", (x, y), (2, 2), textcoords="offset points", fontsize=6, color=shade)
            _logarithmic(axes.xaxis)
            _logarithmic(axes.yaxis)
            axes.set_xlabel(f"{label}, over the least")
            axes.set_ylabel("time, over the least")
            axes.grid(alpha=0.5)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", fontsize=6.5, ncols=2)

    caption = "Each point is a group size, written beside it: time against F(g), then against the format's bytes."
    return Plot("group-size", "group_size", title, caption, 5.2, draw)


def _scaling(run: Run, title: str) -> Plot:
    rows = run.of("scaling")
    providers = _providers(rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for provider in providers:
            points = sorted((row.x or 0, row.value) for row in rows if row.provider == provider)
            xs, ys = zip(*points)
            axes.plot(xs, ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=provider)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("entries")
        axes.set_ylabel("ms")
        axes.grid(alpha=0.5)
        axes.legend(fontsize=7)

    return Plot("scaling", "scaling", title, "Time against the number of entries, eight a row.", 3.0, draw)


def _roofline(run: Run) -> Plot:
    """Ours under what this machine was measured to do: bytes copied, dense products."""
    copies = [row.traffic / row.value / 1e6 for row in run.of("roof") if row.traffic]  # GB/s
    peaks = {row.series: row.flops / row.value / 1e6 for row in run.of("roof") if row.flops}  # GFLOP/s
    rows = [row for row in run.rows if row.provider == OURS and row.flops and row.traffic and row.unit == "ms"]
    experiments = list(dict.fromkeys(row.experiment for row in rows))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row in rows:
            shade = colour(row.experiment, experiments)
            axes.plot(row.flops / row.traffic, row.flops / row.value / 1e6, "o", ms=3, color=shade)
        for experiment in experiments:
            axes.plot(
                [], [], "o", ms=4, color=colour(experiment, experiments), label=TITLES.get(experiment, experiment)
            )
        reach = [row.flops / row.traffic for row in rows]
        ends = (min(reach) / 2, max(reach) * 2)
        for bandwidth in copies[:1]:
            for dtype, peak in peaks.items():
                xs = [ends[0], min(max(peak / bandwidth, ends[0]), ends[1]), ends[1]]
                ys = [min(peak, x * bandwidth) for x in xs]
                axes.plot(xs, ys, lw=1, color=matplotlib.rcParams["text.color"])
                axes.annotate(
                    f"dense {dtype}", (xs[-1], ys[-1]), (-2, 3), textcoords="offset points", ha="right", fontsize=6.5
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("useful flops for each byte that must move")
        axes.set_ylabel("GFLOP/s")
        axes.grid(alpha=0.5)
        figure.legend(loc="outside upper left", fontsize=6.5, ncols=2)

    caption = "Every case of ours; the lines are this machine's own copy and dense product, measured in the same run."
    return Plot("roofline", "roof", "Roofline", caption, 3.6, draw)


def _logarithmic(axis: Axis) -> None:
    """Few decades, so that 2 and 5 are worth a label and powers of ten are not worth an exponent."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _one(axes: Axes, vertical: bool = False) -> None:
    line = axes.axvline if vertical else axes.axhline
    line(1, lw=1, ls="--", color=matplotlib.rcParams["text.color"])
