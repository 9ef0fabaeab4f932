"""Products with weights for each sample, or without weights, over coefficients that a kernel's source holds.

    Z[DST[b],i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u]
    Z[DST[b],i,w] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]
    Z[DST[b],i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]]

Each of the tensors is made from the others by such a line, with the coefficients in rows of its own: no entry is
scattered, and gradients have gradients. The tables are known when the kernel is written, so it has a product for each
entry, loads what several entries read once, and reads no table.

X and Z may be flat, columns in the order of their irreps: `X[b,COLX[CGJ[i,r],u]]` reads the channels of a component
wherever they lie, so that nothing has to be put in order before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import JointCall, planned, run_several
from ..formats import ELL
from ..formats.facts import ConstantTables
from ..formats.torch_state import asked_once, is_free, is_grad_enabled, is_watched
from ..functional import insum_pinned
from ..lru_cache import LRUCache
from .constants import Memory, copy_on
from .contraction import Contractions, Rows, outside_autocast

__all__ = ["ALL_APART", "APART", "MIXED", "UNWEIGHTED", "Channels", "statement"]

NUMBERS_OF_ROWS = 64  # whose launch plans are kept
CALLS = 64  # launch plans for each number of rows
LETTERS = {"Z": "i", "X": "j", "Y": "k", "W": "l"}
Along = tuple[str, ...]  # the channel letters of Z, X, Y and, where there are weights, W
APART: Along = ("u", "u", "", "u")  # they never mix
ALL_APART: Along = ("u", "u", "u", "u")
MIXED: Along = ("w", "u", "", "uw")
UNWEIGHTED: Along = ("u", "u", "")


class Side(NamedTuple):
    """The coefficients in rows of one tensor's components, in a device's memory."""

    fixed: dict[str, Tensor]
    fact: ConstantTables
    memories: LRUCache[LRUCache[Any]]  # the launch plans, by the number of rows that were added to, -1 without such

    def memory(self, rows: int) -> LRUCache[Any]:
        """Return the launch plans of calls that add to so many rows."""
        cache = self.memories.get(rows)
        if cache is None:
            cache = self.memories[rows] = LRUCache(CALLS)
        return cache


Sides = dict[tuple[str, str], Side]


@dataclass(frozen=True)
class Channels(Contractions):
    """X, Y, W to Z, and any of the four from the others; or of three, without W."""

    CG: ELL  # [i, j, k, l], [i, j, k] without weights
    along: Along
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # of X and Z where they may be flat: [component, u]
    copies: dict[tuple[torch.device, torch.dtype], Sides] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> Sides | None:
        """Return the coefficients for each of Z, X, Y and W on a device, copied there by the first call.

        A key is the one of the four that is made, and those that are flat: "", "X", "Z" or "XZ". The result is None if
        the first call comes while torch traces or transforms it: tensors made then may hold no numbers.
        """
        sides = self.copies.get((device, dtype))
        return sides if sides or is_watched() else copy_on(self.copies, device, dtype, self.copied)

    def copied(self, device: torch.device, dtype: torch.dtype) -> Sides:
        """Return what `on` does, copied to the device now."""
        return dict(chain.from_iterable(self.sides(dim, device, dtype) for dim in range(len(self.along))))

    def sides(self, dim: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[tuple[str, str], Side]]:
        """Yield the coefficients with one row for each component along `dim`, for all choices of what is flat."""
        form, name = self.CG.regroup(dim), list(LETTERS)[dim]
        tables = {f"CG{letter.upper()}": at for letter, at in zip(LETTERS.values(), form.coords) if at is not None}
        tables["CGV"] = form.values.to(dtype)
        fixed = {table_name: table.to(device) for table_name, table in tables.items()}
        columns = {f"COL{flat}": at for flat, at in self.columns.items()}
        fixed_columns = {column_name: at.to(device) for column_name, at in columns.items()}
        for flat in ("", "X", "Z", "XZ"):
            if all(tensor in self.columns for tensor in flat):
                read = [f"COL{tensor}" for tensor in flat]
                fact = ConstantTables.of(tables | {column: columns[column] for column in read})
                own = fixed | {column: fixed_columns[column] for column in read}
                yield (name, flat), Side(own, fact, LRUCache(NUMBERS_OF_ROWS))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(LETTERS)[: len(self.along)]

    def __call__(
        self, tensors: Mapping[str, Tensor], SRC: Tensor | None, DST: Tensor | None, size: tuple[int, ...]
    ) -> Tensor:
        """Return Z of X, Y and W. SRC and DST, where given, name the rows of X and of Z that belong to each edge.

        The caller has seen that `on` does not return None.
        """
        return outside_autocast(lambda operands: self.contract("Z", operands, None, (SRC, DST), size), tensors)

    def run(
        self, name: str, operands: Mapping[str, Tensor], seed: Tensor | None, rows: Rows, size: tuple[int, ...]
    ) -> Tensor:
        """Return what `contract` returns, without a graph. X and Z are flat where they have two dimensions."""
        SRC, DST = rows
        flat = "".join([one for one in "XZ" if len(size if one == name else operands[one].shape) == 2])
        side = self.side_for(operands, name, flat)
        read = _with_rows(operands if seed is None else {**operands, name: seed}, rows)
        text = _statement(name, self.along, SRC is not None, DST is not None, flat)
        is_added = (name == "Z" and DST is not None) or (name == "X" and SRC is not None)
        memory = {} if is_watched() else side.memory(size[0] if is_added else -1)
        return insum_pinned(memory, text, side.fixed, size, side.fact, **read)

    def gradients(self, wanted: Sequence[str], operands: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
        """Return the wanted tensors, several of them by one call where no graph is recorded."""
        if len(wanted) > 1 and is_free() and not is_grad_enabled():
            return dict(zip(wanted, self.run_several(wanted, operands, rows)))
        return super().gradients(wanted, operands, rows)

    def run_several(
        self,
        names: Sequence[str],
        tensors: Mapping[str, Tensor],
        rows: Rows,
        alone: Callable[[str], Tensor] | None = None,
    ) -> list[Tensor]:
        """Return several of Z, X, Y and W without a graph, each contracted from the other three of `tensors`.

        The one of a name in `tensors` gives the size of the result. What no kernel makes with others `alone` returns,
        if that is given.
        """
        flat, has_rows = "".join([one for one in "XZ" if tensors[one].dim() == 2]), [row is not None for row in rows]
        sides, operands = [self.side_for(tensors, name, flat) for name in names], _with_rows(tensors, rows)

        def run(*_: Tensor) -> tuple[Tensor, ...]:
            calls = []
            for name, side in zip(names, sides):
                read = {**{key: tensor for key, tensor in operands.items() if key != name}, **side.fixed}
                text, size = _statement(name, self.along, *has_rows, flat), tuple(tensors[name].shape)
                by_itself = None if alone is None else partial(alone, name)
                calls.append(JointCall(text, ",".join(read), size, list(read.values()), side.fact, None, by_itself))
            return tuple(run_several(calls))

        marks = "several", self.along, tuple(names), *operands
        return list(planned(sides[0].memory(-1), marks, run, list(operands.values()), varies=True))

    def side_for(self, tensors: Mapping[str, Tensor], name: str, flat: str) -> Side:
        """Return the coefficients in rows of one tensor's components, where the tensors are; `flat` are flat."""
        first = next(iter(tensors.values()))
        sides = self.on(first.device, first.dtype)
        assert sides is not None
        return sides[name, flat]


def _with_rows(tensors: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """Return the tensors of a statement, with those that name rows."""
    return {**tensors, **{name: index for name, index in zip(("SRC", "DST"), rows) if index is not None}}


@cache
def statement(target: str, along: Along, is_gathered: bool, is_scattered: bool, flat: str = "") -> str:
    """Return the statement that computes `target` of the other three; of X and Z those in `flat` are flat.

    >>> statement("Z", APART, True, False)
    'Z[b,i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u]'
    >>> statement("X", MIXED, True, False)
    'X[SRC[b],j,u] += CGV[j,r] * Z[b,CGI[j,r],w] * Y[b,CGK[j,r]] * W[b,CGL[j,r],u,w]'
    >>> statement("Y", UNWEIGHTED, False, False)
    'Y[b,k] += CGV[k,r] * Z[b,CGI[k,r],u] * X[b,CGJ[k,r],u]'
    >>> statement("Z", APART, False, False, "XZ")
    'Z[b,COLZ[i,u]] += CGV[i,r] * X[b,COLX[CGJ[i,r],u]] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u]'
    """
    row = {"Z": "DST[b]" if is_scattered else "b", "X": "SRC[b]" if is_gathered else "b"}
    row_letter = LETTERS[target]
    accesses = {}
    for (name, letter), channels in zip(LETTERS.items(), along):
        at = letter if name == target else f"CG{letter.upper()}[{row_letter},r]"
        place = ",".join([at, *channels])
        accesses[name] = f"{name}[{row.get(name, 'b')},{f'COL{name}[{place}]' if name in flat else place}]"
    others = " * ".join(access for name, access in accesses.items() if name != target)
    return f"{accesses[target]} += CGV[{row_letter},r] * {others}"


@asked_once  # a tracer does not look into an lru_cache
def _statement(*key: Any) -> str:
    return statement(*key)
