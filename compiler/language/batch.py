"""A batch of statements is a statement: tensors that differ gain an index, and so does the output."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .differentiate import fresh_name
from .ir import Access, Index, Statement, Var
from .parse import parse

__all__ = ["batched"]


@lru_cache(maxsize=1024)
def batched(expr: str, names: tuple[str, ...]) -> str:
    """Return the statement over a batch of the tensors `names`: each of them and the output gain a first dimension.

    >>> batched("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", ("B",))
    'C[b,AM[p],n] += AV[p,q] * B[b,AK[p,q],n]'
    >>> batched("C[i] += A[i,k] * b[k]", ("A", "C"))
    'C[b_,i] += A[b_,i,k] * b[k]'
    """
    statement = parse(expr)
    taken = (*statement.names, *statement.tensor_names, statement.output.name)
    batch = Var(fresh_name("b", taken))

    def indices(access: Access) -> tuple[Index, ...]:
        return tuple(widened(index) if isinstance(index, Access) else index for index in access.indices)

    def widened(access: Access) -> Access:
        first = (batch,) if access.name in names else ()
        return replace(access, indices=(*first, *indices(access)))

    output = replace(statement.output, indices=(batch, *indices(statement.output)))
    factors = tuple(widened(factor) if isinstance(factor, Access) else factor for factor in statement.factors)
    return str(Statement(output, factors, statement.op, statement.reduction))
