"""Sparse matrices as their caller lists them, where patterns do not last: then none is sorted into a format at once.

The first calls over a pattern are statements over its index tensors, `C[AM[e],n] += AV[e] * B[AK[e],n]`, whose launch
plans take these as inputs and serve any pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import INDEX_DTYPES, has_kernels, read_ranges, remember_range
from ..formats.check import VALUE_DTYPES
from ..formats.guard import ChangeGuard, SparseChangeGuard, may_keep
from ..formats.torch_state import (
    PLAIN,
    is_capturing,
    is_deterministic,
    is_free,
    is_grad_enabled,
    is_inference_mode,
    wants_gradient,
)
from ..identity_cache import ByIdentity
from . import lifetimes
from .edges import checked_sizes, known_edges
from .lifetimes import Lifetimes
from .torch_sparse import entries_of, known_source

__all__ = ["Listed", "listed_matrix", "listed_patterns"]


class Listed(NamedTuple):
    """A[AM[e], AK[e]] += AV[e], in the order in which the entries are listed."""

    AM: Tensor  # [E]
    AK: Tensor  # [E]
    AV: Tensor | None  # [E]; None: ones
    shape: tuple[int, int]

    @property
    def operands(self) -> dict[str, Tensor]:
        """The tensors that a statement reads, by their names there."""
        own = {"AM": self.AM, "AK": self.AK}
        return own if self.AV is None else {**own, "AV": self.AV}


@dataclass(eq=False)
class _Pattern:
    """The positions of a matrix's entries, kept with the tensor that lists them, and how often they were used.

    They are copies: gradients may be asked for after the tensor was written to.
    """

    guard: ChangeGuard | SparseChangeGuard | None  # None: changes of the tensor can't be detected
    AM: Tensor
    AK: Tensor
    least: int  # of all positions
    most: tuple[int, int]  # of rows and of columns
    uses: int = 0


listed_patterns: ByIdentity[_Pattern] = ByIdentity(lambda pattern: Lifetimes.ended(pattern.uses))


def listed_matrix(A: Any, dense: Tensor, size: tuple[int, int], reduce: str) -> Listed | None:
    """Return the entries of a torch sparse tensor or a graph as they are listed, if its pattern is not taken to last.

    None if the pattern has been converted or is to be, if a call over it must go another way (deterministic algorithms,
    transforms, autocast), or if there is something wrong with the matrix, of which its conversion says what.

    Args:
        A: the sparse matrix, in any kind that a product takes.
        dense: the dense tensor that it is multiplied by.
        size: (sources, targets) of a graph that has none of its own.
        reduce: what becomes of a row's products; "" where the entries are told apart.
    """
    if not is_free() or is_deterministic() or dense.dtype not in VALUE_DTYPES or dense.is_meta:
        return None
    if isinstance(A, tuple):
        listed = _listed_edges(A, size)
    else:
        listed = _listed_entries(A, reduce, wants_gradient((dense,))) if type(A) in PLAIN and A.ndim == 2 else None
    return listed if listed is not None and dense.device == listed.AM.device else None


def _listed_edges(A: tuple[Any, ...], size: tuple[int, int]) -> Listed | None:
    """Return the edges of (edge_index, edge_weight, size) as they are listed."""
    if len(A) not in (2, 3) or type(A[0]) not in PLAIN or not isinstance(A[1], (Tensor, type(None))):
        return None
    edge_index, weight = A[0], A[1]
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in INDEX_DTYPES or edge_index.is_meta:
        return None
    if weight is not None and (
        type(weight) not in PLAIN
        or weight.dtype not in VALUE_DTYPES
        or weight.shape != edge_index.shape[1:]
        or weight.device != edge_index.device
        or (weight.is_inference() and not is_inference_mode())  # autograd would not save it
    ):
        return None
    sources, targets = size if len(A) == 2 or A[2] is None else checked_sizes(A[2])
    pattern = _recent(edge_index)
    if pattern is None:
        if _is_to_be_converted(edge_index) or known_edges(edge_index, (sources, targets)) is not None:
            return None
        guard = ChangeGuard.of(edge_index)  # before it is read: another thread may write to it
        with torch.inference_mode(False):  # what is kept must be good for training too
            columns, rows = edge_index.clone(memory_format=torch.contiguous_format).unbind(0)
        (low, high), (least, most) = _read((rows, columns))
        pattern = _kept(edge_index, _Pattern(guard, rows, columns, min(low, least), (high, most)))
    return _used(edge_index, pattern, weight, (targets, sources))


def _listed_entries(A: Tensor, reduce: str, learns: bool) -> Listed | None:
    """Return the entries of a torch sparse tensor as they are listed: of COO, or of a matrix in CSR or CSC.

    `learns` says whether a gradient of the dense factor is asked for, which reads the values once more.
    """
    is_coo, is_trained = A.layout is torch.sparse_coo, A.requires_grad and is_grad_enabled()
    if A.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc) or A.dtype not in VALUE_DTYPES:
        return None
    # of COO what is listed twice is one entry, which a sum need not know
    if A.dense_dim() or A.is_meta or (is_coo and not A.is_coalesced() and (reduce != "sum" or is_trained)):
        return None
    pattern = _recent(A)
    if pattern is None:
        if _is_to_be_converted(A) or (known_source(A) is not None and A not in listed_patterns):
            return None
        guard = SparseChangeGuard.of(A)
        with torch.inference_mode(False):
            pattern = _read_coo(A, guard) if is_coo else _read_compressed(A, guard)
        if pattern is None:
            return None
        _kept(A, pattern)
    if is_trained:
        values = entries_of(A)
    else:
        values = (A._values() if is_coo else A.values()).detach()
        values = values.clone() if learns else values
    return _used(A, pattern, values, (A.shape[0], A.shape[1]))


def _read_coo(A: Tensor, guard: SparseChangeGuard | None) -> _Pattern:
    rows, columns = A._indices().clone(memory_format=torch.contiguous_format).unbind(0)
    (low, high), (least, most) = _read((rows, columns))
    return _Pattern(guard, rows, columns, min(low, least), (high, most))


def _read_compressed(A: Tensor, guard: SparseChangeGuard | None) -> _Pattern | None:
    """Return the pattern of a matrix in CSR or CSC; None if its pointers are broken, or there are none."""
    by_rows = A.layout is torch.sparse_csr
    pointers, others = (A.crow_indices(), A.col_indices()) if by_rows else (A.ccol_indices(), A.row_indices())
    if len(pointers) < 2:
        return None
    others = others.clone()
    entries = torch.arange(len(others), device=others.device, dtype=pointers.dtype)
    pointed = torch.searchsorted(pointers, entries, right=True) - 1  # of broken pointers some row, or -1
    faults = torch.stack([pointers[0], pointers.diff().amin().clamp(max=0), pointers[-1] - len(others)])
    (least, most), is_whole = _read((others, faults))
    if is_whole != (0, 0):
        return None
    remember_range(pointed, 0, len(pointers) - 2, ascends=True)
    places, largest = (pointed, others), (len(pointers) - 2, most)
    return _Pattern(guard, *places, least, largest) if by_rows else _Pattern(guard, *places[::-1], least, largest[::-1])


def _read(indices: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of index tensors, for which the host waits once; if a kernel may ask, their order too."""
    return read_ranges(indices, range(len(indices)) if has_kernels(indices[0].device) else ())


def _recent(source: Tensor) -> _Pattern | None:
    """Return what is kept of the pattern of a tensor that has not changed since; None without any."""
    pattern = listed_patterns.get(source)
    return pattern if pattern is not None and pattern.guard is not None and pattern.guard.holds_for(source) else None


def _is_to_be_converted(source: Tensor) -> bool:
    """Whether a new pattern is taken to last, or can't be read now."""
    return not Lifetimes.are_short() or (source.is_cuda and is_capturing())


def _kept(source: Tensor, pattern: _Pattern) -> _Pattern:
    """Keep a pattern with its tensor; a sparse tensor that was written to, as by an optimizer, is not new by that."""
    before = listed_patterns.get(source)
    if before is not None and isinstance(before.guard, SparseChangeGuard):
        pattern.uses = before.uses
    if pattern.guard is not None and may_keep():
        listed_patterns.keep(source, pattern)
    return pattern


def _used(source: Tensor, pattern: _Pattern, values: Tensor | None, shape: tuple[int, int]) -> Listed | None:
    """Return a matrix after one more use of its pattern; None if that lasts and can be converted, or does not fit."""
    if pattern.least < 0 or pattern.most[0] >= shape[0] or pattern.most[1] >= shape[1]:
        return None
    pattern.uses += 1
    if pattern.uses > lifetimes.PAYS_AFTER and not (source.is_cuda and is_capturing()):
        listed_patterns.drop(source)
        Lifetimes.ended(pattern.uses)
        return None
    return Listed(pattern.AM, pattern.AK, values, shape)
