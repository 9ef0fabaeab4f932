"""The four tensors of fully connected paths, each contracted from the others by tables in memory or in a kernel.

    Z[b,ROW[TILE[p],i],w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * W[b,CGL[p],u,w]
    Z[b,i,w] += CGV[i,r] * X[b,CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]

In the first, i, j and k are the components of a path's three blocks. Paths are sorted by their output block,
ROW[TILE[p]], which one program owns, and the 2l+1 components of X meet the weights before the coefficients do: fewer
products than with a row for every coefficient. X is the same product with X and Z, and u and w, swapped. The second is
for few channels: `Channels` has kernels whose source holds the coefficients. A gradient is one more of the four. Which
of the two is faster is timed, see `choice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import device_of, power_of_two
from ..formats.facts import ConstantTables, Fact, OwnedRows
from ..formats.torch_state import asked_once, is_free, is_grad_enabled, is_watched
from ..functional import insum, insum_pinned
from ..lru_cache import LRUCache
from .channels import Channels
from .choice import fastest_way
from .constants import Constants, Memory, copy_on
from .contraction import NO_ROWS, Contractions, Rows

__all__ = [
    "HELD_PARTS",
    "MEASURED_HELD",
    "TEXTS",
    "InMemory",
    "MeasuredHeld",
    "PathTables",
    "Side",
    "Tables",
    "held_bytes",
    "held_texts",
    "product_texts",
]

CALLS = 64  # launch plans that are kept for the tables of one device
CHOICES = 64  # between coefficients in a kernel and in tables that are kept, by what is made and by its sizes
HELD, IN_MEMORY = "held", "in memory"
NAMES = ("Z", "X", "Y", "W")
CPU = torch.device("cpu")


Pair = tuple[float, float]


class MeasuredHeld(NamedTuple):
    """Milliseconds of each of the four, by a kernel that holds the coefficients and by tables in memory."""

    lmax: int
    channels: int
    Z: Pair
    X: Pair
    Y: Pair
    W: Pair


# One H200 (torch 2.11, triton 3.6), 10,000 samples in full float32, `python -m bench.path_tables`.
MEASURED_HELD = (
    MeasuredHeld(1, 16, Z=(0.010, 0.022), X=(0.010, 0.030), Y=(0.010, 0.025), W=(0.012, 0.035)),
    MeasuredHeld(1, 32, Z=(0.049, 0.050), X=(0.043, 0.085), Y=(0.049, 0.065), W=(0.047, 0.083)),
    MeasuredHeld(1, 64, Z=(0.161, 0.160), X=(0.160, 0.250), Y=(0.155, 0.159), W=(0.176, 0.218)),
    MeasuredHeld(2, 16, Z=(0.037, 0.098), X=(0.033, 0.200), Y=(0.039, 0.111), W=(0.034, 0.161)),
    MeasuredHeld(2, 32, Z=(0.141, 0.164), X=(0.117, 0.369), Y=(0.148, 0.266), W=(0.125, 0.309)),
    MeasuredHeld(2, 64, Z=(0.448, 0.533), X=(0.467, 1.325), Y=(0.487, 0.716), W=(0.476, 1.110)),
    MeasuredHeld(3, 16, Z=(0.085, 0.195), X=(0.100, 0.407), Y=(0.094, 0.228), W=(0.068, 0.333)),
    MeasuredHeld(3, 32, Z=(0.321, 0.335), X=(0.246, 0.758), Y=(0.917, 0.533), W=(0.256, 0.644)),
    MeasuredHeld(3, 64, Z=(1.419, 1.121), X=(1.963, 2.757), Y=(5.556, 1.664), W=(1.062, 1.454)),
)
# A guess where nothing may be timed. A kernel holds the coefficients if they are at most so many: it walks the channels
# in blocks, whatever their number. It holds more of them where a path's weights take at most such a part of a
# multiprocessor's registers, so that enough programs run at once; fitted to `MEASURED_HELD`, in which W is faster to
# make so at every size.
HELD_ENTRIES = 128
HELD_PARTS = {"Z": 1 / 64, "X": 1 / 16, "Y": 1 / 256, "W": math.inf}


def held_bytes(u: int, w: int, dtype: torch.dtype) -> int:
    """Return the bytes of a path's weights as a kernel holds them, in tiles whose sides are powers of two.

    >>> held_bytes(10, 48, torch.float16) == 16 * 64 * 4
    True
    """
    return power_of_two(u) * power_of_two(w) * max(dtype.itemsize, torch.float32.itemsize)


@asked_once
def _register_bytes(device: torch.device) -> int:
    """Return the bytes in all registers of a multiprocessor."""
    return device_of(device).register_bytes


class Texts(NamedTuple):
    """The statements; of two the second gathers rows of X.

    They are indexed by an int, since not every tracer takes a bool for an index.
    """

    product: tuple[str, str]
    dY: tuple[str, str]
    dW: tuple[str, str]
    dX: str  # where rows of X were gathered


def product_texts(reads_columns: bool = False, writes_columns: bool = False) -> tuple[str, str]:
    """Return the product's statements.

    Tables of x, and of z, name a column for each component and channel, or a component for all channels.
    """
    Z = "Z[b,ROW[TILE[p],i,w]]" if writes_columns else "Z[b,ROW[TILE[p],i],w]"
    at = "CGJ[p,j,u]" if reads_columns else "CGJ[p,j],u"
    rest = "Y[b,CGK[p,k]] * W[b,CGL[p],u,w]"
    return f"{Z} += CG[p,i,j,k] * X[b,{at}] * {rest}", f"{Z} += CG[p,i,j,k] * X[SRC[b],{at}] * {rest}"


TEXTS = Texts(
    product_texts(),
    (
        "dY[b,CGK[p,k]] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * W[b,p,u,w] * dZ[b,CGI[p,i],w]",
        "dY[b,CGK[p,k]] += CG[p,i,j,k] * X[SRC[b],CGJ[p,j],u] * W[b,p,u,w] * dZ[b,CGI[p,i],w]",
    ),
    (
        "dW[b,p,u,w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * dZ[b,CGI[p,i],w]",
        "dW[b,p,u,w] += CG[p,i,j,k] * X[SRC[b],CGJ[p,j],u] * Y[b,CGK[p,k]] * dZ[b,CGI[p,i],w]",
    ),
    "dX[SRC[b],j,u] += D[b,j,u]",
)


def held_texts(reads_columns: bool, writes_columns: bool) -> tuple[str, str]:
    """Return the statements of `product_texts` for kernels that hold the coefficients."""
    Z = "Z[b,ROW[i,w]]" if writes_columns else "Z[b,i,w]"
    at = "CGJ[i,r,u]" if reads_columns else "CGJ[i,r],u"
    rest = "Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]"
    return f"{Z} += CGV[i,r] * X[b,{at}] * {rest}", f"{Z} += CGV[i,r] * X[SRC[b],{at}] * {rest}"


class OnDevice(NamedTuple):
    """Tables in one device's memory."""

    fixed: dict[str, Tensor]
    fact: Fact | None
    memory: dict[Any, Any]  # the launch plans of calls over them


@dataclass(frozen=True)
class Tables:
    """The constant tables that statements read, and their copies in each device's memory."""

    constants: Constants
    is_known: bool = False  # their numbers may stand in a kernel's source; else programs own output blocks
    copies: dict[tuple[torch.device, torch.dtype], OnDevice] = field(default_factory=Memory, repr=False)

    def is_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the tables can be had on a device.

        They can't if the first call comes while torch traces or transforms it: tensors made then may hold no numbers.
        """
        return not self.is_known or (device, dtype) in self.copies or not is_watched()

    def on(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        """Return the tables on a device, copied there by the first call."""
        return self.copies.get((device, dtype)) or copy_on(self.copies, device, dtype, self.copied)

    def copied(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        """Return the tables on a device, copied there now."""
        tables = self.constants.on(device, dtype)
        fixed = {name: tensor for name, tensor in tables.items() if name != "pointers"}
        return OnDevice(fixed, self.fact(dtype, tables.get("pointers")), LRUCache(CALLS))

    def fact(self, dtype: torch.dtype, pointers: Tensor | None) -> Fact | None:
        """Return what kernels may know of the tables; `pointers` says where the paths of each output block begin."""
        if self.is_known:
            return ConstantTables.of(self.constants.on(CPU, dtype))
        return None if pointers is None else OwnedRows("ROW", "TILE", pointers)


@dataclass(frozen=True)
class Side(Tables):
    """The tables of a product, with its paths sorted by output block."""

    def __call__(
        self,
        text: str,
        X: Tensor,
        Y: Tensor,
        W: Tensor,
        Z: Tensor | None,
        size: tuple[int, ...],
        SRC: Tensor | None,
    ) -> Tensor:
        """Return the value of the statement `text` over these tables, added to Z."""
        fixed, fact, memory = self.on(X.device, X.dtype)
        moving = {"X": X, "Y": Y, "W": W}
        if Z is not None:
            moving["Z"] = Z
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_pinned(memory, text, fixed, size, fact, **moving)


class InMemory(NamedTuple):
    """Tables of the same paths in three orders: by the output block, by the block of X, and as their weights lie."""

    forward: Side
    swapped: Side
    as_weights: Tables  # CG, CGI, CGJ, CGK


@dataclass(frozen=True)
class PathTables(Contractions):
    """Coefficients in memory, one by one, or both."""

    in_memory: InMemory | None  # None: kernels that hold them make all four
    known: Channels | None  # None: they are too many to be held
    shapes: Mapping[str, tuple[int, ...]]  # of a row of X, Y, W and Z
    choices: LRUCache[Any] = field(default_factory=partial(LRUCache, CHOICES), repr=False, compare=False)

    def is_held(self, name: str, dtype: torch.dtype, device: torch.device) -> bool:
        """Guess whether a kernel whose source holds the coefficients is faster to make one of Z, X, Y and W."""
        if self.known is None:
            return False
        if self.in_memory is None:
            return True
        if self.known.CG.nnz <= HELD_ENTRIES:
            return True
        _, u, w = self.shapes["W"]
        return held_bytes(u, w, dtype) <= HELD_PARTS[name] * _register_bytes(device)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy all tables to a device: a tracer can't make copies, and may meet the tables of gradients first."""
        if self.in_memory is not None and (device, dtype) not in self.in_memory.forward.copies:
            for side in self.in_memory:
                side.on(device, dtype)
        if self.known is not None:
            self.known.on(device, dtype)

    def is_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the tables can be had on a device; not if a tracer, which can't make them, is the first to ask."""
        return self.in_memory is not None or (self.known is not None and self.known.on(device, dtype) is not None)

    def takes_held(self, name: str, operands: Mapping[str, Tensor], SRC: Tensor | None) -> bool:
        """Whether a kernel that holds the coefficients makes the named one of the others: the faster way, if timed."""
        first = next(iter(operands.values()))
        is_held = self.is_held(name, first.dtype, first.device)
        if self.known is None or self.in_memory is None or is_watched():
            return is_held
        ways = (HELD, IN_MEMORY) if is_held else (IN_MEMORY, HELD)
        run = lambda way: self._made(way == HELD, name, operands, None, SRC)
        what = name, self.known.CG.nnz, self.shapes["W"], SRC is not None
        return fastest_way(self.choices, what, ways, run, operands) == HELD

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    def run(
        self,
        name: str,
        operands: Mapping[str, Tensor],
        seed: Tensor | None = None,
        rows: Rows = NO_ROWS,
        size: tuple[int, ...] = (),
    ) -> Tensor:
        """Return the named one of Z, X, Y and W, contracted from the others and added to `seed`, without a graph.

        `rows` says which row of X each b reads, where X is an operand. The size follows from the tables.
        """
        first, SRC = next(iter(operands.values())), rows[0]
        self.prepare(first.device, first.dtype)
        is_held = self.takes_held(name, operands, SRC)
        if is_held:
            assert self.known is not None
            is_held = self.known.on(first.device, first.dtype) is not None
        return self._made(is_held, name, operands, seed, SRC)

    def gradients(self, wanted: Sequence[str], operands: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
        """Return the wanted tensors; one kernel may make several where no graph is recorded."""
        first = next(iter(operands.values()))
        is_held = self.known is not None and self.known.on(first.device, first.dtype) is not None
        if not is_held or len(wanted) < 2 or not is_free() or is_grad_enabled():
            return super().gradients(wanted, operands, rows)
        assert self.known is not None
        alone = lambda name: super(PathTables, self).gradients((name,), operands, rows)[name]
        return dict(zip(wanted, self.known.run_several(wanted, operands, rows, alone)))

    def gradient(self, name: str, others: Mapping[str, Tensor], rows: Rows, size: tuple[int, ...]) -> Tensor:
        """Return the named one of the four; of X, where rows of it were gathered, a row for each b is added up."""
        if name != "X" or rows[0] is None:
            return self.contract(name, others, None, rows, size)
        return insum(TEXTS.dX, SRC=rows[0], D=self.contract("X", others), size=size)

    def _made(
        self,
        is_held: bool,
        name: str,
        operands: Mapping[str, Tensor],
        seed: Tensor | None,
        SRC: Tensor | None,
    ) -> Tensor:
        """Return what `run` returns, by a kernel that holds the coefficients or by tables."""
        first = next(iter(operands.values()))
        size = ((operands["W"] if name == "Y" else operands["Y"]).shape[0], *self.shapes[name])
        if is_held:
            assert self.known is not None
            return self.known.run(name, operands, seed, (SRC, None), size)
        assert self.in_memory is not None
        if name == "X":
            Z, Y, W = operands["Z"], operands["Y"], operands["W"]
            return self.in_memory.swapped(TEXTS.product[0], Z, Y, W.mT, seed, size, None)
        at = int(SRC is not None)
        if name == "Z":
            X, Y, W = operands["X"], operands["Y"], operands["W"]
            return self.in_memory.forward(TEXTS.product[at], X, Y, W, seed, size, SRC)
        fixed, _, memory = self.in_memory.as_weights.on(first.device, first.dtype)
        moving = {"dZ" if other == "Z" else other: tensor for other, tensor in operands.items()}
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_pinned(memory, (TEXTS.dY if name == "Y" else TEXTS.dW)[at], fixed, size, **moving)
