"""The report of rows that no run should leave: figures that are none, names of any letters, a case measured twice."""

from __future__ import annotations

import doctest
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_results import H200, entry, noted, write

from bench.case import OURS
from bench.results import load

pytest.importorskip("matplotlib")
from test_bench_report import drawn, words

from bench import drawing
from bench.plots import plots
from bench.report import report

pytestmark = pytest.mark.cpu

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    """Figures of few pixels: what they show is not looked at here."""
    monkeypatch.setattr(drawing, "DPI", 40)


def shown(folder: Path, rows: list[dict], machine: dict = H200) -> ElementTree.Element:
    """The page, with all of its rows, no link that leads nowhere, and an id for one thing alone."""
    path = report(load(write(folder / "results.json", rows, machine)), folder)
    tree = ElementTree.fromstring(path.read_text().removeprefix("<!DOCTYPE html>"))
    ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert {link.attrib["href"].removeprefix("#") for link in tree.iter("a")} <= set(ids)
    assert len([name for name in ids if name.startswith("row-")]) == len(rows)
    assert {plot.name for plot in Path(folder).glob("*.png")} == {
        f"{figure.attrib['id']}{style}.png" for figure in tree.iter("figure") for style in ("", "-dark")
    }
    return tree


def figures(tree: ElementTree.Element) -> list[str]:
    return [figure.attrib["id"] for figure in tree.iter("figure")]


def marked(tree: ElementTree.Element) -> list[str]:
    return [words(cell) for cell in tree.iter("td") if (cell.text or "").endswith(", not compared")]


def spmm(ours: float, peer: float, case: str = "cora") -> list[dict]:
    return [entry("unstructured_spmm", case, provider, ms) for provider, ms in ((OURS, ours), ("torch.sparse", peer))]


def block_spmm(ours: float, dense: float) -> list[dict]:
    times = {OURS: ours, "dense": dense, "TorchBSR": 2.0}
    return [entry("structured_spmm", "32x32, half", name, ms, 0.5, series="32x32") for name, ms in times.items()]


def with_info(row: dict, **info: object) -> dict:
    row["extra_info"] |= info
    return row


@pytest.mark.parametrize("ms", [0.0, NAN, INF])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (lambda ms: spmm(1.0, ms), []),
        (lambda ms: spmm(ms, 1.0), []),
        (lambda ms: spmm(1.0, ms) + spmm(1.0, 2.0, "DD"), ["speedup-unstructured_spmm"]),
        (lambda ms: block_spmm(ms, 1.0), ["crossover-32x32"]),
        (lambda ms: block_spmm(1.0, ms), ["crossover-32x32"]),
        (lambda ms: [entry("ablation", "a", step, time) for step, time in (("COO", 2.0), (OURS, ms))], ["ablation"]),
        (lambda ms: [entry("ablation", "a", step, time) for step, time in (("COO", ms), (OURS, 1.0))], []),
        (lambda ms: [entry("group_size", "cora", OURS, ms, 4, series="cora", accesses=9, bytes=9)], []),
        (lambda ms: [entry("scaling", "10 entries", OURS, ms, 10)], []),
        (lambda ms: [entry("roof", "copy", "torch", ms), entry("roof", "matmul", "torch", 1.0)], []),
        (lambda ms: [entry("roof", "copy", "torch", 1.0), entry("cost", "cora", OURS, ms)], []),
        (lambda ms: [entry("roof", "copy", "torch", ms), entry("cost", "cora", OURS, 1.0)], []),
        (
            lambda ms: [entry("roof", "a", "torch", 1.0), entry("roof", "b", "torch", ms), entry("cost", "c", OURS, 1)],
            ["roofline"],
        ),
        (lambda ms: [noted("host", "format", OURS, ms, "us"), noted("host", "format", "torch", 1.0, "us")], []),
    ],
)
def test_what_is_no_measurement_is_marked_and_not_drawn(tmp_path, rows, expected, ms):
    tree = shown(tmp_path, rows(ms))
    assert figures(tree) == expected
    unit = "us" if rows(ms)[0]["extra_info"]["experiment"] == "host" else "ms"
    assert marked(tree) == [f"{ms:g} {unit}, not compared"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (entry("group_size", "cora, groups of 4", OURS, 1.0, 4, series="cora"), []),
        (entry("group_size", "cora, groups of 4", OURS, 1.0, 4, series="cora", accesses=0, bytes=0), []),
        (entry("scaling", "10 entries", OURS, 1.0), []),
        (with_info(entry("scaling", "10 entries", OURS, 1.0, 10), facts=None), ["scaling"]),
        (with_info(entry("scaling", "10 entries", OURS, 1.0, 10), facts={"peak_mib": "n/a"}), ["scaling"]),
        (with_info(entry("scaling", "10 entries", OURS, 1.0, 10), device_ms=None), []),
        (with_info(entry("structured_spmm", "half", "dense", 1.0, 0.5), x=None), []),
    ],
)
def test_what_a_row_lacks_is_not_drawn(tmp_path, row, expected):
    assert figures(shown(tmp_path, [row])) == expected


def test_a_machine_without_packages_has_a_page(tmp_path):
    for packages in ({"packages": None}, {}):
        tree = shown(
            tmp_path, [entry("scaling", "10 entries", OURS, 1.0, 10)], {"gpu": "none", "cpu": "one", **packages}
        )
        assert words(tree.find(".//p[@class='lead']")) == "one, 2026-11-15. Above 1 ours is faster."


def test_the_ablation_is_of_a_case_that_has_its_first_step(tmp_path):
    rows = [entry("ablation", case, step, 1.0) for case, step in (("a", OURS), ("b", "COO"), ("b", OURS))]
    tree = shown(tmp_path, rows)
    assert words(tree.find(".//figcaption")).startswith("b: each step adds one idea.")


def test_a_losing_variant_is_among_what_loses(tmp_path):
    times = {OURS: 1.0, f"{OURS} tf32": 5.0, "e3nn": 2.0}
    tree = shown(tmp_path, [entry("tensor_product", "lmax 1", provider, ms) for provider, ms in times.items()])
    lines = [words(line) for line in list(tree.find(".//section[@id='losses']").iter("tr"))[1:]]
    assert lines == ["lmax 1 Fully connected tensor product, insum_ops tf32 over e3nn 0.40x 0.43x"]
    assert [words(item) for item in tree.find(".//ul[@class='verdict']")] == [
        "1 of 1 are no slower by device time",
        "1 of 1 are no slower as called, with Python",
        "1 cases where ours is behind",
        "3 rows; results checked, then timed",
    ]


ODD = ('a"b<c>&', "a/b", "a b", "$x_{$", "$\\frac{$", "a\x00\x1b", "")


def test_names_of_any_letters_are_shown_as_they_are(tmp_path):
    names = [*ODD[:-2], ""]
    rows = [entry(name, name, provider, 1.0, series=name) for name in names for provider in (OURS, f"peer {name}")]
    cells = [
        [cell.text or "" for cell in row.iter("td")] for row in shown(tmp_path, rows).iter("tr") if "id" in row.attrib
    ]
    assert [row[:2] for row in cells] == [[name, who] for name in names for who in (OURS, f"peer {name}")]
    (tree,) = [shown(tmp_path, [noted("host", "a", OURS, 1.0, "<b>")])]
    assert "1 <b>" in [cell.text for cell in tree.iter("td")]


@pytest.mark.filterwarnings("ignore:Glyph")  # of control letters
@pytest.mark.parametrize("name", ODD)
def test_figures_of_names_of_any_letters_are_drawn(tmp_path, name):
    rows = [entry("unstructured_spmm", name, provider, 1.0) for provider in (OURS, f"{name} peer")]
    rows += [entry("structured_spmm", name, provider, 1.0, 0.5, series=name) for provider in (OURS, f"{name} peer")]
    rows += [entry("ablation", name, provider, 1.0) for provider in (OURS, f"{name} step")]
    rows += [entry("group_size", name, OURS, 1.0, 4, series=name, accesses=9, bytes=9)]
    rows += [entry("scaling", name, provider, 1.0, 10) for provider in (OURS, f"{name} peer")]
    rows += [entry("roof", name, "torch", 1.0, series=name)]
    assert len(figures(shown(tmp_path, rows))) == 6


def test_series_of_the_same_letters_are_figures_of_their_own(tmp_path):
    rows = [
        entry("structured_spmm", f"half, {series}", provider, 1.0, 0.5, series=series)
        for series in ("32/32", "32 32", "32-32 2")
        for provider in (OURS, "dense")
    ]
    assert figures(shown(tmp_path, rows)) == ["crossover-32-32", "crossover-32-32-2", "crossover-32-32-2-2"]


def test_a_case_that_was_measured_twice_has_both_rows(tmp_path):
    rows = [
        entry("scaling", "10 entries", provider, ms, 10) for provider, ms in ((OURS, 1.0), (OURS, 3.0), ("peer", 6.0))
    ]
    cells = [[words(cell) for cell in row.iter("td")] for row in shown(tmp_path, rows).iter("tr") if "id" in row.attrib]
    assert [row[2:4] for row in cells] == [["1 ms", ""], ["3 ms", ""], ["6 ms", "2.00x"]]


def test_without_the_dense_product_a_curve_does_not_say_where_sparse_pays(tmp_path):
    captions = []
    for rows in (
        block_spmm(1.0, 2.0),
        [row for row in block_spmm(1.0, 2.0) if row["extra_info"]["provider"] != "dense"],
    ):
        (plot,) = plots(load(write(tmp_path / "results.json", rows)))
        captions.append(plot.caption)
    assert captions == [
        "Speed over dense for blocks of 32x32; sparse pays where a curve is above 1.",
        "Speed over TorchBSR for blocks of 32x32; TorchBSR is slower where a curve is above 1.",
    ]


def test_bars_of_what_was_never_captured_are_of_calls_in_turns(tmp_path):
    ours, peer = (
        with_info(entry("unet", "room", name, 4.0), timing="queue", queued_ms=4.0) for name in (OURS, "spconv")
    )
    peer["extra_info"] |= {"ours_ms": 5.0}
    (plot,) = plots(load(write(tmp_path / "results.json", [ours, peer])))
    assert "0.80" in [text.get_text() for text in drawn(plot).axes[0].texts]


def test_the_examples_of_drawing_hold():
    assert doctest.testmod(drawing) == (0, 1)
