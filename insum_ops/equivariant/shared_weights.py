"""Fully connected paths with weights that all samples share: channels are mixed by one matrix product.

    T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]
    Z[b,i,w] += T[b,r,n] * W[l,n,w] * A[i,r,l]

The first of them runs over coefficients in a format, or in a kernel's source, whichever is faster. r counts the
components of every path's own output. In one statement the product with W would be taken once for each coefficient; T
is small, since it has no weights in it. n counts pairs (u,v) of channels. Kernels want long rows, so for them X and Y
are written out over n; torch operations read X[b,j,u] and Y[b,k,v]. With one channel in the second input n is u, and Y
has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..compiler import MOST_ENTRIES, evaluate, gradients_of, has_kernels
from ..formats import ELL
from ..formats.torch_state import is_transformed, is_watched
from ..functional import insum
from ..lru_cache import LRUCache
from .channels import UNWEIGHTED, Channels
from .choice import fastest_way
from .clebsch_gordan import Irreps
from .constants import Memory, copy_on
from .multilinear import Multilinear
from .paths import Instruction
from .slots import Slots
from .terms import Key, coefficients

__all__ = ["SharedTerm", "shared_term"]

# [are rows of X gathered]; by an int, since not every tracer takes a bool for an index
PAIRED = "T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k]", "T[b,r,n] += CG[r,j,k] * X[SRC[b],j,n] * Y[b,k]"
PAIRED_LONG = "T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]", "T[b,r,n] += CG[r,j,k] * X[SRC[b],j,n] * Y[b,k,n]"
PAIRED_BOTH = "T[b,r,u,v] += CG[r,j,k] * X[b,j,u] * Y[b,k,v]", "T[b,r,u,v] += CG[r,j,k] * X[SRC[b],j,u] * Y[b,k,v]"
MIXED = {"Z": "Z[b,i,w]", "T": "T[b,r,n]", "W": "W[l,n,w]"}
GROUP_DIMS = {"Z": 0, "T": 1, "W": 0}
HELD, IN_FORMAT = WAYS = ("held", "in a format")
CHOICES = 64  # between the two that are kept, by sizes


@dataclass(frozen=True)
class Pairs:
    """`T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k]` and its gradients, by a format or by numbers in a kernel's source."""

    CG: ELL
    held: Channels | None  # None: there are too many coefficients
    flat: Slots | None = None  # of x, if it may be columns [b, c] as they are
    copies: dict[tuple[torch.device, torch.dtype], ELL] = field(default_factory=Memory, repr=False)
    choices: LRUCache[Any] = field(default_factory=partial(LRUCache, CHOICES), repr=False, compare=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> ELL:
        return copy_on(self.copies, device, dtype, self.CG.to)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy the coefficients to a device: a tracer can't make copies."""
        self.on(device, dtype)
        if self.held is not None:
            self.held.on(device, dtype)

    def __call__(self, X: Tensor, Y: Tensor, SRC: Tensor | None, size: tuple[int, ...]) -> Tensor:
        """Return T of X and Y, with gradients of any order; SRC, where given, names the row of X for each b.

        X may be columns [b, c] if `flat` is given and no graph is recorded.
        """
        tensors = {"X": X, "Y": Y}

        def run(way: str) -> Tensor:
            if way == HELD:
                assert self.held is not None
                return self.held(tensors, SRC, None, size)
            CG = self.on(X.device, X.dtype)
            dense = _with_rows({"X": self.in_order(X), "Y": Y}, SRC)
            return insum(PAIRED[int(SRC is not None)], size=size, CG=CG, **dense)

        return run(self.way("T", tensors, SRC, run))

    def gradients(
        self, X: Tensor, Y: Tensor, SRC: Tensor | None, dT: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of X and Y, None for one that is not wanted, without a graph."""
        tensors = {"Z": dT, "X": X, "Y": Y}
        names = [name for name, is_wanted in zip("XY", wanted) if is_wanted]

        def run(way: str) -> Mapping[str, Tensor | None]:
            if way == HELD:
                assert self.held is not None
                return dict(zip(names, self.held.run_several(names, tensors, (SRC, None))))
            dense = _with_rows({"X": self.in_order(X), "Y": Y}, SRC)
            needs_grad = (False, *wanted, False)[: 1 + len(dense)]
            CG: Any = self.on(X.device, X.dtype)
            _, dX, dY, *_ = gradients_of(evaluate, PAIRED[int(SRC is not None)], "CG", CG, dense, dT, needs_grad)
            if X.dim() == 2 and dX is not None:
                assert self.flat is not None
                dX = self.flat.unordered(dX.flatten(1))
            return {"X": dX, "Y": dY}

        grads = run(self.way("".join(names), tensors, SRC, run))
        return grads.get("X"), grads.get("Y")

    def in_order(self, X: Tensor) -> Tensor:
        """Return X [b, j, n] of columns as they are, or as it is."""
        if X.dim() != 2:
            return X
        assert self.flat is not None
        return self.flat.spread(self.flat.ordered(X))[0]

    def way(self, what: str, tensors: Mapping[str, Tensor], SRC: Tensor | None, run: Any) -> str:
        """Return the faster way to T, or to gradients; the guess is the kernel that holds the coefficients."""
        X = tensors["X"]
        if self.held is None or is_transformed() or not has_kernels(X.device):
            return IN_FORMAT
        if is_watched():  # by a tracer, which can't make copies
            return HELD if self.held.on(X.device, X.dtype) is not None else IN_FORMAT
        self.prepare(X.device, X.dtype)
        return fastest_way(self.choices, (what, self.CG.nnz, X.dim(), SRC is not None), WAYS, run, tensors)


def _with_rows(tensors: Mapping[str, Tensor], SRC: Tensor | None) -> dict[str, Tensor]:
    return dict(tensors) if SRC is None else {**tensors, "SRC": SRC}


@dataclass(frozen=True)
class SharedTerm:
    """`T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]`, then `Z[b,i,w] += T[b,r,n] * W[l,n,w] * A[i,r,l]`."""

    key: Key
    num_paths: int
    pairs: Pairs
    mixed: Multilinear

    @property
    def weight_numel(self) -> int:
        return self.num_paths * prod(self.key[1])

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.pairs.prepare(device, dtype)
        self.mixed.on(device, dtype)

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC; without u if that is 1
        Y: Tensor,  # [b, k], [b, k, v] with several channels
        W: Tensor | None,  # [weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        assert W is not None
        _, (mul1, mul2, mul_out), _, _ = self.key
        X = X.unsqueeze(2) if X.dim() == 2 else X
        T = self.paired(X, Y, size[0], SRC)
        return self.mixed({"T": T, "W": W.view(self.num_paths, mul1 * mul2, mul_out)}, Z, size)

    def paired(self, X: Tensor, Y: Tensor, rows: int, SRC: Tensor | None) -> Tensor:
        """Return T [b, r, n], the products of components before weights mix channels."""
        _, (mul1, mul2, _), _, _ = self.key
        size: tuple[int, ...] = (rows, self.pairs.CG.shape[0], mul1 * mul2)
        if mul2 == 1:
            return self.pairs(X, Y, SRC, size)
        CG, is_gathered = self.pairs.on(X.device, X.dtype), int(SRC is not None)
        if has_kernels(X.device):
            expr, X, Y = PAIRED_LONG[is_gathered], X.repeat_interleave(mul2, 2), Y.repeat(1, 1, mul1)
        else:
            expr, size = PAIRED_BOTH[is_gathered], (*size[:2], mul1, mul2)
        T = insum(expr, size=size, CG=CG, **_with_rows({"X": X, "Y": Y}, SRC))
        return T if T.dim() == 3 else T.flatten(2)


def shared_term(key: Key, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]) -> SharedTerm:
    """Return the two statements for paths that share a key."""
    first, second, out = slots
    entries, values, places = [], [], []
    rows = 0
    for number, path in enumerate(paths):
        (i, j, k), path_values = coefficients(path, irreps)
        entries.append(torch.stack([rows + k, first.first[path.i_in1] + i, second.first[path.i_in2] + j]))
        values.append(path_values)
        dim = irreps[2][path.i_out].ir.dim
        component = torch.arange(dim)
        places.append(torch.stack([out.first[path.i_out] + component, rows + component, torch.full((dim,), number)]))
        rows += dim
    count1, count2, count3 = (slot.counts[at] for slot, at in zip(slots, key[3]))
    CG = ELL.from_coo(torch.cat(entries, 1), torch.cat(values), (rows, count1, count2))
    ones = torch.ones(rows, dtype=torch.float64)
    A = ELL.from_coo(torch.cat(places, 1), ones, (count3, rows, len(paths)))
    is_flat = len(first.widths) == 1 < first.widths[0] and first.order is not None
    columns = {"X": first.columns} if is_flat else {}
    held = Channels(CG, UNWEIGHTED, columns) if 0 < CG.nnz <= MOST_ENTRIES else None
    pairs = Pairs(CG, held, first if is_flat and held is not None else None)
    return SharedTerm(key, len(paths), pairs, Multilinear.grouped(MIXED, GROUP_DIMS, "A[i,r,l]", A))
