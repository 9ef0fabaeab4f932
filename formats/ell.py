"""ELL: one p per row, padded to the fullest one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .convert import Layout, lay_out_rows
from .sparse_format import SparseFormat

__all__ = ["ELL"]


@dataclass(frozen=True, eq=False, repr=False)
class ELL(SparseFormat):
    """A[p, AK[p,q]] += AV[p,q]; an empty row is all padding.

    The row is p itself, so `coords[group_dim]` is None. A vector is stored whole, zeros included.

    >>> import torch
    >>> A = ELL.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
    >>> A
    ELL(shape=[3, 2], nnz=3, groups=3, group_dim=0, group_size=2, padding=50.0%, bytes=48)
    >>> A.AK.tolist(), A.AV.tolist()
    ([[1, -1], [-1, -1], [0, 1]], [[5.0, 0.0], [0.0, 0.0], [6.0, 7.0]])
    """

    value_axes: ClassVar[tuple[str, ...]] = ("p", "q")
    stores_rows: ClassVar[bool] = False

    @classmethod
    def _lay_out(cls, coords: Tensor, grid: tuple[int, ...], group_dim: int, group_size: int | None) -> Layout:
        return lay_out_rows(coords, grid, group_dim)
