"""The suite's figures: what a case is beside the best other, its share of the floor, and what is told of all."""

from __future__ import annotations

import pytest
from bench_results import noted, write

from bench.drawing import png
from bench.plots import plots
from bench.results import load

pytestmark = pytest.mark.cpu


def rows(family: str, sizes: str, floor: float | None, timing: str = "graph", **times: float) -> list[dict]:
    found = []
    for provider, ms in times.items():
        row = noted("statements", f"{family}, {sizes}", provider, ms, "ms")
        row["extra_info"]["facts"] = {"series": "forward", "floor_ms": floor}
        row["extra_info"]["timing"] = timing
        found.append(row)
    return found


def test_a_case_is_held_against_the_best_other(tmp_path):
    some = rows("sum", "odd", 0.5, insum_ops=1.0, torch=4.0, compiled=2.0)
    some += rows("edges", "odd", 0.25, insum_ops=1.0, torch=0.5)
    some += rows("edges", "even", None, "queue", insum_ops=1.0, torch=1.0)
    (plot,) = plots(load(write(tmp_path / "results.json", some)))
    assert (plot.name, plot.experiment) == ("statements-forward", "statements")
    assert plot.caption == (
        "3 cases: 1.00 times as fast as the best of torch, torch.compile and torch's own routine, as geometric mean; "
        "1 are slower (red), the least at 0.50. Share of the floor: 0.35 as geometric mean."
    )
    assert png(plot, "dark").startswith(b"\x89PNG")


def test_a_suite_without_others_has_no_figure(tmp_path):
    some = rows("sum", "odd", None, insum_ops=1.0)
    assert not list(plots(load(write(tmp_path / "results.json", some))))


def test_rows_of_replays_are_compared_by_the_device(tmp_path):
    run = load(write(tmp_path / "results.json", rows("sum", "odd", 0.5, insum_ops=1.0, torch=4.0)))
    assert [row.timing for row in run.rows] == ["graph", "graph"]
