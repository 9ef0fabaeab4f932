"""All terms of a tensor product and what stands between them, forward and backward, for tensors of one layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .pieces import Piece
from .slots import Slots
from .steps import Parts, Statement, Step, run

__all__ = ["SCATTER", "Whole", "Work", "writes_parts"]

LARGEST = 2**31  # bytes of a tensor that kernels for smaller ones may write parts of
# [are slots flat]; by an int where it is traced, since not every tracer takes a bool for an index
SCATTER = tuple(Statement(f"Z[DST[b],{c}] += M[b,{c}]", (("M", 0), ("DST", 1)), {}) for c in ("i,w", "c"))
GATHER = Statement("dM[b,i,w] += dZ[DST[b],i,w]", (("dZ", 0), ("DST", 1)), {})

View = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, and how far behind the first element it begins


class Work(Protocol):
    """Terms with the weights that are handed out to them."""

    @property
    def pieces(self) -> Mapping[bool, tuple[bool, Sequence[Piece]]]: ...

    def ordered(self, weight: Tensor) -> Tensor: ...

    def unordered(self, dW: Tensor) -> Tensor: ...


class Whole:
    """A plan for tensors of one layout: views of them, and statements that are ready."""

    def __init__(
        self,
        slots: tuple[Slots, Slots, Slots],
        work: Work,
        steps: Sequence[Step],
        given: Sequence[Any],  # x, y, weight, src, dst
        num_rows: int,
    ) -> None:
        x, y, weight, _, _ = given
        first, second, out = slots
        self.slots, self.work, self.num_rows = slots, work, num_rows
        self.is_ordered, pieces = work.pieces[writes_parts(weight)]
        keys = [piece.term.key[3] for piece in pieces]
        self.sizes = [out.shape(y.shape[0], at) for at in range(len(out.widths))]
        variants = sorted({(key[1], step.has_v) for key, step in zip(keys, steps)})
        self.y_slots = [at for at, _ in variants]
        self.steps = [(step, key[0], variants.index((key[1], step.has_v)), key[2]) for key, step in zip(keys, steps)]
        x = first.ordered(x)
        self.x_views = _views_of(first.spread(x), x)
        y = second.ordered(y)
        spread = second.spread(y)
        self.y_views = _views_of([spread[at] if has_v else spread[at].flatten(1) for at, has_v in variants], y)
        self.w_views: list[View | None] = [None] * len(steps)
        self.dw_views: list[View] = []  # of a gradient that is written in parts
        if weight is not None:
            weight, weighted = self.in_order(weight), [each for each in zip(pieces, steps) if each[0].numel]
            self.w_views = [_weight_view(weight, *each) if each[0].numel else None for each in zip(pieces, steps)]
            if writes_parts(weight):
                dw = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                self.dw_views = [_weight_view(dw, *each) for each in weighted]
            starts = [piece.start for piece, _ in weighted]
            self.dw_order = sorted(range(len(starts)), key=starts.__getitem__)

    def in_order(self, weight: Tensor) -> Tensor:
        """Weights with those of each term side by side."""
        return weight if self.is_ordered else self.work.ordered(weight)

    def parts(self, x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """What the steps read, of tensors that are in order."""
        Ws: list[Any] = self.w_views
        if weight is not None:
            start = weight.storage_offset()
            Ws = [None if v is None else weight.as_strided(v[0], v[1], start + v[2]) for v in self.w_views]
        return _views(x, self.x_views), _views(y, self.y_views), Ws

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The product, and what backward needs of it: the tensors in order, and what terms keep."""
        first, second, out = self.slots
        x, y = first.ordered(x), second.ordered(y)
        if weight is not None:
            weight = self.in_order(weight)
        Xs, Ys, Ws = self.parts(x, y, weight)
        Zs: list[Tensor | None] = [None] * len(self.sizes)
        kept: list[Tensor | None] = [x, y, weight]
        for (step, at1, at2, at3), W in zip(self.steps, Ws):
            Zs[at3], own = step.forward(Parts(Xs[at1], Ys[at2], W, src), Zs[at3], self.sizes[at3])
            kept.append(own)
        flat = [self.finished(at, Z, x, dst) for at, Z in enumerate(Zs)]
        return out.unordered(flat[0] if len(flat) == 1 else torch.cat(flat, 1)), kept

    def finished(self, at: int, Z: Tensor | None, x: Tensor, dst: Tensor | None) -> Tensor:
        """A slot of the output: zeros where no path leads, added up by `dst` where there is one."""
        out = self.slots[2]
        if Z is None:
            return x.new_zeros(self.num_rows, out.sizes[at])
        if dst is not None:
            Z = run(SCATTER[out.is_flat], out.shape(self.num_rows, at), (Z, dst))
        return Z if out.is_flat else Z.view(self.num_rows, out.sizes[at])

    def backward(
        self,
        kept: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
        upstream: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        first, second, out = self.slots
        (x, y, weight, *own), (src, dst) = kept, given
        assert x is not None
        assert y is not None
        dz = out.ordered(upstream)
        dZs = _views(dz, _views_of(out.spread(dz), dz))
        if dst is not None:
            dZs = [run(GATHER, size, (dZ, dst)) for dZ, size in zip(dZs, self.sizes)]
        Xs, Ys, Ws = self.parts(x, y, weight)
        dXs: list[Tensor | None] = [None] * len(Xs)
        dYs: list[Tensor | None] = [None] * len(Ys)
        dWs: list[Tensor] = []
        dw, places = None, list[Tensor]()
        if wanted[2] and weight is not None and self.dw_views:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            places = _views(dw, self.dw_views)
        for (step, at1, at2, at3), W, saved in zip(self.steps, Ws, own):
            parts = Parts(Xs[at1], Ys[at2], W, src)
            place = places[len(dWs)] if places and W is not None else None
            dXs[at1], dYs[at2], dW = step.backward(parts, saved, dZs[at3], wanted, dXs[at1], dYs[at2], place)
            if dW is not None:
                dWs.append(dW)
        dx = dy = None
        if wanted[0]:
            dx = _joined(first, dXs, x)
        if wanted[1]:
            dy = _joined(second, _by_slot(dYs, self.y_slots, len(second.widths)), y)
        if wanted[2] and weight is not None:
            if dw is None:
                flat = [dWs[at].flatten(weight.dim() - 1) for at in self.dw_order]
                dw = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
            dw = dw if self.is_ordered else self.work.unordered(dw)
        return dx, dy, dw


def writes_parts(weight: Tensor | None) -> bool:
    """Statements write their parts of dW where they belong, else the parts are put together."""
    return weight is not None and weight.dim() == 2 and weight.numel() * weight.itemsize < LARGEST


def _weight_view(weight: Tensor, piece: Piece, step: Step) -> View:
    """The weights of a piece, as its statement has them: [b, p, ...], without b where they are shared."""
    paths, *rest = step.weight_shape
    lead, each = weight.shape[:-1], math.prod(rest)
    one = weight.narrow(-1, piece.start, each).view(*lead, 1, *rest)
    between = (piece.step or each) * weight.stride(-1)
    strides = one.stride()
    at = len(lead)
    size = (*lead, paths, *rest)
    return size, (*strides[:at], between, *strides[at + 1 :]), _start(one) - _start(weight)


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _view_of(view: Tensor, base: Tensor) -> View:
    return tuple(view.shape), view.stride(), _start(view) - _start(base)


def _views_of(views: Sequence[Tensor], base: Tensor) -> list[View | None]:
    """None: the tensor as it is, which costs the host nothing."""
    found = [_view_of(view, base) for view in views]
    return [None if view == (tuple(base.shape), base.stride(), 0) else view for view in found]


def _views(base: Tensor, views: Sequence[View | None]) -> list[Tensor]:
    start = base.storage_offset()
    return [base if view is None else base.as_strided(view[0], view[1], start + view[2]) for view in views]


def _by_slot(dYs: Sequence[Tensor | None], at: Sequence[int], count: int) -> list[Tensor | None]:
    """One gradient for each slot, whether statements read it with or without an index for its one channel."""
    found: list[Tensor | None] = [None] * count
    for slot, dY in zip(at, dYs):
        if dY is not None:
            known = found[slot]
            found[slot] = dY if known is None else known.flatten(1) + dY.flatten(1)
    return found


def _joined(slots: Slots, parts: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Gradients of slots as one of the columns; zeros where no path begins."""
    rows = like.shape[0]
    flat = [
        like.new_zeros(rows, size) if part is None else part.view(rows, size) for part, size in zip(parts, slots.sizes)
    ]
    return slots.unordered(flat[0] if len(flat) == 1 else torch.cat(flat, 1))
