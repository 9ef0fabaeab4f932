"""The columns of irreps as dense tensors [b, component, channel], and back: what statements read and write.

A slot holds the blocks of one multiplicity. Where layout and multiplicities allow it a slot is a view of the columns;
else all of them are put in order by one gather, and the gradient is the inverse gather. Statements that find each
column by a table take them as they are, flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..compiler import OperandError, has_kernels, unbatch_gradients
from ..formats.torch_state import PLAIN, is_free, is_transformed, records_gradient
from ..functional import insum
from .clebsch_gordan import Irreps
from .constants import Constants

__all__ = ["LayoutName", "Slots", "check_layout", "flat_slots", "gather", "make_order", "make_slots"]

LayoutName = Literal["mul_ir", "ir_mul"]
LAYOUTS = get_args(LayoutName)


@dataclass(frozen=True)
class Slots:
    """The slots of a tensor, and where the components of each block of its irreps stand in them."""

    widths: tuple[int, ...]  # channels of each slot
    counts: tuple[int, ...]  # components of each slot
    slot_of: tuple[int, ...]  # the slot of each block; -1: an empty block
    first: tuple[int, ...]  # the number of each block's first component in its slot
    parts: tuple[int, ...]  # how many pieces of `width` channels a block was cut into
    order: Constants | None  # the column of each element and the inverse; None: the columns are in order
    is_flat: bool = False  # one slot [b, column]: statements have tables of columns

    @property
    def sizes(self) -> list[int]:
        return [width * count for width, count in zip(self.widths, self.counts)]

    @property
    def columns(self) -> Tensor:
        """The column [component, channel] of each element of the one slot that there is."""
        order = torch.arange(self.sizes[0]) if self.order is None else self.order.tensors["columns"]
        return order.int().view(self.counts[0], self.widths[0])

    def shape(self, rows: int, at: int) -> tuple[int, ...]:
        """Return the shape of a slot's tensor."""
        return (rows, self.counts[at]) if self.is_flat else (rows, self.counts[at], self.widths[at])

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the slots [b, component, channel] of columns [b, dim]; [b, component] where there is one channel."""
        if self.order is not None:
            order = self.order.on(x.device)
            x = gather(x, order["columns"], order["inverse"])
        rows, widths = x.shape[0], self.widths
        if len(widths) == 1:
            return [x if widths[0] == 1 else x.view(rows, self.counts[0], widths[0])]
        parts = zip(x.split(self.sizes, 1), self.counts, widths)
        return [part if width == 1 else part.view(rows, count, width) for part, count, width in parts]

    def ordered(self, x: Tensor) -> Tensor:
        """Return columns in the order of the slots. No graph is recorded."""
        return x if self.order is None else _gathered(x, self.order.on(x.device)["columns"])

    def unordered(self, x: Tensor) -> Tensor:
        """Return columns in the order of the irreps; the inverse of `ordered`."""
        return x if self.order is None else _gathered(x, self.order.on(x.device)["inverse"])

    def spread(self, x: Tensor) -> list[Tensor]:
        """Return views [b, component, channel] of ordered columns, one for each slot."""
        if self.is_flat:
            return [x]
        parts = zip(x.split(self.sizes, 1), self.counts, self.widths)
        return [part.unflatten(1, (count, width)) for part, count, width in parts]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the columns of slots [b, component, channel]; the inverse of `split`."""
        flat = [part.flatten(1) for part in parts]
        z = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        if self.order is None:
            return z
        order = self.order.on(z.device)
        return gather(z, order["inverse"], order["columns"])


def check_layout(layout: str) -> None:
    """Refuse a layout that there is not."""
    if layout not in LAYOUTS:
        raise OperandError(f"layout is {layout!r}; choose one of {', '.join(map(repr, LAYOUTS))}")


def make_slots(irreps: Irreps, layout: str, width: int = 0, most: int = 0) -> Slots:
    """Return slots for all columns of `irreps`: by multiplicity, or with every block cut into `width` channels.

    No slot has more than `most` components, unless one block does.
    """
    widths: list[int] = []
    counts: list[int] = []
    columns: list[list[Tensor]] = []
    slot_of, first, parts = [], [], []
    for (mul, ir), where in zip(irreps, irreps.slices()):
        block_width = width or mul
        pieces = mul // block_width if block_width else 0
        open_slots = [
            number
            for number, (taken, count) in enumerate(zip(widths, counts))
            if taken == block_width and not (most and count + ir.dim * pieces > most)
        ]
        slot = (open_slots[-1] if open_slots else len(widths)) if mul else -1
        if slot == len(widths):
            widths.append(block_width)
            counts.append(0)
            columns.append([])
        slot_of.append(slot)
        first.append(counts[slot] if mul else 0)
        parts.append(pieces)
        if mul:
            counts[slot] += ir.dim * pieces
            block = torch.arange(where.start, where.stop)
            columns[slot].append(block.view(mul, ir.dim).T.reshape(-1) if layout == "mul_ir" else block)
    order = torch.cat([piece for slot in columns for piece in slot]) if columns else torch.arange(0)
    return Slots(tuple(widths), tuple(counts), tuple(slot_of), tuple(first), tuple(parts), make_order(order))


def flat_slots(dim: int) -> Slots:
    """Return one slot that holds all columns as they are."""
    return Slots((1,), (dim,), (), (), (), None, is_flat=True)


def make_order(columns: Tensor) -> Constants | None:
    """Return the column of each element and the inverse permutation, or None if the columns are in order."""
    if torch.equal(columns, torch.arange(len(columns))):
        return None
    return Constants({"columns": columns, "inverse": columns.argsort()})


def gather(x: Tensor, columns: Tensor, inverse: Tensor) -> Tensor:
    """`Y[b,i] = X[b,I[i]]` for a permutation I and its inverse."""
    if records_gradient([x]) and not is_transformed():
        return _Gather.apply(x, columns, inverse)  # type: ignore[no-any-return]
    return _gathered(x, columns)


def _gathered(x: Tensor, columns: Tensor) -> Tensor:
    """Return what `gather` returns, without a graph; a tracer sees torch's operator, which it may fuse.

    On a GPU the clock chooses between that operator and kernels, as of every statement: of 917 rows of 748 columns an
    H200 took 5 to 7 us by the operator and 3.3 by a kernel, of 1,200 rows of 1,400 6.8 and 7.1. A CPU has the operator
    alone.
    """
    if type(x) in PLAIN and is_free() and has_kernels(x.device):
        return insum("Y[b,i] = X[b,I[i]]", X=x, I=columns)
    return x.index_select(1, columns)


class _Gather(torch.autograd.Function):
    """`Y[b,i] = X[b,I[i]]` for a permutation I: the gradient gathers too, where torch's own would add atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(columns, inverse)
        return _gathered(x, columns)

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        columns, inverse = ctx.saved_tensors
        return gather(upstream, inverse, columns), None, None
