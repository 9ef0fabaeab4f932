"""Fully connected paths with weights of their own for each sample, the coefficients of a path in one dense table.

    Z[b,ROW[TILE[p],i],w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * W[b,CGL[p],u,w]

i, j and k are the components of a path's three blocks. Paths are sorted by their output block, ROW[TILE[p]], which one
program owns, and the 2l+1 components of X meet the weights before the coefficients do: fewer products than with a row
for every coefficient. The gradient of X is the same product with X and Z, and u and w, swapped. Where nothing learns,
tables can name columns, `X[b,CGJ[p,j,u]]`, in whichever layout: nothing has to be put in order first.

With few channels the coefficients are better numbers in the kernel's source: `Channels` makes those of the four, Z and
the gradients of X, Y and W, that `is_held` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.contract import SHORT
from ..compiler.known import known
from ..compiler.pipeline import has_kernels
from ..compiler.ready import as_autocast, is_transformed, may_autocast
from ..compiler.schedule import MOST_ENTRIES
from ..formats import ELL
from ..functional import OWNED, insum, insum_beside, insum_owned
from .channels import MIXED, Channels
from .clebsch_gordan import Irreps
from .constants import Constants, Memory
from .paths import Instruction
from .slots import Slots
from .terms import Beside, PathTerm, coefficients

__all__ = ["TEXTS", "ColumnTerm", "TableTerm", "by_column", "has_tables_on", "product_texts", "with_tables"]

CPU = torch.device("cpu")
LEAST_ROWS = 4  # of a dot that is worth it
# One H200, 10,000 samples, microseconds of Z, dX, dY and dW by kernels that hold the coefficients:
#     channels   lmax 1            lmax 2             lmax 3               Z by tables, put in order before and after
#     16         10 9 10 13        36 34 36 34        72 122 96 69         27, 113, 219
#     32         50 43 50 47       139 118 147 124    301 495 762 257      55, 192, 363
#     64         179 158 - 185     573 491 - 501      1376 1548 - 1030     162, 544, 1136
# dX by tables takes as long as Z, dW and dY longer.
HELD_BYTES = {"Z": 4096, "X": 4096, "Y": 4096, "W": math.inf}  # at most, of a path's weights as they are summed
HELD_ENTRIES, BYTES_OF_MANY = 128, 1024  # with more coefficients dX runs out of registers, but for so few bytes


class Texts(NamedTuple):
    """The statements; of two the second gathers rows of X. By an int, since not every tracer takes a bool for one."""

    product: tuple[str, str]
    dY: tuple[str, str]
    dW: tuple[str, str]
    dX: str  # where rows of X were gathered


def product_texts(reads_columns: bool = False, writes_columns: bool = False) -> tuple[str, str]:
    """With a column for each component and channel, or with a component for all channels of x, and of z."""
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
    """`product_texts` for coefficients one by one."""
    Z = "Z[b,ROW[i,w]]" if writes_columns else "Z[b,i,w]"
    at = "CGJ[i,r,u]" if reads_columns else "CGJ[i,r],u"
    rest = "Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]"
    return f"{Z} += CGV[i,r] * X[b,{at}] * {rest}", f"{Z} += CGV[i,r] * X[SRC[b],{at}] * {rest}"


class OnDevice(NamedTuple):
    """Tables in one device's memory."""

    fixed: dict[str, Tensor]
    fact: str
    facts: list[Tensor]  # where the paths of each output block begin
    memory: dict[Any, Any]  # of how they were used


@dataclass(frozen=True)
class Tables:
    """What statements read beside their moving tensors, and its copies in each device's memory."""

    constants: Constants
    is_known: bool = False  # their numbers may stand in a kernel's source; else programs own output blocks
    copies: dict[tuple[torch.device, torch.dtype], OnDevice] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        found = self.copies.get((device, dtype))
        if found is None:
            tables = self.constants.on(device, dtype)
            fixed = {name: tensor for name, tensor in tables.items() if name != "pointers"}
            fact = known(self.constants.on(CPU, dtype)) if self.is_known else OWNED
            found = OnDevice(fixed, fact, [tables["pointers"]] if "pointers" in tables else [], {})
            if all([type(table) is Tensor for table in fixed.values()]):  # a FakeTensorMode's are good for one call
                self.copies[device, dtype] = found
        return found


@dataclass(frozen=True)
class Side(Tables):
    """The product's, sorted for Z."""

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
        fixed, fact, facts, memory = self.on(X.device, X.dtype)
        moving = {"X": X, "Y": Y, "W": W}
        if Z is not None:
            moving["Z"] = Z
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_owned(memory, text, fixed, size, fact, facts, **moving)


@dataclass(frozen=True)
class PathTables:
    """The same paths sorted for their output, for the gradient of X, and as their weights lie."""

    forward: Side
    swapped: Side
    as_weights: Tables  # CG, CGI, CGJ, CGK
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of a row of X, Y and Z
    known: Channels | None  # the same coefficients one by one, if they are not too many

    def is_held(self, name: str, dtype: torch.dtype) -> bool:
        """A kernel whose source holds the coefficients makes Z, or the gradient of X, Y or W."""
        if self.known is None:
            return False
        size = self.shapes[0][-1] * self.shapes[2][-1] * max(dtype.itemsize, torch.float32.itemsize)
        is_many = name == "X" and self.known.CG.nnz > HELD_ENTRIES
        return size <= min(HELD_BYTES[name], BYTES_OF_MANY if is_many else math.inf)

    def held(self, name: str, tensors: dict[str, Tensor], SRC: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
        """That one of the others; None: it is made by tables."""
        _, like = next(iter(tensors.items()))
        if not self.is_held(name, like.dtype):
            return None
        assert self.known is not None
        if self.known.on(like.device, like.dtype) is None:
            return None
        return self.known.run(name, tensors, SRC, None, size)

    def product(
        self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None, is_swapped: bool
    ) -> Tensor:
        self.prepare(X.device, X.dtype)
        own, other = ("X", "Z") if is_swapped else ("Z", "X")
        seed = {} if Z is None else {own: Z}
        made = self.held(own, {other: X, "Y": Y, "W": W, **seed}, SRC, (len(Y), *self.shapes[0 if is_swapped else 2]))
        if made is not None:
            return made
        text = TEXTS.product[int(SRC is not None)]
        if is_swapped:
            return self.swapped(text, X, Y, W.mT, Z, (len(Y), *self.shapes[0]), SRC)
        return self.forward(text, X, Y, W, Z, (len(Y), *self.shapes[2]), SRC)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """All tables at once: a tracer can make none, and may meet those of gradients first."""
        if (device, dtype) not in self.forward.copies:
            self.forward.on(device, dtype)
            self.swapped.on(device, dtype)
            self.as_weights.on(device, dtype)
            if self.known is not None:
                self.known.on(device, dtype)

    def y_gradient(self, X: Tensor, W: Tensor, dZ: Tensor, SRC: Tensor | None) -> Tensor:
        made = self.held("Y", {"Z": dZ, "X": X, "W": W}, SRC, (len(W), *self.shapes[1]))
        if made is not None:
            return made
        fixed, _, _, memory = self.as_weights.on(X.device, X.dtype)
        moving = {"X": X, "W": W, "dZ": dZ}
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_beside(memory, TEXTS.dY[int(SRC is not None)], fixed, (len(W), *self.shapes[1]), **moving)

    def w_gradient(self, X: Tensor, Y: Tensor, dZ: Tensor, size: tuple[int, ...], SRC: Tensor | None) -> Tensor:
        made = self.held("W", {"Z": dZ, "X": X, "Y": Y}, SRC, size)
        if made is not None:
            return made
        fixed, _, _, memory = self.as_weights.on(X.device, X.dtype)
        moving = {"X": X, "Y": Y, "dZ": dZ}
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_beside(memory, TEXTS.dW[int(SRC is not None)], fixed, size, **moving)


def _product(
    X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None, tables: PathTables, is_swapped: bool
) -> Tensor:
    given = (X, Y, W) if Z is None else (X, Y, W, Z)
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in given]):
        return _TableProduct.apply(X, Y, W, Z, SRC, tables, is_swapped)  # type: ignore[no-any-return]
    return tables.product(X, Y, W, Z, SRC, is_swapped)


class _TableProduct(torch.autograd.Function):
    """A product and its gradients, each of which is a statement again."""

    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        Y: Tensor,
        W: Tensor,
        Z: Tensor | None,
        SRC: Tensor | None,
        tables: PathTables,
        is_swapped: bool,
    ) -> Tensor:
        ctx.save_for_backward(*((X, Y, W) if SRC is None else (X, Y, W, SRC)))
        ctx.rest = tables, is_swapped
        return tables.product(X, Y, W, Z, SRC, is_swapped)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        X, Y, W, *rest = ctx.saved_tensors
        SRC = rest[0] if rest else None
        tables, is_swapped = ctx.rest
        wants_x, wants_y, wants_w, *_ = ctx.needs_input_grad
        first, last = (upstream, X) if is_swapped else (X, upstream)  # where X and dZ stand in the other gradients
        dX = dY = dW = None
        if wants_x:
            dX = _product(upstream, Y, W, None, None, tables, not is_swapped)
            if SRC is not None:
                dX = insum(TEXTS.dX, SRC=SRC, D=dX, size=X.shape)
        if wants_y:
            dY = tables.y_gradient(first, W, last, SRC)
        if wants_w:
            dW = tables.w_gradient(first, Y, last, W.shape, SRC)
        return dX, dY, dW, upstream if ctx.needs_input_grad[3] else None, None, None, None


def has_tables_on(device: torch.device) -> bool:
    """Tables are for kernels; torch operations do better without."""
    return has_kernels(device)


class Tabled(Beside):
    """A term whose paths have tables too."""

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        raise NotImplementedError

    def run(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        W = W.view(len(W), self.plain.num_paths, *self.plain.weight_shape[::2])
        kind = X.device.type
        if (torch.compiler.is_compiling() or may_autocast()) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            X, Y, W = as_autocast(X, dtype), as_autocast(Y, dtype), as_autocast(W, dtype)
            seed = None if Z is None else as_autocast(Z, dtype)
            with torch.autocast(kind, enabled=False):
                return self.product(X, Y, W, seed, SRC)
        return self.product(X, Y, W, Z, SRC)


@dataclass(frozen=True)
class TableTerm(Tabled):
    """Tables of components, for the product and its gradients, where kernels run; `plain` where torch operations do."""

    tables: PathTables

    def runs_on(self, device: torch.device) -> bool:
        return has_tables_on(device)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.plain.prepare(device, dtype)
        self.tables.prepare(device, dtype)

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        return _product(X, Y, W, Z, SRC, self.tables, False)

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC
        Y: Tensor,  # [b, k]
        W: Tensor | None,  # flat, [b, weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        if W is None or W.dim() != 2 or Y.dim() != 2 or is_transformed() or not self.runs_on(X.device):
            return self.plain(X, Y, W, Z, size, SRC)
        return self.run(X, Y, W, Z, SRC)


@dataclass(frozen=True)
class ColumnTerm(Tabled):
    """Tables of columns, for a product that nobody differentiates: as `TableTerm`, but x or z are flat, or both."""

    side: Side
    texts: tuple[str, str]
    row: tuple[int, ...]  # of Z

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.side.on(device, dtype)

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        return self.side(self.texts[int(SRC is not None)], X, Y, W, Z, (len(Y), *self.row), SRC)

    def __call__(
        self,
        X: Tensor,  # [b, c] or [b, j, u], n for b with SRC
        Y: Tensor,  # [b, k]
        W: Tensor | None,  # flat, [b, weight_numel]; there is one
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        assert W is not None
        return self.run(X, Y, W, Z, SRC)


def with_tables(
    term: PathTerm, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> PathTerm | TableTerm:
    """The term, with tables where they make it faster: a dot is worth it, between blocks of few components."""
    mode, (_, mul2, _), _, places = term.key
    blocks = [_blocks(*item) for item in zip(irreps, slots, places)]
    is_short = all(dim <= SHORT for side in blocks for _, dim in side)
    if mode != "uvw" or mul2 != 1 or not term.is_worth_a_dot or not is_short:
        return term
    extents = [max(LEAST_ROWS, 1 << (max(dim for _, dim in side) - 1).bit_length()) for side in blocks]
    CG = torch.zeros(len(paths), *(extents[at] for at in (2, 0, 1)), dtype=torch.float64)
    # a block's last component stands for those that it lacks: their coefficients are 0, and no load needs a mask
    at = [torch.zeros(len(paths), extent, dtype=torch.int32) for extent in extents]
    entries, numbers = [], []
    for number, path in enumerate(paths):
        (j, k, i), values = coefficients(path, irreps)
        CG[number, i, j, k] = values
        first, second, last = (own.first[place] for own, place in zip(slots, (path.i_in1, path.i_in2, path.i_out)))
        entries.append(torch.stack([last + i, first + j, second + k, torch.full_like(i, number)]))
        numbers.append(values)
        for own, slot, table, place in zip(irreps, slots, at, (path.i_in1, path.i_in2, path.i_out)):
            last = own[place].ir.dim - 1
            table[number] = slot.first[place] + torch.arange(table.shape[1]).clamp(max=last)
    CGJ, CGK, CGI = at
    forward = _side(CG, CGI, CGJ, CGK, blocks[2], extents[2])
    swapped = _side(CG.transpose(1, 2), CGJ, CGI, CGK, blocks[0], extents[0])
    as_weights = {"CG": CG, "CGI": CGI, "CGJ": CGJ, "CGK": CGK}
    (in1, _, out), (at1, at2, at3) = slots, places
    shapes = (in1.counts[at1], in1.widths[at1]), (slots[1].counts[at2],), (out.counts[at3], out.widths[at3])
    sides = Side(Constants(forward)), Side(Constants(swapped)), Tables(Constants(as_weights))
    counts = shapes[2][0], shapes[0][0], shapes[1][0], len(paths)
    known = ELL.from_coo(torch.cat(entries, 1), torch.cat(numbers), counts, group_dim=0)
    held = Channels(known, MIXED) if 0 < known.nnz <= MOST_ENTRIES else None
    return TableTerm(term, PathTables(*sides, shapes, held))


def by_column(term: TableTerm, first: Slots | None, out: Slots | None) -> ColumnTerm:
    """The same for the columns of x, or of z, or of both, as they are; None: in order. Each has one slot."""
    sides = {"CGJ": first, "ROW": out}
    columns = {name: _columns(slots) for name, slots in sides.items() if slots is not None}
    row = term.tables.shapes[2] if out is None else (columns["ROW"].numel(),)
    if term.tables.is_held("Z", torch.float32):
        assert term.tables.known is not None
        form = term.tables.known.CG
        names = dict(zip(("ROW", "CGJ", "CGK", "CGL"), form.coords))
        tables = {name: at for name, at in names.items() if at is not None} | {"CGV": form.values}
        if out is not None:
            tables["ROW"] = torch.arange(form.shape[0])
        side = Side(Constants(_at(tables, columns)), is_known=True)
        return ColumnTerm(term.plain, side, held_texts(first is not None, out is not None), row)
    texts = product_texts(first is not None, out is not None)
    return ColumnTerm(term.plain, Side(Constants(_at(term.tables.forward.constants.tensors, columns))), texts, row)


def _columns(slots: Slots) -> Tensor:
    """[component, channel]: where each stands."""
    columns = torch.arange(slots.sizes[0]) if slots.order is None else slots.order.tensors["columns"]
    return columns.int().view(slots.counts[0], slots.widths[0])


def _at(tables: dict[str, Tensor], columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the columns of all channels, [..., channel], in the place of some tables' components; -1 stays."""
    found = {
        name: torch.where(tables[name][..., None] < 0, -1, own[tables[name].long()]) for name, own in columns.items()
    }
    return {**tables, **found}


Block = tuple[int, int]  # its first component in a slot, and how many it has


def _blocks(irreps: Irreps, slots: Slots, slot: int) -> list[Block]:
    """All blocks of a slot: programs write every component, whether a path leads to it or not."""
    own = zip(irreps, slots.slot_of, slots.first)
    return [(first, ir.dim) for (_, ir), where, first in own if where == slot]


def _side(CG: Tensor, CGI: Tensor, CGJ: Tensor, CGK: Tensor, blocks: list[Block], extent: int) -> dict[str, Tensor]:
    """The paths sorted by their output block."""
    ROW = torch.full((len(blocks), extent), -1, dtype=torch.int32)
    for tile, (first, dim) in enumerate(blocks):
        ROW[tile, :dim] = first + torch.arange(dim)
    tile_of = {first: tile for tile, (first, _) in enumerate(blocks)}
    TILE = torch.tensor([tile_of[first] for first in CGI[:, 0].tolist()], dtype=torch.int32)
    TILE, order = TILE.sort(stable=True)
    pointers = torch.searchsorted(TILE, torch.arange(len(blocks) + 1, dtype=torch.int32), out_int32=True)
    tables = {"ROW": ROW, "TILE": TILE, "CG": CG[order].contiguous(), "CGJ": CGJ[order], "CGK": CGK[order]}
    return {**tables, "CGL": order.int(), "pointers": pointers}
