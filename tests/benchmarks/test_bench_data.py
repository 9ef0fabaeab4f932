"""Loaders of graphs and point clouds on tiny files, and generated inputs of the statistics they promise."""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from bench.data import DataError, load_cloud, load_graph
from bench.generate import GENERATED, SMALL, graph, room, scan, wired
from bench.inputs import cloud_loaders, graph_loaders, submanifold_map, voxels

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")]
EDGES = [[0, 1], [0, 2], [2, 0], [3, 3]]
MARKET = "%%MatrixMarket matrix coordinate "


def positions(pattern) -> list[list[int]]:
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))
    return np.stack([rows, pattern.indices], 1).tolist()


def write(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


def test_compressed_rows_are_read(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, indptr=np.array([0, 2, 2, 3, 4]), indices=np.array([1, 2, 0, 3]), shape=np.array([4, 5]))
    pattern = load_graph(path)
    assert pattern.shape == (4, 5)
    assert positions(pattern) == EDGES


def test_tc_gnn_edges_are_read_in_any_order(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, src_li=np.array([3, 2, 0, 0, 0]), dst_li=np.array([3, 0, 2, 1, 1]), num_nodes=5)
    pattern = load_graph(path)
    assert pattern.shape == (5, 5)
    assert positions(pattern) == EDGES


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_snap_nodes_are_numbered_in_their_order(tmp_path, suffix):
    text = "# Directed graph\n# FromNodeId\tToNodeId\n10\t20\n10\t70\n70\t10\n99\t99\n10\t20\n"
    path = tmp_path / f"graph{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    pattern = load_graph(path)
    assert pattern.shape == (4, 4)
    assert positions(pattern) == EDGES


def test_matrix_market_counts_from_one(tmp_path):
    text = "%%MatrixMarket matrix coordinate real general\n% a remark\n4 5 4\n1 2 0.5\n1 3 -1e3\n3 1 2\n4 4 0\n"
    pattern = load_graph(write(tmp_path / "graph.mtx", text))
    assert pattern.shape == (4, 5)
    assert positions(pattern) == EDGES


def test_a_symmetric_matrix_has_both_triangles(tmp_path):
    text = "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 3\n1 1\n2 1\n3 2\n"
    found = positions(load_graph(write(tmp_path / "graph.mtx", text)))
    assert found == [[0, 0], [0, 1], [1, 0], [1, 2], [2, 1]]


def test_a_room_of_s3dis_is_its_first_three_columns(tmp_path):
    points = load_cloud(write(tmp_path / "room.txt", "1.5 2 3 10 20 30\n-4 5e-1 6 0 0 0\n"))
    assert points.dtype == np.float32
    assert points.tolist() == [[1.5, 2, 3], [-4, 0.5, 6]]


def test_a_cloud_in_npz_is_its_xyz(tmp_path):
    np.savez(tmp_path / "cloud.npz", xyz=np.array([[1.0, 2, 3]]))
    assert load_cloud(tmp_path / "cloud.npz").tolist() == [[1, 2, 3]]


PLY = "ply\nformat {} 1.0\ncomment none\nelement vertex 2\nproperty uchar red\nproperty {} x\nproperty float y\n"
PLY += "property float z\nelement face 1\nproperty list uchar int vertex_indices\nend_header\n"


def test_text_ply_is_read_by_the_names_of_its_columns(tmp_path):
    text = PLY.format("ascii", "float") + "255 1 2 3\n0 4 5 6.5\n3 0 1 0\n"
    assert load_cloud(write(tmp_path / "cloud.ply", text)).tolist() == [[1, 2, 3], [4, 5, 6.5]]


@pytest.mark.parametrize(("kind", "order"), [("binary_little_endian", "<"), ("binary_big_endian", ">")])
def test_binary_ply_is_read_in_either_order(tmp_path, kind, order):
    body = b"".join(struct.pack(f"{order}Bdff", 7, *point) for point in ((1, 2, 3), (4, 5, 6.5)))
    path = tmp_path / "cloud.ply"
    path.write_bytes(PLY.format(kind, "double").encode() + body + b"\x03\x00\x00\x00\x00")
    assert load_cloud(path).tolist() == [[1, 2, 3], [4, 5, 6.5]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv is no graph file; its name must end in one of .npz, .txt, .mtx"),
        ("a.txt", "# nothing\n", "a.txt holds no entries"),
        ("a.txt", "1\n2\n", "a.txt has a line of 1 numbers; an edge list has two node numbers"),
        ("a.txt", "1\n2 3\n", "a.txt has a line of 1 numbers; an edge list has two node numbers"),
        (
            "a.txt",
            "1 b\n",
            "a.txt holds something that is no whole number: invalid literal for int() with base 10: 'b'",
        ),
        (
            "a.txt",
            "1.5 2\n",
            "a.txt holds something that is no whole number: invalid literal for int() with base 10: '1.5'",
        ),
        ("a.mtx", "1 1 1\n", "a.mtx is no Matrix Market file of coordinates; its first line must say so"),
        (
            "a.mtx",
            MARKET + "real general\n2 2 3\n1 1 5\n",
            "a.mtx announces 3 entries and lists 1; the file is cut short or damaged",
        ),
        (
            "a.mtx",
            MARKET + "whole general\n2 2 0\n",
            "a.mtx is whole general; Matrix Market knows pattern, real, integer, complex and general, symmetric, "
            "skew-symmetric, hermitian",
        ),
        (
            "a.mtx",
            MARKET + "real general\n2 2\n",
            "a.mtx has a line of 2 numbers; the first is rows, columns and entries",
        ),
        ("a.mtx", MARKET + "real symmetric\n2 3 0\n", "a.mtx has 2 rows and 3 columns, which no symmetric matrix has"),
        (
            "a.mtx",
            MARKET + "real general\n2 2 2\n1 1 5\n2\n",
            "a.mtx has a line of 1 numbers; an entry of a real matrix has 3",
        ),
        (
            "a.mtx",
            MARKET + "real general\n2 2 1\n1 1 abc\n",
            "a.mtx holds something that is no number: could not convert string to float: 'abc'",
        ),
        (
            "a.mtx",
            MARKET + "pattern general\n3000000 9000000000000 2\n2999999 8999999999999\n1 1\n",
            "a.mtx has 3000000 rows and 9000000000000 columns; each may be 0 to 2147483647",
        ),
        (
            "a.mtx",
            MARKET + "pattern general\n1000000000000 1 1\n1 1\n",
            "a.mtx has 1000000000000 rows and 1 columns; each may be 0 to 2147483647",
        ),
        ("a.mtx", MARKET + "real general\n2 2 0\n", "a.mtx holds no entries; there is nothing to multiply"),
        (
            "a.mtx",
            MARKET + "pattern general\n2 3 1\n3 1\n",
            "a.mtx has an entry in row 2, counted from 0, of 2 rows",
        ),
        (
            "a.mtx",
            MARKET + "pattern general\n2 3 1\n1 0\n",
            "a.mtx has an entry in column -1, counted from 0, of 3 columns",
        ),
    ],
)
def test_a_damaged_graph_is_refused(tmp_path, name, text, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_graph(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.obj", "", "a.obj is no point cloud file; its name must end in one of .npz, .txt, .ply"),
        ("a.txt", "1 2\n", "a.txt has a line of 2 numbers; a point has x, y and z first"),
        ("a.txt", "1 2\n1 2 3\n", "a.txt has a line of 2 numbers; a point has x, y and z first"),
        ("a.txt", "1 2 3x\n", "a.txt holds something that is no number: could not convert string to float: '3x'"),
        ("a.txt", "1 2 1e300\n", "a.txt holds coordinates that are not finite; remove those points"),
        ("a.txt", "1 2 nan\n", "a.txt holds coordinates that are not finite; remove those points"),
        ("a.ply", "x", "a.ply is no PLY file; it must begin with ply and have an end_header"),
        (
            "a.ply",
            "ply\nformat ascii 1.0\nelement face 1\nend_header\n",
            "a.ply has no vertices; a cloud's are an element vertex",
        ),
        (
            "a.ply",
            "ply\nformat ascii 1.0\nelement vertex 1\nproperty list uchar int ids\nend_header\n1\n",
            "a.ply has vertices of ids; x, y and z are needed, each once and a number",
        ),
        (
            "a.ply",
            "ply\nformat ascii 1.0\nelement vertex 1\nproperty float x\nproperty float y\nend_header\n1 2\n",
            "a.ply has vertices of x, y; x, y and z are needed, each once and a number",
        ),
        (
            "a.ply",
            PLY.format("binary_little_endian", "float").replace("uchar red", "float x"),
            "a.ply has vertices of x, x, y, z; x, y and z are needed, each once and a number",
        ),
        (
            "a.ply",
            PLY.format("middle_endian", "float"),
            "a.ply is in format middle_endian; PLY knows ascii, binary_little_endian, binary_big_endian",
        ),
        (
            "a.ply",
            PLY.format("ascii", "float").replace("format ascii 1.0\n", ""),
            "a.ply is in format none; PLY knows ascii, binary_little_endian, binary_big_endian",
        ),
        ("a.ply", PLY.format("ascii", "half"), "a.ply has a property half x; PLY names a type and it"),
        (
            "a.ply",
            PLY.format("ascii", "float").replace("vertex 2", "vertex many"),
            "a.ply announces many vertices; it must be a whole number",
        ),
        ("a.ply", PLY.format("binary_little_endian", "float"), "a.ply announces 2 vertices and is cut short"),
        ("a.ply", PLY.format("ascii", "float") + "255 1 2 3\n", "a.ply announces 2 vertices and is cut short"),
        (
            "a.ply",
            PLY.format("ascii", "float") + "255 1 2 3\n255 1\n",
            "a.ply has a line of 2 numbers; a vertex has 4 properties",
        ),
        (
            "a.ply",
            PLY.format("ascii", "float") + "255 1 2 3\n255 1 b 3\n",
            "a.ply holds something that is no number: could not convert string to float: 'b'",
        ),
        (
            "a.ply",
            PLY.format("ascii", "float").replace("vertex 2", "vertex 0"),
            "a.ply holds points of shape [0, 3]; a cloud is [n, 3]",
        ),
    ],
)
def test_a_damaged_cloud_is_refused(tmp_path, name, text, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_cloud(write(tmp_path / name, text))


def test_an_npz_without_the_arrays_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", rows=np.zeros(1))
    message = "a.npz holds rows; a graph has indptr, indices, shape or src_li, dst_li, num_nodes"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_graph(tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"^a\.npz holds rows; a cloud has xyz$"):
        load_cloud(tmp_path / "a.npz")


TC_GNN = dict(src_li=np.array([0, 1]), dst_li=np.array([1, 0]), num_nodes=2)
COMPRESSED = dict(indptr=np.array([0, 1, 2]), indices=np.array([0, 1]), shape=np.array([2, 2]))
INDPTR = (
    "a.npz has {} numbers in indptr for 2 rows and 2 indices; they must ascend from 0 to the number of indices, one "
)
INDPTR += "more than there are rows"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({**TC_GNN, "dst_li": np.array([1, 2])}, "a.npz has an entry in column 2, counted from 0, of 2 columns"),
        ({**TC_GNN, "src_li": np.array([1, -1])}, "a.npz has an entry in row -1, counted from 0, of 2 rows"),
        ({**TC_GNN, "src_li": np.array([1.0, 0.5])}, "a.npz has src_li of type float64; it holds whole numbers"),
        (
            {**TC_GNN, "src_li": np.array([1])},
            "a.npz has 1 sources, 2 targets and 1 numbers of nodes; an edge has one of each, and a graph one number of "
            "nodes",
        ),
        ({**TC_GNN, "num_nodes": -2}, "a.npz has -2 rows and -2 columns; each may be 0 to 2147483647"),
        (
            {**TC_GNN, "src_li": np.array([], int), "dst_li": np.array([], int)},
            "a.npz holds no entries; there is nothing to multiply",
        ),
        ({**COMPRESSED, "format": b"bsr"}, "a.npz is in scipy's format bsr; csr and csc can be read"),
        ({**COMPRESSED, "indices": np.array([0, 2])}, "a.npz has an entry in column 2, counted from 0, of 2 columns"),
        ({**COMPRESSED, "shape": np.array([2])}, "a.npz has shape [2]; a matrix has rows and columns"),
        ({**COMPRESSED, "indptr": np.array([0, 2])}, INDPTR.format(2)),
        ({**COMPRESSED, "indptr": np.array([0, 1, 3])}, INDPTR.format(3)),
        ({**COMPRESSED, "indptr": np.array([0, 3, 2])}, INDPTR.format(3)),
    ],
)
def test_arrays_that_are_no_graph_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_graph(tmp_path / "a.npz")


def test_rows_that_are_not_in_order_are_sorted(tmp_path):
    np.savez(tmp_path / "a.npz", indptr=np.array([0, 3, 4]), indices=np.array([2, 0, 2, 1]), shape=np.array([2, 3]))
    assert positions(load_graph(tmp_path / "a.npz")) == [[0, 0], [0, 2], [1, 1]]


def test_arrays_that_are_no_points_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", xyz=np.array([["a", "b", "c"]]))
    with pytest.raises(DataError, match=r"^a\.npz holds points of type <U1; coordinates are numbers$"):
        load_cloud(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", xyz=np.array([None]))
    message = "a.npz holds something that is no array: Object arrays cannot be loaded when allow_pickle=False"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load_cloud(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", b"PK\x03\x04 and no more", "a.npz is no npz file, or it is cut short"),
        (
            "a.txt.gz",
            gzip.compress(b"1 2 3\n" * 100, mtime=0)[
                :25
            ],  # the time of day would give two workers two names for a test
            "a.txt.gz can't be read, it is cut short or damaged: Compressed file ended before the end-of-stream marker "
            "was reached",
        ),
        (
            "a.txt",
            b"1 2 \xb03\n",
            r"a.txt can't be read, it is cut short or damaged: '1 2 \udcb03' is no ASCII",
        ),
    ],
    ids=["npz", "gzip", "text"],
)
@pytest.mark.parametrize("load", [load_graph, load_cloud])
def test_a_file_that_is_cut_short_is_refused(tmp_path, load, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load(tmp_path / name)


def test_a_remark_may_name_the_end_of_a_header(tmp_path):
    text = PLY.format("ascii", "float").replace("comment none", "comment before end_header") + "255 1 2 3\n0 4 5 6\n"
    assert load_cloud(write(tmp_path / "cloud.ply", text)).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_what_scipy_saves_is_read_by_its_format(tmp_path, form):
    rows, columns = np.array(EDGES).T
    matrix = scipy.sparse.coo_array((np.ones(4), (rows, columns)), (4, 5)).asformat(form)
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix)
    pattern = load_graph(tmp_path / "a.npz")
    assert pattern.shape == (4, 5)
    assert positions(pattern) == EDGES


@pytest.mark.parametrize("load", [load_graph, load_cloud])
@pytest.mark.parametrize("name", ["none.txt", "none.npz"])
def test_a_file_that_is_not_there_is_named(tmp_path, load, name):
    message = f"{tmp_path / name} can't be read: No such file or directory"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.mtx", MARKET + "pattern general\n% caf\xe9\n2 2 1\n1 2\n"), ("a.txt", "# caf\xe9\n0 1\n")],
    ids=["market", "snap"],
)
@pytest.mark.parametrize("encode", [lambda text: text.encode("latin1"), lambda text: text.encode("utf-8-sig")])
def test_a_remark_may_be_in_any_encoding_and_a_mark_of_it_may_come_first(tmp_path, name, text, encode):
    (tmp_path / name).write_bytes(encode(text))
    assert positions(load_graph(tmp_path / name)) == [[0, 1]]


def test_files_are_read_whatever_the_locale(tmp_path):
    write(tmp_path / "a.txt", "# caf\xe9 \u2603\n0 1\n")
    code = "import sys; from pathlib import Path; from bench.data import load_graph; load_graph(Path(sys.argv[1]))"
    run_in_posix("-c", code, str(tmp_path / "a.txt"))
    run_in_posix("-m", "bench", "readme", "bench/results/nvidia-h200.json", "--check")


def run_in_posix(*arguments: str) -> None:
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_without_data_graphs_and_clouds_are_generated(monkeypatch):
    monkeypatch.delenv("INSUM_DATA", raising=False)
    assert set(graph_loaders()) == set(GENERATED)
    assert set(graph_loaders(is_small=True)) == set(SMALL)
    assert set(cloud_loaders()) == {"generated-room", "generated-scan"}


def test_generated_graphs_have_the_degree_and_skew_asked_for():
    even, hubs = graph(5_000, 4, 0.0), graph(5_000, 4, 0.8)
    for pattern in (even, hubs):
        assert pattern.shape == (5_000, 5_000)
        assert len(pattern.indices) == pytest.approx(20_000, rel=0.1)
        for start, stop in zip(pattern.indptr[:50], pattern.indptr[1:]):
            assert (np.diff(pattern.indices[start:stop]) > 0).all()
    assert np.diff(hubs.indptr).max() > 20 * np.diff(even.indptr).max()
    assert (graph(50, 4, 0.3).indices == graph(50, 4, 0.3).indices).all()


# rows, and of their degrees the mean, the deviation over it and the largest, of the graphs that they stand for
REAL_GRAPHS = {
    "citations-2k": (2_708, 3.898, 1.341, 168),
    "citations-20k": (19_717, 4.496, 1.653, 171),
    "proteins-43k": (43_471, 3.729, 0.308, 25),
    "proteins-335k": (334_925, 5.034, 0.335, 19),
    "hubs-859k": (859_254, 2.317, 8.919, 3_062),
    "social-10k": (10_312, 64.776, 2.743, 3_992),
    "social-19k": (18_660, 84.756, 1.015, 3_156),
    "dense-4k": (4_267, 500.544, 0.840, 2_234),
    "users-items": (70_839, 22.872, 1.527, 1_415),
    "hubs-86k": (85_925, 2.317, 8.919, 3_062),  # a tenth of the rows
}


@pytest.mark.parametrize("name", {**GENERATED, **SMALL})
def test_generated_graphs_have_the_degrees_of_real_ones(name):
    pattern, (rows, mean, variation, largest) = {**GENERATED, **SMALL}[name](), REAL_GRAPHS[name]
    counts = np.diff(pattern.indptr)
    assert pattern.shape == (rows, rows)
    assert counts.mean() == pytest.approx(mean, rel=0.2)
    assert counts.std() / counts.mean() == pytest.approx(variation, rel=0.2)
    assert counts.max() == pytest.approx(largest, rel=0.2)
    assert (counts == 0).mean() < 0.01
    assert (np.diff(pattern.indices)[np.diff(np.repeat(np.arange(rows), counts)) == 0] > 0).all()


def test_many_small_graphs_keep_near_the_diagonal_and_two_kinds_of_nodes_apart():
    near, apart = wired("PROTEINS", 2_000, reach=5), wired("gowalla-bip", 4_000, is_bipartite=True)
    rows = np.repeat(np.arange(2_000), np.diff(near.indptr))
    assert np.median(np.abs(rows - near.indices)) < 20
    rows = np.repeat(np.arange(4_000), np.diff(apart.indptr))
    cut = rows[len(rows) // 2]
    assert ((rows < cut) != (apart.indices < cut)).mean() > 0.99
    assert wired("gowalla-bip", 20, is_bipartite=True).shape == (20, 20)  # too few to have all entries
    assert (wired("cora", 500).indices == wired("cora", 500).indices).all()


# voxels of 5 cm, and pairs for each voxel of 2 and of 5 cm
REAL_CLOUDS = {"generated-room": (65_667, 8.70, 10.30), "generated-scan": (79_943, 2.22, 4.97)}


@pytest.mark.parametrize("name", REAL_CLOUDS)
def test_generated_clouds_have_the_pairs_of_real_ones(name, monkeypatch):
    monkeypatch.delenv("INSUM_DATA", raising=False)
    points, (count, *pairs) = cloud_loaders()[name](), REAL_CLOUDS[name]
    small, large = (voxels(points, size, "cpu") for size in (0.02, 0.05))
    assert len(large) == pytest.approx(count, rel=0.2)
    found = [submanifold_map(each).shape[1] / len(each) for each in (small, large)]
    assert found == pytest.approx(pairs, rel=0.2)


def test_generated_clouds_lie_on_surfaces():
    inside = room(20_000)
    assert inside.shape == (20_000, 3)
    assert inside.min() >= 0
    assert (inside.max(0) <= np.float32([5.8, 6, 3.1])).all()
    assert scan(1_000).shape == (1_000, 3)


def test_a_submanifold_map_pairs_neighbours():
    points = torch.tensor([[0, 0, 0], [0, 0, 1], [5, 5, 5]])
    triples = {tuple(triple) for triple in submanifold_map(points).T.tolist()}
    assert triples == {(13, 0, 0), (13, 1, 1), (13, 2, 2), (14, 1, 0), (12, 0, 1)}
