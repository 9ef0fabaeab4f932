"""GroupCOO: entries of one row share a p."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

from torch import Tensor

from .check import check_inside
from .convert import Layout, lay_out_across, lay_out_groups, lay_out_listed
from .sparse_format import SparseFormat
from .torch_state import untransformed

__all__ = ["GroupCOO"]

Format = TypeVar("Format", bound="GroupCOO")


@dataclass(frozen=True, eq=False, repr=False)
class GroupCOO(SparseFormat):
    """A[AM[p], AK[p,q]] += AV[p,q]: groups of Q entries that lie in one row each.

    A group never leaves its row, and an empty row has no group. Choose it for most matrices: it pads less than ELL and
    has a row to write for each group, not for each entry as COO. With groups of one it is COO; with groups as large as
    the fullest row, and no row empty, it is ELL. For a matrix grouped by rows the tensors are AM [P], AK [P, Q] and AV
    [P, Q]; where AK is -1 there is no entry, whatever the value there. Make one by `from_dense`, `from_coo`,
    `from_torch` or `from_scipy`; the constructor takes tensors that are laid out already. Values take part in autograd.
    `insum` takes the format as a factor, as in `insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)`.

    Args:
        coords: for the group dimension a tensor [P], for each other a tensor [P, Q] with -1 at padding, int32 or int64;
            conversion makes int32 where it suffices.
        values: the value of each entry [P, Q]; conversion puts 0 at padding, float16, bfloat16, float32 or float64.
        shape: the size of each dimension.
        group_dim: the dimension whose coordinate ascends with p, 0 for a matrix by rows.
        block_size: None; only blocked formats take it.

    Raises:
        FormatError: coordinates or values have another shape, dtype or device, a coordinate lies outside the shape, the
            group coordinate does not ascend, or an option is none of this format.

    Example:
        >>> import torch
        >>> from insum_ops.formats import GroupCOO
        >>> A = GroupCOO.from_dense(torch.tensor([[0.0, 5.0], [0.0, 0.0], [6.0, 7.0]]), group_size=2)
        >>> A
        GroupCOO(shape=[3, 2], nnz=3, groups=2, group_dim=0, group_size=2, padding=25.0%, bytes=40)
        >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
        ([0, 2], [[1, -1], [0, 1]], [[5.0, 0.0], [6.0, 7.0]])
        >>> A.ndim, A.nnz, A.num_groups, A.group_size, A.has_padding, A.padding_share, A.nbytes, A.coord_axes
        (2, 3, 2, 2, True, 0.25, 40, (('p',), ('p', 'q')))
    """

    value_axes: ClassVar[tuple[str, ...]] = ("p", "q")
    takes_group_size: ClassVar[bool] = True

    @classmethod
    def _lay_out(cls, coords: Tensor, grid: tuple[int, ...], group_dim: int, group_size: int | None) -> Layout:
        return lay_out_groups(coords, grid, group_dim, group_size, cls.is_blocked)

    @classmethod
    def _from_listed(
        cls: type[Format],
        coords: Tensor,
        values: Tensor,
        shape: tuple[int, ...],
        group_dim: int,
        group_size: int | None,
    ) -> Format | None:
        listed = None
        if len(shape) == 2:
            grid = shape[group_dim], shape[1 - group_dim]
            refuse = partial(check_inside, coords, shape)
            with untransformed():
                rows, columns = (coords[dim] for dim in (group_dim, 1 - group_dim))
                listed = lay_out_listed(rows, columns, grid, refuse, adds=True, group_size=group_size)
        if listed is None:
            return None
        if listed.merged is not None:
            distinct, into = listed.merged
            values = values.new_zeros(distinct.shape[1]).index_put_((into,), values, accumulate=True)
        layout = listed.layout.along(group_dim)
        assert layout.gather is not None
        return cls._laid_out(layout, layout.gather(values), len(values), shape, group_dim)

    def _lay_out_across(self, num_entries: int, group_dim: int, group_size: int | None) -> Layout | None:
        if group_size is not None or self.is_blocked or self.ndim != 2 or group_dim == self.group_dim:
            return None
        rows, columns = self.coords[group_dim], self.coords[self.group_dim]
        assert rows is not None
        assert columns is not None
        layout = lay_out_across(rows, columns, num_entries, (self.shape[group_dim], self.shape[self.group_dim]))
        return None if layout is None else layout.along(group_dim)
