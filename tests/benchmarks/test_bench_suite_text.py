"""What README and the documentation tell of the suite: made of a results file, with every case that others win."""

from __future__ import annotations

import pytest
from bench_results import noted, write

from bench.__main__ import main
from bench.readme import block, rewrite
from bench.results import ResultsError, load
from bench.suite_text import NONE, suite_lines, suite_rows
from bench.suite_times import measured_of

pytestmark = pytest.mark.cpu


def rows(case: str, seed: int, floor: float, **times: float) -> list[dict]:
    found = []
    for provider, ms in times.items():
        row = noted("statements", f"{case}: i = 3, j = 5", provider, ms, "ms")
        facts = {"series": case.split(", ")[2], "sizes": "i = 3, j = 5", "seed": seed, "floor_ms": floor, "error": 1e-7}
        row["extra_info"] |= {"facts": facts, "timing": "graph"}
        found.append(row)
    return found


@pytest.fixture
def run(tmp_path):
    some = rows("sum, rows, forward, odd", 7, 0.5, insum_ops=1.0, torch=4.0, **{"torch.compile": 2.0})
    some += rows("sum, columns, forward, odd", 7, 0.9, insum_ops=1.0, torch=0.5)
    some += rows("sum, rows, backward, odd", 7, 0.25, insum_ops=1.0, torch=1.0)
    some += rows("dense, vector, forward, odd", 8, 0.25, insum_ops=1.0, torch=8.0)
    return load(write(tmp_path / "results.json", some))


def test_a_run_is_read_back_as_it_was_measured(run):
    first, *_, last = measured_of(run)
    assert (first.workload.id, first.pass_, first.sizes, first.extents) == (
        "sum-rows",
        "forward",
        "odd",
        dict(i=3, j=5),
    )
    assert (first.ratio, first.share, first.seed) == (2.0, 0.5, 7)
    assert last.workload.id == "dense-vector"


def test_the_suite_is_told_by_pass(run):
    *_, empty, header, _, forward, backward = suite_lines(run).split("\n")
    assert suite_lines(run).startswith("3 statements of 2 families, ")
    assert "sizes drawn from seeds 7 and 8 (sets: odd)" in suite_lines(run)
    assert empty == ""
    assert header.startswith("| pass | cases | times as fast as the best other | median | least | below 0.95x |")
    # the geometric mean of 2, 0.5 and 8; the torch that is 0.5 ms is faster than the floor of 0.9 ms
    assert forward == "| forward | 3 | **2.00x** | 2.00x | 0.50x | 1 | 4.00x (2) | 0.48 |"
    assert backward == "| backward | 1 | **1.00x** | 1.00x | 1.00x | 0 | 1.00x (1) | 0.25 |"


def test_families_come_first_and_then_every_case_that_others_win(run):
    assert suite_rows(run).split("\n")[2:] == [
        "| sum | 2, 1.00x, 0.50x, 0.67 | 1, 1.00x, 1.00x, 0.25 |",
        "| dense | 1, 8.00x, 8.00x, 0.25 |  |",
        "",
        "| where others win | sizes | ours, ms | best other, ms | times as fast | share of the floor |",
        "| --- | --- | --- | --- | --- | --- |",
        "| sum, columns, forward | i=3 j=5 | 1 | 0.5 (plain torch) | 0.50x | 0.90 |",
    ]


def test_a_file_says_so_where_nothing_was_measured(tmp_path):
    run = load(write(tmp_path / "results.json", [noted("cost", "tune", "insum_ops", 1.0, "s")]))
    text = "<!-- suite: begin -->\n<!-- suite: end -->\n<!-- suite, all: begin -->\nold\n<!-- suite, all: end -->\n"
    assert rewrite(text, run, "results.json").count(NONE) == 2


def test_other_tables_leave_the_suite_out(run):
    assert "sum, columns" not in block(run, "results.json")


def test_the_table_is_printed_of_a_file(tmp_path, capsys):
    path = write(tmp_path / "results.json", rows("sum, rows, forward, odd", 7, 0.5, insum_ops=1.0, torch=4.0))
    assert main(["suite", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("== statements, seed 7, milliseconds on ")
    assert "forward: 1 cases, 4.00x the best other as geometric mean" in told


def test_rows_of_a_statement_that_is_no_more_are_refused(tmp_path):
    some = rows("sum, diagonals, forward, odd", 7, 0.5, insum_ops=1.0, torch=4.0)
    with pytest.raises(ResultsError, match="no such statement in the suite"):
        measured_of(load(write(tmp_path / "results.json", some)))
