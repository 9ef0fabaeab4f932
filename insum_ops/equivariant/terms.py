"""The statements of a tensor product, with their Clebsch-Gordan tables.

Grouped by path, for every mode (v and W's b only where there are any):

    Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q],v] * W[b,p,u,v,w]

By output component, where channels never mix (uvu with one channel in the second input, uuu), CG in ELL:

    Z[b,i,u] += CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..compiler import MOST_ENTRIES, has_kernels
from ..formats import ELL, GroupCOO
from ..formats.torch_state import asked_once, autocast_dtype, is_autocast_enabled, is_transformed
from ..functional import insum
from .channels import ALL_APART, APART, Channels
from .clebsch_gordan import Irreps, clebsch_gordan
from .constants import Constants, Memory, copy_on
from .paths import LETTERS, Instruction, path_shape
from .slots import Slots

__all__ = [
    "ChannelTerm",
    "Key",
    "PathTerm",
    "WithFallback",
    "channel_term",
    "coefficients",
    "gathered",
    "path_key",
    "path_term",
]

GATHERED = "G[b,j,u] += X[SRC[b],j,u]"
LEAST_GROUP = 16  # a dot is that deep at least: padding a path's entries to it costs nothing

Key = tuple[str, tuple[int, int, int], bool, tuple[int, int, int]]  # mode, multiplicities, has weight, slots


def path_key(path: Instruction, irreps: Sequence[Irreps], slots: Sequence[Slots]) -> Key:
    """Return the key of a path; paths with equal keys can share a statement."""
    places = (path.i_in1, path.i_in2, path.i_out)
    muls = tuple(side[at].mul for side, at in zip(irreps, places))
    where = tuple(side.slot_of[at] for side, at in zip(slots, places))
    return path.connection_mode, muls, path.has_weight, where  # type: ignore[return-value]


@dataclass(frozen=True)
class PathTerm:
    """`Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q],v] * W[b,p,u,v,w]`, p over some paths."""

    key: Key
    num_paths: int
    tables: Constants  # CGI, CGJ, CGK, CGV: [p, q]
    is_worth_a_dot: bool  # else entries are a loop, and padding would cost time
    counts: tuple[int, int, int]  # components of X, Y and Z

    @property
    def weight_numel(self) -> int:
        return self.num_paths * prod(self.weight_shape) if self.key[2] else 0

    @property
    def weight_shape(self) -> tuple[int, ...]:
        mode, muls, _, _ = self.key
        return path_shape(mode, *muls)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.tables.on(device, dtype)

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC; without u if that is 1
        Y: Tensor,  # [b, k, v], without v if that is 1; or the position of the one that is 1, [b]
        W: Tensor | None,  # flat, [weight_numel] or [b, weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        mode, muls, is_weighted, _ = self.key
        is_one_hot = Y.dim() == 1
        has_v = muls[1] > 1 or mode not in ("uvw", "uvu")
        X = X.unsqueeze(2) if X.dim() == 2 else X
        Y = Y.unsqueeze(2) if has_v and Y.dim() == 2 else Y
        tensors = {**self.tables.on(X.device, X.dtype), "X": X, "Y": Y}
        if is_one_hot:
            del tensors["CGK"]
        is_each = W is not None and W.dim() == 2
        if is_weighted and W is not None:
            letters = self.weight_shape if has_v or is_one_hot else (muls[0], *self.weight_shape[2:])
            tensors["W"] = W.view(*W.shape[:-1], self.num_paths, *letters)
        if SRC is not None:
            tensors["SRC"] = SRC
        expr = _path_statement(mode, has_v, is_weighted, is_each, SRC is not None, is_one_hot)
        shape = size if mode != "uvuv" else (*size[:2], muls[0], muls[1])
        if Z is not None:
            tensors["Z"] = Z if shape is size else Z.view(shape)
        result = insum(expr, size=shape, **tensors)
        return result if shape is size else result.view(size)


@dataclass(frozen=True)
class WithFallback:
    """A term that has a faster implementation beside its plain one, `plain`."""

    plain: PathTerm

    @property
    def key(self) -> Key:
        return self.plain.key

    @property
    def num_paths(self) -> int:
        return self.plain.num_paths

    @property
    def weight_numel(self) -> int:
        return self.plain.weight_numel


def gathered(X: Tensor, SRC: Tensor | None, rows: int) -> Tensor:
    """`G[b,j,u] += X[SRC[b],j,u]`; without SRC, X as it is."""
    return X if SRC is None else insum(GATHERED, X=X, SRC=SRC, size=(rows, *X.shape[1:]))


@cache
def path_statement(
    mode: str, has_v: bool, is_weighted: bool, is_each: bool, is_gathered: bool, is_one_hot: bool
) -> str:
    """Return the statement of paths of one mode.

    >>> path_statement("uvw", False, True, True, False, False)
    'Z[b,CGI[p,q],w] += CGV[p,q] * X[b,CGJ[p,q],u] * Y[b,CGK[p,q]] * W[b,p,u,w]'
    """
    second, weight, out = LETTERS[mode]
    if not has_v and not is_one_hot:
        weight = weight.replace("v", "")
    row = "SRC[b]" if is_gathered else "b"
    factors = ["CGV[p,q]", f"X[{row},CGJ[p,q],u]"]
    if not is_one_hot:
        factors.append(f"Y[b,CGK[p,q],{second}]" if has_v or second == "u" else "Y[b,CGK[p,q]]")
    if is_weighted:
        letters = ["Y[b]" if letter == "v" and is_one_hot else letter for letter in weight]
        factors.append(f"W[{','.join([*('b' * is_each), 'p', *letters])}]")
    return f"Z[b,CGI[p,q],{','.join(out)}] += {' * '.join(factors)}"


def path_term(key: Key, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]) -> PathTerm:
    """Return one statement for paths that share a key."""
    entries, values = [], []
    for number, path in enumerate(paths):
        places = (path.i_in1, path.i_in2, path.i_out)
        positions, path_values = coefficients(path, irreps)
        starts = torch.tensor([side.first[at] for side, at in zip(slots, places)])
        entries.append(torch.cat([torch.full((1, positions.shape[1]), number), positions + starts[:, None]]))
        values.append(path_values)
    in1, in2, out = (side.counts[at] for side, at in zip(slots, key[3]))
    counts = (in1, in2, out)
    longest = max(len(part) for part in values)
    is_worth_a_dot = longest > 1 and max(counts[0], counts[2]) >= 4 and min(key[1][0], key[1][2]) >= 12
    group_size = max(LEAST_GROUP, 1 << (longest - 1).bit_length()) if is_worth_a_dot else longest
    CG = GroupCOO.from_coo(
        torch.cat(entries, 1), torch.cat(values), (len(paths), *counts), group_dim=0, group_size=group_size
    )
    _, CGJ, CGK, CGI = CG.coords
    assert CGI is not None
    assert CGJ is not None
    assert CGK is not None
    tables = Constants({"CGI": CGI, "CGJ": CGJ, "CGK": CGK, "CGV": CG.values})
    return PathTerm(key, len(paths), tables, is_worth_a_dot, counts)


def coefficients(path: Instruction, irreps: Sequence[Irreps]) -> tuple[Tensor, Tensor]:
    """Return the nonzeros of a path: positions [3, n] in in1, in2 and out, and values [n] with normalisation."""
    degrees = [side[at].ir.l for side, at in zip(irreps, (path.i_in1, path.i_in2, path.i_out))]
    positions, values = clebsch_gordan(*degrees)
    return positions, values * path.path_weight


@dataclass(frozen=True)
class ChannelTerm:
    """`Z[b,i,u] += CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[b,l,u]`, i over all output components."""

    CG: ELL
    width: int  # channels u
    has_u: bool  # the second input has them too
    is_weighted: bool
    channels: Channels | None  # computes the term where kernels run and each sample has weights of its own
    copies: dict[tuple[torch.device, torch.dtype], ELL] = field(default_factory=Memory, repr=False)

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC; without u if that is 1, or columns [b, c] if `takes_columns`
        Y: Tensor,  # [b, k], or [b, k, u] without u if that is 1
        W: Tensor | None,  # flat, [l * u] or [b, l * u]
        size: tuple[int, ...],  # of Z: [b, i, u], [n, i, u] with DST; or [b, c] if `takes_columns`
        SRC: Tensor | None,  # [b]
        DST: Tensor | None,  # [b]
        is_flat: bool = False,  # X is [b, c]
    ) -> Tensor:
        X = X.unsqueeze(2) if X.dim() == 2 and not is_flat else X
        Y = Y.unsqueeze(2) if self.has_u and Y.dim() == 2 else Y
        if W is not None and self.is_weighted:
            W = W.view(*W.shape[:-1], W.shape[-1] // self.width, self.width)
            if W.dim() == 3 and self.unrolls(X):
                assert self.channels is not None
                return self.channels({"X": X, "Y": Y, "W": W}, SRC, DST, size)
        return self.plain(X, Y, W, size, SRC, DST)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the coefficients to a device: a tracer can't make copies."""
        copy_on(self.copies, device, dtype, self.CG.to)
        if self.channels is not None:
            self.channels.on(device, dtype)

    def takes_columns(self, name: str, x: Tensor, W: Tensor | None) -> bool:
        """Whether X or Z may be columns as they are, which a kernel finds by the numbers in its source."""
        if W is None or W.dim() != 2 or not self.is_weighted or self.channels is None:
            return False
        return name in self.channels.columns and self.unrolls(x)

    def unrolls(self, X: Tensor) -> bool:
        """Whether a kernel whose source holds the coefficients computes the term."""
        if self.channels is None or is_transformed() or not has_kernels(X.device):
            return False
        kind, dtype = X.device.type, X.dtype
        if dtype == torch.float32 and is_autocast_enabled(kind):  # which it is cast to before it is read
            dtype = autocast_dtype(kind)
        return self.channels.on(X.device, dtype) is not None

    def plain(
        self, X: Tensor, Y: Tensor, W: Tensor | None, size: tuple[int, ...], SRC: Tensor | None, DST: Tensor | None
    ) -> Tensor:
        """Return the term's value by `insum` over the coefficients as a format."""
        tensors = {"CG": copy_on(self.copies, X.device, X.dtype, self.CG.to), "X": X, "Y": Y}
        if W is not None and self.is_weighted:
            tensors["W"] = W
        if SRC is not None:
            tensors["SRC"] = SRC
        if DST is not None:
            tensors["DST"] = DST
        is_each = W is not None and W.dim() == 3
        expr = _channel_statement(self.has_u, self.is_weighted, is_each, SRC is not None, DST is not None)
        return insum(expr, size=size, **tensors)


@cache
def channel_statement(has_u: bool, is_weighted: bool, is_each: bool, is_gathered: bool, is_scattered: bool) -> str:
    """Return the statement by output component.

    >>> channel_statement(False, True, True, True, True)
    'Z[DST[b],i,u] += CG[i,j,k,l] * X[SRC[b],j,u] * Y[b,k] * W[b,l,u]'
    """
    factors = [
        "CG[i,j,k,l]" if is_weighted else "CG[i,j,k]",
        f"X[{'SRC[b]' if is_gathered else 'b'},j,u]",
        "Y[b,k,u]" if has_u else "Y[b,k]",
    ]
    if is_weighted:
        factors.append("W[b,l,u]" if is_each else "W[l,u]")
    return f"Z[{'DST[b]' if is_scattered else 'b'},i,u] += {' * '.join(factors)}"


def channel_term(paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots | None]) -> ChannelTerm:
    """Return one statement for all paths; a block's pieces of `width` channels are paths of their own."""
    first, second, out = slots
    assert first is not None
    assert out is not None
    width, offset = first.widths[0], 0
    starts2 = [where.start for where in irreps[1].slices()]
    entries, values = [], []
    for path in paths:
        positions, path_values = coefficients(path, irreps)
        i, j, k = positions
        pieces = first.parts[path.i_in1]
        for piece in range(pieces):
            X = first.first[path.i_in1] + i * pieces + piece
            Y = starts2[path.i_in2] + j if second is None else second.first[path.i_in2] + j * pieces + piece
            Z = out.first[path.i_out] + k * pieces + piece
            entries.append(torch.stack([Z, X, Y, torch.full_like(Z, offset // width + piece)]))
            values.append(path_values)
        offset += prod(path.path_shape)
    is_weighted = paths[0].has_weight
    dims = 4 if is_weighted else 3
    num_second = irreps[1].dim if second is None else second.counts[0]
    shape = (out.counts[0], first.counts[0], num_second, offset // width)[:dims]
    CG = ELL.from_coo(torch.cat(entries, 1)[:dims], torch.cat(values), shape, group_dim=0)
    has_u = second is not None
    along = ALL_APART if has_u else APART
    columns = {name: slot.columns for name, slot in (("X", first), ("Z", out)) if slot.order is not None}
    channels = Channels(CG, along, columns) if is_weighted and len(CG.values) and CG.nnz <= MOST_ENTRIES else None
    return ChannelTerm(CG, width, has_u, is_weighted, channels)


@asked_once  # a tracer does not look into an lru_cache
def _path_statement(*key: Any) -> str:
    return path_statement(*key)


@asked_once
def _channel_statement(*key: Any) -> str:
    return channel_statement(*key)
