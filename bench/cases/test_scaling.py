"""SpMM against the number of entries, four decades at eight entries a row: where fixed costs end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..generate import graph
from ..inputs import csr

PROVIDERS = (OURS, "torch.sparse")
ENTRIES = on((10**3, 10**4, 10**5, 10**6, 10**7), (10**2, 10**3, 10**4, 10**5, 10**6))
DEGREE, COLUMNS = 8, on(128, 16)


@held
def operands(entries: int) -> tuple[Case, Tensor, Tensor]:
    A = csr(graph(entries // DEGREE, DEGREE, 0.3), DEVICE)
    B = torch.randn(A.shape[1], COLUMNS, device=DEVICE)
    exact = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().double(), A.shape)
    stored = A.values().numel()
    traffic = 4.0 * (2 * stored + len(A) + B.numel() + len(A) * COLUMNS)
    case = Case(
        "scaling",
        f"{entries:,} entries",
        exact @ B.double(),
        LIMIT[torch.float32],
        x=stored,
        flops=2.0 * stored * COLUMNS,
        traffic=traffic,
    )
    return case, A, B


def provide(provider: str, A: Tensor, B: Tensor) -> Call:
    if provider == "torch.sparse":
        return Call(lambda: A @ B)
    format = GroupCOO.from_torch(A)
    return Call(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=format, B=B))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("entries", ENTRIES)
def test_scaling(entries: int, provider: str, measure: Measure) -> None:
    case, A, B = operands(entries)
    measure(case, provider, lambda: provide(provider, A, B))
