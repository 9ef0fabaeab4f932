"""BlockCOO: one block per p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .coo import COO

__all__ = ["BlockCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockCOO(COO):
    """A[AM[p]*bm + i, AK[p]*bk + j] += AV[p,i,j], blocks of size (bm, bk) sorted by `group_dim` first.

    >>> import torch
    >>> A = BlockCOO.from_dense(torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 6.0]]), block_size=(2, 2))
    >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
    ([0], [1], [[[5.0, 0.0], [6.0, 0.0]]])
    """

    is_blocked: ClassVar[bool] = True
