"""The report's page as readers have it: in Chromium, on a phone and a desk, light and dark, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from bench_results import every_kind, write
from browser import CHROMIUM, LEGIBLE, Browser, Page, browser
from statements import IS_THOROUGH

from bench.results import load

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from bench.drawing import SMALL, STYLES, WIDTH
from bench.plots import plots
from bench.report import report

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]

STORED = Path(__file__).parents[2] / "bench" / "results" / "nvidia-h200.json"
SCREENS = tuple((width, scheme) for width in (320, 390, 1280) for scheme in STYLES)
PICTURED = ((390, "light"), (1280, "dark"))  # a picture of each plot takes its time
IMAGES = """[...document.querySelectorAll('figure')].map(figure => {
  const image = figure.querySelector('img');
  return [figure.id, image.naturalWidth, image.clientWidth];
})"""
DEAD_LINKS = """[...document.links].map(link => link.getAttribute('href'))
  .filter(href => !href.startsWith('#') || !document.getElementById(href.slice(1)))"""
FIRST_PICTURE = "document.querySelector('.overview').getBoundingClientRect().bottom"
FIGURES_WITHOUT_ROWS = """[...document.querySelectorAll('figure')].filter(figure => {
  const links = [...figure.querySelectorAll('a')];
  return !links.length || links.some(link => !document.querySelector(link.getAttribute('href') + ' tr[id]'));
}).map(figure => figure.id)"""
# where the row behind the last link of the losing cases is once the link was followed
FOLLOWED = """(async () => {
  const links = [...document.querySelectorAll('#losses a')];
  links.at(-1).click();
  await new Promise(done => setTimeout(done, 100));
  const row = document.querySelector(':target').getBoundingClientRect();
  return [links.length, row.top, innerHeight];
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.mark.parametrize("results", ["of every kind", "stored"])
def test_the_page_is_whole_on_phones_and_desks(results: str, tmp_path: Path, chromium: Browser) -> None:
    source = STORED if results == "stored" else write(tmp_path / "results.json", every_kind())
    run = load(source)
    path = report(run, tmp_path)
    names = [plot.name for plot in plots(run)]
    assert len(names) >= 7
    assert path.stat().st_size < 2_000_000
    if results == "stored":  # README shows some of its plots
        for kept in STORED.with_name("plots").glob("*.png"):
            assert imread(kept).shape == imread(tmp_path / kept.name).shape, f"{kept.name} is of an older report"
    is_short = results == "stored" and not IS_THOROUGH  # its page is long, and of the same kinds
    for width, scheme in ((320, "light"), *PICTURED) if is_short else SCREENS:
        page = chromium.open(path, width, scheme)
        assert page.messages == []
        assert {url for url in page.requests if not url.startswith("data:image/png;")} == {path.as_uri()}
        assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
        assert page.evaluate(FIRST_PICTURE) < (844 if width == 390 else 900), "the first picture ends below the screen"
        contrast, size = page.evaluate(LEGIBLE)
        assert contrast >= 4.5
        assert size >= 12
        for name, _, drawn in page.evaluate(IMAGES):  # on a narrow phone a plot scrolls, its letters don't shrink
            assert drawn * SMALL / 72 / WIDTH > 11, f"{name} is {drawn} pixels wide"
        if (width, scheme) in PICTURED:
            check_plots(page, scheme, names)
    check_links(page, sum(len(list(run.cases(name))) for name in run.experiments))


def check_plots(page: Page, scheme: str, names: list[str]) -> None:
    """Each is there and shows something on the page's own paper."""
    paper = tuple(int(STYLES[scheme][0][at : at + 2], 16) for at in (1, 3, 5))
    found = page.evaluate(IMAGES)
    assert sorted(name for name, *_ in found) == sorted(names)
    for name, natural, _ in found:
        assert natural > 0, f"{name} is no image"
        image = (imread(BytesIO(page.shot(f"#{name} img"))) * 255).round().astype(int)[2:-2, 2:-2, :3]
        is_drawn = (image != paper).any(axis=2)
        assert 0.01 < is_drawn.mean() < 0.8, f"{name} is empty, or not on the page's paper"
        colours = np.unique((image[is_drawn] // 32) @ (64, 8, 1))
        assert len(colours) > 5, f"{name} has no colours"


def check_links(page: Page, cases: int) -> None:
    """All lead somewhere in the page, figures to rows, and a losing case to its own row, on the screen."""
    assert page.evaluate(DEAD_LINKS) == []
    assert page.evaluate(FIGURES_WITHOUT_ROWS) == []
    assert page.evaluate("document.querySelectorAll('tr[id]').length") >= cases
    assert page.evaluate("document.querySelectorAll('[id]').length") == page.evaluate(
        "new Set([...document.querySelectorAll('[id]')].map(element => element.id)).size"
    )
    losing, top, height = page.evaluate(FOLLOWED)
    assert losing >= 2
    assert 0 <= top < height


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path, chromium: Browser) -> None:
    path = tmp_path / "wrong.html"
    path.write_text(
        '<!DOCTYPE html><meta name="viewport" content="width=device-width"/><body style="background: #fff">'
        '<p style="width: 500px; font-size: 9px; color: #ccc">wide, small and pale</p><a href="#nowhere">nowhere</a>'
        '<img src="http://example.invalid/picture.png"/><script>console.error("first"); second()</script>'
    )
    page = chromium.open(path, 390, "light")
    assert [message.split(":")[0] for message in page.messages] == ["error", "error", "error"]
    assert "http://example.invalid/picture.png" in page.requests
    assert page.evaluate("document.documentElement.scrollWidth") > 390
    contrast, size = page.evaluate(LEGIBLE)
    assert contrast < 2
    assert size == 9
    assert page.evaluate(DEAD_LINKS) == ["#nowhere"]
