"""Graphs in PyTorch Geometric's convention, (edge_index, edge_weight, size), as formats, made once per pattern."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor

from ..compiler import IndexRangeError, OperandError, ShapeError, UnsupportedError, outside_transforms
from ..formats import COO
from ..formats.check import COORD_DTYPES, IF_COMPLEX, VALUE_DTYPES
from ..formats.guard import ChangeGuard, may_keep
from ..formats.parts import FormatParts, Kind, keep_pattern, register_kind
from ..formats.sparse_format import SparseFormat
from ..formats.torch_state import is_batched, is_forward_mode, is_grad_enabled, is_wrapped, undifferentiated
from ..identity_cache import ByIdentity
from .arrange import Arranged, arrange_edges
from .listed import may_list

__all__ = ["Edges", "edges_of", "traced_edges"]

SIZES = 64  # kept for one graph, then all are dropped: a new size with every call must not fill memory


class Filled(NamedTuple):
    """A format with the weights of some edges. It is replaced as one object, since threads may bring other weights."""

    weights: ref[Tensor]
    guard: ChangeGuard
    form: SparseFormat

    def is_of(self, edge_weight: Tensor) -> bool:
        """Whether these are the weights that it holds, unchanged."""
        return self.weights() is edge_weight and self.guard.holds_for(edge_weight)


@dataclass(eq=False)
class Edges:
    """The edges of a graph as a format of shape [targets, sources]; an edge listed twice is two."""

    arranged: Arranged
    guard: ChangeGuard | None  # of edge_index; None if its changes can't be detected
    filled: Filled | None = None  # with the weights of the last call
    ones: dict[torch.dtype, SparseFormat] = field(default_factory=dict)

    def is_of(self, edge_index: Tensor) -> bool:
        """Whether edge_index is unchanged since the format was made."""
        return self.guard is not None and self.guard.holds_for(edge_index)

    def format(self, edge_weight: Tensor | None, dtype: torch.dtype) -> SparseFormat:
        """Return the pattern with `edge_weight`, or with ones of `dtype`; refuse weights that do not fit the edges."""
        if edge_weight is None:
            ones = self.ones.get(dtype)
            if ones is None:
                pattern = self.arranged.pattern
                with outside_transforms():
                    ones = pattern.with_values(torch.ones_like(pattern.values, dtype=dtype))
                if may_keep(ones.values):
                    self.ones[dtype] = ones
            return ones
        wants_grad = edge_weight.requires_grad and is_grad_enabled()
        filled = self.filled
        if filled is not None and not wants_grad and filled.is_of(edge_weight):
            return filled.form
        _check_weights(edge_weight, self.arranged)
        if wants_grad or is_wrapped(edge_weight) or is_forward_mode():  # detached, they would lose a tangent
            return self.arranged.fill(edge_weight)
        guard = ChangeGuard.of(edge_weight)  # before they are read: another thread may write to them
        with outside_transforms():
            form = self.arranged.fill(edge_weight.detach())
        if guard is not None and may_keep(form.values):
            self.filled = Filled(ref(edge_weight), guard, form)
        return form

    def slots(self, edge_weight: Tensor) -> Tensor:
        """Return the weights over the format's slots, differentiable; raise if they do not fit the edges."""
        _check_weights(edge_weight, self.arranged)
        return self.arranged.fill(edge_weight).values

    def entries(self, edge_weight: Tensor) -> Tensor:
        """Return the weights without their graph; raise if they do not fit the edges."""
        _check_weights(edge_weight, self.arranged)
        return edge_weight.detach()

    def like(self, edge_weight: Tensor, entries: Tensor) -> Tensor:
        """Return what `entries`, one for each edge, are as a gradient of the weights: themselves."""
        return entries


def edges_of(A: tuple[Any, ...], name: str, size: tuple[int, int] | None, may_be_young: bool = False) -> Edges:
    """Return the edges of (edge_index, edge_weight, size), cached while edge_index does not change.

    `size` (sources, targets) is for a tuple without one. Without either, the nodes are those that edge_index names. If
    they `may_be_young`, edges that are new are left as they are listed, until they were asked for several times.
    """
    check_graph(A, name)
    edge_index = _unbatched(A[0]) if is_wrapped(A[0]) else A[0]
    sizes = size if len(A) == 2 or A[2] is None else _checked_sizes(A[2])
    by_size = _edges.get(edge_index)
    edges = None if by_size is None else by_size.get(sizes)
    is_young, listed = may_be_young, None
    if edges is not None and edges.is_of(edge_index):
        if not edges.arranged.is_listed or (may_be_young and edges.arranged.stays_listed()):
            return edges
        is_young, listed = False, edges
    edges = _arranged_edges(edge_index, sizes, is_young)
    if listed is not None and listed.arranged.is_in_graph:
        edges.arranged.listed_before = listed
    if edges.guard is not None and may_keep(*edges.arranged.parts):
        if by_size is None or len(by_size) >= SIZES or not all(e.is_of(edge_index) for e in by_size.values()):
            by_size = {}
        _edges.keep(edge_index, {**by_size, sizes: edges})  # another dictionary: other threads may be reading this one
    return edges


def check_graph(A: tuple[Any, ...], name: str) -> None:
    """Refuse a tuple that is no graph."""
    if len(A) not in (2, 3) or not isinstance(A[0], Tensor) or not isinstance(A[1], (Tensor, type(None))):
        kinds = ", ".join([type(part).__name__ for part in A])
        raise OperandError(
            f"{name} is a tuple of ({kinds}); pass (edge_index, edge_weight, size) with edge_index [2, E], "
            "edge_weight [E] or None, and size (sources, targets), a number or None"
        )
    for called, part in (("edge_index", A[0]), ("edge_weight", A[1])):
        if part is not None and part.is_nested:
            raise OperandError(
                f"{called} is a nested tensor; pass one for all edges, as torch.cat({called}.unbind(), -1)"
            )
        if part is not None and part.layout is not torch.strided:
            raise OperandError(f"{called} is a {part.layout} tensor; pass {called}.to_dense()")


def _unbatched(edge_index: Tensor) -> Tensor:
    """Return an edge_index without what transforms that differentiate wrap it in; refuse one that vmap batches."""
    edge_index = undifferentiated(edge_index)
    if is_batched(edge_index):
        raise UnsupportedError(
            "edge_index is batched by torch.func.vmap, but a graph is one for all examples; write the product as a "
            'statement, whose index tensors may be batched: insum("C[dst[e],n] += w[e] * B[src[e],n]", ...)'
        )
    return edge_index


def check_edge_index(edge_index: Tensor) -> None:
    """Refuse an edge_index of another type or shape."""
    if edge_index.dtype not in COORD_DTYPES:
        raise OperandError(
            f"edge_index is {edge_index.dtype}; node numbers are int32 or int64, as edge_index.long() has them"
        )
    if edge_index.ndim != 2 or len(edge_index) != 2:
        remedy = "; pass edge_index.T" if edge_index.ndim == 2 and edge_index.shape[1] == 2 else ""
        shape = list(edge_index.shape)
        raise ShapeError(f"edge_index is {shape}; it must be [2, E], sources first, then targets{remedy}")


def traced_edges(A: tuple[Any, ...], name: str, size: tuple[int, int], dtype: torch.dtype) -> FormatParts:
    """Return a graph for a tracer: its edges are checked and put in order when the compiled call runs."""
    check_graph(A, name)
    edge_index, edge_weight = A[0], A[1]
    check_edge_index(edge_index)
    sources, targets = size if len(A) == 2 or A[2] is None else _checked_sizes(A[2])
    if edge_weight is None:
        edge_weight = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
    return FormatParts("Edges;0;;*", (targets, sources), edge_weight, [edge_index])


def _edges_of_parts(parts: FormatParts) -> Edges:
    targets, sources = parts.shape
    return edges_of((parts.coords[0], parts.values, (sources, targets)), "A", None)


def _traced_format(parts: FormatParts) -> SparseFormat:
    sources, targets = parts.coords[0].unbind(0)
    return COO._traced((targets, sources), parts.values, parts.shape, 0, None)


def _pattern(parts: FormatParts) -> SparseFormat:
    """Return the pattern of a graph's edges; refuse weights that do not fit it."""
    edges = _edges_of_parts(parts)
    _check_weights(parts.values, edges.arranged)
    keep_pattern(parts, edges.guard, edges.arranged.pattern)
    return edges.arranged.pattern


register_kind(
    "Edges",
    Kind(
        build=_pattern,
        fill=lambda parts, form, values: _edges_of_parts(parts).arranged.fill(values),
        trace=_traced_format,
        listed=lambda parts, form, grad: _edges_of_parts(parts).arranged.read(grad),
    ),
)


def _checked_sizes(size: Any) -> tuple[int, int]:
    """Return (sources, targets) of a caller's size; refuse what is none."""
    parts = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    try:
        sources, targets = [part if isinstance(part, (int, torch.SymInt)) else index(part) for part in parts]
    except (TypeError, ValueError):
        raise ShapeError(f"size is {size!r}; pass (sources, targets), a number for both, or None") from None
    if sources < 0 or targets < 0:
        raise ShapeError(f"size is {size}; a size is at least 0")
    return sources, targets  # type: ignore[return-value]


@outside_transforms()
def _arranged_edges(edge_index: Tensor, sizes: tuple[int, int] | None, is_young: bool) -> Edges:
    """Return the edges as a format; refuse an edge_index of another type or shape, or that names an absent node."""
    check_edge_index(edge_index)
    if edge_index.is_meta:
        raise OperandError("edge_index is on the meta device, where it lists no edges; give it memory and values first")
    guard = ChangeGuard.of(edge_index)  # before it is read: another thread may write to it
    if sizes is None:
        nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        sizes = nodes, nodes
    refuse = partial(_refuse_edges, edge_index, sizes)
    return Edges(arrange_edges(edge_index, sizes, refuse, is_young and may_list(edge_index.device)), guard)


def _refuse_edges(edge_index: Tensor, sizes: tuple[int, int]) -> NoReturn:
    """Raise for the first edge that names an absent node."""
    limits = edge_index.new_tensor(sizes, dtype=torch.int64)[:, None]
    row, edge = ((edge_index < 0) | (edge_index >= limits)).nonzero()[0].tolist()
    kind, count = ("sources", "targets")[row], sizes[row]
    raise IndexRangeError(
        f"edge_index[{row}, {edge}] is {int(edge_index[row, edge])} but there are {count} {kind}; "
        "give the numbers of nodes as size=(sources, targets), the third part of the tuple"
    )


def _check_weights(edge_weight: Tensor, arranged: Arranged) -> None:
    """Refuse weights of another dtype, shape or device than the edges need."""
    num_edges = arranged.pattern.nnz
    if edge_weight.dtype not in VALUE_DTYPES:
        remedy = IF_COMPLEX if edge_weight.is_complex() else "convert it with edge_weight.float()"
        raise OperandError(f"edge_weight is {edge_weight.dtype}; {remedy}")
    if edge_weight.shape != (num_edges,):
        raise ShapeError(
            f"edge_weight is {list(edge_weight.shape)} but edge_index is [2, {num_edges}]; "
            "give one weight for each edge"
        )
    if edge_weight.device != arranged.pattern.device:
        raise OperandError(
            f"edge_weight is on {edge_weight.device} but edge_index is on {arranged.pattern.device}; "
            "move them to one device"
        )


_edges: ByIdentity[dict[tuple[int, int] | None, Edges]] = ByIdentity()
