"""BlockCOO: one block per p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .coo import COO

__all__ = ["BlockCOO"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockCOO(COO):
    """A[AM[p]*bm + i, AK[p]*bk + j] += AV[p,i,j]: one block of size (bm, bk) for each p, sorted by `group_dim` first.

    Choose it where entries come in dense blocks, as in a pruned weight. Coordinates count blocks. For a matrix grouped
    by rows the tensors are AM [P], AK [P] and AV [P, bm, bk]. The last block of a row or column may stick out of the
    matrix. Make one by `from_dense`, `from_blocks`, `from_coo`, `from_torch` or `from_scipy`; the constructor takes
    tensors that are laid out already. Values take part in autograd. `insum` takes the format as a factor, as in
    `insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)`.

    Args:
        coords: a tensor [P] of int32 or int64 for each dimension, in blocks; conversion makes int32 where it suffices.
        values: the blocks [P, *block_size], float16, bfloat16, float32 or float64.
        shape: the size of each dimension.
        group_dim: the dimension whose coordinate ascends with p, 0 for a matrix by rows.
        block_size: the size of a block along each dimension; it need not divide the shape.

    Raises:
        FormatError: coordinates or values have another shape, dtype or device, a coordinate lies outside the shape, the
            group coordinate does not ascend, or an option is none of this format.

    Example:
        >>> import torch
        >>> from insum_ops.formats import BlockCOO
        >>> A = BlockCOO.from_dense(torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 6.0]]), block_size=(2, 2))
        >>> A.AM.tolist(), A.AK.tolist(), A.AV.tolist()
        ([0], [1], [[[5.0, 0.0], [6.0, 0.0]]])
    """

    is_blocked: ClassVar[bool] = True
