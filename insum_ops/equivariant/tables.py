"""Fully connected paths with weights of their own for each sample, the coefficients of a path in one dense table.

    Z[b,ROW[TILE[p],i],w] += CG[p,i,j,k] * X[b,CGJ[p,j],u] * Y[b,CGK[p,k]] * W[b,CGL[p],u,w]

i, j and k are the components of a path's three blocks. Paths are sorted by their output block, ROW[TILE[p]], which one
program owns, and the 2l+1 components of X meet the weights before the coefficients do: fewer products than with a row
for every coefficient. The gradient of X is the same product with X and Z, and u and w, swapped. Where nothing learns,
tables can name columns, `X[b,CGJ[p,j,u]]`, in whichever layout: nothing has to be put in order first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler.contract import SHORT
from ..compiler.pipeline import has_kernels
from ..compiler.ready import as_autocast, is_transformed, may_autocast
from ..functional import OWNED, insum, insum_beside, insum_owned
from .clebsch_gordan import Irreps
from .constants import Constants, Memory
from .paths import Instruction
from .slots import Slots
from .terms import Beside, PathTerm, coefficients

__all__ = ["TEXTS", "ColumnTerm", "TableTerm", "by_column", "has_tables_on", "product_texts", "with_tables"]

LEAST_ROWS = 4  # of a dot that is worth it


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


class OnDevice(NamedTuple):
    """Tables in one device's memory."""

    fixed: dict[str, Tensor]
    facts: list[Tensor]  # where the paths of each output block begin
    memory: dict[Any, Any]  # of how they were used


@dataclass(frozen=True)
class Tables:
    """What statements read beside their moving tensors, and its copies in each device's memory."""

    constants: Constants
    copies: dict[tuple[torch.device, torch.dtype], OnDevice] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> OnDevice:
        found = self.copies.get((device, dtype))
        if found is None:
            tables = self.constants.on(device, dtype)
            fixed = {name: tensor for name, tensor in tables.items() if name != "pointers"}
            found = OnDevice(fixed, [tables["pointers"]] if "pointers" in tables else [], {})
            if type(fixed["CG"]) is Tensor:  # a FakeTensorMode's are good for one call
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
        fixed, facts, memory = self.on(X.device, X.dtype)
        moving = {"X": X, "Y": Y, "W": W}
        if Z is not None:
            moving["Z"] = Z
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_owned(memory, text, fixed, size, OWNED, facts, **moving)


@dataclass(frozen=True)
class PathTables:
    """The same paths sorted for their output, for the gradient of X, and as their weights lie."""

    forward: Side
    swapped: Side
    as_weights: Tables  # CG, CGI, CGJ, CGK
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of a row of X, Y and Z

    def product(
        self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None, is_swapped: bool
    ) -> Tensor:
        self.prepare(X.device, X.dtype)
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

    def y_gradient(self, X: Tensor, W: Tensor, dZ: Tensor, SRC: Tensor | None) -> Tensor:
        fixed, _, memory = self.as_weights.on(X.device, X.dtype)
        moving = {"X": X, "W": W, "dZ": dZ}
        if SRC is not None:
            moving["SRC"] = SRC
        return insum_beside(memory, TEXTS.dY[int(SRC is not None)], fixed, (len(W), *self.shapes[1]), **moving)

    def w_gradient(self, X: Tensor, Y: Tensor, dZ: Tensor, size: tuple[int, ...], SRC: Tensor | None) -> Tensor:
        fixed, _, memory = self.as_weights.on(X.device, X.dtype)
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
    for number, path in enumerate(paths):
        (j, k, i), values = coefficients(path, irreps)
        CG[number, i, j, k] = values
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
    return TableTerm(term, PathTables(*sides, shapes))


def by_column(term: TableTerm, first: Slots | None, out: Slots | None) -> ColumnTerm:
    """The same for the columns of x, or of z, or of both, as they are; None: in order. Each has one slot."""
    sides = {"CGJ": first, "ROW": out}
    columns = {name: _columns(slots) for name, slots in sides.items() if slots is not None}
    row = term.tables.shapes[2] if out is None else (columns["ROW"].numel(),)
    texts = product_texts(first is not None, out is not None)
    return ColumnTerm(term.plain, Side(_at(term.tables.forward, **columns)), texts, row)


def _columns(slots: Slots) -> Tensor:
    """[component, channel]: where each stands."""
    columns = torch.arange(slots.sizes[0]) if slots.order is None else slots.order.tensors["columns"]
    return columns.int().view(slots.counts[0], slots.widths[0])


def _at(tables: Tables, **columns: Tensor) -> Constants:
    """With the columns of all channels, [..., channel], in the place of some tables' components; -1 stays."""
    known = tables.constants.tensors
    found = {
        name: torch.where(known[name][..., None] < 0, -1, own[known[name].long()]) for name, own in columns.items()
    }
    return Constants({**known, **found})


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
