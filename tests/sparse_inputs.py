"""One sparse matrix in every kind that `spmm` takes, each made from a dense one by plain torch and scipy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import scipy.sparse
import torch
from statements import DEVICE
from torch import Tensor

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

SPARSE_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


def random_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float64, density: float = 0.3) -> Tensor:
    """Random nonzeros; the second row is empty, the first one full."""
    A = torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < density)
    if rows > 1:
        A[0], A[1] = torch.randn(columns), 0
    return A.to(dtype).to(DEVICE)


def edges(A: Tensor, index_dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """(edge_index, edge_weight, size) with an edge from k to m for each nonzero A[m,k], in a shuffled order."""
    targets, sources = A.nonzero().T
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(1)).to(A.device)
    edge_index = torch.stack([sources, targets])[:, order].to(index_dtype)
    return edge_index, A[targets, sources][order], (A.shape[1], A.shape[0])


def uncoalesced(A: Tensor) -> Tensor:
    """A COO tensor that lists every entry twice, as halves, in descending order."""
    indices = A.nonzero().T.flip(1)
    values = A[tuple(indices)] / 2
    return torch.sparse_coo_tensor(
        torch.cat([indices, indices], 1), torch.cat([values, values]), A.shape, check_invariants=True
    )


def csr(A: Tensor, index_dtype: torch.dtype = torch.int64) -> Tensor:
    made = A.to_sparse_csr()
    parts = made.crow_indices().to(index_dtype), made.col_indices().to(index_dtype), made.values()
    return torch.sparse_csr_tensor(*parts, A.shape, check_invariants=True)


def blocked(A: Tensor) -> Tensor:
    """A cut to a multiple of the blocks that the BSR kinds have."""
    return A[: A.shape[0] // 3 * 3, : A.shape[1] // 2 * 2]


def scipy_of(A: Tensor, kind: str) -> Any:
    return getattr(scipy.sparse, f"{kind}_array")(numpy.asarray(A.cpu()))


BLOCK_SIZES = {"BlockCOO": (4, 3), "BlockGroupCOO": (2, 4), "bsr": (3, 2), "bsc": (3, 2)}


def is_entry(A: Tensor, kind: str) -> Tensor:
    """Where a matrix of this kind stores an entry: at its nonzeros, or all over a block that holds one."""
    found = A != 0
    if kind in BLOCK_SIZES:
        for row in range(0, A.shape[0], BLOCK_SIZES[kind][0]):
            for column in range(0, A.shape[1], BLOCK_SIZES[kind][1]):
                block = found[row : row + BLOCK_SIZES[kind][0], column : column + BLOCK_SIZES[kind][1]]
                block.fill_(bool(block.any()))
    return found


def random_dense(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "COO": COO.from_dense,
    "GroupCOO": GroupCOO.from_dense,
    "GroupCOO by columns": lambda A: GroupCOO.from_dense(A, group_dim=1),
    "GroupCOO transposed": lambda A: GroupCOO.from_dense(A.T.contiguous()).T,
    "ELL": ELL.from_dense,
    "ELL transposed": lambda A: ELL.from_dense(A.T.contiguous()).T,
    "BlockCOO": lambda A: BlockCOO.from_dense(A, block_size=(4, 3)),
    "BlockGroupCOO": lambda A: BlockGroupCOO.from_dense(A, block_size=(2, 4), group_size=2),
}
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse_coo,
    "uncoalesced": uncoalesced,
    "csr": csr,
    "csr int32": lambda A: csr(A, torch.int32),
    "csc": Tensor.to_sparse_csc,
}
BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bsr": lambda A: A.to_sparse_bsr((3, 2)),
    "bsc": lambda A: A.to_sparse_bsc((3, 2)),
}
EDGES: dict[str, Callable[[Tensor], Any]] = {
    "edges": edges,
    "edges int32": lambda A: edges(A, torch.int32),
}
SCIPY: dict[str, Callable[[Tensor], Any]] = {
    "scipy coo": lambda A: scipy_of(A, "coo"),
    "scipy csr": lambda A: scipy_of(A, "csr"),
    "scipy csc": lambda A: scipy_of(A, "csc"),
}
EVERY_KIND = {**FORMATS, **TENSORS, **EDGES, **SCIPY}
every_kind = pytest.mark.parametrize("kind", EVERY_KIND)
