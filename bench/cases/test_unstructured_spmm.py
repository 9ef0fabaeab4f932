"""`spmm(A, B)` over graphs, A a CSR tensor, as it is called: beside torch.sparse (cuSPARSE) and PyTorch Geometric."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from insum_ops import spmm
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure, Note
from ..harness import host_us, wall_ms
from ..inputs import csr, graph_loaders
from ..peers import installed

PROVIDERS = (OURS, "torch.sparse", "PyG")
DTYPES = on((torch.float32, torch.float16), (torch.float32,))
COLUMNS = on((16, 32, 64, 128, 256, 512), (32,))
LOADERS = graph_loaders(is_small=DEVICE == "cpu")


@dataclass(frozen=True)
class Operands:
    case: Case
    A: Tensor  # CSR
    B: Tensor


@held
def operands(name: str, dtype: torch.dtype, columns: int) -> Operands:
    A = csr(LOADERS[name](), DEVICE)
    A = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().to(dtype), A.shape)
    B = torch.randn(A.shape[1], columns, device=DEVICE, dtype=dtype)
    exact = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().double(), A.shape)
    entries = A.values().numel()
    case = Case(
        "unstructured_spmm",
        f"{name}, {str(dtype)[6:]}, N = {columns}",
        exact @ B.double(),
        LIMIT[dtype],
        flops=2.0 * entries * columns,
        traffic=float(dtype.itemsize * (entries + B.numel() + len(A) * columns) + 4 * (entries + len(A))),
        facts={"series": f"{str(dtype)[6:]}, N = {columns}", "rows": len(A), "nnz": entries, "columns": columns},
    )
    return Operands(case, A, B)


def provide(provider: str, A: Tensor, B: Tensor) -> Call:
    if provider == "torch.sparse":
        return Call(lambda: A @ B)
    if provider == "PyG":
        peer = installed("torch_geometric.utils").spmm
        return Call(lambda: peer(A, B))
    return Call(lambda: spmm(A, B))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unstructured_spmm(dtype: torch.dtype, name: str, columns: int, provider: str, measure: Measure) -> None:
    if provider == "PyG" and columns != 128 and DEVICE == "cuda":
        pytest.skip("PyTorch Geometric calls torch.sparse here: it runs once for each graph")
    given = operands(name, dtype, columns)
    measure(given.case, provider, lambda: provide(provider, given.A, given.B))


@pytest.mark.alone
@pytest.mark.parametrize("name", LOADERS)
def test_conversion(name: str, note: Note) -> None:
    """What the first call of `spmm` does to a CSR tensor, facts included."""
    A = csr(LOADERS[name](), DEVICE)
    form = GroupCOO.from_torch(A)
    convert = lambda: GroupCOO.from_torch(A).facts
    convert()
    milliseconds = wall_ms(convert, calls=5) if DEVICE == "cuda" else host_us(convert, calls=20) / 1e3
    facts = {"nnz": A.values().numel(), "group_size": form.group_size, "bytes": form.nbytes}
    note(Case("conversion", name, facts=facts), OURS, milliseconds, "ms")
