"""Files of graphs and point clouds: npz (indptr or TC-GNN's edges), SNAP edge lists, Matrix Market, S3DIS text, PLY."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

__all__ = ["CLOUDS", "GRAPHS", "DataError", "Pattern", "load_cloud", "load_graph"]

T = TypeVar("T")
Reader = Callable[[Path], T]


class DataError(ValueError):
    """A file that does not hold what its name says."""


@dataclass(frozen=True)
class Pattern:
    """Where a matrix has entries: compressed rows, columns ascending, each position once."""

    indptr: np.ndarray  # [M + 1]
    indices: np.ndarray  # [nnz]
    shape: tuple[int, int]


def load_graph(path: Path) -> Pattern:
    """The pattern in a graph's file, by its suffix."""
    return _by_suffix(path, GRAPHS, "graph")(path)


def load_cloud(path: Path) -> np.ndarray:
    """The points in a cloud's file, [n, 3] float32, in the file's unit."""
    points = np.ascontiguousarray(_by_suffix(path, CLOUDS, "point cloud")(path), dtype=np.float32)
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise DataError(f"{path.name} holds points of shape {list(points.shape)}; a cloud is [n, 3]")
    if not np.isfinite(points).all():
        raise DataError(f"{path.name} holds coordinates that are not finite; remove those points")
    return points


def _by_suffix(path: Path, readers: Mapping[str, Reader[T]], kind: str) -> Reader[T]:
    name = path.name.removesuffix(".gz")
    reader = readers.get(Path(name).suffix)
    if reader is None:
        raise DataError(f"{path.name} is no {kind} file; its name must end in one of {', '.join(readers)}")
    return reader


def from_edges(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Pattern:
    """Entries in any order, with repetitions, to compressed rows."""
    keys = np.unique(rows.astype(np.int64) * shape[1] + columns)
    counts = np.bincount(keys // max(shape[1], 1), minlength=shape[0])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return Pattern(indptr.astype(np.int64), (keys % max(shape[1], 1)).astype(np.int64), shape)


def _npz_graph(path: Path) -> Pattern:
    with np.load(path) as data:
        if {"indptr", "indices", "shape"} <= set(data):
            rows, columns = (int(size) for size in data["shape"])
            return Pattern(data["indptr"].astype(np.int64), data["indices"].astype(np.int64), (rows, columns))
        if {"src_li", "dst_li", "num_nodes"} <= set(data):  # as TC-GNN stores them
            nodes = int(data["num_nodes"])
            return from_edges(data["src_li"], data["dst_li"], (nodes, nodes))
        held = ", ".join(sorted(data)) or "nothing"
    raise DataError(f"{path.name} holds {held}; a graph has indptr, indices, shape or src_li, dst_li, num_nodes")


def _edge_list(path: Path) -> Pattern:
    """SNAP's: two node numbers a line, # before remarks; the numbers that occur are the nodes, in their order."""
    with _text(path) as lines:
        edges = _numbers(path, lines, "#", np.int64)
    if edges.shape[1] < 2:
        raise DataError(f"{path.name} has {edges.shape[1]} numbers a line; an edge list has two node numbers")
    nodes, numbered = np.unique(edges[:, :2], return_inverse=True)
    sources, targets = numbered.reshape(-1, 2).T
    return from_edges(sources, targets, (len(nodes), len(nodes)))


def _matrix_market(path: Path) -> Pattern:
    """The coordinate form, general or symmetric; only where entries are is kept."""
    with _text(path) as lines:
        header = lines.readline().lower().split()
        if header[:3] != ["%%matrixmarket", "matrix", "coordinate"] or len(header) != 5:
            raise DataError(f"{path.name} is no Matrix Market file of coordinates; its first line must say so")
        entries = _numbers(path, lines, "%", np.float64, first_row=3)
    rows, columns, count = entries[0, :3].astype(np.int64).tolist()
    i, j = entries[1:, :2].T.astype(np.int64) - 1
    if len(i) != count:
        raise DataError(f"{path.name} announces {count} entries and lists {len(i)}; the file is cut short or damaged")
    if header[4] != "general":  # symmetric, skew-symmetric, hermitian: one triangle is listed
        i, j = np.concatenate([i, j]), np.concatenate([j, i])
    return from_edges(i, j, (rows, columns))


def _numbers(path: Path, lines: IO[str], remark: str, dtype: type, first_row: int = 0) -> np.ndarray:
    """Lines of numbers as rows; rows shorter than the longest are filled with zeros (Matrix Market's sizes)."""
    rows = [line.split() for line in lines if line.strip() and not line.lstrip().startswith(remark)]
    if not rows:
        raise DataError(f"{path.name} holds no entries")
    width = max(min(len(row) for row in rows[1:] or rows), first_row)
    try:
        return np.array([(row + ["0"] * width)[:width] for row in rows], dtype=np.float64).astype(dtype)
    except ValueError as error:
        raise DataError(f"{path.name} holds something that is no number: {error}") from None


def _npz_cloud(path: Path) -> np.ndarray:
    with np.load(path) as data:
        if "xyz" not in data:
            raise DataError(f"{path.name} holds {', '.join(sorted(data)) or 'nothing'}; a cloud has xyz")
        return np.asarray(data["xyz"])


def _s3dis_text(path: Path) -> np.ndarray:
    """S3DIS's rooms: x y z and a colour a line, in metres."""
    with _text(path) as lines:
        points = _numbers(path, lines, "#", np.float64)
    if points.shape[1] < 3:
        raise DataError(f"{path.name} has {points.shape[1]} numbers a line; a point has x, y and z first")
    return points[:, :3]


PLY_TYPES = {
    **dict(char="i1", int8="i1", uchar="u1", uint8="u1", short="i2", int16="i2", ushort="u2", uint16="u2"),
    **dict(int="i4", int32="i4", uint="u4", uint32="u4", float="f4", float32="f4", double="f8", float64="f8"),
}
PLY_ORDER = {"binary_little_endian": "<", "binary_big_endian": ">"}


def _ply(path: Path) -> np.ndarray:
    """The vertices of a PLY file, text or binary; they must be its first element."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head, found, body = data.partition(b"end_header")
    words = [line.split() for line in head.decode("ascii", "replace").splitlines()]
    if not found or not words or words[0] != ["ply"]:
        raise DataError(f"{path.name} is no PLY file; it must begin with ply and have an end_header")
    body = body[body.index(b"\n") + 1 :]
    kind = next(line[1] for line in words if line[:1] == ["format"])
    elements = [line for line in words if line[:1] == ["element"]]
    if not elements or elements[0][1] != "vertex":
        raise DataError(f"{path.name} does not begin with vertices; reorder its elements")
    start = words.index(elements[0]) + 1
    stop = words.index(elements[1]) if len(elements) > 1 else len(words)
    properties = [line[1:] for line in words[start:stop] if line[:1] == ["property"]]
    if any(p[0] not in PLY_TYPES for p in properties):
        raise DataError(f"{path.name} has vertices with lists; only numbers can be read")
    names, count = [p[1] for p in properties], int(elements[0][2])
    if not {"x", "y", "z"} <= set(names):
        raise DataError(f"{path.name} has vertices of {', '.join(names)}; x, y and z are needed")
    if kind == "ascii":
        rows = [line.split() for line in body.decode("ascii").splitlines()[:count]]
        return np.array([[float(row[names.index(axis)]) for axis in "xyz"] for row in rows])
    dtype = np.dtype([(p[1], PLY_ORDER[kind] + PLY_TYPES[p[0]]) for p in properties])
    if len(body) < count * dtype.itemsize:
        raise DataError(f"{path.name} announces {count} vertices and is cut short")
    vertices = np.frombuffer(body, dtype, count)
    return np.stack([vertices[axis] for axis in "xyz"], 1)


def _text(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


GRAPHS: dict[str, Reader[Pattern]] = {
    ".npz": _npz_graph,
    ".txt": _edge_list,
    ".mtx": _matrix_market,
}
CLOUDS: dict[str, Reader[np.ndarray]] = {".npz": _npz_cloud, ".txt": _s3dis_text, ".ply": _ply}
