"""Figures of a run: speed-up bars, crossover curves, a roofline, the ablation, group sizes, scaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import isfinite

import matplotlib
from matplotlib.figure import Figure

from .bars import bars, slug
from .case import OURS
from .drawing import LEGEND_LINE, TALLEST, Plot, colour, decades, literal, logarithmic, marker, one
from .results import TITLES, Row, Run, better, is_positive
from .suite_plot import suite_plots

__all__ = ["plots"]

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
# what a curve is drawn against, from the experiments that have one
CURVES = {"structured_spmm": "sparsity", "linear": "density", "linear_training": "density"}


def plots(run: Run) -> Iterator[Plot]:
    """Every figure that the run has rows for, of a name that is its own and a file's; what is no figure is left out."""
    taken: set[str] = set()
    for plot in _plots(replace(run, rows=tuple(row for row in run.rows if row.is_sound))):
        name = next(name for name in _names(plot.name) if name not in taken)
        taken.add(name)
        yield replace(plot, name=name)


def _names(name: str) -> Iterator[str]:
    """A name, and others should another series have it: `a/b` and `a b` are both a-b."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def _plots(run: Run) -> Iterator[Plot]:
    for experiment in run.experiments:
        title = TITLES.get(experiment, experiment).replace("`", "")
        baseline = run.baseline(experiment)
        if experiment in BARS and baseline is not None:
            yield from bars(run, experiment, title)
        elif experiment in CURVES and baseline is not None:
            yield from _crossovers(run, experiment, title, baseline)
        elif experiment == "ablation" and baseline is not None:
            yield _ablation(run, title, baseline)
        elif experiment == "group_size":
            yield from _group_sizes(run, title)
        elif experiment == "scaling":
            yield from _scaling(run, title)
        elif experiment == "statements":
            yield from suite_plots(run, title)
        elif experiment == "roof":
            yield from _roofline(run)


def _providers(rows: tuple[Row, ...]) -> list[str]:
    found = dict.fromkeys(row.provider for row in rows)
    return sorted(found, key=lambda name: name != OURS)


def _crossovers(run: Run, experiment: str, title: str, baseline: str) -> Iterator[Plot]:
    """Speed over the dense product against how sparse, or how dense, one figure for each series."""
    rows, against = run.of(experiment), CURVES[experiment]
    providers = _providers(rows)
    for series in dict.fromkeys(row.series for row in rows):
        curves = {provider: _curve(run, experiment, series, provider, baseline) for provider in providers}
        if not any(curves.values()):
            continue

        def draw(figure: Figure, curves: dict[str, list[tuple[float, float]]] = curves) -> None:
            axes = figure.subplots()
            for provider, points in curves.items():
                if points:
                    xs, ys = zip(*points)
                    axes.plot(xs, ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=literal(provider))
            one(axes)
            if against == "density":
                logarithmic(axes.xaxis)
            logarithmic(axes.yaxis)
            axes.set_xlabel(f"{against}, %")
            axes.set_ylabel(literal(f"times faster than {baseline}"))
            axes.grid(alpha=0.5)
            figure.legend(loc="outside upper left", ncols=2)

        legend = LEGEND_LINE * -(-sum(map(bool, curves.values())) // 2)
        pays = "sparse pays" if baseline == "dense" else f"{baseline} is slower"  # without dense there is no crossover
        caption = f"Speed over {baseline} for blocks of {series}; {pays} where a curve is above 1."
        name = f"crossover-{series}" if experiment == "structured_spmm" else f"crossover-{experiment}-{series}"
        yield Plot(slug(name), experiment, f"{title}, {series} blocks", caption, 2.6 + legend, draw)


def _curve(run: Run, experiment: str, series: str, provider: str, baseline: str) -> list[tuple[float, float]]:
    """Where a provider's cases lie, in percent, and how many times faster than the baseline each is."""
    least = 0 if CURVES[experiment] == "sparsity" else 1e-9  # density's axis is logarithmic
    return sorted(
        (100 * row.x, better(row, case[baseline]))
        for case in run.cases(experiment)
        if baseline in case and (row := case.get(provider)) is not None
        if row.series == series and row.x is not None and isfinite(row.x) and row.x >= least
    )


def _ablation(run: Run, title: str, baseline: str) -> Plot:
    case = next(case for case in run.cases("ablation") if baseline in case)
    steps = list(case)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, step in enumerate(steps):
            speed = better(case[step], case[baseline])
            axes.barh(at, speed, 0.7, color=colour(step, [OURS, *(s for s in steps if s != OURS)]))
            text = f"{speed:.3g}x" if speed < 1000 else f"{speed:,.0f}x"
            axes.annotate(text, (speed, at), (2, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(steps)), ["+ lazy broadcasting (all)" if s == OURS else literal(s) for s in steps])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        logarithmic(axes.xaxis, labelled=(1,))
        axes.set_xlabel(literal(f"times faster than {baseline} without fusion"))

    others = "; the last bars are other implementations" * (steps[-1] != OURS)
    caption = f"{case[baseline].case}: each step adds one idea{others}."
    return Plot("ablation", "ablation", title, caption, 0.9 + 0.28 * len(steps), draw)


def _group_sizes(run: Run, title: str) -> Iterator[Plot]:
    rows = [row for row in run.of("group_size") if _fact(row, "accesses") and _fact(row, "bytes")]
    if not rows:
        return
    graphs = list(dict.fromkeys(row.series for row in rows))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(2, 1)
        for axes, fact, label in (
            (left, "accesses", "indirect accesses F(g)"),
            (right, "bytes", "bytes of the format"),
        ):
            for graph in graphs:
                mine = [row for row in rows if row.series == graph]
                least = min(row.value for row in mine), min(_fact(row, fact) for row in mine)
                points = sorted((_fact(row, fact) / least[1], row.value / least[0], row.x or 0) for row in mine)
                shade, shape = colour(graph, graphs), marker(graph, graphs)
                xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
                axes.plot(xs, ys, shape, ms=3.5, color=shade, label=literal(graph))
                for x, y, size in points:
                    axes.annotate(f"{size:g}", (x, y), (2, 2), textcoords="offset points", color=shade)
            logarithmic(axes.xaxis)
            logarithmic(axes.yaxis)
            axes.set_xlabel(f"{label}, over the least")
            axes.set_ylabel("time, over the least")
            axes.grid(alpha=0.5)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=1)

    caption = "Each point is a group size, written beside it: time against F(g), then against the format's bytes."
    yield Plot("group-size", "group_size", title, caption, min(4.6 + LEGEND_LINE * len(graphs), TALLEST), draw)


def _fact(row: Row, name: str) -> float:
    """A count among a row's facts, or 0 where there is none."""
    value = row.facts.get(name)
    return float(value) if isinstance(value, int | float) and is_positive(value) else 0.0


def _scaling(run: Run, title: str) -> Iterator[Plot]:
    rows = tuple(row for row in run.of("scaling") if is_positive(row.x))
    if not rows:
        return
    providers = _providers(rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for provider in providers:
            points = sorted((row.x or 0, row.value) for row in rows if row.provider == provider)
            xs, ys = zip(*points)
            axes.plot(xs, ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=literal(provider))
        decades(axes)
        axes.set_xlabel("entries of the matrix")
        axes.set_ylabel("time, ms")
        axes.grid(alpha=0.5)
        figure.legend(loc="outside upper left", ncols=2)

    height = 2.6 + LEGEND_LINE * -(-len(providers) // 2)
    yield Plot("scaling", "scaling", title, "Time against the number of entries, eight a row.", height, draw)


def _roofline(run: Run) -> Iterator[Plot]:
    """Ours under what this machine was measured to do: bytes copied, dense products."""
    copies = [row.traffic / row.value / 1e6 for row in run.of("roof") if is_positive(row.traffic)]  # GB/s
    peaks = {row.series: row.flops / row.value / 1e6 for row in run.of("roof") if is_positive(row.flops)}  # GFLOP/s
    timed = [row for row in run.rows if row.provider == OURS and row.unit == "ms"]
    rows = [row for row in timed if is_positive(row.flops) and is_positive(row.traffic)]
    if not rows:
        return
    experiments = list(dict.fromkeys(row.experiment for row in rows))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row in rows:
            shade, shape = colour(row.experiment, experiments), marker(row.experiment, experiments)
            axes.plot(row.flops / row.traffic, row.flops / row.value / 1e6, shape, ms=3, color=shade)
        for experiment in experiments:
            label = literal(TITLES.get(experiment, experiment).replace("`", ""))
            shade, shape = colour(experiment, experiments), marker(experiment, experiments)
            axes.plot([], [], shape, ms=4, color=shade, label=label)
        reach = [row.flops / row.traffic for row in rows]
        ends = (min(reach) / 2, max(reach) * 2)
        for bandwidth in sorted(copies)[-1:]:
            for dtype, peak in peaks.items():
                xs = [ends[0], min(max(peak / bandwidth, ends[0]), ends[1]), ends[1]]
                ys = [min(peak, x * bandwidth) for x in xs]
                axes.plot(xs, ys, lw=1, color=matplotlib.rcParams["text.color"])
                axes.annotate(
                    literal(f"dense {dtype}"), (xs[-1], ys[-1]), (-2, 3), textcoords="offset points", ha="right"
                )
        decades(axes)
        axes.set_xlabel("useful flops for each byte that must move")
        axes.set_ylabel("GFLOP/s")
        axes.grid(alpha=0.5)
        figure.legend(loc="outside upper left", ncols=1)

    caption = "Every case of ours; the lines are this machine's own copy and dense product, measured as the rows are."
    height = min(2.8 + LEGEND_LINE * len(experiments), TALLEST)
    yield Plot("roofline", "roof", "Roofline", caption, height, draw, tuple(experiments))
