"""Block SpMM against sparsity: speed-up over the dense product, and where sparse begins to pay."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from insum_ops import insum
from insum_ops.formats import BlockCOO

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..peers import inductor, torch_bsr

DENSE = "dense"
PROVIDERS = (OURS, DENSE, "TorchBSR", "Inductor", "torch.sparse")
SIZE = on(4096, 512)
DTYPE = on(torch.float16, torch.float32)
EDGES = on((32, 64, 128), (32,))
SPARSITIES = on((0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95), (0.0, 0.5, 0.8, 0.9, 0.95))
COMPILED = (0.9,)  # sparsities at which Inductor runs: each takes it seconds to compile


@dataclass(frozen=True)
class Operands:
    case: Case
    dense: Tensor
    B: Tensor


@held
def operands(edge: int, sparsity: float) -> Operands:
    grid = SIZE // edge
    blocks = torch.zeros(grid * grid, device=DEVICE, dtype=DTYPE)
    stored = max(1, round((1 - sparsity) * grid * grid))
    blocks[torch.randperm(grid * grid, device=DEVICE)[:stored]] = 1
    mask = blocks.view(grid, grid).repeat_interleave(edge, 0).repeat_interleave(edge, 1)
    dense = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE) * mask
    B = torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE)
    entries = stored * edge * edge
    case = Case(
        "structured_spmm",
        f"{edge}x{edge}, {sparsity:.0%} sparse",
        dense.double() @ B.double(),
        LIMIT[DTYPE],
        x=sparsity,
        flops=2.0 * entries * SIZE,
        traffic=float(DTYPE.itemsize * (entries + 2 * SIZE * SIZE)),
        facts={"series": f"{edge}x{edge}", "size": SIZE, "block": edge, "dtype": str(DTYPE)[6:]},
    )
    return Operands(case, dense, B)


def provide(provider: str, given: Operands, edge: int) -> Call:
    dense, B = given.dense, given.B
    if provider == DENSE:
        return Call(lambda: dense @ B)
    if provider == "TorchBSR":
        return torch_bsr(dense, B, edge)
    if provider == "torch.sparse":
        if DEVICE == "cuda":
            pytest.skip("TorchBSR is torch's kernel for blocks on a GPU")
        csr = dense.to_sparse_csr()
        return Call(lambda: csr @ B)
    A = BlockCOO.from_dense(dense, block_size=(edge, edge))
    if provider == "Inductor":
        if given.case.x not in COMPILED or edge != 32:
            pytest.skip(f"Inductor runs at 32x32 and {', '.join(map(str, COMPILED))} alone: each takes seconds")
        tensors = {"AM": A.AM, "AV": A.AV, "AK": A.AK, "B": B.unflatten(0, (-1, edge))}
        call = inductor("C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]", (SIZE // edge, edge, SIZE), tensors)
        return Call(call.run, result=lambda: call.run().flatten(0, 1))  # type: ignore[attr-defined]
    return Call(lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), facts={"bytes": A.nbytes})


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("edge", EDGES)
def test_structured_spmm(edge: int, sparsity: float, provider: str, measure: Measure) -> None:
    given = operands(edge, sparsity)
    measure(given.case, provider, lambda: provide(provider, given, edge))
