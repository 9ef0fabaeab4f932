"""A whole tensor product without a graph, forward and backward, for tensors of one layout.

Every term of the product runs here, with the splits, views and gathers between terms. Where it can, a term writes its
part of the weights' gradient in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compiler import run_summed
from .slots import Slots
from .term_statements import Gradients, Parts, Statement, Step, joint_call, run
from .weight_slices import Terms, WeightSlice

__all__ = ["SCATTER", "InPlaceProduct", "writes_parts"]

LARGEST = 2**31  # bytes: kernels for smaller tensors can not address parts of a larger one
# [are slots flat]; by an int where it is traced, since not every tracer takes a bool for an index
SCATTER = tuple(Statement(f"Z[DST[b],{c}] += M[b,{c}]", (("M", 0), ("DST", 1)), {}) for c in ("i,w", "c"))
GATHER = Statement("dM[b,i,w] += dZ[DST[b],i,w]", (("dZ", 0), ("DST", 1)), {})


class Columns:
    """The columns of several slots side by side: some are written there, the others put there at the end."""

    def __init__(self, slots: Slots, like: Tensor, rows: int) -> None:
        self.slots, self.like, self.rows = slots, like, rows
        self.memory: Tensor | None = None

    def place(self, at: int) -> Tensor | None:
        """Return the memory of one slot; None where there is no other: it has all columns."""
        if len(self.slots.sizes) == 1:
            return None
        if self.memory is None:
            self.memory = self.like.new_empty(self.rows, sum(self.slots.sizes))
        return self.slots.spread(self.memory)[at]

    def filled(self, parts: Sequence[Tensor | None], placed: Collection[int]) -> Tensor:
        """Return all columns in the order of the irreps, zeros for a slot without a part; those `placed` are there."""
        sizes, absent = self.slots.sizes, lambda size: self.like.new_zeros(self.rows, size)
        if self.memory is None:
            flat = [absent(size) if part is None else part.view(self.rows, size) for part, size in zip(parts, sizes)]
            return self.slots.unordered(flat[0] if len(flat) == 1 else torch.cat(flat, 1))
        for at, (part, place) in enumerate(zip(parts, self.slots.spread(self.memory))):
            if part is None:
                place.zero_()
            elif at not in placed:
                place.copy_(part.view(place.shape))
        return self.slots.unordered(self.memory)


class InPlaceProduct:
    """The terms of a product for tensors of one layout: which slot and which weights each term reads and writes."""

    def __init__(
        self,
        slots: tuple[Slots, Slots, Slots],
        work: Terms,
        steps: Sequence[Step],
        inputs: Sequence[Any],  # x, y, weight, src, dst
        num_rows: int,
    ) -> None:
        _, y, weight, _, _ = inputs
        out = slots[2]
        self.slots, self.work, self.num_rows = slots, work, num_rows
        self.is_ordered, self.weight_slices = work.weight_slices[writes_parts(weight)]
        keys = [part.term.key[3] for part in self.weight_slices]
        self.sizes = [out.shape(y.shape[0], at) for at in range(len(out.widths))]
        self.variants = sorted({(key[1], step.has_v) for key, step in zip(keys, steps)})
        places = [self.variants.index((key[1], step.has_v)) for key, step in zip(keys, steps)]
        self.reads_columns = bool(steps) and all(step.reads_columns for step in steps)
        self.steps = [(step, key[0], at, key[2]) for key, step, at in zip(keys, steps, places)]

    def in_order(self, weight: Tensor) -> Tensor:
        """Return weights with those of each term side by side."""
        return weight if self.is_ordered else self.work.ordered(weight)

    def parts(self, x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        """Return the slots of x, the slots of y and the weights that the steps read, of tensors that are in order."""
        first, second, _ = self.slots
        spread = second.spread(y)
        Ys = [spread[at] if has_v else spread[at].flatten(1) for at, has_v in self.variants]
        return [x] if self.reads_columns else first.spread(x), Ys, self.weights(weight)

    def weights(self, weight: Tensor | None) -> list[Any]:
        """Return the part of each step in the weights, or in their gradient; None for a step without weights."""
        if weight is None:
            return [None] * len(self.steps)
        pairs = zip(self.weight_slices, self.steps)
        return [_weight_view(weight, part, step) if part.numel else None for part, (step, *_) in pairs]

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | None, src: Tensor | None, dst: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the product, and what backward needs: x, y and weight in order, and each term's intermediate."""
        first, second, out = self.slots
        x, y = x if self.reads_columns else first.ordered(x), second.ordered(y)
        if weight is not None:
            weight = self.in_order(weight)
        Xs, Ys, Ws = self.parts(x, y, weight)
        operands = [Parts(Xs[at1], Ys[at2], W, src) for (_, at1, at2, _), W in zip(self.steps, Ws)]
        columns = Columns(out, x, self.num_rows)
        slots = [at3 for *_, at3 in self.steps]
        product = lambda at, Z: self.steps[at][0].forward(operands[at], Z, self.sizes[slots[at]])[0]
        Zs, done, placed = self.summed("Z", slots, operands, self.sizes, product, columns if dst is None else None)
        saved: list[Tensor | None] = [x, y, weight]
        for number, ((step, *_, at3), parts) in enumerate(zip(self.steps, operands)):
            intermediate = None
            if number not in done:
                Zs[at3], intermediate = step.forward(parts, Zs[at3], self.sizes[at3])
            saved.append(intermediate)
        if dst is not None:
            shapes = [out.shape(self.num_rows, at) for at in range(len(Zs))]
            Zs = [Z if Z is None else run(SCATTER[out.is_flat], size, (Z, dst)) for Z, size in zip(Zs, shapes)]
        return columns.filled(Zs, placed), saved

    def summed(
        self,
        name: str,
        slots: Sequence[int],
        operands: Sequence[Any],
        sizes: Sequence[Sequence[int]],
        add: Callable[[int, Tensor | None], Tensor | None],
        columns: Columns | None = None,
    ) -> tuple[list[Tensor | None], set[int], set[int]]:
        """Return the sums of Z, dX or dY of those steps of one slot that a kernel may add up, and their numbers.

        `slots` says to which of `sizes` each step adds, and `add` returns a total with what one step adds to it. Where
        no other step adds to a slot its sum is written to its place in `columns`; last come the numbers of such slots.
        """
        sums: list[Tensor | None] = [None] * len(sizes)
        done, placed = set[int](), set[int]()
        stated = [step.summand(name) for step, *_ in self.steps]
        for at, size in enumerate(sizes):
            own = {number: each for number, each in enumerate(stated) if each is not None and slots[number] == at}
            if len(own) > 1:
                is_whole = columns is not None and len(own) == slots.count(at)
                place = columns.place(at) if columns is not None and is_whole else None
                calls = [joint_call(each, size, operands[number], place) for number, each in own.items()]
                sums[at] = run_summed(calls, partial(_in_turn, list(own), add))
                done.update(own)
                if place is not None:
                    placed.add(at)
        return sums, done, placed

    def backward(
        self,
        saved: Sequence[Tensor | None],
        edges: Sequence[Tensor | None],
        upstream: Tensor,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the wanted gradients of x, y and weight, None for each other.

        `saved` is what `forward` returned beside the product, and `edges` is src and dst.
        """
        first, second, out = self.slots
        (x, y, weight, *intermediates), (src, dst) = saved, edges
        assert x is not None
        assert y is not None
        dz = out.ordered(upstream)
        dZs = out.spread(dz)
        if dst is not None:
            dZs = [run(GATHER, size, (dZ, dst)) for dZ, size in zip(dZs, self.sizes)]
        Xs, Ys, Ws = self.parts(x, y, weight)
        operands = [(Xs[at1], Ys[at2], W, src, dZs[at3]) for (_, at1, at2, at3), W in zip(self.steps, Ws)]
        dXs: list[Tensor | None] = [None] * len(Xs)
        dYs: list[Tensor | None] = [None] * len(Ys)
        summed = {"X": set[int](), "Y": set[int]()}

        def gradients(at: int, wanted: Sequence[bool], totals: Gradients) -> Gradients:
            return self.steps[at][0].backward(
                Parts(*operands[at][:4]), intermediates[at], operands[at][4], wanted, totals
            )

        columns, placed = Columns(first, x, x.shape[0]), set[int]()
        if wanted[0]:
            to_X = lambda at, dX: gradients(at, (True, False, False), Gradients(dX)).dX
            slots_of_X = [at1 for _, at1, *_ in self.steps]
            sizes = [X.shape for X in Xs]
            dXs, summed["X"], placed = self.summed("X", slots_of_X, operands, sizes, to_X, columns)
        if wanted[1]:
            to_Y = lambda at, dY: gradients(at, (False, True, False), Gradients(None, dY)).dY
            slots_of_Y = [at2 for _, _, at2, _ in self.steps]
            dYs, summed["Y"], _ = self.summed("Y", slots_of_Y, operands, [Y.shape for Y in Ys], to_Y)
        dWs: list[Tensor] = []
        dw, places = None, [None] * len(self.steps)
        if wanted[2] and weight is not None and writes_parts(weight):
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
            places = self.weights(dw)
        for number, ((_, at1, at2, _), place) in enumerate(zip(self.steps, places)):
            own = (wanted[0] and number not in summed["X"], wanted[1] and number not in summed["Y"], wanted[2])
            dXs[at1], dYs[at2], dW = gradients(number, own, Gradients(dXs[at1], dYs[at2], place))
            if dW is not None:
                dWs.append(dW)
        dx = dy = None
        if wanted[0]:
            dx = dXs[0] if self.reads_columns else columns.filled(dXs, placed)
        if wanted[1]:
            parts_of_y = _by_slot(dYs, [at for at, _ in self.variants], len(second.widths))
            dy = Columns(second, y, y.shape[0]).filled(parts_of_y, ())
        if wanted[2] and weight is not None:
            if dw is None:
                starts = [part.start for part in self.weight_slices if part.numel]
                order = sorted(range(len(starts)), key=starts.__getitem__)
                flat = [dWs[at].flatten(weight.dim() - 1) for at in order]
                dw = flat[0] if len(flat) == 1 else torch.cat(flat, -1)
            dw = dw if self.is_ordered else self.work.unordered(dw)
        return dx, dy, dw


def _in_turn(numbers: Sequence[int], add: Callable[[int, Tensor | None], Tensor | None]) -> Tensor:
    """Return what several steps add up to, one after the other."""
    total = None
    for number in numbers:
        total = add(number, total)
    assert total is not None
    return total


def writes_parts(weight: Tensor | None) -> bool:
    """Whether statements write their parts of dW in place; otherwise the parts are joined afterwards."""
    return weight is not None and weight.dim() == 2 and weight.numel() * weight.itemsize < LARGEST


def _weight_view(weight: Tensor, part: WeightSlice, step: Step) -> Tensor:
    """Return the weights of a slice, as its statement reads them: [b, p, ...], without b where they are shared."""
    paths, *rest = step.weight_shape
    lead, path_numel = weight.shape[:-1], math.prod(rest)
    first_path = weight.narrow(-1, part.start, path_numel).view(*lead, 1, *rest)
    between = (part.step or path_numel) * weight.stride(-1)
    strides, at = first_path.stride(), len(lead)
    size = (*lead, paths, *rest)
    return first_path.as_strided(size, (*strides[:at], between, *strides[at + 1 :]), first_path.storage_offset())


def _by_slot(dYs: Sequence[Tensor | None], slot_of: Sequence[int], count: int) -> list[Tensor | None]:
    """Add up the gradients of each slot.

    Statements read a slot of one channel with or without an index for that channel: such gradients differ in shape.
    """
    grads: list[Tensor | None] = [None] * count
    for slot, dY in zip(slot_of, dYs):
        if dY is not None:
            total = grads[slot]
            grads[slot] = dY if total is None else total.flatten(1) + dY.flatten(1)
    return grads
