"""COO: one entry per p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .convert import Layout, lay_out_entries, lay_out_groups
from .regrouped_view import RegroupedView
from .sparse_format import SparseFormat

__all__ = ["COO"]


@dataclass(frozen=True, eq=False, repr=False)
class COO(SparseFormat):
    """A[AM[p], AK[p]] += AV[p]: one entry for each p, sorted by `group_dim` first.

    Choose it where rows hold few entries or very different numbers of them: nothing is padded. For a matrix grouped by
    rows the tensors are AM [P], AK [P] and AV [P]; a tensor of more dimensions has a coordinate for each. Make one by
    `from_dense`, `from_coo`, `from_torch` or `from_scipy`; the constructor takes tensors that are laid out already.
    Values take part in autograd. `insum` takes the format as a factor, as in `insum("C[m,n] += A[m,k] * B[k,n]", A=A,
    B=B)`.

    Args:
        coords: a tensor [P] of int32 or int64 for each dimension; conversion makes int32 where it suffices.
        values: the value of each entry [P], float16, bfloat16, float32 or float64.
        shape: the size of each dimension.
        group_dim: the dimension whose coordinate ascends with p, 0 for a matrix by rows.
        block_size: None; only blocked formats take it.

    Raises:
        FormatError: coordinates or values have another shape, dtype or device, a coordinate lies outside the shape, the
            group coordinate does not ascend, or an option is none of this format.

    Example:
        >>> import torch
        >>> from insum_ops.formats import COO
        >>> A = COO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]))
        >>> A
        COO(shape=[3, 2], nnz=3, groups=3, group_dim=0, group_size=1, padding=0.0%, bytes=36)
        >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
        ([0, 2, 2], [1, 0, 1], [5.0, 6.0, 7.0])
    """

    value_axes: ClassVar[tuple[str, ...]] = ("p",)

    @classmethod
    def _lay_out(cls, coords: Tensor, grid: tuple[int, ...], group_dim: int, group_size: int | None) -> Layout:
        if group_size is None:
            return lay_out_entries(coords, grid)
        return lay_out_groups(coords, grid, group_dim, group_size, cls.is_blocked)

    def in_groups(self, group_size: int) -> RegroupedView:
        """Return a view in which entries of one row share a p, as in GroupCOO, with the values in place.

        The pattern is cached.
        """
        return RegroupedView(self, self._pattern_along(self.group_dim, group_size), self.group_dim, ("p", "q"))
