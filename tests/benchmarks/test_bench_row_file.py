"""Rows on disk as soon as they are measured, of several processes; runs that go on where one was cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench_results import H200, noted, write

from bench.conftest import case_of
from bench.results import ResultsError, load, merge
from bench.row_file import append, as_results, finished, lines, rows_path, time_table

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
HEAD = {"machine_info": H200, "commit_info": {"id": "abc", "dirty": False}, "datetime": "2026-11-17T22:00:00"}


def row(provider: str, ms: float) -> dict:
    found = noted("statements", "sum, rows, forward, odd: i = 3, j = 5", provider, ms, "ms")
    return {"fullname": f"cases/test_statements.py::test_statement[sum-rows-{provider}]", **found}


def test_lines_of_many_are_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: append(path, {"of": "x" * 5000, "spent": {"measuring": at}}), range(64)))
    assert sorted(line["spent"]["measuring"] for line in lines(path)) == list(range(64))


def test_a_line_that_was_cut_off_is_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"row": row("torch", 1.0)})
    with path.open("a") as file:
        file.write('{"row": {"fullna')
    assert finished(path) == {row("torch", 1.0)["fullname"]}


def test_what_a_peer_has_not_is_finished_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert finished(path) == set()
    append(path, {"left_out": "cases/test_a.py::test_a[b-spconv]", "why": "spconv is not installed"})
    assert finished(path) == {"cases/test_a.py::test_a[b-spconv]"}


def test_a_file_of_rows_is_a_results_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"head": HEAD})
    for provider, ms in (("torch", 3.0), ("insum_ops", 1.0), ("torch", 2.0)):
        append(path, {"row": row(provider, ms)})
        append(path, {"head": {**HEAD, "commit_info": {"id": provider, "dirty": True}}})
        append(path, {"of": "a case", "spent": {"measuring": 0.5, "waiting": 2.0}})
    assert len(as_results(path)["benchmarks"]) == 2
    assert {each.provider: each.value for each in load(path).rows} == {"insum_ops": 1.0, "torch": 2.0}
    assert {each.commit for each in load(path).rows} == {"torch, changed", "insum_o, changed"}  # of the head before
    other = {"fullname": "cases/test_cost.py::test_cost[tune]", **noted("cost", "tune", "insum_ops", 1.0, "s")}
    stored = write(tmp_path / "stored.json", [other])
    merge([stored, path], tmp_path / "whole.json")
    assert load(tmp_path / "whole.json").experiments == ("cost", "statements")


def test_a_file_of_rows_without_a_head_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"row": row("torch", 3.0)})
    with pytest.raises(ResultsError, match="'machine_info' is missing"):
        load(path)


def test_the_table_of_times_has_stages_and_the_longest_cases(tmp_path):
    path = tmp_path / "rows.jsonl"
    for case, spent in (
        ("a.py::a", {"measuring": 2.0, "building": 30.0}),
        ("a.py::b", {"tuning": 5.0, "waiting": 9.0}),
    ):
        append(path, {"of": case, "spent": spent})
    assert time_table(path) == [
        "seconds of all processes: building 30, waiting 9, tuning 5, measuring 2",
        "of the GPU 7, most by: b 5.0, a 2.0",
    ]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("cases/test_host.py::test_host[spmm-torch.mm]", "cases/test_host.py::test_host[spmm"),
        ("cases/test_ablation.py::test_ablation[+ group]", "cases/test_ablation.py::test_ablation"),
        ("cases/test_roof.py::test_copy", "cases/test_roof.py::test_copy"),
    ],
)
def test_a_case_is_a_row_without_its_provider(name, case):
    assert case_of(name) == case


def run(rows: Path, *options: str, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSUM"))}
    command = [sys.executable, "-m", "pytest", "bench/cases/test_statements.py", "-q", "-p", "no:cacheprovider"]
    command += ["--scale", "small", "--seed", "5", *options]
    environment = {**kept, **more, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "INSUM_BENCH_ROWS": str(rows)}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_run_goes_on_where_one_was_cut_short(tmp_path):
    """By two processes that share a lock, then by one that has no time and names what it did not reach."""
    rows = tmp_path / "rows.jsonl"
    first = run(rows, "-n", "2", "-k", "outer-vectors and odd and forward", INSUM_BENCH_LOCK=str(tmp_path / "lock"))
    assert "== statements, seed 5, milliseconds on cpu" in first
    assert "forward: 1 cases, " in first
    assert "seconds of all processes: " in first
    assert {line["row"]["extra_info"]["provider"] for line in lines(rows) if "row" in line} == {"insum_ops", "torch"}
    assert [set(line["head"]) for line in lines(rows) if "head" in line] == [set(HEAD)]
    second = run(rows, "-k", "outer and odd and forward", INSUM_BENCH_SECONDS="0")
    assert "2 skipped, " in second
    assert (
        "not reached in time: 1 cases, of 2 rows\n  bench/cases/test_statements.py::test_statement[outer-batched"
        in second
    )
    assert len([line for line in lines(rows) if "row" in line]) == 2
    assert json.loads(rows.read_text().splitlines()[0])["head"]["machine_info"]["gpu"] == "none"


def test_a_file_of_another_name_is_refused(monkeypatch):
    monkeypatch.setenv("INSUM_BENCH_ROWS", "rows.json")
    with pytest.raises(ValueError, match=r"^INSUM_BENCH_ROWS is 'rows.json', but a file of rows has a name that ends"):
        rows_path()
