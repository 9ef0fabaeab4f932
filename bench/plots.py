"""Figures of a run: speed-up bars, crossover curves, a roofline, the ablation, group sizes, scaling."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
from matplotlib.figure import Figure

from .bars import bars, slug
from .case import OURS
from .drawing import Plot, colour, decades, logarithmic, marker, one
from .results import TITLES, Row, Run

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
    """Every figure that the run has rows for."""
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
            yield _group_sizes(run, title)
        elif experiment == "scaling":
            yield _scaling(run, title)
        elif experiment == "roof" and any(row.provider == OURS and row.flops and row.traffic for row in run.rows):
            yield _roofline(run)


def _providers(rows: tuple[Row, ...]) -> list[str]:
    found = dict.fromkeys(row.provider for row in rows)
    return sorted(found, key=lambda name: name != OURS)


def _crossovers(run: Run, experiment: str, title: str, baseline: str) -> Iterator[Plot]:
    """Speed over the dense product against how sparse, or how dense, one figure for each series."""
    rows, against = run.of(experiment), CURVES[experiment]
    providers = _providers(rows)
    for series in dict.fromkeys(row.series for row in rows):

        def draw(figure: Figure, series: str = series) -> None:
            axes = figure.subplots()
            for provider in providers:
                points = []
                for case in run.cases(experiment):
                    row = case.get(provider)
                    if row is not None and baseline in case and row.series == series and row.x is not None:
                        points.append((100 * row.x, case[baseline].value / row.value))
                if points:
                    xs, ys = zip(*sorted(points))
                    axes.plot(xs, ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=provider)
            one(axes)
            if against == "density":
                logarithmic(axes.xaxis)
            logarithmic(axes.yaxis)
            axes.set_xlabel(f"{against}, %")
            axes.set_ylabel(f"times faster than {baseline}")
            axes.grid(alpha=0.5)
            axes.legend()

        caption = f"Speed over {baseline} for blocks of {series}; sparse pays where a curve is above 1."
        name = f"crossover-{series}" if experiment == "structured_spmm" else slug(f"crossover-{experiment}-{series}")
        yield Plot(name, experiment, f"{title}, {series} blocks", caption, 2.6, draw)


def _ablation(run: Run, title: str, baseline: str) -> Plot:
    (case, *_) = run.cases("ablation")
    steps = list(case)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for at, step in enumerate(steps):
            speed = case[baseline].value / case[step].value
            axes.barh(at, speed, 0.7, color=colour(step, [OURS, *(s for s in steps if s != OURS)]))
            text = f"{speed:.3g}x" if speed < 1000 else f"{speed:,.0f}x"
            axes.annotate(text, (speed, at), (2, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(steps)), ["+ lazy broadcasting (all)" if s == OURS else s for s in steps])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        logarithmic(axes.xaxis, labelled=(1,))
        axes.set_xlabel(f"times faster than {baseline} without fusion")

    others = "; the last bars are other implementations" * (steps[-1] != OURS)
    caption = f"{case[baseline].case}: each step adds one idea{others}."
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
                shade, shape = colour(graph, graphs), marker(graph, graphs)
                xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
                axes.plot(xs, ys, shape, ms=3.5, color=shade, label=graph)
                for x, y, size in points:
                    axes.annotate(f"{size:g}", (x, y), (2, 2), textcoords="offset points", fontsize=7, color=shade)
            logarithmic(axes.xaxis)
            logarithmic(axes.yaxis)
            axes.set_xlabel(f"{label}, over the least")
            axes.set_ylabel("time, over the least")
            axes.grid(alpha=0.5)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=1)

    caption = "Each point is a group size, written beside it: time against F(g), then against the format's bytes."
    return Plot("group-size", "group_size", title, caption, 4.8 + 0.16 * len(graphs), draw)


def _scaling(run: Run, title: str) -> Plot:
    rows = run.of("scaling")
    providers = _providers(rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for provider in providers:
            points = sorted((row.x or 0, row.value) for row in rows if row.provider == provider)
            xs, ys = zip(*points)
            axes.plot(xs, ys, "o-", ms=3, lw=1.3, color=colour(provider, providers), label=provider)
        decades(axes)
        axes.set_xlabel("entries of the matrix")
        axes.set_ylabel("time, ms")
        axes.grid(alpha=0.5)
        axes.legend()

    return Plot("scaling", "scaling", title, "Time against the number of entries, eight a row.", 2.6, draw)


def _roofline(run: Run) -> Plot:
    """Ours under what this machine was measured to do: bytes copied, dense products."""
    copies = [row.traffic / row.value / 1e6 for row in run.of("roof") if row.traffic]  # GB/s
    peaks = {row.series: row.flops / row.value / 1e6 for row in run.of("roof") if row.flops}  # GFLOP/s
    rows = [row for row in run.rows if row.provider == OURS and row.flops and row.traffic and row.unit == "ms"]
    experiments = list(dict.fromkeys(row.experiment for row in rows))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row in rows:
            shade, shape = colour(row.experiment, experiments), marker(row.experiment, experiments)
            axes.plot(row.flops / row.traffic, row.flops / row.value / 1e6, shape, ms=3, color=shade)
        for experiment in experiments:
            label = TITLES.get(experiment, experiment).replace("`", "")
            shade, shape = colour(experiment, experiments), marker(experiment, experiments)
            axes.plot([], [], shape, ms=4, color=shade, label=label)
        reach = [row.flops / row.traffic for row in rows]
        ends = (min(reach) / 2, max(reach) * 2)
        for bandwidth in copies[:1]:
            for dtype, peak in peaks.items():
                xs = [ends[0], min(max(peak / bandwidth, ends[0]), ends[1]), ends[1]]
                ys = [min(peak, x * bandwidth) for x in xs]
                axes.plot(xs, ys, lw=1, color=matplotlib.rcParams["text.color"])
                axes.annotate(f"dense {dtype}", (xs[-1], ys[-1]), (-2, 3), textcoords="offset points", ha="right")
        decades(axes)
        axes.set_xlabel("useful flops for each byte that must move")
        axes.set_ylabel("GFLOP/s")
        axes.grid(alpha=0.5)
        figure.legend(loc="outside upper left", ncols=1)

    caption = "Every case of ours; the lines are this machine's own copy and dense product, measured as the rows are."
    height = 2.8 + 0.16 * len(experiments)
    return Plot("roofline", "roof", "Roofline", caption, height, draw, tuple(experiments))
