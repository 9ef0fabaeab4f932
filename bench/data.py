"""Files of graphs and point clouds: npz (indptr or TC-GNN's edges), SNAP edge lists, Matrix Market, S3DIS text, PLY."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from .ply import PlyError, vertices

__all__ = ["CLOUDS", "GRAPHS", "DataError", "Pattern", "from_edges", "kind_of", "load_cloud", "load_graph"]

T = TypeVar("T")
Reader = Callable[[Path], T]
# of a file cut short, or worse
BROKEN = (EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error)
MOST = 2**31 - 1  # rows, or columns: indices are int32, and a position's number fits in int64


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
        pattern = _by_suffix(path, GRAPHS, "graph")(path)
    if not len(pattern.indices):
        raise DataError(f"{path.name} holds no entries; there is nothing to multiply")
    return pattern


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
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    except MemoryError as error:
        raise DataError(f"{path.name} needs more memory than there is: {error}") from None


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds, in small letters, that of compression aside.

    >>> kind_of(Path("Roads.MTX.gz")), kind_of(Path("LICENSE"))
    ('.mtx', '')
    """
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _by_suffix(path: Path, readers: Mapping[str, Reader[T]], kind: str) -> Reader[T]:
    reader = readers.get(kind_of(path))
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
    """The same of a file, which may name positions that its matrix lacks, or sizes that none can have."""
    if min(shape) < 0 or max(shape) > MOST:
        raise DataError(f"{path.name} has {shape[0]} rows and {shape[1]} columns; each may be 0 to {MOST}")
    for name, positions, size in (("row", rows, shape[0]), ("column", columns, shape[1])):
        outside = positions[(positions < 0) | (positions >= size)]
        if len(outside):
            raise DataError(f"{path.name} has an entry in {name} {outside[0]}, counted from 0, of {size} {name}s")
    return from_edges(rows, columns, shape)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    path.open("rb").close()  # one that is not there is not cut short
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
    form = _scipy_format(path, data)
    if form == "csc":
        shape = shape[::-1]
    counts = np.diff(indptr)
    if len(indptr) != shape[0] + 1 or indptr[0] != 0 or indptr[-1] != len(columns) or (counts < 0).any():
        lines = "columns" if form == "csc" else "rows"
        raise DataError(
            f"{path.name} has {len(indptr)} numbers in indptr for {shape[0]} {lines} and {len(columns)} indices; they "
            f"must ascend from 0 to the number of indices, one more than there are {lines}"
        )
    rows = np.repeat(np.arange(shape[0]), counts)
    if form == "csc":
        return _within(path, columns, rows, (int(shape[1]), int(shape[0])))
    return _within(path, rows, columns, (int(shape[0]), int(shape[1])))


def _scipy_format(path: Path, data: Mapping[str, np.ndarray]) -> str:
    """What scipy's save_npz calls its format; a file without one has compressed rows."""
    held = data["format"].ravel()[:1].tolist() if "format" in data else ["csr"]
    form = "".join(word.decode("ascii", "replace") if isinstance(word, bytes) else str(word) for word in held)
    if form not in ("csr", "csc"):
        raise DataError(f"{path.name} is in scipy's format {form or 'none'}; csr and csc can be read")
    return form


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
    width, need = MARKET_FIELDS[field], f"an entry of a {field} matrix has {MARKET_FIELDS[field]}"
    i, j = (_numbers(path, listed, width, need, np.int64, of=2) - 1).T
    if width > 2:  # values are checked, and dropped
        _numbers(path, [row[2:] for row in listed], width - 2, need, np.float64)
    if symmetry != "general":  # one triangle is listed
        i, j = np.concatenate([i, j]), np.concatenate([j, i])
    return _within(path, i, j, (rows, columns))


def _rows(path: Path, lines: IO[str], remark: str) -> list[list[str]]:
    """The words of each line that is no remark; a remark may be in any encoding."""
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith(remark)]
    if not kept:
        raise DataError(f"{path.name} holds no entries")
    odd = next((line for line in kept if not line.isascii()), None)
    if odd is not None:
        raise DataError(f"{path.name} can't be read, it is cut short or damaged: {odd.strip()[:40]!a} is no ASCII")
    return [line.split() for line in kept]


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


def _ply(path: Path) -> np.ndarray:
    data = path.read_bytes()
    try:
        return vertices(gzip.decompress(data) if _is_gzip(path) else data)
    except PlyError as error:
        raise DataError(f"{path.name} {error}") from None


def _text(path: Path) -> IO[str]:
    """Whatever the locale: UTF-8, after a byte-order mark or without; what is not passes in remarks."""
    if _is_gzip(path):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="surrogateescape")
    return path.open(encoding="utf-8-sig", errors="surrogateescape")


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


GRAPHS: dict[str, Reader[Pattern]] = {
    ".npz": _npz_graph,
    ".txt": _edge_list,
    ".mtx": _matrix_market,
}
CLOUDS: dict[str, Reader[np.ndarray]] = {".npz": _npz_cloud, ".txt": _s3dis_text, ".ply": _ply}
