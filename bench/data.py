"""Files of graphs and point clouds: npz (indptr or TC-GNN's edges), SNAP edge lists, Matrix Market, S3DIS text, PLY."""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

__all__ = ["CLOUDS", "GRAPHS", "DataError", "Pattern", "load_cloud", "load_graph"]

T = TypeVar("T")
Reader = Callable[[Path], T]
# of a file cut short, or worse
BROKEN = (EOFError, UnicodeDecodeError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error)


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
    with _whole(path):
        return _by_suffix(path, GRAPHS, "graph")(path)


def load_cloud(path: Path) -> np.ndarray:
    """The points in a cloud's file, [n, 3] float32, in the file's unit."""
    with _whole(path):
        found = _by_suffix(path, CLOUDS, "point cloud")(path)
    if found.dtype.kind not in "fiu":
        raise DataError(f"{path.name} holds points of type {found.dtype}; coordinates are numbers")
    with np.errstate(over="ignore"):  # too large for float32: not finite
        points = np.ascontiguousarray(found, dtype=np.float32)
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        raise DataError(f"{path.name} holds points of shape {list(points.shape)}; a cloud is [n, 3]")
    if not np.isfinite(points).all():
        raise DataError(f"{path.name} holds coordinates that are not finite; remove those points")
    return points


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except BROKEN as error:
        raise DataError(f"{path.name} can't be read, it is cut short or damaged: {error}") from None


def _by_suffix(path: Path, readers: Mapping[str, Reader[T]], kind: str) -> Reader[T]:
    name = path.name.removesuffix(".gz")
    reader = readers.get(Path(name).suffix)
    if reader is None:
        raise DataError(f"{path.name} is no {kind} file; its name must end in one of {', '.join(readers)}")
    return reader


def from_edges(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Pattern:
    """Entries in any order, with repetitions, to compressed rows."""
    keys = rows.astype(np.int64) * shape[1] + columns
    if not (np.diff(keys) > 0).all():  # most files are in order
        keys = np.unique(keys)
    counts = np.bincount(keys // max(shape[1], 1), minlength=shape[0])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return Pattern(indptr.astype(np.int64), (keys % max(shape[1], 1)).astype(np.int64), shape)


def _within(path: Path, rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Pattern:
    """The same of a file, which may name positions that its matrix lacks."""
    for name, positions, size in (("row", rows, shape[0]), ("column", columns, shape[1])):
        outside = positions[(positions < 0) | (positions >= size)]
        if len(outside):
            raise DataError(f"{path.name} has an entry in {name} {outside[0]}, counted from 0, of {size} {name}s")
    return from_edges(rows, columns, shape)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path.name} is no npz file, or it is cut short")
    try:
        with np.load(path) as data:
            return dict(data)
    except ValueError as error:  # pickled objects
        raise DataError(f"{path.name} holds something that is no array: {error}") from None


def _npz_graph(path: Path) -> Pattern:
    data = _arrays(path)
    if {"indptr", "indices", "shape"} <= set(data):
        return _compressed(path, data)
    if {"src_li", "dst_li", "num_nodes"} <= set(data):  # as TC-GNN stores them
        sources, targets, nodes = (_whole_numbers(path, data, name) for name in ("src_li", "dst_li", "num_nodes"))
        if nodes.size != 1 or sources.shape != targets.shape:
            sizes = f"{sources.size} sources, {targets.size} targets and {nodes.size} numbers of nodes"
            raise DataError(f"{path.name} has {sizes}; an edge has one of each, and a graph one number of nodes")
        return _within(path, sources, targets, (int(nodes[0]), int(nodes[0])))
    held = ", ".join(sorted(data)) or "nothing"
    raise DataError(f"{path.name} holds {held}; a graph has indptr, indices, shape or src_li, dst_li, num_nodes")


def _compressed(path: Path, data: Mapping[str, np.ndarray]) -> Pattern:
    indptr, columns, shape = (_whole_numbers(path, data, name) for name in ("indptr", "indices", "shape"))
    if len(shape) != 2 or min(shape) < 0:
        raise DataError(f"{path.name} has shape {shape.tolist()}; a matrix has rows and columns")
    counts = np.diff(indptr)
    if len(indptr) != shape[0] + 1 or indptr[0] != 0 or indptr[-1] != len(columns) or (counts < 0).any():
        raise DataError(
            f"{path.name} has {len(indptr)} numbers in indptr for {shape[0]} rows and {len(columns)} indices; they "
            "must ascend from 0 to the number of indices, one more than there are rows"
        )
    return _within(path, np.repeat(np.arange(shape[0]), counts), columns, (int(shape[0]), int(shape[1])))


def _whole_numbers(path: Path, data: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if data[name].dtype.kind not in "iu":
        raise DataError(f"{path.name} has {name} of type {data[name].dtype}; it holds whole numbers")
    return data[name].astype(np.int64).ravel()


def _edge_list(path: Path) -> Pattern:
    """SNAP's: two node numbers a line, # before remarks; the numbers that occur are the nodes, in their order."""
    with _text(path) as lines:
        edges = _numbers(path, _rows(path, lines, "#"), 2, "an edge list has two node numbers", np.int64)
    nodes, numbered = np.unique(edges, return_inverse=True)
    sources, targets = numbered.reshape(-1, 2).T
    return from_edges(sources, targets, (len(nodes), len(nodes)))


MARKET_FIELDS = {"pattern": 2, "real": 3, "integer": 3, "complex": 4}  # and how many numbers an entry has
MARKET_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")


def _matrix_market(path: Path) -> Pattern:
    """The coordinate form, general or symmetric; only where entries are is kept."""
    with _text(path) as lines:
        header = lines.readline().lower().split()
        if header[:3] != ["%%matrixmarket", "matrix", "coordinate"] or len(header) != 5:
            raise DataError(f"{path.name} is no Matrix Market file of coordinates; its first line must say so")
        sizes, *listed = _rows(path, lines, "%")
    field, symmetry = header[3:]
    if field not in MARKET_FIELDS or symmetry not in MARKET_SYMMETRIES:
        known = f"{', '.join(MARKET_FIELDS)} and {', '.join(MARKET_SYMMETRIES)}"
        raise DataError(f"{path.name} is {field} {symmetry}; Matrix Market knows {known}")
    rows, columns, count = _numbers(path, [sizes], 3, "the first is rows, columns and entries", np.int64)[0].tolist()
    if min(rows, columns) < 0 or (symmetry != "general" and rows != columns):
        raise DataError(f"{path.name} has {rows} rows and {columns} columns, which no {symmetry} matrix has")
    if len(listed) != count:
        message = f"{path.name} announces {count} entries and lists {len(listed)}; the file is cut short or damaged"
        raise DataError(message)
    need = f"an entry of a {field} matrix has {MARKET_FIELDS[field]}"
    i, j = (_numbers(path, listed, MARKET_FIELDS[field], need, np.int64, of=2) - 1).T
    if symmetry != "general":  # one triangle is listed
        i, j = np.concatenate([i, j]), np.concatenate([j, i])
    return _within(path, i, j, (rows, columns))


def _rows(path: Path, lines: IO[str], remark: str) -> list[list[str]]:
    """The words of each line that is no remark."""
    rows = [line.split() for line in lines if line.strip() and not line.lstrip().startswith(remark)]
    if not rows:
        raise DataError(f"{path.name} holds no entries")
    return rows


def _numbers(
    path: Path, rows: Sequence[Sequence[str]], least: int, need: str, dtype: type, of: int | None = None
) -> np.ndarray:
    """The first `of` numbers, or `least`, of rows that have at least so many."""
    fewest = min(map(len, rows), default=least)
    if fewest < least:
        raise DataError(f"{path.name} has a line of {fewest} numbers; {need}")
    width = least if of is None else of
    try:
        return np.array([row[:width] for row in rows], dtype=dtype).reshape(-1, width)
    except (ValueError, OverflowError) as error:
        kind = "number" if dtype is np.float64 else "whole number"
        raise DataError(f"{path.name} holds something that is no {kind}: {error}") from None


def _npz_cloud(path: Path) -> np.ndarray:
    data = _arrays(path)
    if "xyz" not in data:
        raise DataError(f"{path.name} holds {', '.join(sorted(data)) or 'nothing'}; a cloud has xyz")
    return data["xyz"]


POINT = "a point has x, y and z first"


def _s3dis_text(path: Path) -> np.ndarray:
    """S3DIS's rooms: x y z and a colour a line, in metres."""
    with _text(path) as lines:
        return _numbers(path, _rows(path, lines, "#"), 3, POINT, np.float64)


PLY_TYPES = {
    **dict(char="i1", int8="i1", uchar="u1", uint8="u1", short="i2", int16="i2", ushort="u2", uint16="u2"),
    **dict(int="i4", int32="i4", uint="u4", uint32="u4", float="f4", float32="f4", double="f8", float64="f8"),
}
PLY_ORDER = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


def _ply(path: Path) -> np.ndarray:
    """The vertices of a PLY file, text or binary; they must be its first element."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    end = re.search(rb"^end_header[ \t]*\r?\n", data, re.MULTILINE)
    words = [line.split() for line in data[: end.start() if end else 0].decode("ascii", "replace").splitlines()]
    if end is None or not words or words[0] != ["ply"]:
        raise DataError(f"{path.name} is no PLY file; it must begin with ply and have an end_header")
    formats = [" ".join(line[1:2]) for line in words if line[:1] == ["format"]]
    if len(formats) != 1 or formats[0] not in PLY_ORDER:
        raise DataError(f"{path.name} is in format {', '.join(formats) or 'none'}; PLY knows {', '.join(PLY_ORDER)}")
    names, types, count = _ply_vertices(path, words)
    body = data[end.end() :]
    if formats[0] == "ascii":
        rows = [line.split() for line in body.decode("ascii", "replace").splitlines() if line.strip()][:count]
        if len(rows) < count:
            raise DataError(f"{path.name} announces {count} vertices and is cut short")
        need = f"a vertex has {len(names)} properties"
        return _numbers(path, rows, len(names), need, np.float64)[:, [names.index(axis) for axis in "xyz"]]
    dtype = np.dtype([(name, PLY_ORDER[formats[0]] + PLY_TYPES[kind]) for name, kind in zip(names, types)])
    if len(body) < count * dtype.itemsize:
        raise DataError(f"{path.name} announces {count} vertices and is cut short")
    vertices = np.frombuffer(body, dtype, count)
    return np.stack([vertices[axis] for axis in "xyz"], 1)


def _ply_vertices(path: Path, words: Sequence[Sequence[str]]) -> tuple[list[str], list[str], int]:
    """The names and the types of a vertex' properties, and how many vertices there are, by the header."""
    elements = [at for at, line in enumerate(words) if line[:1] == ["element"]]
    if not elements or words[elements[0]][1:2] != ["vertex"]:
        raise DataError(f"{path.name} does not begin with vertices; reorder its elements")
    start, stop = elements[0], elements[1] if len(elements) > 1 else len(words)
    properties = [line[1:] for line in words[start:stop] if line[:1] == ["property"]]
    if any(line[:1] == ["list"] for line in properties):
        raise DataError(f"{path.name} has vertices with lists; only numbers can be read")
    unknown = next((line for line in properties if len(line) != 2 or line[0] not in PLY_TYPES), None)
    if unknown is not None:
        raise DataError(f"{path.name} has a property {' '.join(unknown) or 'without a name'}; PLY names a type and it")
    names = [name for _, name in properties]
    if not {"x", "y", "z"} <= set(names) or len(set(names)) < len(names):
        raise DataError(f"{path.name} has vertices of {', '.join(names)}; x, y and z are needed, each once")
    count = " ".join(words[start][2:])
    if not count.isdecimal():
        raise DataError(f"{path.name} announces {count or 'no number of'} vertices; it must be a whole number")
    return names, [kind for kind, _ in properties], int(count)


def _text(path: Path) -> IO[str]:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


GRAPHS: dict[str, Reader[Pattern]] = {
    ".npz": _npz_graph,
    ".txt": _edge_list,
    ".mtx": _matrix_market,
}
CLOUDS: dict[str, Reader[np.ndarray]] = {".npz": _npz_cloud, ".txt": _s3dis_text, ".ply": _ply}
