"""`insum`: one line in, one tensor out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .compiler.autograd import evaluate
from .compiler.errors import OperandError
from .compiler.sparse import is_sparse

__all__ = ["Insum", "insum"]


def insum(expr: str, /, *, size: Sequence[int] | None = None, **tensors: Any) -> Tensor:
    """`C[AM[p],n] += AV[p,q] * B[AK[p,q],n]`: evaluate an indirect Einsum.

    Indices that the left side lacks are summed over; an access as an index reads positions from an integer tensor, on the
    right to gather, on the left to scatter and add. A negative position means "no entry" and contributes nothing. A sparse
    format of `insum_ops.formats` may stand for one factor.

    With `+=` and the output given, the result starts from it; no tensor that is passed in is ever changed. The output's size
    comes from the output tensor, from `size`, or from the indices when none of them is an indirection.

    >>> import torch
    >>> A, B = torch.tensor([[1., 2.], [3., 4.]]), torch.tensor([10., 20.])
    >>> insum("C[i] += A[i,k] * B[k]", A=A, B=B)
    tensor([ 50., 110.])
    >>> insum("C[I[p]] += A[p,k] * B[k]", A=A, B=B, I=torch.tensor([2, 2]), size=(3,))
    tensor([  0.,   0., 160.])
    >>> insum("C[()] += B[k] * B[k]", B=B)
    tensor(500.)
    """
    for name, operand in tensors.items():
        if not isinstance(operand, Tensor) and not is_sparse(operand):
            raise OperandError(f"{name} is a {type(operand).__name__}; pass a torch.Tensor or a format of insum_ops.formats")
    return evaluate(expr, tensors, size)


Insum = insum
