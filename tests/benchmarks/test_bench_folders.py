"""INSUM_DATA: which files are inputs, what they are called, and a run that says where its inputs come from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.data import DataError
from bench.inputs import cloud_loaders, clouds, graph_loaders, graphs, origins

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
MARKET = "%%MatrixMarket matrix coordinate pattern general\n2 3 1\n2 3\n"
EDGES = "0 1\n1 0\n"
POINTS = "0 0 0\n1 1 1\n"


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("INSUM_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant")
def test_insum_data_names_the_folders(data):
    fill(data, {"graphs/snap.txt": EDGES, "graphs/market.mtx": MARKET, "graphs/LICENSE": "not a graph"})
    fill(data, {"clouds/room.txt": POINTS})
    found = graphs("cpu")
    assert {name: tuple(matrix.shape) for name, matrix in found.items()} == {"market": (2, 3), "snap": (2, 2)}
    assert found["snap"].col_indices().dtype == torch.int32
    assert (found["snap"].to_dense() != 0).tolist() == [[False, True], [True, False]]
    assert {name: len(points) for name, points in clouds().items()} == {"room": 2}
    assert set(graph_loaders(is_small=True)) == {"market", "snap"}
    assert origins() == [f"graphs: 2 files of {data / 'graphs'}", f"clouds: 1 files of {data / 'clouds'}"]


def test_suffixes_are_read_in_capitals_too(data):
    fill(data, {"graphs/Roads.MTX": MARKET, "graphs/Snap.Txt": EDGES, "clouds/ROOM.TXT": POINTS})
    assert {name: load().shape for name, load in graph_loaders().items()} == {"Roads": (2, 3), "Snap": (2, 2)}
    assert {name: len(points) for name, points in clouds().items()} == {"ROOM": 2}


def test_files_that_differ_in_their_suffix_alone_keep_it(data):
    fill(data, {"graphs/a.mtx": MARKET, "graphs/a.txt": EDGES, "graphs/b.txt": EDGES, "graphs/a.txt.mtx": MARKET})
    assert {name: load().shape for name, load in graph_loaders().items()} == {
        "a.mtx": (2, 3),
        "a.txt": (2, 2),
        "a.txt.mtx": (2, 3),
        "b": (2, 2),
    }


def test_a_folder_without_inputs_is_refused(data):
    fill(data, {"clouds/R.OBJ": ""})
    (data / "graphs" / "a.npz").mkdir(parents=True)
    message = f"{data / 'clouds'} holds no file whose name ends in .npz, .txt, .ply; remove it or fill it"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        cloud_loaders()
    message = f"{data / 'graphs'} holds no file whose name ends in .npz, .txt, .mtx; remove it or fill it"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        graph_loaders()


def test_insum_data_without_either_folder_is_refused_and_with_one_is_not(data, monkeypatch):
    fill(data, {"a.txt": EDGES})
    message = f"INSUM_DATA is {data}, which has neither graphs/ nor clouds/"
    for loaders in (graph_loaders, cloud_loaders):
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            loaders()
    fill(data, {"graphs/a.txt": EDGES})
    assert set(graph_loaders()) == {"a"}
    assert set(cloud_loaders()) == {"generated-room", "generated-scan"}
    assert origins()[1] == "clouds: generated, for INSUM_DATA has no clouds/"
    monkeypatch.setenv("INSUM_DATA", str(data / "none"))
    message = f"INSUM_DATA is {data / 'none'}, which is no folder; unset it for generated inputs"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        graph_loaders()
    monkeypatch.delenv("INSUM_DATA")
    assert origins() == [f"{kind}: generated, for INSUM_DATA is not set" for kind in ("graphs", "clouds")]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"clouds/R.OBJ": ""}, "{}/clouds holds no file whose name ends in .npz, .txt, .ply; remove it or fill it"),
        ({"graphs/a.txt": EDGES}, "clouds: generated, for INSUM_DATA has no clouds/"),
    ],
    ids=["empty", "graphs alone"],
)
def test_a_run_says_where_its_inputs_come_from(tmp_path, files, line):
    pytest.importorskip("pytest_benchmark")
    fill(tmp_path, files)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "INSUM"))}
    environment = {**kept, "INSUM_DATA": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "bench/cases/test_kernel_map.py", "-q", "--collect-only"]
    command += ["-p", "no:cacheprovider"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert line.format(tmp_path) in answer.stdout.splitlines()
    assert "StopIteration" not in answer.stdout
