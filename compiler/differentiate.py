"""The gradient of a statement is a statement: a factor and the output trade places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from .ir import Access, Statement
from .parse import parse

__all__ = ["Term", "fresh_name", "gradient", "terms", "upstream_name"]


def fresh_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, or `wanted_`, `wanted__`, ...: the first that is not taken."""
    names = set(taken)
    while wanted in names:
        wanted += "_"
    return wanted


def upstream_name(statement: Statement) -> str:
    """What the gradient of the output is called in the statement's gradients."""
    return fresh_name(f"d{statement.output.name}", statement.tensor_names)


def gradient(statement: Statement, wrt: int) -> Statement:
    """The statement accumulating d loss / d factors[wrt].

    For `C[AM[p],n] += AV[p,q] * B[AK[p,q],n]` and factor 1 it is `dB[AK[p,q],n] += dC[AM[p],n] * AV[p,q]`.
    """
    target = statement.factors[wrt]
    assert isinstance(target, Access), "a number has no gradient"
    upstream = replace(statement.output, name=upstream_name(statement))
    name = fresh_name(f"d{target.name}", (*statement.tensor_names, upstream.name))
    others = statement.factors[:wrt] + statement.factors[wrt + 1 :]
    return Statement(replace(target, name=name), (upstream, *others))


Term = tuple[str, str, tuple[str, ...]]  # gradient expression, the upstream's name in it, the other tensors it reads


@lru_cache(maxsize=4096)
def terms(expr: str, name: str) -> tuple[Term, ...]:
    """The gradient of tensor `name` as expressions to be added up, one for each place where it stands.

    >>> terms("C[i] += A[i,k] * B[k]", "B")
    (('dB[k] += dC[i] * A[i,k]', 'dC', ('A',)),)
    """
    statement = parse(expr)
    upstream = upstream_name(statement)
    found = []
    for at, factor in enumerate(statement.factors):
        if isinstance(factor, Access) and factor.name == name:
            derived = gradient(statement, at)
            found.append((str(derived), upstream, tuple(key for key in derived.tensor_names if key != upstream)))
    return tuple(found)
