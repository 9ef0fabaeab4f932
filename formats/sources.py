"""Sparse tensors of torch and scipy -> the coordinates and values that they list; nothing is sorted here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol, cast

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..close_names import with_article
from .check import check_has_numbers
from .device_kernels import layouts, runs_kernels
from .errors import FormatError

__all__ = ["ScipyArray", "scipy_entries", "spread_blocks", "torch_entries"]

ROWS = {"csr": "rows", "csc": "columns", "bsr": "rows of blocks"}  # what a compressed array of scipy points at


class ScipyArray(Protocol):
    """What is read of any scipy sparse array or matrix (scipy 1.13 or newer)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    def tocoo(self) -> ScipyCOO: ...


class ScipyCOO(Protocol):
    """What is read of a scipy array in COO."""

    @property
    def coords(self) -> Sequence[NDArray[numpy.integer]]: ...
    @property
    def data(self) -> NDArray[numpy.number]: ...


class ScipyRepeating(ScipyArray, Protocol):
    """What is read of a scipy array that may list an entry several times, to be summed."""

    @property
    def has_canonical_format(self) -> bool: ...
    def copy(self) -> ScipyRepeating: ...
    def sum_duplicates(self) -> None: ...


class ScipyCompressed(Protocol):
    """What is read of a scipy array in CSR, CSC or BSR."""

    shape: tuple[int, ...]
    format: str
    indptr: NDArray[numpy.integer]
    indices: NDArray[numpy.integer]
    data: NDArray[numpy.number]


def torch_entries(A: Tensor, name: str = "A") -> tuple[Tensor, Tensor]:
    """Return the coords [ndim, E] and values [E] of a torch sparse tensor; BSR and BSC list blocks.

    Raises FormatError for any other tensor, or if its compressed indices are broken.
    """
    if not isinstance(A, Tensor):
        raise FormatError(f"A is {with_article(type(A).__name__)}; from_torch takes a torch sparse tensor")
    check_has_numbers("A", A)
    if A.layout == torch.sparse_coo:
        if A.dense_dim():
            raise FormatError(f"A is hybrid, with dense_dim() {A.dense_dim()}; use from_dense(A.to_dense())")
        A = A.coalesce()
        return A.indices(), A.values()
    if A.layout in (torch.sparse_csr, torch.sparse_bsr):
        pointers, others, first = A.crow_indices(), A.col_indices(), 0
    elif A.layout in (torch.sparse_csc, torch.sparse_bsc):
        pointers, others, first = A.ccol_indices(), A.row_indices(), 1
    else:
        kinds = "torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr or torch.sparse_bsc"
        raise FormatError(f"A has layout {A.layout}; from_torch takes {kinds}, from_dense takes a dense tensor")
    if A.ndim != 2:
        raise FormatError(f"A is a {A.layout} tensor of shape {list(A.shape)}; only a matrix converts from this layout")
    coords = _unfolded(pointers, others, first)
    if coords is None:
        which = ("crow_indices", "ccol_indices")[first]
        raise FormatError(f"{name}.{which}() must ascend from 0 to {len(others)}, its entries; mend its indices")
    return coords, A.values()


def _unfolded(pointers: Tensor, others: Tensor, first: int) -> Tensor | None:
    """Return the coordinates [2, E] of a compressed matrix; None if its pointers are broken."""
    if runs_kernels(pointers, others) and len(others) < 2**31:
        return layouts.unfold(pointers.contiguous(), others.contiguous(), first)
    counts = pointers.diff()
    least = counts.amin() if len(counts) else pointers[0]
    first_pointer, last_pointer, fewest = torch.stack([pointers[0], pointers[-1], least]).tolist()
    if fewest < 0 or (first_pointer, last_pointer) != (0, len(others)):
        return None
    pair = (_pointed_rows(counts, len(others)), others.long())
    return torch.stack([pair[first], pair[1 - first]])


def scipy_entries(A: ScipyArray) -> tuple[Tensor, Tensor]:
    """Return the coords [ndim, E] and values [E] of a scipy sparse array, each once; BSR lists blocks.

    Raises FormatError for anything else, for values that torch has no dtype for, or if its indices are broken.
    """
    if not hasattr(A, "tocoo"):
        remedy = ", from_dense or from_torch a tensor" if isinstance(A, Tensor) else ""
        kind = with_article(type(A).__name__)
        raise FormatError(f"A is {kind}; from_scipy takes a scipy sparse array or matrix{remedy}")
    if A.format in ROWS and len(A.shape) == 2:  # that of a vector has a row, too
        _check_compressed(cast(ScipyCompressed, A))
        coords, values = _unfolded_scipy(cast(ScipyCompressed, _distinct(A)))
    else:
        if A.format == "coo":
            for dim, places in enumerate(cast(ScipyCOO, A).coords):
                _check_lengths(f"coords[{dim}]", places, cast(ScipyCOO, A).data)
        coo = _distinct(A).tocoo()
        coords, values = torch.stack([torch.tensor(c).long() for c in coo.coords]), _values(coo.data)
    _check_listed(coords, [-(-size // block) for size, block in zip_longest(A.shape, values.shape[1:], fillvalue=1)])
    return coords, values


def _unfolded_scipy(A: ScipyCompressed) -> tuple[Tensor, Tensor]:
    """Return the coords [2, E] and values of a compressed array, which may have room for more than it lists."""
    entries, others = int(A.indptr[-1]), torch.tensor(A.indices).long()
    pair = (_pointed_rows(torch.tensor(A.indptr).diff(), entries), others[:entries])
    return torch.stack(pair[::-1] if A.format == "csc" else pair), _values(A.data[:entries])


def _check_compressed(A: ScipyCompressed) -> None:
    """Raise FormatError if arrays do not fit each other; scipy's functions would read and write elsewhere."""
    _check_lengths("indices", A.indices, A.data)
    axis = 1 if A.format == "csc" else 0
    lines = -(-A.shape[axis] // (A.data.shape[1] if A.data.ndim > 1 else 1))
    if len(A.indptr) != lines + 1:
        listed, kind = len(A.indptr), ROWS[A.format]
        raise FormatError(f"A.indptr lists {listed} positions but A has {lines} {kind}; it must list {lines + 1}")
    if A.indptr[0] != 0 or A.indptr[-1] > len(A.indices) or (numpy.diff(A.indptr) < 0).any():
        raise FormatError(f"A.indptr must ascend from 0 to {len(A.indices)}, its entries; mend its indices")


def _check_lengths(name: str, indices: NDArray[numpy.integer], data: NDArray[numpy.number]) -> None:
    if len(data) != len(indices):
        raise FormatError(f"A.data lists {len(data)} entries but A.{name} {len(indices)}; mend its indices")


def _check_listed(coords: Tensor, grid: Sequence[int]) -> None:
    """Raise FormatError for the first entry outside of a scipy array."""
    limits = coords.new_tensor(list(grid))[:, None]
    is_outside = (coords < 0) | (coords >= limits)
    if is_outside.any():
        place = coords[:, int(is_outside.any(0).nonzero()[0])].tolist()
        raise FormatError(f"A lists an entry at {place}, but its shape holds {list(grid)}; mend its indices")


def _distinct(A: ScipyArray) -> ScipyArray:
    """Return A, or a copy without repetitions unless scipy knows that there are none."""
    if A.format not in ("coo", "csr", "csc") or cast(ScipyRepeating, A).has_canonical_format:
        return A
    copy = cast(ScipyRepeating, A).copy()
    copy.sum_duplicates()
    return copy


def _values(data: NDArray[numpy.number]) -> Tensor:
    try:
        return torch.tensor(data)
    except TypeError:  # torch has no such numbers
        raise FormatError(f"A holds values of {data.dtype}; convert them with A.astype('float32')") from None


def spread_blocks(coords: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return all elements of blocks at block coordinates, as coords [ndim, E] and values [E]."""
    block_size = values.shape[1:]
    axes = [torch.arange(size, device=coords.device) for size in block_size]
    within = torch.stack(torch.meshgrid(axes, indexing="ij")).flatten(1)  # [ndim, elements of a block]
    first = coords * coords.new_tensor(block_size)[:, None]
    return (first[:, :, None] + within[:, None, :]).flatten(1), values.flatten()


def _pointed_rows(counts: Tensor, entries: int) -> Tensor:
    """Return the row of each of the entries of a compressed matrix, of which each row has so many."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=entries)
