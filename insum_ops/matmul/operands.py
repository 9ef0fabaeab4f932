"""Whatever holds a sparse matrix -> its format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiler import OperandError, ShapeError
from ..formats.check import VALUE_DTYPES
from ..formats.errors import FormatError
from ..formats.sources import scipy_entries
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import default_dtype
from .arrange import arrange
from .edges import Edges, edges_of
from .torch_sparse import SparseSource, remembered_format, sparse_source

__all__ = ["as_format", "trained_source"]


def as_format(A: Any, B: Tensor | None = None) -> SparseFormat:
    """The format of a matrix A of any kind; what A leaves open comes from B, the dense tensor that it multiplies."""
    if isinstance(A, SparseFormat):
        return A
    if isinstance(A, Tensor):
        return remembered_format(A) or sparse_source(A, "A").format(A)
    if isinstance(A, tuple):
        dtype = B.dtype if B is not None and B.dtype in VALUE_DTYPES else default_dtype()
        return edges_of(A, "A", _size(B)).format(A[1], dtype)
    if hasattr(A, "tocoo"):
        return _from_scipy(A, None if B is None else B.device)
    raise OperandError(
        f"A is of type {type(A).__name__}; pass a format of insum_ops.formats, a torch sparse tensor, "
        "a scipy sparse array or (edge_index, edge_weight, size)"
    )


def trained_source(A: Any, B: Tensor) -> tuple[Tensor, SparseSource | Edges] | None:
    """The tensor that lists A's values and where they go, if a gradient is wanted for it."""
    if isinstance(A, Tensor):
        return (A, sparse_source(A, "A")) if A.requires_grad else None
    if isinstance(A, tuple) and len(A) > 1 and isinstance(A[1], Tensor) and A[1].requires_grad:
        return A[1], edges_of(A, "A", _size(B))
    return None


def _size(B: Tensor | None) -> tuple[int, int] | None:
    """A graph without a size has as many nodes as B has rows."""
    return None if B is None else (B.shape[-2 if B.ndim > 1 else 0],) * 2


def _from_scipy(A: Any, device: torch.device | None) -> SparseFormat:
    """A copy of a scipy matrix, which can't tell when it changes, so that none is kept."""
    if len(A.shape) != 2:
        raise ShapeError(f"A is a scipy array of shape {list(A.shape)}; pass a matrix")
    try:
        coords, values = scipy_entries(A)
    except FormatError as error:
        raise OperandError(str(error)) from None
    if values.dtype not in VALUE_DTYPES:
        raise OperandError(f"A holds values of {values.dtype}; convert them with A.astype('float32')")
    if device is not None and device.type != "meta":  # which the product refuses in words of its own
        coords, values = coords.to(device), values.to(device)
    return arrange(coords, values, tuple(A.shape), is_sorted=A.format in ("csr", "bsr")).fill(values)
