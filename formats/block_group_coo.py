"""BlockGroupCOO: blocks of one row of blocks share a p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .group_coo import GroupCOO

__all__ = ["BlockGroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockGroupCOO(GroupCOO):
    """A[AM[p]*bm + i, AK[p,q]*bk + j] += AV[p,q,i,j], blocks of size (bm, bk).

    >>> import torch
    >>> A = BlockGroupCOO.from_dense(torch.eye(3), block_size=(2, 2), group_size=1)
    >>> A.AM.tolist(), A.AK.tolist(), A.AV[1, 0].tolist()
    ([0, 1], [[0], [1]], [[1.0, 0.0], [0.0, 0.0]])
    """

    is_blocked: ClassVar[bool] = True
