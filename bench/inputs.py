"""Inputs for benchmarks: real graphs and point clouds from INSUM_DATA, or generated ones of similar statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import CLOUDS, GRAPHS, DataError, Pattern, kind_of, load_cloud, load_graph
from .generate import GENERATED, SMALL, room, scan

__all__ = [
    "clebsch_gordan",
    "cloud_loaders",
    "clouds",
    "csr",
    "graph_loaders",
    "graphs",
    "origins",
    "submanifold_map",
    "voxels",
]

SMALL_BYTES = 300_000  # of a file that a run on a CPU reads: a few hundred thousand entries
KINDS: dict[str, Mapping[str, object]] = {"graphs": GRAPHS, "clouds": CLOUDS}  # of folders, with their readers


def _folder(kind: str) -> Path | None:
    """Where the real inputs of a kind are; None: they are generated."""
    root = os.environ.get("INSUM_DATA")
    if not root:
        return None
    if not Path(root).is_dir():
        raise DataError(f"INSUM_DATA is {root}, which is no folder; unset it for generated inputs")
    found = [each for each in KINDS if (Path(root) / each).is_dir()]
    if not found:
        raise DataError(f"INSUM_DATA is {root}, which has neither {' nor '.join(f'{each}/' for each in KINDS)}")
    return Path(root) / kind if kind in found else None


def origins() -> list[str]:
    """Where the inputs come from, in a line for each kind: a run that was to be on real ones should not look so."""
    lines = []
    for kind, readers in KINDS.items():
        folder = _folder(kind)
        if folder is not None:
            lines.append(f"{kind}: {len(_files(folder, readers))} files of {folder}")
        elif os.environ.get("INSUM_DATA"):
            lines.append(f"{kind}: generated, for INSUM_DATA has no {kind}/")
        else:
            lines.append(f"{kind}: generated, for INSUM_DATA is not set")
    return lines


def graphs(device: str) -> dict[str, Tensor]:
    """Name -> adjacency pattern as a CSR tensor with random values."""
    return {name: csr(load(), device) for name, load in graph_loaders().items()}


def graph_loaders(is_small: bool = False) -> dict[str, Callable[[], Pattern]]:
    """Name -> what reads or generates that graph: names are wanted before any graph is."""
    folder = _folder("graphs")
    if folder is None:
        return dict(SMALL if is_small else GENERATED)
    named = _named(folder, GRAPHS)
    return {
        name: partial(load_graph, file)
        for name, file in named.items()
        if file.stat().st_size <= SMALL_BYTES or not is_small
    }


def _files(folder: Path, readers: Mapping[str, object]) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if kind_of(file) in readers and file.is_file()]
    if not files:
        raise DataError(f"{folder} holds no file whose name ends in {', '.join(readers)}; remove it or fill it")
    return files


def _named(folder: Path, readers: Mapping[str, object]) -> dict[str, Path]:
    """Files by their names without suffixes, or with them where two would be called the same."""
    files = _files(folder, readers)
    stems = [_stem(file) for file in files]
    taken = [*stems, *(file.name for file in files)]
    return {stem if taken.count(stem) == 1 else file.name: file for file, stem in zip(files, stems)}


def _stem(file: Path) -> str:
    return file.name[: file.name.lower().removesuffix(".gz").rindex(".")]


def csr(pattern: Pattern, device: str) -> Tensor:
    """int32 indices, as cuSPARSE likes them best, and random values."""
    crow, columns = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (pattern.indptr, pattern.indices))
    values = torch.randn(len(columns), generator=torch.Generator().manual_seed(len(columns)))
    return torch.sparse_csr_tensor(crow, columns, values.to(device), pattern.shape, check_invariants=True)


def clouds() -> dict[str, np.ndarray]:
    """Name -> points in metres, [n, 3]."""
    return {name: load() for name, load in cloud_loaders().items()}


def cloud_loaders() -> dict[str, Callable[[], np.ndarray]]:
    """Name -> what reads or generates that cloud."""
    folder = _folder("clouds")
    if folder is None:
        return {"generated-room": room, "generated-scan": scan}
    return {name: partial(load_cloud, file) for name, file in _named(folder, CLOUDS).items()}


def voxels(xyz: np.ndarray, size: float, device: str) -> Tensor:
    """Distinct voxel coordinates, [n, 3], ascending."""
    cells = np.floor(xyz / size).astype(np.int64)
    low = cells.min(0)
    extent = cells.max(0) - low + 1
    keys = np.unique(np.ravel_multi_index(tuple((cells - low).T), tuple(extent)))  # faster than rows
    return torch.from_numpy(np.stack(np.unravel_index(keys, tuple(extent)), 1) + low).to(device)


def submanifold_map(coordinates: Tensor, kernel: int = 3) -> Tensor:
    """(offset, input, output) triples of a submanifold convolution, [3, pairs]."""
    low = coordinates.amin(0) - kernel
    extent = coordinates.amax(0) + kernel - low + 1

    def key(points: Tensor) -> Tensor:
        p = points - low
        return (p[:, 0] * extent[1] + p[:, 1]) * extent[2] + p[:, 2]

    keys, order = key(coordinates).sort()
    half, triples = kernel // 2, []
    for offset, delta in enumerate(product(range(-half, half + 1), repeat=3)):
        wanted = key(coordinates + torch.tensor(delta, device=coordinates.device))
        at = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
        outputs = (keys[at] == wanted).nonzero().flatten()
        triples.append(torch.stack([torch.full_like(outputs, offset), order[at[outputs]], outputs]))
    return torch.cat(triples, 1)


def clebsch_gordan(lmax: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Coordinates (path, i, j, k), values and shape of the tensor coupling l1 x l2 -> l3, l <= lmax, parity kept."""
    from e3nn import o3  # an optional peer

    coordinates, values, path = [], [], 0
    for l1, l2, l3 in product(range(lmax + 1), repeat=3):
        if abs(l1 - l2) <= l3 <= l1 + l2 and (l1 + l2 + l3) % 2 == 0:
            coefficients = o3.wigner_3j(l1, l2, l3, dtype=torch.float64)
            j, k, i = coefficients.abs().gt(1e-12).nonzero().T
            shifted = torch.stack([torch.full_like(i, path), i + l3 * l3, j + l1 * l1, k + l2 * l2])
            coordinates.append(shifted)
            values.append(coefficients[j, k, i] * (2 * l3 + 1) ** 0.5)
            path += 1
    size = (lmax + 1) ** 2
    return torch.cat(coordinates, 1), torch.cat(values).float(), (path, size, size, size)
