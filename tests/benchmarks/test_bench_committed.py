"""The committed run has the rows that a GPU would measure, but for a list that may only shrink."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from bench.readme import CURVES
from bench.results import TITLES, load

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
RUN = ROOT / "bench" / "results" / "nvidia-h200.json"
GRAPHS = ("cora", "pubmed", "PROTEINS", "DD", "REDDIT-BINARY", "blogcatalog3", "fb-Cornell5", "ogbl-ddi", "gowalla-bip")
CLOUDS = ("kitti_000000", "pcl_room_scan1", "s3dis_room", "scannet_scene0000", "spconv_benchmark")
# rows that a GPU should have and the committed run has not: take out what a new run adds, and add nothing
LACKING: set[str] = set()
# cases that skip themselves on a GPU, or whose peer does
SKIPPED = (
    r"test_structured_spmm\[.*-torch\.sparse\]",
    r"test_structured_spmm\[(?!32-0\.9-).*-Inductor\]",
    r"test_unstructured_spmm\[.*-(16|32|64|256|512)-PyG\]",
    r"test_group_size\[(DD|PROTEINS)-(32|64|128)\]",  # no row has so many entries
    r"test_beside_matmul\[.*alone-e3nn\]",
    r"test_edges\[SevenNet-l3i5-.*-cuequivariance\]",  # it falls back from its fused kernels
    r"test_statement\[.*\]",  # whose sizes are of a seed
    r"test_kernel_map\[.*a step of four layers over a new cloud.*\]",  # which came after the last whole run
    r"test_compiled_step\[.*\]",  # which was not measured in a whole run yet
    r"test_sampled_graph\[.*\]",  # nor was this
)
UNMEASURED = {"compiled_steps", "sampled_graph"}


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> set[str]:
    """The rows of every case on a GPU, with inputs of the committed run's names: nothing is read before it is run."""
    pytest.importorskip("pytest_benchmark")
    pytest.importorskip("e3nn")
    data = tmp_path_factory.mktemp("data")
    for kind, names in (("graphs", GRAPHS), ("clouds", CLOUDS)):
        (data / kind).mkdir()
        for name in names:
            (data / kind / f"{name}.npz").touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSUM"))}
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), kept.get("PYTHONPATH"))))
    environment = {**kept, "INSUM_DATA": str(data), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "bench/cases", "-q", "--collect-only"]
    command += ["-p", "as_gpu", "-p", "no:cacheprovider"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return {line.removeprefix("bench/cases/") for line in answer.stdout.splitlines() if "::" in line}


def test_the_committed_run_lacks_the_rows_of_a_short_list_alone(collected):
    rows = json.loads(RUN.read_text(encoding="utf-8"))["benchmarks"]
    stored = {row["fullname"].removeprefix("bench/cases/") for row in rows}
    assert {_of_no_seed(row) for row in stored} <= {_of_no_seed(row) for row in collected}, (
        "rows of cases that are no more"
    )
    lacking = {row for row in collected - stored if not any(re.search(f"::{known}$", row) for known in SKIPPED)}
    assert lacking - LACKING == set(), "measure them: make bench, then python -m bench merge"
    assert LACKING - lacking == set(), "the run has them now: shorten LACKING"


def _of_no_seed(row: str) -> str:
    return re.sub(r"-seed\d+-", "-", row)


def test_the_committed_run_has_every_experiment():
    assert set(TITLES) - UNMEASURED <= set(load(RUN).experiments)


def test_readme_knows_the_points_that_the_cases_measure(collected):
    def points(pattern: str) -> set[tuple[str, ...]]:
        return {found.groups() for row in collected if (found := re.search(pattern, row))}

    series, xs = CURVES["structured_spmm"]
    assert points(r"test_structured_spmm\[(\d+)-([\d.]+)-dense\]") == {
        (name.split("x")[0], str(x)) for name, x in product(series, xs)
    }
    for experiment, test in (("linear", "test_forward"), ("linear_training", "test_training")):
        series, xs = CURVES[experiment]
        found = points(rf"{test}\[dtype(\d)-(\d+)-([\d.]+)-dense\]")
        expected = {(str(at), name.split("x")[0], str(x)) for (at, name), x in product(enumerate(series), xs)}
        assert found == expected
