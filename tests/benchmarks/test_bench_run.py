"""Cases are checked before they are timed, a missing peer is skipped, and a slow-down is caught."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from time import sleep

import pytest
import torch

from bench import harness
from bench.case import OURS, Call, Case, TritonError, forget, held
from bench.compare import compare
from bench.harness import Times, check
from bench.results import load

pytest.importorskip("pytest_benchmark")
import bench.conftest
from bench.conftest import SLOWDOWN, measured, noted
from bench.peers import installed

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
ONES = Case("experiment", "ones", torch.ones(3, dtype=torch.float64))


class Benchmark:
    """What pytest-benchmark's fixture does with a call, written down."""

    def __init__(self) -> None:
        self.extra_info: dict[str, object] = {}
        self.group = ""
        self.events: list[str] = []
        self.rounds: list[int] = []

    def pedantic(self, call, rounds, warmup_rounds=0):
        self.events.append("timed")
        self.rounds.append(rounds)
        call()


def call_of(result: float, events: list[str]) -> Call:
    events.append("prepared")
    return Call(lambda: torch.full((3,), result), facts={"group_size": 4})


def test_a_right_result_is_timed_after_it_was_prepared():
    benchmark = Benchmark()
    measured(benchmark, ONES, OURS, lambda: call_of(1.0, benchmark.events))
    assert benchmark.events == ["prepared", "timed"]
    assert benchmark.group == "experiment: ones"
    assert benchmark.extra_info["error"] == 0
    assert benchmark.extra_info["facts"] == {"group_size": 4}


def test_a_wrong_result_of_ours_fails_and_gets_no_time():
    benchmark = Benchmark()
    with pytest.raises(AssertionError, match=r"^relative error 1\.00e\+00 is above 1e-05$"):
        measured(benchmark, ONES, OURS, lambda: call_of(2.0, benchmark.events))
    assert benchmark.events == ["prepared"]


def test_a_nan_is_a_wrong_result():
    with pytest.raises(AssertionError, match=r"^relative error nan is above 1e-05$"):
        measured(Benchmark(), ONES, OURS, lambda: call_of(float("nan"), []))


def test_each_of_several_results_is_held_to_its_own_reference():
    small, large = torch.full((3,), 1e-6, dtype=torch.float64), torch.full((5,), 1e6, dtype=torch.float64)
    assert check((small, large * (1 + 1e-6)), (small, large), 1e-5) == pytest.approx(1e-6)
    for wrong in ((2 * small, large), (small, 1000 * large), (1000 * small, 1000 * large)):
        with pytest.raises(AssertionError, match=r"^relative error .* is above 1e-05$"):
            check(wrong, (small, large), 1e-5)
    with pytest.raises(AssertionError, match=r"^relative error nan is above 1e-05$"):
        check((small, large * float("nan")), (small, large), 1e-5)
    assert check((small, 1.5 * large), (small, large), (1e-5, 0.6)) == 0.5
    with pytest.raises(ValueError, match="is longer than argument"):
        check((small,), (small, large), 1e-5)


def test_a_wrong_peer_is_skipped_and_stops_nobody():
    benchmark = Benchmark()
    with pytest.raises(pytest.skip.Exception, match="peer fails here: AssertionError: relative error"):
        measured(benchmark, ONES, "peer", lambda: call_of(2.0, benchmark.events))
    assert benchmark.events == ["prepared"]


def test_a_peer_that_is_not_installed_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="no_such_peer can't be imported: No module named 'no_such_peer'"):
        measured(Benchmark(), ONES, "peer", lambda: installed("no_such_peer.nn").Layer())


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.12: cannot open shared object file"),
        ImportError("'spmm' requires the 'torch-sparse' package"),
        TritonError("out of resources"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("moment", ["made", "called"])
def test_a_broken_peer_is_skipped_and_broken_ours_fails(error, moment):
    def run() -> torch.Tensor:
        raise error

    make = run if moment == "made" else lambda: Call(run)
    problem = f"fails here: {type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        problem = "needs more memory than this machine has"
    with pytest.raises(pytest.skip.Exception, match=f"^peer {re.escape(problem)}$"):
        measured(Benchmark(), ONES, "peer", make)
    for ours in (OURS, f"{OURS} tf32"):
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            measured(Benchmark(), ONES, ours, make)


def test_a_peer_whose_import_breaks_is_skipped(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(pytest.skip.Exception, match=r"^broken_peer can't be imported: libcudart\.so\.12: cannot open"):
        installed("broken_peer")


def test_the_slow_down_is_for_ours_alone(monkeypatch):
    monkeypatch.setenv(SLOWDOWN, "3")
    for provider, times in ((OURS, 3), ("peer", 1)):
        calls: list[int] = []

        def run(calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return torch.ones(3)

        measured(Benchmark(), ONES, provider, lambda run=run: Call(run))
        assert len(calls) == 4 * times  # checked, warmed up, sized, timed


def refuses(call: object, calls: int) -> Times:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("captured", "is_capturable", "expected"),
    [
        (lambda call, calls: Times(1.0, 0.9, 1.1), True, {"timing": "graph", "device_ms": 1.0, "cold_ms": 3.0}),
        (lambda call, calls: Times(1.0, 0.9, 1.1), False, {"timing": "queue", "device_ms": 2.0}),
        (refuses, True, {"timing": "queue", "device_ms": 2.0}),
    ],
    ids=["captured", "known not to be", "refuses"],
)
def test_on_a_gpu_rows_say_how_the_device_was_timed(monkeypatch, captured, is_capturable, expected):
    monkeypatch.setattr(bench.conftest, "DEVICE", "cuda")
    monkeypatch.setattr(bench.conftest, "device_times", captured)
    monkeypatch.setattr(bench.conftest, "cold_times", lambda call: Times(3.0, 2.9, 3.1))
    monkeypatch.setattr(bench.conftest, "queued_in_turns", lambda each, calls: [Times(2.0, 1.9, 2.1)] * len(each))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    benchmark = Benchmark()
    call = Call(lambda: torch.ones(3), is_capturable=is_capturable)
    measured(benchmark, ONES, "peer", lambda: call)
    info = benchmark.extra_info
    assert {name: info.get(name) for name in expected} == expected
    assert ("cold_ms" in info) == ("cold_ms" in expected)
    assert (info["queued_ms"], info["queued_p20"]) == (2.0, 1.9)


@pytest.mark.parametrize(("device_ms", "is_kept"), [([3.1, 3.1, 2.1], True), ([3.1, 3.1, 3.1], False)])
def test_times_that_contradict_each_other_are_measured_again_and_then_left_out(monkeypatch, device_ms, is_kept):
    """Work on the device is a part of a call, so it can't take longer."""
    times = iter([Times(ms, ms, ms) for ms in device_ms])
    monkeypatch.setattr(bench.conftest, "DEVICE", "cuda")
    monkeypatch.setattr(bench.conftest, "device_times", lambda call, calls: next(times))
    monkeypatch.setattr(bench.conftest, "cold_times", lambda call: Times(3.1, 3.1, 3.1))
    monkeypatch.setattr(bench.conftest, "queued_in_turns", lambda each, calls: [Times(2.0, 2.0, 2.0)] * len(each))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    benchmark = Benchmark()
    if is_kept:
        measured(benchmark, ONES, "torch", lambda: call_of(1.0, []))
        assert benchmark.extra_info["device_ms"] == 2.1
    else:
        problem = "torch took 3.1 ms on the device and 2 ms as called, which can not be both"
        with pytest.raises(pytest.skip.Exception, match=f"^measured 3 times and left out: {problem}$"):
            measured(benchmark, ONES, "torch", lambda: call_of(1.0, []))
    assert benchmark.events == ["timed"] * is_kept


def test_a_peer_is_timed_in_turns_with_ours(monkeypatch):
    monkeypatch.setattr(bench.conftest, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "_elapsed", lambda several: (several(), 1.0)[1])
    bench.conftest._last.clear()
    order: list[str] = []
    other = replace(ONES, name="other")
    for case, provider in ((ONES, OURS), (ONES, "peer"), (other, "peer")):
        order.clear()
        benchmark = Benchmark()
        run = lambda provider=provider: order.append(provider) or torch.ones(3)
        measured(benchmark, case, provider, lambda run=run: Call(run, is_capturable=False))
        is_beside = (case, provider) == (ONES, "peer")
        assert ("ours_ms" in benchmark.extra_info) == is_beside
        assert (OURS in order) == (is_beside or provider == OURS)
        if is_beside:
            turns = [name for name, before in zip(order[1:], order) if name != before]
            assert min(turns.count(OURS), turns.count("peer")) > 10
    bench.conftest._last.clear()


def test_a_peer_in_tf32_is_timed_in_turns_with_ours_in_tf32(monkeypatch):
    monkeypatch.setattr(bench.conftest, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "_elapsed", lambda several: (several(), 1.0)[1])
    bench.conftest._last.clear()
    called: set[str] = set()
    beside = {}
    for provider in (OURS, "peer", f"{OURS} tf32", f"{OURS}, grouped", "peer tf32"):
        called.clear()
        run = lambda provider=provider: called.add(provider) or torch.ones(3)
        measured(Benchmark(), ONES, provider, lambda run=run: Call(run, is_capturable=False))
        beside[provider] = set(called)
    assert beside == {
        OURS: {OURS},
        "peer": {OURS, "peer"},
        f"{OURS} tf32": {f"{OURS} tf32"},
        f"{OURS}, grouped": {OURS, f"{OURS}, grouped"},
        "peer tf32": {f"{OURS} tf32", "peer tf32"},
    }
    other = replace(ONES, name="other")
    measured(Benchmark(), other, OURS, lambda: Call(lambda: torch.ones(3), is_capturable=False))
    assert {name: of for name, (of, _) in bench.conftest._last.items()} == {OURS: ("experiment", "other")}
    bench.conftest._last.clear()


def test_a_note_is_a_row_too():
    benchmark = Benchmark()
    noted(benchmark, ONES, OURS, 2.5, "s")
    assert (benchmark.extra_info["value"], benchmark.extra_info["unit"]) == (2.5, "s")


def test_times_are_a_median_and_the_middle_three_fifths():
    assert Times.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Times(3.5, 2.0, 5.0)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0)


def test_operands_are_made_once_for_all_providers():
    made = []
    make = held(lambda case: made.append(case))
    for case in ("a", "a", "b", "b"):
        make(case)
    forget()
    make("b")
    assert made == ["a", "b", "b"]


def run_cases(path: Path, *files: str, **variables: str) -> Path:
    # a worker of xdist may run this, and pytest-benchmark would then not time
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSUM"))}
    command = [sys.executable, "-m", "pytest", *[f"bench/cases/{file}" for file in files], "-q"]
    command += ["-k", "scaling and 1000- or host", f"--benchmark-json={path}", "-p", "no:cacheprovider"]
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    return run_cases(tmp_path_factory.mktemp("stored") / "results.json", "test_scaling.py", "test_host.py")


def test_a_run_leaves_times_and_what_they_depend_on(stored):
    data = json.loads(stored.read_text())
    assert {"gpu", "driver", "cuda", "architecture", "cpu", "python", "packages"} <= set(data["machine_info"])
    assert {"torch", "triton"} <= set(data["machine_info"]["packages"])
    assert set(data["commit_info"]) == {"id", "time", "dirty"}
    assert "data" not in data["benchmarks"][0]["stats"]
    run = load(stored)
    (case,) = run.cases("scaling")
    assert set(case) == {OURS, "torch.sparse"}
    assert all(row.value > 0 and row.error <= 1e-5 and row.timing == "wall" for row in case.values())
    assert {row.unit for row in run.of("host")} == {"us"}
    steps = {peer.case for _, peer, _ in run.ratios("host") if peer.provider == "empty function"}
    assert steps == {row.case for row in run.of("host") if row.case.endswith("step")} != set()


def test_a_deliberate_slow_down_fails_the_comparison(stored, tmp_path, capsys):
    assert compare(stored, stored) == 0
    slow = run_cases(tmp_path / "slow.json", "test_scaling.py", **{SLOWDOWN: "10"})
    assert compare(slow, stored, threshold=3) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worse")]
    assert len(worse) == 1
    assert worse[0].startswith("worse  scaling: 1,000 entries, against torch.sparse: ")


def test_host_times_are_of_calls_in_turns():
    names: list[str] = []
    calls = [lambda: names.append("quick"), lambda: names.append("slow") or sleep(1e-4)]
    quick, slow = harness.host_us_in_turns(calls, calls=250)
    rounds = [(name, len(list(group))) for name, group in groupby(names)]
    assert rounds[2:] == [("quick", 100), ("slow", 100)] * 2 + [("quick", 50), ("slow", 50)]  # after warming up
    assert quick < 100 <= slow


def test_no_case_begins_when_time_is_over(monkeypatch):
    bench.conftest.skip_if_late()
    monkeypatch.setenv("INSUM_BENCH_SECONDS", "0")
    with pytest.raises(pytest.skip.Exception, match=r"^INSUM_BENCH_SECONDS is 0, and they are over$"):
        bench.conftest.skip_if_late()


def test_a_run_may_time_each_call_a_few_times_only(monkeypatch):
    benchmark = Benchmark()
    measured(benchmark, ONES, OURS, lambda: call_of(1.0, []))
    monkeypatch.setenv("INSUM_BENCH_ROUNDS", "3")
    measured(benchmark, ONES, OURS, lambda: call_of(1.0, []))
    first, second = benchmark.rounds
    assert first >= 10
    assert second == 3


def test_make_runs_and_compares():
    answer = subprocess.run(["make", "-n", "bench-compare"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m pytest bench/cases -q -rs --benchmark-quiet --benchmark-json=build/bench/results.json" in answer.stdout
    assert "-m bench compare build/bench/results.json" in answer.stdout
