"""Conversion of every kind of sparse matrix that a product takes to a format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiler import OperandError, ShapeError
from ..formats.check import IF_COMPLEX, VALUE_DTYPES
from ..formats.convert import block_grid, sort_order
from ..formats.errors import FormatError
from ..formats.sources import scipy_entries
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import default_dtype
from .arrange import arrange
from .edges import Edges, edges_of
from .torch_sparse import SparseSource, remembered_format, sparse_source

__all__ = ["as_format", "trained_source"]


def as_format(A: Any, B: Tensor | None = None, reduce: str = "") -> SparseFormat:
    """Return the format of a matrix A of any kind.

    The dtype, size or device that A leaves open is that of B, the dense tensor that it multiplies. `reduce` is what
    becomes of a row's products in a call that needs the format but once: then that of a new pattern may be its entries
    as they are listed. Raises OperandError or ShapeError if A is no sparse matrix.
    """
    if isinstance(A, SparseFormat):
        return A
    if isinstance(A, Tensor):
        return remembered_format(A) or sparse_source(A, "A", reduce != "", reduce == "sum").format(A)
    if isinstance(A, tuple):
        dtype = B.dtype if B is not None and B.dtype in VALUE_DTYPES else default_dtype()
        return edges_of(A, "A", _size(B), reduce != "").format(A[1], dtype)
    if hasattr(A, "tocoo"):
        return _from_scipy(A, None if B is None else B.device)
    raise OperandError(
        f"A is of type {type(A).__name__}; pass a format of insum_ops.formats, a torch sparse tensor, "
        "a scipy sparse array or (edge_index, edge_weight, size)"
    )


def trained_source(A: Any, B: Tensor) -> tuple[Tensor, SparseSource | Edges] | None:
    """Return the tensor that lists A's values and their source, or None if no gradient is wanted for it."""
    if isinstance(A, Tensor):
        return (A, sparse_source(A, "A", may_be_young=True)) if A.requires_grad else None
    if isinstance(A, tuple) and len(A) > 1 and isinstance(A[1], Tensor) and A[1].requires_grad:
        return A[1], edges_of(A, "A", _size(B), may_be_young=True)
    return None


def _size(B: Tensor | None) -> tuple[int, int] | None:
    """Return the size of a graph that has none of its own: as many nodes as B has rows."""
    return None if B is None else (B.shape[-2 if B.ndim > 1 else 0],) * 2


def _from_scipy(A: Any, device: torch.device | None) -> SparseFormat:
    """Return a scipy matrix as a format, which is not kept: changes of the matrix can't be detected."""
    if len(A.shape) != 2:
        raise ShapeError(f"A is a scipy array of shape {list(A.shape)}; pass a matrix")
    try:
        coords, values = scipy_entries(A)
    except FormatError as error:
        raise OperandError(str(error)) from None
    if values.dtype not in VALUE_DTYPES:
        remedy = IF_COMPLEX if values.is_complex() else "convert them with A.astype('float32')"
        raise OperandError(f"A holds values of {values.dtype}; {remedy}")
    if device is not None and device.type != "meta":  # the product itself refuses a B on the meta device
        coords, values = coords.to(device), values.to(device)
    shape, is_sorted = tuple(A.shape), A.format in ("csr", "bsr")
    order = None if is_sorted else sort_order(coords, block_grid(shape, tuple(values.shape[1:]) or None), 0)
    return arrange(coords, values, shape, order).fill(values)
