"""Products with weights for each sample, over coefficients that a kernel's source holds.

    Z[DST[b],i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u]
    Z[DST[b],i,w] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u,w]

Each of the four is made from the others by such a line, with the coefficients in rows of its own: no entry is
scattered, and gradients have gradients. The tables are known when the kernel is written, so it has a product for each
entry, loads what several entries read once, and reads no table.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import one_by_one, outside_transforms, owned
from ..formats import ELL
from ..formats.facts import ConstantTables
from ..formats.torch_state import (
    as_autocast,
    autocast_dtype,
    is_autocast_enabled,
    is_compiling,
    is_grad_enabled,
    is_watched,
    may_autocast,
)
from ..functional import insum_pinned
from ..lru_cache import LRUCache
from .constants import Memory, cast_from

__all__ = ["ALL_APART", "APART", "MIXED", "Channels", "statement"]

NUMBERS_OF_ROWS = 64  # whose launch plans are kept
CALLS = 64  # launch plans for each number of rows
LETTERS = {"Z": "i", "X": "j", "Y": "k", "W": "l"}
Along = tuple[str, str, str, str]  # the channel letters of Z, X, Y and W
APART: Along = ("u", "u", "", "u")  # they never mix
ALL_APART: Along = ("u", "u", "u", "u")
MIXED: Along = ("w", "u", "", "uw")


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


@dataclass(frozen=True)
class Channels:
    """X, Y, W to Z, and any of the four from the others."""

    CG: ELL  # [i, j, k, l]
    along: Along
    copies: dict[tuple[torch.device, torch.dtype], dict[str, Side]] = field(default_factory=Memory, repr=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Side] | None:
        """Return the coefficients for each of Z, X, Y and W on a device, copied there by the first call.

        None if the first call comes while torch traces or transforms it: tensors made then may hold no numbers.
        """
        sides = self.copies.get((device, dtype))
        if sides is None and not is_watched():
            with outside_transforms():
                for cast_dtype in cast_from(dtype):
                    copies = {name: self.side(dim, device, cast_dtype) for dim, name in enumerate(LETTERS)}
                    self.copies.setdefault((device, cast_dtype), copies)
            sides = self.copies[device, dtype]
        return sides

    def side(self, dim: int, device: torch.device, dtype: torch.dtype) -> Side:
        """Return the coefficients with one row for each component along `dim`, copied to a device."""
        form = self.CG.regroup(dim)
        tables = {f"CG{letter.upper()}": at for letter, at in zip(LETTERS.values(), form.coords) if at is not None}
        tables["CGV"] = form.values.to(dtype)
        fixed = {name: table.to(device) for name, table in tables.items()}
        return Side(fixed, ConstantTables.of(tables), LRUCache(NUMBERS_OF_ROWS))

    def __call__(
        self, tensors: Mapping[str, Tensor], SRC: Tensor | None, DST: Tensor | None, size: tuple[int, ...]
    ) -> Tensor:
        """Return Z of X, Y and W. SRC and DST, where given, name the rows of X and of Z that belong to each edge.

        The caller has seen that `on` does not return None.
        """
        device = tensors["X"].device
        if (is_compiling() or may_autocast()) and is_autocast_enabled(device.type):
            dtype = autocast_dtype(device.type)
            tensors = {name: as_autocast(tensor, dtype) for name, tensor in tensors.items()}
            with torch.autocast(device.type, enabled=False):
                return self.contract("Z", tensors, SRC, DST, size)
        return self.contract("Z", tensors, SRC, DST, size)

    def contract(
        self, name: str, tensors: Mapping[str, Tensor], SRC: Tensor | None, DST: Tensor | None, size: tuple[int, ...]
    ) -> Tensor:
        """Return the named one of Z, X, Y and W, contracted from the other three, with gradients of any order."""
        if is_grad_enabled() and any([tensor.requires_grad for tensor in tensors.values()]):
            return _Contraction.apply(self, name, tuple(tensors), size, SRC, DST, *tensors.values())  # type: ignore[no-any-return]
        return self.run(name, tensors, SRC, DST, size)

    def run(
        self, name: str, tensors: Mapping[str, Tensor], SRC: Tensor | None, DST: Tensor | None, size: tuple[int, ...]
    ) -> Tensor:
        """Return what `contract` returns, without a graph."""
        first = next(iter(tensors.values()))
        sides = self.on(first.device, first.dtype)
        assert sides is not None
        operands, side = dict(tensors), sides[name]
        if SRC is not None:
            operands["SRC"] = SRC
        if DST is not None:
            operands["DST"] = DST
        text = _statement(name, self.along, SRC is not None, DST is not None)
        is_added = (name == "Z" and DST is not None) or (name == "X" and SRC is not None)
        memory = {} if is_compiling() else side.memory(size[0] if is_added else -1)
        return insum_pinned(memory, text, side.fixed, size, side.fact, **operands)


class _Contraction(torch.autograd.Function):
    """One of the four tensors, contracted from the others. Its gradients are such contractions too."""

    @staticmethod
    def forward(
        ctx: Any,
        channels: Channels,
        target: str,
        names: tuple[str, ...],
        size: tuple[int, ...],
        SRC: Tensor | None,
        DST: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(SRC, DST, *tensors)
        ctx.rest = channels, target, names
        return owned(channels.run(target, dict(zip(names, tensors)), SRC, DST, size))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, upstream: Tensor) -> Any:
        SRC, DST, *tensors = ctx.saved_tensors
        channels, target, names = ctx.rest
        operands = {target: upstream, **dict(zip(names, tensors))}
        grads: list[Tensor | None] = []
        # backward computes in the dtypes of forward, whatever autocast says where it is called
        is_cast = not is_compiling() and may_autocast()
        with torch.autocast(upstream.device.type, enabled=False) if is_cast else nullcontext():
            for name, is_wanted in zip(names, ctx.needs_input_grad[6:]):
                others = {other: operands[other] for other in LETTERS if other != name}
                size = tuple(operands[name].shape)
                grads.append(channels.contract(name, others, SRC, DST, size) if is_wanted else None)
        return None, None, None, None, None, None, *grads


@cache
def statement(target: str, along: Along, is_gathered: bool, is_scattered: bool) -> str:
    """Return the statement that computes `target` of the other three.

    >>> statement("Z", APART, True, False)
    'Z[b,i,u] += CGV[i,r] * X[SRC[b],CGJ[i,r],u] * Y[b,CGK[i,r]] * W[b,CGL[i,r],u]'
    >>> statement("X", MIXED, True, False)
    'X[SRC[b],j,u] += CGV[j,r] * Z[b,CGI[j,r],w] * Y[b,CGK[j,r]] * W[b,CGL[j,r],u,w]'
    """
    row = {"Z": "DST[b]" if is_scattered else "b", "X": "SRC[b]" if is_gathered else "b"}
    row_letter = LETTERS[target]
    accesses = {}
    for (name, letter), channels in zip(LETTERS.items(), along):
        at = letter if name == target else f"CG{letter.upper()}[{row_letter},r]"
        accesses[name] = f"{name}[{','.join([row.get(name, 'b'), at, *channels])}]"
    others = " * ".join(access for name, access in accesses.items() if name != target)
    return f"{accesses[target]} += CGV[{row_letter},r] * {others}"


def _statement(*key: Any) -> str:
    return statement(*key)


# a tracer calls it once and keeps what it returns: it does not look into an lru_cache
setattr(_statement, "_dynamo_marked_constant", True)  # noqa: B010 - no such attribute to a type checker
