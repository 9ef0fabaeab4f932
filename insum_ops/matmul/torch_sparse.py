"""Torch sparse tensors as formats: the pattern is made once per tensor, values are gathered when they change.

A tensor that was written to may have other coordinates: torch counts its writes together, whether to values or to
indices, and `copy_` writes both where they lie. So its index tensors are compared with copies of them, of which the
host waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compiler import (
    INDEX_DTYPES,
    IndexRangeError,
    OperandError,
    ShapeError,
    outside_modes,
    outside_transforms,
    unbatch_gradients,
)
from ..formats.check import IF_COMPLEX, VALUE_DTYPES
from ..formats.convert import block_grid
from ..formats.errors import FormatError
from ..formats.guard import SparseChangeGuard, may_keep
from ..formats.sources import torch_entries
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import is_free, is_grad_enabled, is_transformed, modes, wants_gradient
from ..identity_cache import ByIdentity
from .arrange import Arranged, Merged, arrange_listed
from .listed import list_entries, may_list

__all__ = [
    "SparseSource",
    "remembered_format",
    "remembered_source",
    "sparse_source",
]

Tensors = tuple[Tensor, ...]
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(eq=False)
class SparseSource:
    """A torch sparse tensor's pattern as a format. Entries that an uncoalesced COO tensor lists twice are one."""

    arranged: Arranged
    merged: Merged | None  # None: no entry is listed twice
    guard: SparseChangeGuard | None = None  # of the tensor when the pattern was last known to be its own
    filled: SparseFormat | None = None  # with the values that it had then
    indices: tuple[Tensor, ...] = ()  # copies of the tensor's index tensors, made when it was first written to
    shaped: Callable[[Tensor], Tensor | None] | None = None  # makes a sparse tensor like it of entries
    has_made_one: bool = False  # a sparse tensor like it was made of entries once

    def is_of(self, A: Tensor) -> bool:
        """Whether A is unchanged since the pattern was last compared with it."""
        return self.guard is not None and self.guard.holds_for(A)

    def format(self, A: Tensor) -> SparseFormat:
        """Return the pattern with A's values; gradients come back to A as a sparse tensor of its layout."""
        if A.requires_grad and is_grad_enabled():
            return self.arranged.pattern.with_values(self.slots(A))
        return self.fill(A)

    def fill(self, A: Tensor) -> SparseFormat:
        """Return the pattern with A's values without their graph, and keep it if it may be kept."""
        with outside_transforms(), outside_modes(A, *self.arranged.parts):
            filled = self.arranged.fill(_entries(A, self.merged))
        if may_keep(filled.values):
            self.filled = filled
        return filled

    def slots(self, A: Tensor) -> Tensor:
        """Return A's values over the format's slots; differentiable."""
        return _Slots.apply(A, self)  # type: ignore[no-any-return]

    def entries(self, A: Tensor) -> Tensor:
        """Return A's values in the order in which the pattern lists them, without their graph: [E, *block_size]."""
        return _entries(A, self.merged)

    def like(self, A: Tensor, entries: Tensor) -> Tensor:
        """Return a torch sparse tensor of A's pattern and layout that holds `entries`, in the order of the pattern."""
        is_constant = not (modes() or is_grad_enabled())
        if is_constant and self.shaped is not None:
            shaped = self.shaped(entries)
            if shaped is not None:  # in a pass for named tensors it has no gradient for those that are not named
                return shaped
        with outside_modes(A):
            indices = self.indices or _indices(A)
            if self.merged is not None:
                indices = self.merged[:1]
            is_coalesced = A.layout is not torch.sparse_coo or self.merged is not None or A.is_coalesced()
        if is_constant and is_coalesced and self.shaped is None and may_keep(*indices, entries):
            if self.has_made_one:  # most patterns that are new at each step have one gradient
                self.shaped = _shaped_by(_sparse(A, indices, entries.new_zeros(()).expand(entries.shape), is_coalesced))
            self.has_made_one = True
        return _followed(A, indices, entries, is_coalesced, self.arranged)


def _shaped_by(example: Tensor) -> Callable[[Tensor], Tensor | None] | None:
    """Return torch's own gradient of `values()`: a function that makes a sparse tensor like an example of values.

    It takes the host two thirds of the time of torch's constructors, which look at each of their arguments.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return example.requires_grad_().values().grad_fn  # type: ignore[return-value]


def remembered_source(A: Tensor) -> SparseSource | None:
    """Return the cached source of A that holds its present values, or None."""
    kept = _kept.get(id(A))
    if kept is None or kept[0]() is not A:
        return None
    source = kept[1]  # `_sources.get` and `is_of`, inlined: every call comes here
    if source.arranged.is_listed:  # whose products are counted
        return None
    guard = source.guard
    if guard is not None and source.filled is not None and guard.holds_for(A):
        return source
    return _rewritten(A) if is_free() else None


def _rewritten(A: Tensor) -> SparseSource | None:
    """Return the source of a tensor that was written to since it was converted; None if it can't be kept."""
    source = sparse_source(A, "A")
    source.fill(A)
    return None if source.guard is None or source.filled is None else source


def remembered_format(A: Tensor) -> SparseFormat | None:
    """Return the cached format with A's present values, or None; None too if a gradient is wanted."""
    source = remembered_source(A)
    return None if source is None or (A.requires_grad and is_grad_enabled()) else source.filled


def sparse_source(A: Tensor, name: str, may_be_young: bool = False, may_repeat: bool = False) -> SparseSource:
    """Return the source of a torch sparse tensor, cached while the tensor does not change.

    Entries are sorted again only for a new pattern. If it `may_be_young`, a new one is left as it is listed, until it
    was asked for several times, and if entries `may_repeat` of a tensor too that may list some twice: of these the
    values are not told apart. Errors call the tensor `name`.
    """
    cached, listed = _sources.get(A), None
    is_young = may_be_young and (may_repeat or A.layout is not torch.sparse_coo or A.is_coalesced())
    if cached is not None and cached.arranged.is_listed:
        is_young = is_young and cached.arranged.stays_listed()
        if not is_young:
            cached, listed = None, cached
    if cached is not None and cached.is_of(A):
        return cached
    guard = SparseChangeGuard.of(A)  # before A is read: another thread may write to it
    with outside_modes(A):  # a tensor that a graph holds is read while it is traced
        source = _refreshed(A, cached, name, is_young)
    if listed is not None and listed.arranged.is_in_graph:
        source.arranged.listed_before = listed
    if guard is not None and may_keep(*source.arranged.parts, *(source.merged or ())):
        source.guard = guard
        _sources.keep(A, source)
    return source


@outside_transforms()
def _refreshed(A: Tensor, cached: SparseSource | None, name: str, is_young: bool) -> SparseSource:
    """Return a source with the cached pattern if that is still A's, else with a new one, as listed if it `is_young`."""
    A = A.detach()  # here: inside a transform torch has no detached compressed tensors
    before = cached if cached is not None and _is_alike(cached.arranged, A) else None
    if before is not None and before.indices and all(map(torch.equal, before.indices, _indices(A))):
        return SparseSource(before.arranged, before.merged, indices=before.indices, shaped=before.shaped)
    coords, values, is_sorted = _listed(A, name)
    indices = () if cached is None else tuple([part.clone() for part in _indices(A)])  # it may be written to again
    if before is not None and before.merged is None and torch.equal(before.arranged.coords, coords):
        return SparseSource(before.arranged, None, indices=indices)
    shape = tuple(A.shape)
    grid = block_grid(shape, tuple(values.shape[1:]) or None)
    refuse = partial(_refuse_entries, coords, grid, name)
    if is_young and values.ndim == 1 and may_list(values.device):
        rows, columns = (coords.clone() if A.layout is torch.sparse_coo else coords).contiguous().unbind(0)
        nothing = values.new_zeros(()).expand(values.shape)
        return SparseSource(
            Arranged(list_entries(rows, columns, nothing, (shape[0], shape[1]), refuse), None), None, indices=indices
        )
    arranged, merged = arrange_listed(coords, values, shape, refuse, is_sorted, adds=A.layout is torch.sparse_coo)
    return SparseSource(arranged, merged, indices=indices)


def _is_alike(arranged: Arranged, A: Tensor) -> bool:
    """Whether a pattern has A's shape, dtype and device."""
    pattern = arranged.pattern
    return (pattern.shape, pattern.dtype, pattern.device) == (tuple(A.shape), A.dtype, A.device)


def _listed(A: Tensor, name: str) -> tuple[Tensor, Tensor, bool]:
    """Return the coordinates [2, E] and values [E, *block_size] of A as stored, and whether the rows ascend.

    Raises OperandError, ShapeError or IndexRangeError for what is no sparse matrix of numbers.
    """
    if A.layout not in LAYOUTS:
        if A.layout is torch.strided and A.dtype in INDEX_DTYPES and A.ndim == 2 and len(A) == 2:
            raise OperandError(
                f"{name} is a dense tensor {list(A.shape)} of {A.dtype}, as an edge_index is; pass a graph as a tuple, "
                f"({name}, None) or ({name}, edge_weight)"
            )
        remedy = f"pass insum_ops.formats.GroupCOO.from_dense({name}), or {name}.to_sparse_csr()"
        if A.dtype not in VALUE_DTYPES:
            remedy = f"pass insum_ops.formats.GroupCOO.from_dense({name}.float())"
        kind = "dense" if A.layout is torch.strided else str(A.layout)
        raise OperandError(f"{name} is a {kind} tensor; {remedy}")
    if A.ndim != 2 or A.dense_dim() != 0:
        kind = f"of shape {list(A.shape)} with {A.dense_dim()} dense dimensions"
        raise ShapeError(f"{name} is a {A.layout} tensor {kind}; pass a sparse matrix")
    if A.dtype not in VALUE_DTYPES:
        remedy = IF_COMPLEX if A.is_complex() else f"convert them with {name}.float()"
        raise OperandError(f"{name} holds values of {A.dtype}; {remedy}")
    if A.is_meta:
        raise OperandError(f"{name} is on the meta device, where it lists no entries; give it memory and values first")
    if A.layout is torch.sparse_coo:
        return A._indices(), A._values(), A.is_coalesced()
    try:
        coords, values = torch_entries(A, name)
    except FormatError as error:
        raise IndexRangeError(str(error)) from None
    return coords, values, A.layout in (torch.sparse_csr, torch.sparse_bsr)


class _Slots(torch.autograd.Function):
    """The values of a torch sparse tensor over a format's slots; the gradient is a sparse tensor of its layout."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, source: SparseSource) -> Tensor:
        ctx.pattern, ctx.source = A.detach(), source
        return source.arranged.write(_entries(ctx.pattern, source.merged))

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return ctx.source.like(ctx.pattern, ctx.source.arranged.read(upstream)), None


class _Compressed(torch.autograd.Function):
    """A compressed tensor of its entries, whose gradient reads entries alone: torch's own makes the matrix dense."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, A: Tensor, indices: Tensors, arranged: Arranged) -> Tensor:
        ctx.layout, ctx.indices, ctx.arranged = A.layout, indices, arranged
        return _sparse(A, indices, entries, True)

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if upstream.layout is ctx.layout and all(map(torch.equal, _indices(upstream), ctx.indices)):
            return upstream.values(), *[None] * 3  # that of `values()` holds the same index tensors: nothing waits
        dense, (rows, columns) = upstream.to_dense(), ctx.arranged.coords
        for at, length in enumerate(ctx.arranged.pattern.block_size or ()):
            dense = dense.unflatten(2 * at, (-1, length))
        return (dense if dense.ndim == 2 else dense.transpose(1, 2))[rows, columns], *[None] * 3


def _followed(A: Tensor, indices: Tensors, entries: Tensor, is_coalesced: bool, arranged: Arranged) -> Tensor:
    """Return a sparse tensor of A's layout, with a gradient of the entries, which lie where `arranged` has them."""
    if A.layout is not torch.sparse_coo and wants_gradient([entries]) and not is_transformed():
        return _Compressed.apply(entries, A, indices, arranged)  # type: ignore[no-any-return]
    return _sparse(A, indices, entries, is_coalesced)


def _entries(A: Tensor, merged: Merged | None) -> Tensor:
    values = (A._values() if A.layout is torch.sparse_coo else A.values()).detach()
    return values if merged is None else _merge(values, merged)


def _merge(values: Tensor, merged: Merged) -> Tensor:
    """Return the values of distinct coordinates, each the sum of those that are listed for it."""
    distinct, into = merged
    return values.new_zeros(distinct.shape[1]).index_add_(0, into, values)


def _indices(A: Tensor) -> tuple[Tensor, ...]:
    """Return the index tensors of a sparse tensor of any layout."""
    return (A._indices(),) if A.layout is torch.sparse_coo else _positions(A)


def _positions(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index tensors of a compressed tensor."""
    if A.layout in (torch.sparse_csr, torch.sparse_bsr):
        return A.crow_indices(), A.col_indices()
    return A.ccol_indices(), A.row_indices()


def _sparse(A: Tensor, indices: tuple[Tensor, ...], values: Tensor, is_coalesced: bool) -> Tensor:
    """Return a sparse tensor of A's layout and shape, on the device of its values, else it goes to the default one."""
    place: Any = {"device": values.device, "check_invariants": False}
    if A.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(indices[0], values, A.shape, is_coalesced=is_coalesced or None, **place)
    compressed, plain = indices
    return torch.sparse_compressed_tensor(compressed, plain, values, A.shape, layout=A.layout, **place)


def _refuse_entries(coords: Tensor, grid: tuple[int, ...], name: str) -> NoReturn:
    """Raise for the first entry outside the matrix."""
    is_outside = ((coords < 0) | (coords >= coords.new_tensor(grid)[:, None])).any(0)
    place = coords[:, int(is_outside.nonzero()[0])].tolist()
    raise IndexRangeError(f"{name} lists an entry at {place}, but its shape holds {list(grid)}; mend its indices")


_sources: ByIdentity[SparseSource] = ByIdentity()
_kept = _sources.kept
