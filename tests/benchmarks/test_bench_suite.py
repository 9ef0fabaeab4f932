"""The suite of statements: sizes follow from the seed, plain torch and the statements agree, work is counted right."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.case import OURS
from bench.harness import check, wall_in_turns
from bench.roofs import Roofs, floor_ms
from bench.statement_times import COMPILED, TORCH
from bench.suite import FAMILIES, SUITE
from bench.suite_times import BACKWARD, FORWARD, LIBRARY, PASSES, Measured, calls, expected, measure_workload, summary
from bench.workload import HOST, SCALES, SETS, Range, Work, Workload, work

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
EXACT = 1e-12
by_id = {workload.id: workload for workload in SUITE}
each_workload = pytest.mark.parametrize("workload", SUITE, ids=list(by_id))


def test_the_suite_is_as_wide_as_it_says():
    assert len(SUITE) >= 40
    assert len(by_id) == len(SUITE)
    assert {
        *("network", "sum", "histogram", "edges", "scatter", "gather", "permutation", "diagonal", "outer", "dense"),
        *("experts", "adapters", "relations", "blocks", "segments", "edge-convolution", "sampled", "spmv", "bags"),
        *("hash-grid", "decomposition", "tensor-product"),
    } == set(FAMILIES)
    changing = {workload.family for workload in SUITE if workload.is_changing}
    assert changing == {"edges", "experts"}


@each_workload
def test_sizes_follow_from_the_seed(workload: Workload):
    for scale in SCALES:
        drawn = {(seed, sizes): workload.drawn(seed, sizes, scale) for seed in (0, 1) for sizes in SETS}
        assert drawn == {key: workload.drawn(*key, scale) for key in drawn}
        assert all(extent % 2 for seed in (0, 1) for extent in drawn[seed, "odd"].values())
        for extents in drawn.values():
            for name, extent in extents.items():
                limits = workload.sizes[name]
                assert min(limits.small_low, 8) <= extent <= limits.high + 1
    full = [tuple(workload.drawn(0, sizes, "full").values()) for sizes in SETS]
    assert len({*full, tuple(workload.drawn(1, "first", "full").values())}) == 4


@each_workload
def test_the_set_for_the_host_is_small_at_every_scale(workload: Workload):
    small = workload.drawn(5, HOST, "small")
    assert small == workload.drawn(5, HOST, "full")
    assert all(extent <= workload.sizes[name].small_high | 1 for name, extent in small.items())


def test_a_size_is_drawn_the_same_on_every_machine():
    assert by_id["dense-matmul"].drawn(7, "odd", "full") == {"m": 3337, "n": 4907, "k": 1413}


@each_workload
@pytest.mark.parametrize("sizes", ["first", "odd"])
def test_plain_torch_equals_the_statement_and_its_gradients(workload: Workload, sizes: str):
    given = workload.make(workload.drawn(3, sizes, "small"), 3, dtype=torch.float64)
    for pass_ in PASSES:
        reference, upstream = expected(workload, given, pass_)
        ours = calls(workload, given, pass_, upstream.double())[OURS]
        for call in ours:
            if workload.is_changing and call is ours[0]:
                call()  # the first of its indices, in a tensor of its own
            else:
                check(call(), reference, EXACT)


def test_each_timed_call_of_a_changing_index_has_a_tensor_that_is_new():
    workload = by_id["edges-scores-new-index"]
    given = workload.make(workload.drawn(0, "first", "small"), 0)
    seen: list[Tensor] = []

    def noticed(Q: Tensor, K: Tensor, T: Tensor, U: Tensor) -> Tensor:
        seen.append(T)
        return Q

    pair = calls(Workload(**{**vars(workload), "plain": noticed}), given, FORWARD, torch.zeros(()))[TORCH]
    for _ in range(4):
        pair[0]()
    assert len({id(each) for each in seen}) == 4
    assert [torch.equal(seen[0], each) for each in seen] == [True, False, False, True]
    pair[1]()
    assert seen[4] is given.operands["T"]


@pytest.mark.parametrize(
    ("name", "extents", "forward", "backward"),
    [
        # 12 numbers read, 4 written; then 4 read and 12 written
        ("sum-columns", dict(i=3, j=4), Work(64, 0, 12), Work(128, 0, 24)),
        # 8 + 2 * 6 numbers; 24 products of two in either of two orders, then each gradient as many
        ("dense-vector", dict(i=2, j=4), Work(4 * 14, 0, 16), Work(4 * 28, 0, 48)),
        ("diagonal-batched", dict(b=2, i=3), Work(4 * 12, 0, 6), Work(4 * 36, 0, 12)),
    ],
)
def test_dense_work_is_counted_by_hand(name, extents, forward, backward):
    workload = by_id[name]
    given = workload.make(extents, 0)
    assert (work(workload, given), work(workload, given, is_backward=True)) == (forward, backward)


def test_of_a_gathered_tensor_rows_count_that_are_met():
    workload = by_id["gather-rows"]  # Y[p,c] = X[G[p],c] in float16
    given = workload.make(dict(p=5, n=9, c=2), 0)
    given.operands["G"].copy_(torch.tensor([1, 1, 4, 1, 4]))
    assert work(workload, given) == Work(2 * 2 * 2 + 5 * 8 + 2 * 10, 2 * 10, 10)


def test_the_floor_is_the_largest_of_four_times():
    machine = Roofs(copied=10, cached=20, flops=100, launch=0.5)
    assert floor_ms(Work(30, 20, 100), machine) == 3
    assert floor_ms(Work(10, 80, 100), machine) == 4
    assert floor_ms(Work(10, 20, 900), machine) == 9
    assert floor_ms(Work(1, 1, 1), machine) == 0.5


def test_ranges_meet_half_way_by_ratio():
    source = random.Random(0)
    drawn = [Range(900, 1600, 9, 16).draw(source, 0.5, is_odd=False) for _ in range(50)]
    assert min(drawn) >= 88
    assert max(drawn) <= 160
    assert all(size % 8 == 0 for size in drawn)


def test_the_table_has_ratios_to_the_best_other_and_shares_of_the_floor():
    workload = by_id["sum-rows"]
    fast = Measured(workload, FORWARD, "odd", dict(i=3, j=5), 0.1, "kernel", {OURS: 0.2, TORCH: 0.6, COMPILED: 0.4})
    slow = Measured(workload, BACKWARD, "odd", dict(i=3, j=5), 0.1, "kernel", {OURS: 0.8, TORCH: 0.4})
    broken = Measured(workload, FORWARD, "first", dict(i=8, j=8), 0.1, "kernel", {TORCH: 0.4})
    assert (fast.ratio, fast.share, slow.ratio, slow.share) == (2.0, 0.5, 0.5, 0.125)
    tiny = Measured(workload, FORWARD, HOST, dict(i=3, j=5), 0.1, "kernel", {OURS: 0.02, TORCH: 0.005})
    lines = summary([fast, slow, broken, tiny], 4)
    assert lines[0] == "== statements, seed 4, milliseconds on cpu"
    assert lines[2].split() == ["sum", "rows", "forward", "i=3", "j=5", "0.2", "0.6", "0.4", "2", "0.5", "kernel"]
    assert lines[-3:] == [
        "forward: 1 cases, 2.00x the best other as geometric mean, least 2.00x, 0 below 0.95x",
        "forward: 1 cases of a few numbers, whose ratios say nothing of larger ones: "
        "15 us more than the best other as median, 15 most",
        "backward: 1 cases, 0.50x the best other as geometric mean, least 0.50x, 1 below 0.95x",
    ]


def test_what_is_not_captured_is_compared_as_called():
    times, how = {OURS: 0.2, TORCH: 0.6, LIBRARY: 0.3}, {OURS: "graph", TORCH: "graph", LIBRARY: "queue"}
    given = by_id["histogram-numbers"], FORWARD, "odd", dict(p=9, g=3), 0.1, "kernel", times, {}, how
    queued = Measured(*given, queued={OURS: 0.25, TORCH: 0.7, LIBRARY: 0.3})
    assert (queued.rival, queued.ratio, queued.best_other) == (LIBRARY, 1.2, 0.3)
    assert queued.over(TORCH) == pytest.approx(3.0)
    assert Measured(*given).ratio == pytest.approx(1.5)  # nothing else is known
    assert Measured(*given[:6], {TORCH: 0.6}).best_other == 0.6


def test_a_wrong_provider_gets_no_time():
    workload = by_id["sum-rows"]
    wrong = Workload(**{**vars(workload), "library": ("half", lambda X: X.sum(1) / 2)})
    found = measure_workload(wrong, "odd", FORWARD, 0, "small")
    assert set(found.ms) == {OURS, TORCH}
    (problem,) = found.failures.values()
    assert str(problem) == "relative error 5.00e-01 is above 1e-05"


def test_calls_on_a_cpu_are_timed_in_turns():
    order: list[str] = []
    wall_in_turns([lambda: order.append("a"), lambda: order.append("b")], seconds=0, rounds=3)
    assert "".join(order) == "aabb" + "aabb" * 3  # the first call of a round is not timed


def test_a_family_runs_by_its_name_and_with_another_seed(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSUM"))}
    command = [sys.executable, "-m", "pytest", "bench/cases/test_statements.py", "-q", "-p", "no:cacheprovider"]
    command += ["-k", "outer and odd and forward", "--seed", "5", f"--benchmark-json={tmp_path / 'results.json'}"]
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "== statements, seed 5, milliseconds on cpu" in answer.stdout
    assert "forward: 2 cases, " in answer.stdout
    assert (tmp_path / "results.json").exists()
