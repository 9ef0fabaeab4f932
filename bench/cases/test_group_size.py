"""Time against group size, beside the number of indirect accesses F(g) and the bytes of the format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import GroupCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..inputs import csr, graph_loaders

SIZES = on((1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8, 16))
COLUMNS = on(128, 32)
LOADERS = graph_loaders(is_small=DEVICE == "cpu")
NAMES = tuple(LOADERS) if DEVICE == "cuda" else tuple(LOADERS)[:2]


@held
def operands(name: str) -> tuple[Tensor, Tensor, Tensor]:
    A = csr(LOADERS[name](), DEVICE)
    B = torch.randn(A.shape[1], COLUMNS, device=DEVICE)
    exact = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), A.values().double(), A.shape)
    return A, B, exact @ B.double()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_group_size(name: str, size: int, measure: Measure) -> None:
    A, B, expected = operands(name)
    if size > int(A.crow_indices().diff().max()):
        pytest.skip(f"no row of {name} has {size} entries")
    format = GroupCOO.from_torch(A, group_size=size)
    facts: dict[str, float | int | str] = {
        "series": name,
        "accesses": (size + 1) * format.num_groups,
        "bytes": format.nbytes,
    }
    facts["chosen"] = GroupCOO.from_torch(A).group_size
    case = Case("group_size", f"{name}, groups of {size}", expected, LIMIT[torch.float32], x=size, facts=facts)
    measure(case, OURS, lambda: Call(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=format, B=B)))
