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
    """A[p, AK[p,q]] += AV[p,q]: one p for each row, padded to the fullest row; an empty row is all padding.

    Choose it where all rows hold about as many entries. The row is p itself, so `coords[group_dim]` is None. For a
    matrix grouped by rows the tensors are AK [M, Q] and AV [M, Q]; where AK is -1 there is no entry, whatever the value
    there. A vector is stored whole, zeros included. Make one by `from_dense`, `from_coo`, `from_torch` or `from_scipy`;
    the constructor takes tensors that are laid out already. Values take part in autograd. `insum` takes the format as a
    factor, as in `insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)`.

    Args:
        coords: None for the group dimension and a tensor [P, Q] of int32 or int64 for each other, -1 at padding;
            conversion makes int32 where it suffices.
        values: the value of each entry [P, Q], P the number of rows; conversion puts 0 at padding, float16, bfloat16,
            float32 or float64.
        shape: the size of each dimension.
        group_dim: the dimension whose coordinate ascends with p, 0 for a matrix by rows.
        block_size: None; only blocked formats take it.

    Raises:
        FormatError: coordinates or values have another shape, dtype or device, a coordinate lies outside the shape, the
            group coordinate does not ascend, or an option is none of this format.

    Example:
        >>> import torch
        >>> from insum_ops.formats import ELL
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
