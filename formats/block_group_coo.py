"""BlockGroupCOO: blocks of one row of blocks share a p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .group_coo import GroupCOO

__all__ = ["BlockGroupCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockGroupCOO(GroupCOO):
    """A[AM[p]*bm + i, AK[p,q]*bk + j] += AV[p,q,i,j]: groups of blocks of size (bm, bk) of one row of blocks.

    Choose it where entries come in dense blocks and a row of blocks holds several. Coordinates count blocks. For a
    matrix grouped by rows the tensors are AM [P], AK [P, Q] and AV [P, Q, bm, bk]; where AK is -1 there is no block,
    whatever the values there. The last block of a row or column may stick out of the matrix. Make one by `from_dense`,
    `from_blocks`, `from_coo`, `from_torch` or `from_scipy`; the constructor takes tensors that are laid out already.
    Values take part in autograd. `insum` takes the format as a factor, as in `insum("C[m,n] += A[m,k] * B[k,n]", A=A,
    B=B)`.

    Args:
        coords: for the group dimension a tensor [P], for each other a tensor [P, Q] with -1 at padding, int32 or int64,
            in blocks; conversion makes int32 where it suffices.
        values: the blocks [P, Q, *block_size]; conversion puts 0 at padding, float16, bfloat16, float32 or float64.
        shape: the size of each dimension.
        group_dim: the dimension whose coordinate ascends with p, 0 for a matrix by rows.
        block_size: the size of a block along each dimension; it need not divide the shape.

    Raises:
        FormatError: coordinates or values have another shape, dtype or device, a coordinate lies outside the shape, the
            group coordinate does not ascend, or an option is none of this format.

    Example:
        >>> import torch
        >>> from insum_ops.formats import BlockGroupCOO
        >>> A = BlockGroupCOO.from_dense(torch.eye(3), block_size=(2, 2), group_size=1)
        >>> A.AM.tolist(), A.AK.tolist(), A.AV[1, 0].tolist()
        ([0, 1], [[0], [1]], [[1.0, 0.0], [0.0, 0.0]])
    """

    is_blocked: ClassVar[bool] = True
