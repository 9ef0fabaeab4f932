"""Inputs for benchmarks: real graphs and point clouds from INSUM_DATA, or generated ones of similar statistics."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["clebsch_gordan", "clouds", "graphs", "submanifold_map", "voxels"]


def _folder(kind: str) -> Path | None:
    root = os.environ.get("INSUM_DATA")
    folder = Path(root) / kind if root else None
    return folder if folder is not None and folder.is_dir() else None


def graphs(device: str) -> dict[str, Tensor]:
    """Name -> adjacency pattern as a CSR tensor with random values."""
    folder = _folder("graphs")
    found = {}
    if folder is None:
        for name, nodes, degree in (
            ("skewed-20k", 20_000, 10),
            ("even-20k", 20_000, 4),
            ("dense-4k", 4_000, 250),
        ):
            found[name] = _generated_graph(nodes, degree, device)
        return found
    for file in sorted(folder.glob("*.npz")):
        data = np.load(file)
        crow, columns = (torch.from_numpy(data[key].astype(np.int32)).to(device) for key in ("indptr", "indices"))
        found[file.stem] = torch.sparse_csr_tensor(
            crow, columns, torch.randn(len(columns), device=device), tuple(data["shape"].tolist())
        )
    return found


def _generated_graph(nodes: int, degree: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(nodes + degree)
    weight = torch.rand(nodes, generator=generator).pow(-0.5)
    counts = (weight / weight.mean() * degree).long().clamp(0, nodes - 1)
    rows = torch.repeat_interleave(torch.arange(nodes), counts)
    columns = torch.randint(nodes, (len(rows),), generator=generator)
    coo = torch.sparse_coo_tensor(
        torch.stack([rows, columns]), torch.randn(len(rows), generator=generator), (nodes, nodes)
    )
    csr = coo.coalesce().to_sparse_csr()
    parts = csr.crow_indices().int(), csr.col_indices().int(), csr.values()
    return torch.sparse_csr_tensor(*(part.to(device) for part in parts), csr.shape)


def clouds() -> dict[str, np.ndarray]:
    """Name -> points in metres, [n, 3]."""
    folder = _folder("clouds")
    if folder is not None:
        return {file.stem: np.load(file)["xyz"] for file in sorted(folder.glob("*.npz"))}
    generator = np.random.default_rng(0)
    walls = generator.random((400_000, 3)) * [8, 6, 3]
    face = generator.integers(0, 3, len(walls))
    walls[np.arange(len(walls)), face] = np.where(generator.random(len(walls)) < 0.5, 0, np.array([8, 6, 3])[face])
    return {"generated-room": walls.astype(np.float32)}


def voxels(xyz: np.ndarray, size: float, device: str) -> Tensor:
    """Distinct voxel coordinates, [n, 3]."""
    return torch.from_numpy(np.unique(np.floor(xyz / size).astype(np.int64), axis=0)).to(device)


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
