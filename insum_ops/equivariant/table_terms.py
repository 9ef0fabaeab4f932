"""Fully connected paths with weights of their own for each sample, as `path_tables` makes them.

Where nothing learns, tables can name columns, `X[b,CGJ[p,j,u]]`, in whichever layout: nothing has to be put in order
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler import LARGEST_TILE, MOST_ENTRIES, SHORT, has_kernels, power_of_two
from ..formats import ELL
from ..formats.torch_state import is_transformed
from .channels import MIXED, Channels
from .clebsch_gordan import Irreps
from .constants import Constants
from .contraction import outside_autocast
from .path_tables import InMemory, PathTables, Side, Tables, held_texts, product_texts
from .paths import Instruction
from .slots import Slots
from .terms import PathTerm, WithFallback, coefficients

__all__ = ["ColumnTerm", "TableTerm", "by_column", "with_held_coefficients", "with_tables"]

LEAST_ROWS = 4  # of a dot that is worth it


class Tabled(WithFallback):
    """A term that can run by the tables of its paths."""

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        raise NotImplementedError

    def run(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        W = W.view(W.shape[0], self.plain.num_paths, *self.plain.weight_shape[::2])
        product = lambda given: self.product(given["X"], given["Y"], given["W"], given.get("Z"), SRC)
        return outside_autocast(product, {"X": X, "Y": Y, "W": W, **({} if Z is None else {"Z": Z})})


@dataclass(frozen=True)
class TableTerm(Tabled):
    """Tables of components, for the product and its gradients, where kernels run; `plain` where torch operations do."""

    tables: PathTables

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.plain.prepare(device, dtype)
        self.tables.prepare(device, dtype)

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        return self.tables.contract("Z", {"X": X, "Y": Y, "W": W}, Z, (SRC, None))

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC; without u if that is 1
        Y: Tensor,  # [b, k]
        W: Tensor | None,  # flat, [b, weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        if W is None or W.dim() != 2 or Y.dim() != 2 or is_transformed() or not has_kernels(X.device):
            return self.plain(X, Y, W, Z, size, SRC)
        if not self.tables.is_on(X.device, X.dtype):
            return self.plain(X, Y, W, Z, size, SRC)
        return self.run(X.unsqueeze(2) if X.dim() == 2 else X, Y, W, Z, SRC)


@dataclass(frozen=True)
class ColumnTerm(Tabled):
    """Tables of columns, for a product that nobody differentiates: as `TableTerm`, but x or z are flat, or both."""

    side: Side
    texts: tuple[str, str]
    row: tuple[int, ...]  # of Z
    reads_columns: bool  # x is flat

    def is_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.side.is_on(device, dtype)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.side.on(device, dtype)

    def product(self, X: Tensor, Y: Tensor, W: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
        return self.side(self.texts[int(SRC is not None)], X, Y, W, Z, (Y.shape[0], *self.row), SRC)

    def __call__(
        self,
        X: Tensor,  # [b, c] or [b, j, u], n for b with SRC; without u if that is 1
        Y: Tensor,  # [b, k]
        W: Tensor | None,  # flat, [b, weight_numel]; there is one
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        assert W is not None
        return self.run(X.unsqueeze(2) if X.dim() == 2 and not self.reads_columns else X, Y, W, Z, SRC)


def with_tables(
    term: PathTerm, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> PathTerm | TableTerm:
    """Return the term with tables if they make it faster, else as it is.

    They do where a dot is worth it, between blocks of few components, and where the first input has one channel. With
    several channels paths are put together first, see `slices_of`.
    """
    mode, (mul1, mul2, _), _, places = term.key
    if mode == "uvw" and mul1 == mul2 == 1:
        return with_held_coefficients(term)
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
        for side_irreps, slot, table, place in zip(irreps, slots, at, (path.i_in1, path.i_in2, path.i_out)):
            last = side_irreps[place].ir.dim - 1
            table[number] = slot.first[place] + torch.arange(table.shape[1]).clamp(max=last)
    CGJ, CGK, CGI = at
    forward = _side(CG, CGI, CGJ, CGK, blocks[2], extents[2])
    swapped = _side(CG.transpose(1, 2), CGJ, CGI, CGK, blocks[0], extents[0])
    as_weights = {"CG": CG, "CGI": CGI, "CGJ": CGJ, "CGK": CGK}
    in_memory = InMemory(Side(Constants(forward)), Side(Constants(swapped)), Tables(Constants(as_weights)))
    return TableTerm(term, PathTables(in_memory, _held_coefficients(term), _shapes(term)))


def with_held_coefficients(term: PathTerm) -> PathTerm | TableTerm:
    """Return the term with kernels that hold its coefficients, if a tile holds a path's weights; else as it is."""
    mode, (mul1, mul2, mul3), is_weighted, _ = term.key
    is_large = power_of_two(mul1) * power_of_two(mul3) > LARGEST_TILE
    if mode != "uvw" or mul2 != 1 or not is_weighted or is_large:
        return term
    channels = _held_coefficients(term)
    return term if channels is None else TableTerm(term, PathTables(None, channels, _shapes(term)))


def _held_coefficients(term: PathTerm) -> Channels | None:
    """Return the coefficients of a term for a kernel's source, or None if there are none or too many."""
    tables = term.tables.tensors
    is_entry = (tables["CGI"] >= 0) & (tables["CGV"] != 0)
    path, _ = is_entry.nonzero(as_tuple=True)
    if not 0 < len(path) <= MOST_ENTRIES:
        return None
    entries = torch.stack([*(tables[name][is_entry].long() for name in ("CGI", "CGJ", "CGK")), path])
    X, Y, Z = term.counts
    return Channels(ELL.from_coo(entries, tables["CGV"][is_entry], (Z, X, Y, term.num_paths), group_dim=0), MIXED)


def _shapes(term: PathTerm) -> dict[str, tuple[int, ...]]:
    (X, Y, Z), (u, _, w) = term.counts, term.key[1]
    return {"X": (X, u), "Y": (Y,), "W": (term.num_paths, u, w), "Z": (Z, w)}


def by_column(term: TableTerm, first: Slots | None, out: Slots | None, is_held: bool) -> ColumnTerm:
    """Return the term for columns as they are: of x if `first` is its slots, of z if `out` is; each has one slot.

    A None means that columns are in order. If `is_held`, a kernel's source holds the coefficients, else tables do.
    """
    sides = {"CGJ": first, "ROW": out}
    columns = {name: slots.columns for name, slots in sides.items() if slots is not None}
    row = term.tables.shapes["Z"] if out is None else (columns["ROW"].numel(),)
    if is_held:
        assert term.tables.known is not None
        form = term.tables.known.CG
        names = dict(zip(("ROW", "CGJ", "CGK", "CGL"), form.coords))
        tables = {name: at for name, at in names.items() if at is not None} | {"CGV": form.values}
        if out is not None:
            tables["ROW"] = torch.arange(form.shape[0])
        side = Side(Constants(_at(tables, columns)), is_known=True)
        texts = held_texts(first is not None, out is not None)
        return ColumnTerm(term.plain, side, texts, row, first is not None)
    assert term.tables.in_memory is not None
    side = Side(Constants(_at(term.tables.in_memory.forward.constants.tensors, columns)))
    texts = product_texts(first is not None, out is not None)
    return ColumnTerm(term.plain, side, texts, row, first is not None)


def _at(tables: dict[str, Tensor], columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tables in which those named in `columns` hold the columns of all channels instead of components.

    They gain a dimension, [..., channel]. An entry of -1 stays.
    """
    by_channel = {}
    for name, column in columns.items():
        component = tables[name]
        by_channel[name] = torch.where(component[..., None] < 0, -1, column[component.long()])
    return {**tables, **by_channel}


Block = tuple[int, int]  # its first component in a slot, and how many it has


def _blocks(irreps: Irreps, slots: Slots, slot: int) -> list[Block]:
    """Return all blocks of a slot: programs write every component, whether a path leads to it or not."""
    placed_blocks = zip(irreps, slots.slot_of, slots.first)
    return [(first, ir.dim) for (_, ir), where, first in placed_blocks if where == slot]


def _side(CG: Tensor, CGI: Tensor, CGJ: Tensor, CGK: Tensor, blocks: list[Block], extent: int) -> dict[str, Tensor]:
    """Return the tables of paths that are sorted by their output block."""
    ROW = torch.full((len(blocks), extent), -1, dtype=torch.int32)
    for tile, (first, dim) in enumerate(blocks):
        ROW[tile, :dim] = first + torch.arange(dim)
    tile_of = {first: tile for tile, (first, _) in enumerate(blocks)}
    TILE = torch.tensor([tile_of[first] for first in CGI[:, 0].tolist()], dtype=torch.int32)
    TILE, order = TILE.sort(stable=True)
    pointers = torch.searchsorted(TILE, torch.arange(len(blocks) + 1, dtype=torch.int32), out_int32=True)
    tables = {"ROW": ROW, "TILE": TILE, "CG": CG[order].contiguous(), "CGJ": CGJ[order], "CGK": CGK[order]}
    return {**tables, "CGL": order.int(), "pointers": pointers}
