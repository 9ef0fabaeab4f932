"""GroupCOO: entries of one row share a p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .convert import Layout, lay_out_groups
from .sparse_format import SparseFormat

__all__ = ["GroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class GroupCOO(SparseFormat):
    """A[AM[p], AK[p,q]] += AV[p,q]; a group never leaves its row, an empty row has no group.

    With groups of one it is COO; with groups as large as the fullest row, and no row empty, it is ELL.

    >>> import torch
    >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]), group_size=2)
    >>> A
    GroupCOO(shape=[3, 2], nnz=3, groups=2, group_dim=0, group_size=2, padding=25.0%, bytes=40)
    >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
    ([0, 2], [[1, -1], [0, 1]], [[5.0, 0.0], [6.0, 7.0]])
    """

    value_axes: ClassVar[tuple[str, ...]] = ("p", "q")
    takes_group_size: ClassVar[bool] = True

    @classmethod
    def _lay_out(cls, coords: Tensor, grid: tuple[int, ...], group_dim: int, group_size: int | None) -> Layout:
        return lay_out_groups(coords, grid, group_dim, group_size, cls.is_blocked)
