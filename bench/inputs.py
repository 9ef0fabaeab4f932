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

from .data import CLOUDS, GRAPHS, DataError, Pattern, load_cloud, load_graph
from .generate import GENERATED, SMALL, room, scan

__all__ = [
    "clebsch_gordan",
    "cloud_loaders",
    "clouds",
    "csr",
    "graph_loaders",
    "graphs",
    "submanifold_map",
    "voxels",
]

SMALL_BYTES = 300_000  # of a file that a run on a CPU reads: a few hundred thousand entries


def _folder(kind: str) -> Path | None:
    root = os.environ.get("INSUM_DATA")
    if not root:
        return None
    if not Path(root).is_dir():
        raise DataError(f"INSUM_DATA is {root}, which is no folder; unset it for generated inputs")
    folder = Path(root) / kind
    return folder if folder.is_dir() else None


def graphs(device: str) -> dict[str, Tensor]:
    """Name -> adjacency pattern as a CSR tensor with random values."""
    return {name: csr(load(), device) for name, load in graph_loaders().items()}


def graph_loaders(is_small: bool = False) -> dict[str, Callable[[], Pattern]]:
    """Name -> what reads or generates that graph: names are wanted before any graph is."""
    folder = _folder("graphs")
    if folder is None:
        return {name: load for name, load in GENERATED.items() if name in SMALL or not is_small}
    files = [file for file in _files(folder, GRAPHS) if file.stat().st_size <= SMALL_BYTES or not is_small]
    return {_stem(file): partial(load_graph, file) for file in files}


def _files(folder: Path, readers: Mapping[str, object]) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if Path(file.name.removesuffix(".gz")).suffix in readers]


def _stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem


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
    return {_stem(file): partial(load_cloud, file) for file in _files(folder, CLOUDS)}


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
