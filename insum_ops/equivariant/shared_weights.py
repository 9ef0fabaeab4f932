"""Fully connected paths with weights that all samples share: channels are mixed by one matrix product.

    T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]
    Z[b,i,w] += T[b,r,n] * W[l,n,w] * A[i,r,l]

r counts the components of every path's own output. In one statement the product with W would be taken once for each
coefficient; T is small, since it has no weights in it. n counts pairs (u,v) of channels. Kernels want long rows, so
for them X and Y are written out over n; torch operations read X[b,j,u] and Y[b,k,v]. With one channel in the second
input n is u, and Y has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..compiler import has_kernels
from ..formats import ELL
from ..functional import insum
from .clebsch_gordan import Irreps
from .constants import Memory, format_on
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


@dataclass(frozen=True)
class SharedTerm:
    """`T[b,r,n] += CG[r,j,k] * X[b,j,n] * Y[b,k,n]`, then `Z[b,i,w] += T[b,r,n] * W[l,n,w] * A[i,r,l]`."""

    key: Key
    num_paths: int
    CG: ELL
    mixed: Multilinear
    copies: dict[tuple[torch.device, torch.dtype], ELL] = field(default_factory=Memory, repr=False)

    @property
    def weight_numel(self) -> int:
        return self.num_paths * prod(self.key[1])

    def on(self, device: torch.device, dtype: torch.dtype) -> ELL:
        return format_on(device, dtype, self.CG, self.copies)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.on(device, dtype)
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
        CG, is_gathered = self.on(X.device, X.dtype), int(SRC is not None)
        size: tuple[int, ...] = (rows, CG.shape[0], mul1 * mul2)
        if mul2 == 1:
            expr = PAIRED[is_gathered]
        elif has_kernels(X.device):
            expr, X, Y = PAIRED_LONG[is_gathered], X.repeat_interleave(mul2, 2), Y.repeat(1, 1, mul1)
        else:
            expr, size = PAIRED_BOTH[is_gathered], (*size[:2], mul1, mul2)
        tensors = {"CG": CG, "X": X, "Y": Y}
        if SRC is not None:
            tensors["SRC"] = SRC
        T = insum(expr, size=size, **tensors)
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
    return SharedTerm(key, len(paths), CG, Multilinear.grouped(MIXED, GROUP_DIMS, "A[i,r,l]", A))
