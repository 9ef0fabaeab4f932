"""The site that `make docs` has built, in a browser: it asks no other host, fits a phone, sorts, filters and finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser

SITE = Path(__file__).parents[2] / "build" / "docs"
MAIN = ("index", "start/first-statement", "start/formats", "reference/insum", "reference/conv", "measured/index")

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make docs"),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", MAIN)
def test_a_page_loads_in_silence_from_its_folder_and_fits_the_screen(chromium, name, width):
    page = chromium.open(SITE / f"{name}.html", width, "light")
    assert page.messages == []
    assert [address for address in page.requests if not address.startswith(("file:", "data:", "about:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")


def test_pages_follow_the_colours_of_the_system(chromium):
    found = {
        scheme: chromium.open(SITE / "index.html", 1280, scheme).evaluate("document.body.dataset.mdColorScheme")
        for scheme in ("light", "dark", "light")
    }
    assert found == {"light": "default", "dark": "slate"}


def test_the_table_of_every_time_sorts_and_filters(chromium):
    page = chromium.open(SITE / "measured" / "rows.html", 1280, "light")
    column = (
        "[...document.querySelectorAll('.rows tbody tr:not([hidden])')].map(row => row.lastElementChild.textContent)"
    )
    before = page.evaluate(column)
    page.evaluate("document.querySelector('.rows th:last-child').click()")
    assert page.evaluate(column) == sorted(before, key=lambda words: -float(words))
    page.evaluate("document.querySelector('.rows th:last-child').click()")
    assert page.evaluate(column) == sorted(before, key=float)
    page.evaluate(
        "(field => { field.value = 'SPCONV float16'; field.dispatchEvent(new Event('input', {bubbles: true})) })"
        "(document.querySelector('.filter'))"
    )
    kept = page.evaluate("[...document.querySelectorAll('.rows tbody tr:not([hidden])')].map(row => row.textContent)")
    assert 0 < len(kept) < len(before)
    assert all("spconv" in words and "float16" in words for words in kept)


def test_the_search_finds_a_name_without_a_server(chromium):
    page = chromium.open(SITE / "index.html", 1280, "light")
    found = page.evaluate("""new Promise(done => {
        const field = document.querySelector('.md-search__input')
        field.focus()
        field.value = 'BlockGroupCOO'
        field.dispatchEvent(new Event('keyup', {bubbles: true}))
        const titles = () => [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)
        const wait = left => titles().length || !left ? done(titles()) : setTimeout(wait, 100, left - 1)
        wait(100)
    })""")
    assert any("formats.html" in address for address in found)
