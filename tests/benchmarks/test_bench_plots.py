"""The plots that the documentation shows are of the committed run: drawn anew, they are equal byte for byte."""

from __future__ import annotations

import re
from importlib import metadata
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from bench_results import entry, write

from bench.case import OURS
from bench.results import load

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from bench.bars import MOST_BARS, MOST_LINES, bars
from bench.drawing import COLOURS, STYLES, TALLEST, WIDTH, png
from bench.plots import plots

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
RUN = ROOT / "bench" / "results" / "nvidia-h200.json"


def is_pinned(package: str) -> bool:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return any(line.split(";")[0].strip() == f"{package}=={metadata.version(package)}" for line in lines)


def test_the_plots_that_the_documentation_shows_are_of_the_committed_run():
    kept = {path.name: path.read_bytes() for path in RUN.with_name("plots").glob("*.png")}
    page = (ROOT / "docs" / "measured" / "index.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\(plots/([\w.-]+\.png)", page))
    assert shown == set(kept)
    ends = {"light": "", "dark": "-dark"}
    assert set(ends) == set(STYLES)
    drawn = {
        f"{plot.name}{ends[style]}.png": png(plot, style)
        for plot, style in product(plots(load(RUN)), STYLES)
        if f"{plot.name}{ends[style]}.png" in kept
    }
    assert set(drawn) == set(kept)
    for name, image in drawn.items():
        if image != kept[name]:
            assert not (is_pinned("matplotlib") and is_pinned("pillow")), f"{name} is of an older run; draw it anew"
            now, before = imread(BytesIO(image)), imread(BytesIO(kept[name]))
            assert now.shape == before.shape, f"{name} is of an older run; draw it anew"
            assert np.mean(np.abs(now - before).max(axis=2) > 0.2) < 0.01, f"{name} is of an older run; draw it anew"


@pytest.mark.parametrize("style", STYLES)
def test_series_of_few_points_keep_their_colours(style):
    (roofline,) = [plot for plot in plots(load(RUN)) if plot.name == "roofline"]
    pixels = imread(BytesIO(png(roofline, style)))[..., :3].reshape(-1, 3)
    for colour in COLOURS:
        distances = np.abs(pixels - to_rgb(colour)).max(axis=1)
        assert distances.min() < 0.02, colour


def test_no_legend_covers_a_plot_and_no_figure_is_taller_than_a_screen():
    for plot in plots(load(RUN)):
        assert plot.height <= TALLEST, plot.name
        figure = Figure(figsize=(WIDTH, plot.height), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        plot.draw(figure)
        canvas.draw()
        assert [axes.get_legend() for axes in figure.axes if axes.get_legend()] == [], plot.name
        for legend in figure.legends:
            covered = legend.get_window_extent()
            for axes in figure.axes:
                shown = axes.get_window_extent()
                assert covered.y0 >= shown.y1 or covered.y1 <= shown.y0, f"{plot.name} is covered by its legend"


@pytest.mark.parametrize(
    ("inputs", "sizes", "titles"),
    [
        (1, MOST_BARS, ["T"]),
        (2, MOST_BARS, ["T"]),
        (MOST_LINES + 1, 2, ["T, part 1 of 2", "T, part 2 of 2"]),
    ],
    ids=["bars", "dots", "parts"],
)
def test_many_cases_make_no_tall_figure(tmp_path, inputs, sizes, titles):
    cases = [f"input {number}, {size} channels" for number in range(inputs) for size in range(sizes)]
    rows = [entry("unet", case, provider, 2.0) for case in cases for provider in (OURS, "spconv")]
    found = list(bars(load(write(tmp_path / "results.json", rows)), "unet", "T"))
    assert [plot.title for plot in found] == titles
    assert all(plot.height <= TALLEST for plot in found)
    assert ("A dot is a case" in found[0].caption) == (inputs == 2)
