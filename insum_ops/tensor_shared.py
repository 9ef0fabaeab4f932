"""Fully connected paths with weights that all samples share: channels are mixed by one matrix product.

    T[b,r,u] += CG[r,j,k] * X[b,j,u] * Y[b,k]
    Z[b,i,w] += A[i,r,l] * T[b,r,u] * W[l,u,w]

r counts the components of every path's own output. In one statement the product with W would be taken once for each
coefficient; T is small, since it has no weights in it. Where the second input has channels too, T[b,r,u,v] has them
all, and the second statement takes (u,v) as one index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from .clebsch_gordan import Irreps
from .compiler.ready import outside_transforms
from .formats import ELL
from .functional import insum
from .tensor_paths import Instruction
from .tensor_slots import Slots
from .tensor_terms import Key, coefficients

__all__ = ["SharedTerm", "shared_term"]

Pair = tuple[ELL, ELL]

# [are rows of X gathered]; by an int, since not every tracer takes a bool for an index
MIXED = "T[b,r,u] += CG[r,j,k] * X[b,j,u] * Y[b,k]", "T[b,r,u] += CG[r,j,k] * X[SRC[b],j,u] * Y[b,k]"
MIXED_BOTH = "T[b,r,u,v] += CG[r,j,k] * X[b,j,u] * Y[b,k,v]", "T[b,r,u,v] += CG[r,j,k] * X[SRC[b],j,u] * Y[b,k,v]"


@dataclass(frozen=True)
class SharedTerm:
    """`T[b,r,u] += CG[r,j,k] * X[b,j,u] * Y[b,k]`, then `Z[b,i,w] += A[i,r,l] * T[b,r,u] * W[l,u,w]`."""

    key: Key
    num_paths: int
    CG: ELL
    A: ELL
    copies: dict[tuple[torch.device, torch.dtype], Pair] = field(default_factory=dict, repr=False)

    @property
    def weight_numel(self) -> int:
        return self.num_paths * prod(self.key[1])

    def on(self, device: torch.device, dtype: torch.dtype) -> Pair:
        found = self.copies.get((device, dtype))
        if found is None:
            with outside_transforms():
                found = self.CG.to(device, dtype), self.A.to(device, dtype)
            if type(found[0].values) is Tensor:  # a FakeTensorMode's are good for one call
                self.copies[device, dtype] = found
        return found

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
        CG, A = self.on(X.device, X.dtype)
        tensors = {"CG": CG, "X": X.unsqueeze(2) if X.dim() == 2 else X, "Y": Y}
        if SRC is not None:
            tensors["SRC"] = SRC
        if mul2 == 1:
            T = insum(MIXED[int(SRC is not None)], size=(size[0], CG.shape[0], mul1), **tensors)
        else:
            T = insum(MIXED_BOTH[int(SRC is not None)], size=(size[0], CG.shape[0], mul1, mul2), **tensors).flatten(2)
        tensors = {"A": A, "T": T, "W": W.view(self.num_paths, mul1 * mul2, mul_out)}
        if Z is not None:
            tensors["Z"] = Z
        return insum("Z[b,i,w] += A[i,r,l] * T[b,r,u] * W[l,u,w]", size=size, **tensors)


def shared_term(key: Key, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]) -> SharedTerm:
    """The two statements for paths that share a key."""
    first, second, out = slots
    entries, values, places = [], [], []
    rows = 0
    for number, path in enumerate(paths):
        (i, j, k), own = coefficients(path, irreps)
        entries.append(torch.stack([rows + k, first.first[path.i_in1] + i, second.first[path.i_in2] + j]))
        values.append(own)
        dim = irreps[2][path.i_out].ir.dim
        component = torch.arange(dim)
        places.append(torch.stack([out.first[path.i_out] + component, rows + component, torch.full((dim,), number)]))
        rows += dim
    count1, count2, count3 = (slot.counts[at] for slot, at in zip(slots, key[3]))
    CG = ELL.from_coo(torch.cat(entries, 1), torch.cat(values), (rows, count1, count2))
    ones = torch.ones(rows, dtype=torch.float64)
    A = ELL.from_coo(torch.cat(places, 1), ones, (count3, rows, len(paths)))
    return SharedTerm(key, len(paths), CG, A)
