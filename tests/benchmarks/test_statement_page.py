"""The page of twenty statements: what it says is the compiler's own, and a reader can use it on any screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from browser import CHROMIUM, LEGIBLE, Browser, browser
from torch.utils._pytree import tree_map

from bench.__main__ import main
from bench.case import LIMIT
from bench.harness import check
from bench.results import ResultsError
from bench.statement_page import statement_page
from bench.statement_times import STORED, stored_times, time_statements
from bench.statements import EXAMPLES, Draw, Example
from bench.tile_picture import programs, tile_picture
from insum_ops import explain, insum
from insum_ops.compiler.codegen import Config
from insum_ops.compiler.planning import Schedule

pytestmark = pytest.mark.cpu

in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
SCREENS = tuple((width, scheme) for width in (390, 1280) for scheme in ("light", "dark"))
SHOWN = "[...document.querySelectorAll('article')].filter(a => a.getClientRects().length).map(a => a.id)"
PAPER = "getComputedStyle(document.body).backgroundColor"
# a statement's place on the page and what each stage of it holds
STAGES = """[...document.querySelectorAll('article')].map(a => [a.id, a.querySelector('.statement').textContent,
  [...a.querySelectorAll('h3')].map(h => h.lastChild.textContent),
  a.querySelector('[aria-label="FX program"]').textContent, a.querySelector('[aria-label="Triton source"]').textContent,
  a.querySelectorAll('svg').length])"""
WIDER_THAN_ITS_PLACE = """[...document.querySelectorAll('article.shown *:not(pre *):not(svg *)')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


def double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as a GPU would leave it, with a peer that failed and one statement that was not reached."""
    rows: list[dict[str, object]] = []
    for number, example in enumerate(EXAMPLES[:-1], 1):
        chosen = {"config": "r=4 n=128 warps=4 stages=2", "scatter": "owner", "tuned": "yes"}
        rows.append(
            dict(statement=example.name, provider="insum_ops", device_ms=0.1 * number, timing="graph", **chosen)
        )
        rows.append(dict(statement=example.name, provider="torch", device_ms=0.25 * number, timing="queue"))
        rows.append(dict(statement=example.name, provider="torch.compile", failure="RuntimeError: <no> backend"))
    path = tmp_path_factory.mktemp("times") / "times.json"
    machine = {"gpu": "NVIDIA H200", "packages": {"torch": "2.13.0"}}
    path.write_text(json.dumps({"machine": machine, "date": "2026-01-02", "commit": "abc1234", "rows": rows}))
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, times: Path) -> Path:
    return statement_page(tmp_path_factory.mktemp("page") / "deep" / "statements.html", times)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_torch_and_the_statement_compute_the_same(example: Example) -> None:
    torch.manual_seed(0)
    given = example.make(Draw(is_small=True))
    expected = example.plain(*tree_map(double, given.arguments))
    check(insum(example.expr, size=given.size, **given.operands), expected, LIMIT[example.dtype])
    check(example.plain(*given.arguments), expected, LIMIT[example.dtype])
    if example.eager is not None:
        own = given.arguments if given.eager_arguments is None else given.eager_arguments
        check(example.eager(*own), expected, LIMIT[example.dtype])


def test_there_are_twenty_and_no_two_share_a_name() -> None:
    assert len({example.name for example in EXAMPLES}) == len({example.title for example in EXAMPLES}) == 20


def planned(name: str, **blocks: int) -> tuple[Schedule, Config]:
    """The schedule of a statement, and a config of these blocks."""
    example = next(example for example in EXAMPLES if example.name == name)
    given = example.make(Draw(is_blank=True))
    schedule = explain(example.expr, size=given.size, **given.operands).schedule
    assert schedule is not None
    assert set(blocks) == set(schedule.axes)
    return schedule, Config(tuple(blocks.items()))


@pytest.mark.parametrize(
    ("name", "blocks", "count"),
    [
        ("bmm", dict(m=128, n=64, k=32), 64 * 4 * 8),
        ("outer-product", dict(i=4, j=256), 2048 * 32),
        ("histogram", dict(i=1024), 977),
    ],
)
def test_programs_are_counted_by_tiles(name: str, blocks: dict[str, int], count: int) -> None:
    assert programs(*planned(name, **blocks)) == count


def test_the_page_is_one_small_file_that_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    assert "http://" not in text
    assert "https://" not in text


@in_chromium
def test_every_stage_is_the_compilers(page: Path, chromium: Browser) -> None:
    found = {name: stages for name, *stages in chromium.open(page, 1280, "light").evaluate(STAGES)}
    assert list(found) == [example.name for example in EXAMPLES]
    titles = ["Statement", "Rewritten", "FX program", "Schedule", "Triton source", "Measured"]
    for example in EXAMPLES:
        given = example.make(Draw(is_blank=True))
        sections = explain(example.expr, size=given.size, **given.operands).sections
        statement, headings, program, source, pictures = found[example.name]
        assert statement == sections["statement"]
        assert headings == titles
        assert program == sections["FX program"]
        assert source == sections["Triton source"]
        assert pictures == 2


@in_chromium
def test_the_page_is_whole_on_phones_and_desks(page: Path, chromium: Browser) -> None:
    for width, scheme in SCREENS:
        opened = chromium.open(page, width, scheme)
        assert opened.messages == []
        assert {url for url in opened.requests if not url.startswith("data:")} == {page.as_uri()}
        contrast, size = opened.evaluate(LEGIBLE)
        assert contrast >= 4.5
        assert size >= 12
        for example in EXAMPLES:
            opened.evaluate(f"pick.value = {json.dumps(example.name)}, pick.dispatchEvent(new Event('change'))")
            assert opened.evaluate(SHOWN) == [example.name]
            assert opened.evaluate("document.documentElement.scrollWidth") == width, f"{example.name} scrolls sideways"
            assert opened.evaluate(WIDER_THAN_ITS_PLACE) == []


@in_chromium
def test_a_keyboard_chooses_statements_and_the_theme(page: Path, chromium: Browser) -> None:
    opened = chromium.open(page, 1280, "light")

    def press(key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            if kind != "char" or key == "Enter":
                opened.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    opened.evaluate("document.querySelector('nav li:nth-child(3) a').focus()")
    press("Enter", 13)
    assert opened.evaluate(SHOWN) == [EXAMPLES[2].name]
    assert opened.evaluate("location.hash") == f"#{EXAMPLES[2].name}"
    opened.evaluate("document.getElementById('next').focus()")
    press("Enter", 13)
    assert opened.evaluate(SHOWN) == [EXAMPLES[3].name]
    light = opened.evaluate(PAPER)
    opened.evaluate("document.getElementById('theme').focus()")
    press("Enter", 13)
    assert opened.evaluate(PAPER) == light
    press("Enter", 13)
    assert opened.evaluate(PAPER) != light
    assert opened.evaluate("document.getElementById('theme').textContent") == "Theme: dark"
    opened.evaluate("localStorage.clear()")


@in_chromium
def test_bars_are_as_long_as_their_times(page: Path, chromium: Browser) -> None:
    opened = chromium.open(page, 1280, "dark")
    lengths = "[...document.querySelectorAll('article.shown .bar')].map(bar => bar.getBoundingClientRect().width)"
    ours, peer = opened.evaluate(lengths)
    assert ours / peer == pytest.approx(0.1 / 0.25, rel=0.01)
    text = opened.evaluate("document.querySelector('article.shown .stage:last-child').textContent")
    assert "torch, csr_matmul0.250 ms, 2.50x ours, as called: it can't be captured" in text
    assert "failed: RuntimeError: <no> backend" in text
    assert "NVIDIA H200, torch 2.13.0, 2026-01-02, commit abc1234" in text
    last = f"document.getElementById({json.dumps(EXAMPLES[-1].name)}).textContent"
    assert "Not measured. On a GPU: python -m bench time-statements" in opened.evaluate(last)


def test_stored_times_are_of_the_statements() -> None:
    for path in STORED.glob("*.json"):
        names = {example.name for example in EXAMPLES}
        assert {row["statement"] for row in stored_times(path)["rows"]} <= names


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, other = tmp_path / "missing.json", tmp_path / "other.json"
    other.write_text('{"rows": [{"statement": "spmm", "provider": "torch", "device_ms": 0}]}')
    for path, words in (
        (missing, f"{missing} can't be read: No such file or directory"),
        (other, f"{other} holds no times of statements: spmm, torch took 0 ms"),
    ):
        assert main(["statements", "--times", str(path), "--out", str(tmp_path / "page.html")]) == 2
        assert capsys.readouterr().err == f"error: {words}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"^timing the statements needs a GPU that torch can use$"):
        time_statements(tmp_path / "times.json")


@pytest.mark.parametrize(
    ("name", "blocks", "words"),
    [
        ("bmm", dict(m=128, n=64, k=32), ["m 128", "n 64", "k 32", "C: 512 m x 512 n, for each b"]),
        ("histogram", dict(i=1024), ["i 1,024", "products: 1,000,000 i", "added to H where BIN says"]),
        ("outer-product", dict(i=4, j=256), ["i 4", "j 256", "C: 8,192 i x 8,192 j"]),
    ],
)
def test_the_tile_picture_names_blocks_and_where_they_go(name: str, blocks: dict[str, int], words: list[str]) -> None:
    drawn = ElementTree.fromstring(tile_picture(*planned(name, **blocks)))
    assert set(words) <= {text.text for text in drawn.iter("text")}
