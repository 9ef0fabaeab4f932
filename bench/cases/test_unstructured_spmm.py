"""SpMM over graphs, N = 128: `C[m,n] += A[m,k] * B[k,n]` with A in GroupCOO, beside cuSPARSE and PyTorch Geometric."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..inputs import csr, graph_loaders
from ..peers import installed

PROVIDERS = (OURS, "torch.sparse", "PyG")
DTYPES = on((torch.float32, torch.float16), (torch.float32,))
COLUMNS = on(128, 32)
LOADERS = graph_loaders(is_small=DEVICE == "cpu")


@dataclass(frozen=True)
class Operands:
    case: Case
    A: Tensor  # CSR
    B: Tensor


@held
def operands(name: str, dtype: torch.dtype) -> Operands:
    A = csr(LOADERS[name](), DEVICE)
    A = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().to(dtype), A.shape)
    B = torch.randn(A.shape[1], COLUMNS, device=DEVICE, dtype=dtype)
    exact = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().double(), A.shape)
    entries = A.values().numel()
    case = Case(
        "unstructured_spmm",
        f"{name}, {str(dtype)[6:]}",
        exact @ B.double(),
        LIMIT[dtype],
        flops=2.0 * entries * COLUMNS,
        traffic=float(dtype.itemsize * (entries + B.numel() + len(A) * COLUMNS) + 4 * (entries + len(A))),
        facts={"series": str(dtype)[6:], "rows": len(A), "nnz": entries, "columns": COLUMNS},
    )
    return Operands(case, A, B)


def provide(provider: str, A: Tensor, B: Tensor) -> Call:
    if provider == "torch.sparse":
        return Call(lambda: A @ B)
    if provider == "PyG":
        spmm = installed("torch_geometric.utils").spmm
        return Call(lambda: spmm(A, B))
    format = GroupCOO.from_torch(A)
    return Call(
        lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=format, B=B),
        facts={"group_size": format.group_size, "bytes": format.nbytes},
    )


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unstructured_spmm(dtype: torch.dtype, name: str, provider: str, measure: Measure) -> None:
    given = operands(name, dtype)
    measure(given.case, provider, lambda: provide(provider, given.A, given.B))
