"""Two runs compared, on small results files: what got worse, what is gone, what can't be compared."""

from __future__ import annotations

import pytest
from bench_results import CPU, H200, entry, noted, spmm, write

from bench.__main__ import main
from bench.compare import STORED, changes, compare, stored_run
from bench.results import load

pytestmark = pytest.mark.cpu


def test_a_run_like_the_stored_one_passes(tmp_path, capsys):
    before = write(tmp_path / "before.json", spmm(1.0, 2.0) + spmm(1.0, 0.5, "DD"))
    assert compare(write(tmp_path / "now.json", spmm(1.0, 1.9) + spmm(1.0, 0.5, "DD")), before) == 0
    assert capsys.readouterr().out == "2 ratios to peers: 0 worse and 0 better by more than 1.2 times\n"


def test_a_slower_machine_is_no_regression(tmp_path):
    before = write(tmp_path / "before.json", spmm(1.0, 2.0))
    assert compare(write(tmp_path / "now.json", spmm(7.0, 14.0)), before) == 0


def test_ground_lost_to_a_peer_fails_and_is_named(tmp_path, capsys):
    before = write(tmp_path / "before.json", spmm(1.0, 2.0) + spmm(1.0, 1.0, "DD"))
    assert compare(write(tmp_path / "now.json", spmm(1.25, 2.0) + spmm(0.5, 1.0, "DD")), before) == 1
    assert capsys.readouterr().out == (
        "worse  unstructured_spmm: cora, against torch.sparse: 2.00x before, 1.60x now, 1.25 times worse\n"
        "2 ratios to peers: 1 worse and 1 better by more than 1.2 times\n"
    )


def test_a_peer_that_was_not_captured_is_compared_as_called(tmp_path):
    ours, theirs = spmm(1.0, 6.0)
    ours["extra_info"] |= dict(queued_ms=3.0, queued_p20=2.0)
    theirs["extra_info"] |= dict(queued_ms=6.0, queued_p20=5.0, timing="queue")
    run = load(write(tmp_path / "run.json", [ours, theirs]))
    ((_, _, ratio),) = run.ratios("unstructured_spmm")
    assert ratio == 2.0
    (change,) = changes(run, run)
    assert change.before == 2.5


def test_the_threshold_is_the_callers_or_the_machines(tmp_path):
    before, now = spmm(1.0, 2.0), spmm(1.4, 2.0)
    stored, run = write(tmp_path / "before.json", before), write(tmp_path / "now.json", now)
    assert compare(run, stored) == 1
    assert compare(run, stored, threshold=1.5) == 0
    stored, run = write(tmp_path / "before.json", before, CPU), write(tmp_path / "now.json", now, CPU)
    assert compare(run, stored) == 0


def test_the_stored_run_is_found_by_the_machine(tmp_path):
    assert stored_run(load(write(tmp_path / "gpu.json", [], H200))) == STORED / "nvidia-h200.json"
    assert stored_run(load(write(tmp_path / "cpu.json", [], CPU))) == STORED / "cpu-x86_64-2.json"


def test_what_can_not_be_compared_is_refused(tmp_path, capsys):
    run, other = write(tmp_path / "run.json", spmm(1, 2)), write(tmp_path / "cpu.json", spmm(1, 2), CPU)
    lonely = write(tmp_path / "lonely.json", [entry("scaling", "10 entries", "insum_ops", 1.0)])
    absent = tmp_path / "absent.json"
    for stored, message in (
        (absent, f"there is no stored run at {absent}; keep one: cp {run} {absent}"),
        (other, f"{other} is of cpu-x86_64-2 and {run} of nvidia-h200; compare runs of one kind of machine"),
        (lonely, f"{lonely} and {run} share no case with a peer; run the same cases"),
    ):
        assert main(["compare", str(run), str(stored)]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"


def test_rows_of_ours_that_are_gone_fail_and_are_named(tmp_path, capsys):
    before = write(tmp_path / "before.json", spmm(1, 2) + spmm(1, 2, "DD") + spmm(1, 2, "E"))
    assert compare(write(tmp_path / "now.json", spmm(1, 2) + spmm(1, 2, "DD")[1:]), before) == 1
    assert capsys.readouterr().out == (
        "gone   unstructured_spmm: DD, insum_ops\n"
        "gone   unstructured_spmm: E, the whole case\n"
        "2 stored ratios not compared, to torch.sparse\n"
        "1 ratios to peers: 0 worse and 0 better by more than 1.2 times\n"
    )


def test_a_peer_that_did_not_run_and_experiments_that_did_not_are_counted(tmp_path, capsys):
    others = [entry("scaling", f"{n} entries", "insum_ops", 1.0) for n in (10, 100)]
    roof = [entry("roof", "copy", "torch", 1.0)]
    before = write(tmp_path / "before.json", spmm(1, 2) + spmm(1, 2, "DD") + others + roof)
    now = spmm(1, 2) + spmm(1, 2, "DD")[:1] + [entry("roof", "matmul", "torch", 1.0)]
    assert compare(write(tmp_path / "now.json", now), before) == 0
    assert capsys.readouterr().out == (
        "gone   roof: copy, which has no row of ours\n"
        "1 stored ratio not compared, to torch.sparse\n"
        "2 stored cases of 1 experiment not run\n"
        "1 ratios to peers: 0 worse and 0 better by more than 1.2 times\n"
    )


def test_inputs_of_other_names_are_said_to_be_others(tmp_path, capsys):
    before = write(tmp_path / "before.json", spmm(1, 2) + spmm(1, 2, "DD"))
    assert compare(write(tmp_path / "now.json", spmm(1, 2, "citations-2k")), before) == 1
    assert capsys.readouterr().out == (
        "gone   unstructured_spmm: all 2 cases; the new run has others (cora before, citations-2k now): compare runs "
        "of the same INSUM_DATA, or both of generated inputs\n"
        "2 stored ratios not compared, to torch.sparse\n"
        "0 ratios to peers: 0 worse and 0 better by more than 1.2 times\n"
    )


@pytest.mark.parametrize("ms", [0.0, float("nan"), float("inf"), None], ids=str)
def test_no_time_of_ours_is_a_failure(tmp_path, capsys, ms):
    before = write(tmp_path / "before.json", spmm(1, 2) + spmm(1, 2, "DD"))
    ours, peer = spmm(1.0, 2)
    ours["extra_info"] |= {"device_ms": ms, "device_p20": ms}
    now = write(tmp_path / "now.json", [ours, peer, *spmm(1, 2, "DD")])
    assert compare(now, before) == 1
    figure = "nan" if ms is None else f"{ms:g}"
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"failed unstructured_spmm: cora, insum_ops: {figure} ms is no measurement",
        "1 stored ratio not compared, to torch.sparse",
    ]
    assert compare(before, now) == 0


def test_a_call_without_memory_of_its_own_is_no_failure(tmp_path):
    rows = [noted("memory", "cora, call", name, mib, "MiB") for name, mib in (("insum_ops", 0.0), ("COO", 1.0))]
    path = write(tmp_path / "run.json", rows + spmm(1, 2))
    assert compare(path, path) == 0


def test_variants_of_ours_are_compared_too(tmp_path, capsys):
    def product(ms: float) -> list[dict]:
        times = {"insum_ops": 1.0, "insum_ops tf32": ms, "e3nn": 5.0}
        return [entry("tensor_product", "lmax 1", provider, time) for provider, time in times.items()]

    before = write(tmp_path / "before.json", product(0.5))
    assert compare(write(tmp_path / "now.json", product(5.0)), before) == 1
    assert capsys.readouterr().out == (
        "worse  tensor_product: lmax 1, insum_ops tf32 against e3nn: 10.00x before, 1.00x now, 10.00 times worse\n"
        "2 ratios to peers: 1 worse and 0 better by more than 1.2 times\n"
    )
    assert compare(write(tmp_path / "now.json", [*product(5.0)[:1], *product(5.0)[2:]]), before) == 1
    assert capsys.readouterr().out.startswith("gone   tensor_product: lmax 1, insum_ops tf32\n")


def test_runs_are_compared_on_a_basis_that_both_have(tmp_path):
    """By replay a peer was 5 times slower; calls, which the host bounds, took the same time then as now."""
    paths = []
    for timing, ms in (("graph", 5.0), ("queue", 10.0)):
        rows = spmm(1.0, ms)
        for row in rows:
            row["extra_info"] |= {"queued_ms": 10.0, "queued_p20": 10.0}
        rows[1]["extra_info"] |= {"timing": timing, "device_p20": ms}
        paths.append(write(tmp_path / f"{timing}.json", rows))
    for before, now in (paths, paths[::-1]):
        (change,) = changes(load(before), load(now))
        assert (change.before, change.now) == (1.0, 1.0)
    (change,) = changes(load(paths[0]), load(paths[0]))
    assert change.before == 5.0 / 0.9


@pytest.mark.parametrize("threshold", ["0", "-1", "1", "0.5", "nan", "inf"])
def test_a_threshold_is_a_number_above_one(tmp_path, capsys, threshold):
    run = write(tmp_path / "run.json", spmm(1, 2))
    assert main(["compare", str(run), str(run), f"--threshold={threshold}"]) == 2
    assert capsys.readouterr().err == (
        f"error: the threshold is {threshold}; how many times worse a ratio may get is a number above 1\n"
    )


def test_a_peer_that_did_not_run_may_have_its_stored_time(tmp_path, capsys):
    ours, theirs = spmm(1.0, 2.0)
    theirs["extra_info"] |= dict(queued_ms=4.0, queued_p20=3.0, ours_ms=0.1, ours_p20=0.1, timing="queue")
    ours["extra_info"] |= dict(queued_p20=1.0)
    before = write(tmp_path / "before.json", [ours, theirs, *spmm(1.0, 2.0, "DD")])
    slower = entry("unstructured_spmm", "cora", "insum_ops", 2.0)
    slower["extra_info"] |= dict(queued_p20=2.0)
    now = write(tmp_path / "now.json", [slower, *spmm(1.0, 2.0, "DD")])
    assert compare(now, before) == 0
    assert "1 stored ratio not compared, to torch.sparse" in capsys.readouterr().out
    assert compare(now, before, has_stored_peers=True) == 1
    told = "worse  unstructured_spmm: cora, against torch.sparse: 30.00x before, 15.00x now, 2.00 times worse"
    assert told in capsys.readouterr().out
    assert main(["compare", str(now), str(before), "--stored-peers"]) == 1


def test_beside_a_stored_time_ours_goes_by_its_replay_and_not_by_a_busy_host(tmp_path):
    ours, theirs = spmm(1.0, 2.0)
    theirs["extra_info"] |= dict(queued_ms=4.0, queued_p20=3.0, timing="queue")
    ours["extra_info"] |= dict(queued_ms=1.0, queued_p20=1.0)
    before = write(tmp_path / "before.json", [ours, theirs])
    (busy,) = spmm(1.0, 2.0)[:1]
    busy["extra_info"] |= dict(queued_ms=9.0, queued_p20=9.0)
    assert compare(write(tmp_path / "now.json", [busy]), before, has_stored_peers=True) == 0


def test_a_stored_time_is_of_the_same_torch(tmp_path, capsys):
    before = write(tmp_path / "before.json", spmm(1.0, 2.0))
    newer = {**H200, "packages": {"torch": "2.12.0", "triton": "3.6.0"}}
    now = write(tmp_path / "now.json", spmm(1.0, 2.0)[:1], newer)
    assert main(["compare", str(now), str(before), "--stored-peers"]) == 2
    assert capsys.readouterr().err == "error: torch was 2.11.0 and is 2.12.0: measure the peers again\n"


def test_sizes_of_another_seed_are_not_gone(tmp_path, capsys):
    def rows(seed: int, ours: float) -> list[dict]:
        return [
            entry("statements", f"sum, {seed}", "insum_ops", ours, seed=seed),
            entry("statements", f"sum, {seed}", "torch", 2.0, seed=seed),
        ]

    before = write(tmp_path / "before.json", rows(7, 1.0) + rows(8, 1.0))
    assert compare(write(tmp_path / "now.json", rows(8, 1.0)), before) == 0
    assert compare(write(tmp_path / "now.json", rows(8, 2.0)), before) == 1
    assert compare(write(tmp_path / "now.json", rows(7, 1.0)[:1] + rows(8, 1.0)[1:]), before) == 1
    assert "gone   statements: sum, 8, insum_ops" in capsys.readouterr().out
