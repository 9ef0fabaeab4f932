"""The errors of formats and sparse tensors that are used as torch tensors, which they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..close_names import close_name, with_article

__all__ = ["NotTensor", "no_attribute"]

REMEDIES = {  # what torch's and scipy's matrices have by these names
    "todense": "A.to_dense()",
    "toarray": "A.to_dense().numpy()",
    "dense": "A.to_dense()",
    "numpy": "A.to_dense().numpy()",
    "t": "A.T",
    "size": "A.shape",
    "dim": "A.ndim",
    "clone": "A.with_values(A.values.clone())",
    "detach": "A.with_values(A.values.detach()), or insum_ops.nn.SpMM(A, trainable=True) to train it",
    "requires_grad_": "A.with_values(A.values.requires_grad_())",
    "requires_grad": "A.values.requires_grad",
    "grad": "A.values.grad",
    "data": "A.values",
    "type": "A.to(dtype)",
    "is_pinned": "A.values.is_pinned()",
    "is_shared": "A.values.is_shared()",
    "to_scipy": "A.to_torch(), whose indices and values scipy.sparse takes",
    "coalesce": "A itself, since conversion has merged its entries",
    "matmul": "insum_ops.spmm(A, B)",
    "mm": "insum_ops.spmm(A, B)",
    "mv": "insum_ops.spmm(A, b)",
    "indices": "A.coords",
    "sum": "A.to_dense().sum(...), or insum_ops.spmm(A, ones) for the sums of rows",
}


def no_attribute(instance: object, name: str, called: str, remedies: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object lacks, with what to write instead, or with a close match."""
    problem = f"{with_article(type(instance).__name__)} has no {name}"
    if not name.startswith("_"):
        names = [attribute for attribute in dir(type(instance)) if not attribute.startswith("_")]
        close = close_name(name, names)
        remedy = remedies.get(name) or (f"{called}.{close}" if close else "")
        problem += f"; use {remedy}" if remedy else ""
    return AttributeError(problem, obj=instance)  # without a name, to which Python would add a guess of its own


class NotTensor:
    """Operators and names of tensors, refused with what to write instead."""

    def __matmul__(self, other: object) -> NoReturn:
        raise TypeError(f"{with_article(type(self).__name__)} is not multiplied with @; use insum_ops.spmm(A, B)")

    def __rmatmul__(self, other: object) -> NoReturn:
        name = with_article(type(self).__name__)
        raise TypeError(f"{name} is not multiplied with @; use insum with the statement C[m,n] += B[m,k] * A[k,n]")

    def __getitem__(self, at: object) -> NoReturn:
        name = with_article(type(self).__name__)
        raise TypeError(f"{name} is not indexed; use A.to_dense()[...], or A.coords and A.values")

    __iter__: ClassVar[None] = None  # or Python would call __getitem__ for it

    def __mul__(self, *other: object) -> NoReturn:
        name = with_article(type(self).__name__)
        raise TypeError(
            f"{name} has no arithmetic; use A.with_values(f(A.values)) for each of its values, a "
            "statement of insum_ops.insum for products, or A.to_dense()"
        )

    __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __mul__

    if not TYPE_CHECKING:  # to which every attribute would be one

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has said why there is none
                return object.__getattribute__(self, name)
            raise no_attribute(self, name, "A", REMEDIES)
