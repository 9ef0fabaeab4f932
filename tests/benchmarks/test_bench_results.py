"""Reading and joining runs and writing the figures of README and the documentation, on small results files."""

from __future__ import annotations

import doctest
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bench_results import CPU, H200, entry, every_kind, noted, spmm, write
from test_readme import run_examples

import bench.data
import bench.machine
import bench.results
from bench.__main__ import main
from bench.case import OURS
from bench.glance import groups
from bench.headlines import headlines
from bench.paper import FLEX_GEMM_MS
from bench.picture import PICTURES, picture
from bench.readme import BEGIN, CURVES, END, TARGETS, pictures_block, rewrite
from bench.results import ResultsError, called_ratio, load

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
COMMITTED = "bench/results/nvidia-h200.json"


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(ResultsError, match=re.escape(f"{path} does not exist; make it: make bench")):
        load(path)
    path.write_text("[")
    with pytest.raises(ResultsError, match=re.escape(f"{path} is not JSON: Expecting value: line 1 column 2 (char 1)")):
        load(path)
    path.write_text("{}")
    message = f"{path} is no results file of this benchmark: 'benchmarks' is missing"
    with pytest.raises(ResultsError, match=re.escape(message)):
        load(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"commit_info": None}, "'commit_info' is null, not an object"),
        ({"machine_info": None}, "'machine_info' is null, not an object"),
        ({"benchmarks": {}}, "'benchmarks' is {}, not a list"),
        ({"datetime": None}, "'datetime' is null, not a text"),
        ({"benchmarks": [None]}, "a row of it can't be read: 'NoneType' object is not subscriptable"),
    ],
)
def test_what_a_file_holds_instead_is_said(tmp_path, capsys, change, problem):
    path = write(tmp_path / "results.json", spmm(1.0, 2.0))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for command in (["compare", str(path), str(path)], ["merge", str(tmp_path / "all.json"), str(path)]):
        assert main(command) == 2
        assert capsys.readouterr().err == f"error: {path} is no results file of this benchmark: {problem}\n"


def test_a_folder_or_a_list_is_no_results_file(tmp_path):
    with pytest.raises(ResultsError, match=re.escape(f"{tmp_path} can't be read: Is a directory")):
        load(tmp_path)
    path = tmp_path / "results.json"
    path.write_text("[]")
    with pytest.raises(ResultsError, match=r"is no results file of this benchmark: it holds \[\], not an object$"):
        load(path)


def test_a_row_whose_times_contradict_each_other_is_refused(tmp_path, capsys):
    copy = entry("roof", "copy", "torch", 3.1)
    copy["extra_info"]["queued_ms"] = 2.0
    path = write(tmp_path / "results.json", [*spmm(1.0, 2.0), copy])
    problem = "roof: copy, torch took 3.1 ms on the device and 2 ms as called, which can not be both"
    for command in (["compare", str(path), str(path)], ["merge", str(tmp_path / "all.json"), str(path)]):
        assert main(command) == 2
        remedy = "measure the case again, or take the row out"
        assert capsys.readouterr().err == f"error: {path} can't be used: {problem}; {remedy}\n"
    copy["extra_info"]["queued_ms"] = 2.9
    load(write(path, [copy]))


def test_what_is_null_was_not_measured(tmp_path):
    ours, peer = spmm(1.0, 2.0)
    ours["extra_info"] |= {"device_ms": None, "facts": None}
    run = load(write(tmp_path / "results.json", [ours, peer], {**H200, "packages": None}))
    assert [row.is_sound for row in run.rows] == [False, True]
    assert (run.rows[0].facts, run.machine["packages"]) == ({}, {})
    assert list(run.ratios("unstructured_spmm")) == []


def named(rows: list[dict]) -> list[dict]:
    for row in rows:
        row["fullname"] = f"{row['extra_info']['case']} {row['extra_info']['provider']}"
    return rows


def test_runs_of_two_versions_are_not_joined(tmp_path, capsys):
    """A peer may be of one run alone; what both have, and torch, is of one version."""
    first = write(tmp_path / "first.json", named(spmm(1.0, 2.0)))
    whole = tmp_path / "all.json"
    for packages, message in (
        ({"torch": "2.10.0", "triton": "3.6.0"}, "torch is 2.10.0 in {} and 2.11.0 in {}"),
        ({"torch": "2.11.0"}, "triton is none in {} and 3.6.0 in {}"),
    ):
        other = write(tmp_path / "other.json", named(spmm(1.0, 2.0, "DD")), {**H200, "packages": packages})
        assert main(["merge", str(whole), str(first), str(other)]) == 2
        said = message.format(other, first)
        assert capsys.readouterr().err == f"error: {said}; join runs of the same versions\n"
    packages = {**H200["packages"], "e3nn": "0.6.0"}
    other = write(tmp_path / "other.json", named(spmm(1.0, 2.0, "DD")), {**H200, "packages": packages})
    assert main(["merge", str(whole), str(first), str(other)]) == 0
    assert load(whole).machine["packages"] == packages


def test_a_case_and_its_peers_are_of_one_run_even_at_one_commit(tmp_path):
    first = write(tmp_path / "first.json", named(spmm(1.0, 2.0) + spmm(5.0, 6.0, "DD")))
    later = write(tmp_path / "later.json", named(spmm(4.0, 2.0)[:1]))
    assert main(["merge", str(tmp_path / "all.json"), str(first), str(later)]) == 0
    assert [row.value for row in load(tmp_path / "all.json").rows] == [5.0, 6.0, 4.0]


def test_the_committed_run_joined_with_nothing_is_itself(tmp_path):
    path = ROOT / COMMITTED
    if path.exists():
        assert main(["merge", str(tmp_path / "all.json"), str(path)]) == 0
        assert load(tmp_path / "all.json") == load(path)


@pytest.mark.parametrize(("machine", "is_joined"), [(H200, True), (CPU, False)])
def test_threads_of_the_host_tell_runs_apart_on_a_cpu_alone(tmp_path, machine, is_joined):
    paths = []
    for threads in (1, 16):
        rows = [{**row, "fullname": f"{threads} {at}"} for at, row in enumerate(spmm(1.0, 2.0, str(threads)))]
        paths.append(write(tmp_path / f"{threads}.json", rows, {**machine, "threads": threads}))
    assert main(["merge", str(tmp_path / "all.json"), *map(str, paths)]) == (0 if is_joined else 2)


def test_runs_of_several_experiments_are_joined(tmp_path, capsys):
    first, again, other = spmm(1.0, 2.0), spmm(3.0, 4.0), spmm(5.0, 6.0, "DD")
    for entries, name in ((first, "cora"), (again, "cora"), (other, "DD")):
        for row in entries:
            row["fullname"] = f"{name} {row['extra_info']['provider']}"
    paths = [write(tmp_path / f"{n}.json", rows) for n, rows in enumerate((first, other, again))]
    assert main(["merge", str(tmp_path / "all.json"), *map(str, paths)]) == 0
    assert [row.value for row in load(tmp_path / "all.json").rows] == [5.0, 6.0, 3.0, 4.0]
    foreign = write(tmp_path / "cpu.json", first, CPU)
    assert main(["merge", str(tmp_path / "all.json"), str(paths[0]), str(foreign)]) == 2
    message = f"error: {foreign} and {paths[0]} differ in machine_info; join runs of one machine\n"
    assert capsys.readouterr().err == message


def test_a_case_is_of_one_commit_and_a_run_says_which(tmp_path, readme):
    """The later run measured no peer: the earlier one's would make a ratio of two runs."""
    old, new = spmm(1.0, 2.0) + spmm(5.0, 6.0, "DD"), spmm(3.0, 4.0)[:1]
    for row in (*old, *new):
        row["fullname"] = f"{row['extra_info']['case']} {row['extra_info']['provider']}"
    paths = []
    for name, rows in (("aaaaaaaa", old), ("bbbbbbbb", new)):
        path = write(tmp_path / f"{name}.json", rows)
        path.write_text(json.dumps({**json.loads(path.read_text()), "commit_info": {"id": name, "dirty": False}}))
        paths.append(path)
    whole = tmp_path / "all.json"
    assert main(["merge", str(whole), *map(str, paths)]) == 0
    run = load(whole)
    assert [(row.value, row.commit) for row in run.rows] == [(5.0, "aaaaaaa"), (6.0, "aaaaaaa"), (3.0, "bbbbbbb")]
    assert main(["readme", str(whole), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert ", at the commits that are listed below the table. " in text
    assert "\nMeasured at bbbbbbb: `spmm` over graphs; aaaaaaa: `spmm` over graphs. A case and" in text


@pytest.fixture
def readme(tmp_path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{BEGIN}\nold figures\n{END}\n\nmore\n")
    return path


def test_the_readme_block_states_machine_results_and_paper(tmp_path, readme):
    results = write(tmp_path / "results.json", every_kind())
    assert main(["readme", str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(
        f"# Title\n\n{BEGIN}\nMeasured on NVIDIA H200, driver 580.1, torch 2.11.0, triton 3.6.0, 2026-11-15, "
    )
    assert text.endswith(f"{END}\n\nmore\n")
    assert "old figures" not in text
    for line in (
        "| Block SpMM against sparsity, 32x32 | dense "
        "| 0.50x at 0% to 5.00x at 90%; pays from 34% on; 4 of 7 not measured "
        "| 0.56x at 0% to 2.78x at 90%; pays from 35% on; 4 of 7 not measured | pays from 25 % sparsity on |",
        "| `spmm` over graphs, float32, N = 128 | torch.sparse | 1.26x geomean, least 0.80x, of 2 "
        "| 1.18x geomean, least 0.83x, of 2 | 1.20x on average, 14 graphs |",
        "| What each idea brings | COO | 40.00x | 27.00x | groups 8x, blocks 20x, fusion 2.6x more |",
        "| Before the first result: compile |  |  | 1.25 s | 9.9 s |",
        "| Host time of one call: format | torch.sparse: 35 µs |  | 28 µs |  |",
    ):
        assert line in text.splitlines()


def test_a_peer_that_cannot_be_captured_is_compared_as_both_are_called(tmp_path, readme):
    ours = entry("convolution", "room", "insum_ops", 1.0, series="64 channels")
    theirs = entry("convolution", "room", "spconv", 4.0, series="64 channels")
    theirs["extra_info"] |= {"timing": "queue", "queued_ms": 5.0}
    ((_, _, ratio),) = load(results := write(tmp_path / "results.json", [ours, theirs])).ratios("convolution")
    assert ratio == 4.0  # 5 ms over 1.25
    main(["readme", str(results), "--readme", str(readme)])
    assert "| Convolution over rooms and scans, 64 channels | spconv |  | 4.00x |  |" in readme.read_text().splitlines()


def test_times_of_another_run_are_a_row_of_their_own(tmp_path, readme):
    facts = {"series": "float16", FLEX_GEMM_MS: 0.3}
    rows = [entry("convolution", f"room {ms}", "insum_ops", ms, **facts) for ms in (0.1, 0.2)]
    main(["readme", str(write(tmp_path / "results.json", rows)), "--readme", str(readme)])
    row = (
        "Convolution over rooms and scans, float16",
        "FlexGEMM, in another run",
        "2.12x geomean, least 1.50x, of 2",
        "",
        "",
    )
    assert f"| {' | '.join(row)} |" in readme.read_text().splitlines()


def test_a_curve_against_density_says_up_to_where_sparse_pays(tmp_path, readme):
    rows = []
    for density, ms in ((1.0, 4.0), (0.5, 1.0), (0.1, 0.25)):
        for provider, time in (("insum_ops", ms), ("dense", 1.0)):
            rows.append(entry("linear", f"{density:.0%} dense", provider, time, density, series="32x32"))
    main(["readme", str(write(tmp_path / "results.json", rows)), "--readme", str(readme)])
    assert "| 4.00x at 10% to 0.25x at 100%; pays up to 50%; 3 of 6 not measured |" in readme.read_text()


def test_what_does_not_pay_at_a_density_is_not_said_to_pay_up_to_it(tmp_path, readme):
    rows = []
    for density, ms in ((0.3, 1.02), (0.1, 0.25)):
        for provider, time in (("insum_ops", ms), ("dense", 1.0)):
            rows.append(entry("linear", f"{density:.0%} dense", provider, time, density, series="32x32"))
    main(["readme", str(write(tmp_path / "results.json", rows)), "--readme", str(readme)])
    assert "| 4.00x at 10% to 0.98x at 30%; pays up to 29%; 4 of 6 not measured |" in readme.read_text()


def test_figures_changed_by_hand_are_found(tmp_path, readme, capsys):
    results = write(tmp_path / "results.json", every_kind())
    command = ["readme", str(results), "--readme", str(readme)]
    assert main([*command, "--check"]) == 1
    assert capsys.readouterr().out == f"{readme} disagrees with {results}\n"
    main(command)
    assert main([*command, "--check"]) == 0
    assert capsys.readouterr().out == f"{readme} agrees with {results}\n"
    readme.write_text(readme.read_text().replace("1.26x", "1.62x"))
    assert main([*command, "--check"]) == 1


def test_a_readme_without_marks_is_refused(tmp_path, readme, capsys):
    results = write(tmp_path / "results.json", every_kind())
    readme.write_text("no marks")
    assert main(["readme", str(results), "--readme", str(readme)]) == 2
    assert capsys.readouterr().err == (
        f"error: the text needs one block between {BEGIN} and {END}, each on a line of its own\n"
    )


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_what_is_written_of_the_committed_run_agrees_with_it(target):
    text = (ROOT / target).read_text(encoding="utf-8")
    assert rewrite(text, load(ROOT / COMMITTED), COMMITTED) == text, f"run: python -m bench readme {COMMITTED}"


@pytest.mark.parametrize(("style", "path"), PICTURES.items())
def test_readmes_picture_is_of_the_committed_run_and_of_the_kernel_that_runs(style, path):
    drawn = picture(load(ROOT / COMMITTED), style)
    assert (ROOT / path).read_text(encoding="utf-8") == drawn, f"run: python -m bench readme {COMMITTED}"


def test_readmes_picture_has_the_address_that_a_setting_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 'src="docs/assets/statement.svg"' in pictures_block()
    Path("setup.cfg").write_text("[readme]\nimages = https://example.org/files/\n")
    assert 'src="https://example.org/files/docs/assets/statement.svg"' in pictures_block()
    assert 'srcset="https://example.org/files/docs/assets/statement-dark.svg"' in pictures_block()


def test_readme_says_what_it_is_in_eight_kilobytes():
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_headlines_are_the_means_and_ends_of_their_cases_and_name_the_losses(tmp_path):
    rows = [
        entry("unstructured_spmm", case, provider, ms, series="float32, N = 128")
        for case, theirs in (("cora", 2.0), ("DD", 8.0))
        for provider, ms in ((OURS, 1.0), ("torch.sparse", theirs))
    ]
    run = load(write(tmp_path / "results.json", rows))
    row = "| torch.sparse (cuSPARSE) | **4.00x** (2.00x to 8.00x, 2 cases) | `test_unstructured_spmm.py` |"
    assert row in headlines(run, "")
    host = [noted("host", "format", name, us, "us") for name, us in (("insum_ops", 8.0), ("torch.mm", 4.0))]
    assert "host up to 2.0 times as long as `torch.mm`" in headlines(
        load(write(tmp_path / "host.json", rows + host)), ""
    )
    assert "Where others are faster" not in headlines(run, "")


def made(tmp_path: Path, readme: Path, entries: list[dict], machine: dict = H200) -> str:
    assert main(["readme", str(write(tmp_path / "results.json", entries, machine)), "--readme", str(readme)]) == 0
    return readme.read_text(encoding="utf-8")


def curve(series: str, *points: float) -> list[dict]:
    return [
        entry("linear_training", f"{series}, {x:.0%}", provider, ms, x, series=series)
        for x in points
        for provider, ms in (("insum_ops", 2.0), ("dense", 1.0))
    ]


def test_a_lone_point_of_a_curve_is_not_shown_as_the_whole(tmp_path, readme):
    rows = curve("32x32", *CURVES["linear_training"][1]) + curve("64x64", 1.0)
    text = made(tmp_path, readme, rows)
    assert "| 0.50x at 100%; 5 of 6 not measured | 0.56x at 100%; 5 of 6 not measured |" in text
    assert "**Not measured yet**" in text
    assert "; `BlockSparseLinear`, forward and backward, 128x128: everything" in text
    assert ": `BlockSparseLinear`, forward and backward, 64x64: 50%, 30%, 10%, 5%, 1%" in text
    assert "forward and backward, 32x32:" not in text
    assert "not measured" not in made(tmp_path, readme, rows, CPU)  # where the curves are shorter


def test_cases_that_others_win_are_listed_with_their_figures(tmp_path, readme):
    rows = spmm(1.0, 2.0) + spmm(2.0, 1.0, "DD") + spmm(1.0, 0.9, "PROTEINS") + spmm(1.0, 0.998, "pubmed")
    rows += [noted("host", "format", name, us, "us") for name, us in (("insum_ops", 8.0), ("torch.mm", 4.0))]
    rows += [noted("memory", "cora", name, mib, "MiB") for name, mib in (("insum_ops", 8.0), ("COO", 4.0))]
    text = made(tmp_path, readme, rows)
    assert text.split("| where others win ")[1].splitlines()[2:4] == [
        "| `spmm` over graphs: DD; PROTEINS | torch.sparse | 0.50x to 0.90x, 2 of 4 | 0.56x to 0.92x, 2 of 4 |",
        "| Host time of one call: format | torch.mm |  | 0.50x, 1 of 1 |",
    ]
    assert "where others win" not in made(tmp_path, readme, spmm(1.0, 2.0))


def test_what_all_of_a_series_lose_is_said_once(tmp_path, readme):
    rows = curve("32x32", 1.0, 0.5)
    for at, row in enumerate(rows):
        row["extra_info"]["queued_ms"] = 10.0 if at % 2 else 2.0
    line = "| `BlockSparseLinear`, forward and backward, 32x32, every case | dense | 0.50x to 0.50x, 2 of 2 | none: "
    assert f"{line}5.00x to 5.00x |" in made(tmp_path, readme, rows)


def test_the_block_names_the_command_that_makes_its_rows(tmp_path, readme):
    real, generated = spmm(1.0, 2.0), spmm(1.0, 2.0, "citations-2k")
    compiled = entry("tensor_product", "lmax 1", "e3nn compiled", 1.0)
    folder = "the folder holds the graphs and clouds that the report names"
    for rows, words in (
        (generated, "`make bench` measures them. `python"),
        (real, f"`INSUM_DATA=folder make bench` measures them; {folder}. `python"),
        ([*generated, compiled], "`INSUM_BENCH_COMPILED=1 make bench` measures them. `python"),
    ):
        assert f" {words} -m bench readme " in made(tmp_path, readme, rows)


def test_a_peer_without_a_library_is_shown_where_it_is_the_strongest(tmp_path, readme):
    loop, gather = "torch, one matmul an expert", "torch, gather and index_add"
    times = [("mixture_of_experts", {OURS: 1.0, loop: 1.5, "torch grouped_mm": 2.0})]
    times += [("graph_attention", {OURS: 1.0, gather: 4.0, "PyG": 3.0})]
    rows = [entry(name, "case", provider, ms) for name, each in times for provider, ms in each.items()]
    text = made(tmp_path, readme, rows)
    assert f"| A mixture of experts in one line | {loop} | 1.50x | 1.40x |  |" in text
    assert "| A mixture of experts in one line | torch grouped_mm | 2.00x | 1.80x |  |" in text
    assert "| Graph attention in four lines | PyTorch Geometric | 3.00x | 2.60x |  |" in text
    assert gather not in text


def test_the_prose_of_measured_has_no_figure_of_the_run():
    """Those are between the marks; what is outside is not in the file, and says so."""
    text = (ROOT / "docs" / "measured" / "index.md").read_text(encoding="utf-8")
    told = text.split("## How to read the rows")[1].split("\n- ")[1:]
    told = [line for line in told if not line.startswith("Not part of these runs:")]
    assert len(told) >= 3
    found = {figure for line in told for figure in re.findall(r"\d[\d.]*x\b(?! 32)", line)}
    assert found == {"1.8x", "1.00x", "1.05x"}  # the host's noise, and what a draw is


@pytest.mark.parametrize("module", [bench.data, bench.results, bench.machine])
def test_the_docstring_examples_run(module):
    for test in doctest.DocTestFinder().find(module):
        run_examples(test)


def in_both(*providers: str, case: str = "lmax 1") -> list[dict]:
    """Rows of ours in float32 and tf32, and of peers."""
    times = {"insum_ops": 1.0, "insum_ops tf32": 0.5, "e3nn": 4.0, "e3nn tf32": 3.0, "cuequivariance": 6.0}
    return [entry("tensor_product", case, name, times[name]) for name in ("insum_ops", "insum_ops tf32", *providers)]


def test_tf32_is_compared_with_tf32_and_says_where_it_is_not(tmp_path, readme):
    rows = in_both("e3nn", "e3nn tf32", "cuequivariance")
    run = load(results := write(tmp_path / "results.json", rows))
    found = {
        variant: {peer.provider: ratio for _, peer, ratio in run.ratios("tensor_product", variant)}
        for variant in run.variants("tensor_product")
    }
    assert found == {
        "insum_ops": {"e3nn": 4.0, "cuequivariance": 6.0},
        "insum_ops tf32": {"e3nn tf32": 6.0, "cuequivariance": 12.0},
    }
    assert [(group.variant, group.peer) for group in groups(run, "tensor_product")] == [
        ("", "e3nn"),
        ("", "cuequivariance"),
        ("tf32", "e3nn tf32"),
        ("tf32", "cuequivariance, in full float32"),
    ]
    main(["readme", str(results), "--readme", str(readme)])
    for line in (
        "| Fully connected tensor product | e3nn | 4.00x | 3.40x | 2.3x to 8.3x |",
        "| Fully connected tensor product, tf32 | e3nn tf32 | 6.00x | 4.33x |  |",
        "| Fully connected tensor product, tf32 | cuequivariance, in full float32 | 12.00x | 8.33x |  |",
    ):
        assert line in readme.read_text().splitlines()


def test_a_case_whose_peer_ran_in_float32_alone_is_apart_from_those_in_tf32(tmp_path):
    rows = in_both("e3nn", "e3nn tf32") + in_both("e3nn", case="lmax 2")
    found = groups(load(write(tmp_path / "results.json", rows)), "tensor_product")
    assert [(group.peer, group.ratios("device")) for group in found if group.variant == "tf32"] == [
        ("e3nn tf32", [6.0]),
        ("e3nn, in full float32", [8.0]),
    ]


def test_calls_are_compared_as_they_were_timed_in_turns(tmp_path):
    peer, other = entry("e", "case", "peer", 3.0), entry("e", "case", "other", 3.0)
    peer["extra_info"] |= {"queued_ms": 6.0, "queued_p20": 5.0, "ours_ms": 3.0, "ours_p20": 2.0}
    ours, *peers = load(write(tmp_path / "r.json", [entry("e", "case", OURS, 1.0), peer, other])).rows
    assert [called_ratio(ours, each) for each in peers] == [6.0 / 3.0, 3.25 / 1.25]
    assert called_ratio(ours, peers[0], is_low=True) == 5.0 / 2.0
    variant = replace(ours, provider=f"{OURS} tf32")
    assert called_ratio(variant, peers[0]) == 6.0 / 1.25
    alike = replace(peers[0], provider="peer tf32")  # was timed in turns with ours in tf32
    assert called_ratio(variant, alike) == 6.0 / 3.0
    assert called_ratio(ours, alike) == 6.0 / 1.25


def test_where_nothing_was_captured_calls_in_turns_count(tmp_path):
    """The page would otherwise show a case as won in one place and lost in another."""
    ours, peer = entry("unet", "room", OURS, 4.0), entry("unet", "room", "spconv", 4.5)
    for row in (ours, peer):
        row["extra_info"] |= {"timing": "queue", "queued_ms": row["extra_info"]["device_ms"]}
    peer["extra_info"] |= {"ours_ms": 5.0}
    run = load(write(tmp_path / "r.json", [ours, peer]))
    ((_, _, ratio),) = run.ratios("unet")
    assert ratio == called_ratio(*run.rows) == 0.9
