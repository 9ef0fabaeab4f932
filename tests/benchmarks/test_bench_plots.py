"""The plots that the documentation shows are of the committed run: drawn anew, they are equal byte for byte."""

from __future__ import annotations

import re
from importlib import metadata
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from bench.results import load

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from bench.drawing import STYLES, png
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
