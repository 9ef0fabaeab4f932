"""Bytes: what a graph takes up in each format, and, on a GPU, what a product needs at its peak."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import COO, GroupCOO

from ..case import DEVICE, OURS, Case, held
from ..conftest import Note
from ..harness import peak_mib
from ..inputs import csr, graph_loaders
from ..peers import needs_gpu

STORED = (OURS, "COO", "torch.sparse", "dense")
PEAK = (OURS, "torch.sparse", "gather, multiply, scatter")
LOADERS = graph_loaders(is_small=DEVICE == "cpu")


@held
def matrix(name: str) -> Tensor:
    return csr(LOADERS[name](), DEVICE)


@pytest.mark.parametrize("provider", STORED)
@pytest.mark.parametrize("name", LOADERS)
def test_stored(name: str, provider: str, note: Note) -> None:
    A = matrix(name)
    parts = (A.crow_indices(), A.col_indices(), A.values())
    sizes: dict[str, Callable[[], int]] = {
        OURS: lambda: GroupCOO.from_torch(A).nbytes,
        "COO": lambda: COO.from_torch(A).nbytes,
        "torch.sparse": lambda: sum(part.nbytes for part in parts),
        "dense": lambda: A.shape[0] * A.shape[1] * 4,
    }
    note(Case("memory", f"{name}, stored"), provider, sizes[provider]() / 2**20, "MiB")


@pytest.mark.parametrize("provider", PEAK)
@pytest.mark.parametrize("name", LOADERS)
def test_peak(name: str, provider: str, note: Note) -> None:
    needs_gpu("the peak of what torch allocates")
    A = matrix(name)
    B = torch.randn(A.shape[1], 128, device=DEVICE)
    format = GroupCOO.from_torch(A)
    rows = torch.repeat_interleave(torch.arange(len(A), device=DEVICE), A.crow_indices().diff())

    def separate() -> Tensor:
        products = B[A.col_indices()] * A.values()[:, None]
        return torch.zeros(len(A), 128, device=DEVICE).index_add_(0, rows, products)

    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=format, B=B),
        "torch.sparse": lambda: A @ B,
        "gather, multiply, scatter": separate,
    }
    note(Case("memory", f"{name}, peak of a product"), provider, peak_mib(calls[provider]), "MiB")
