"""A second input of scalars that is sparse, one-hot above all: one weight matrix for each kind of row.

    Z[YB[p,q],i,w] += YV[p,q] * CGV[i,r] * X[YB[p,q],CGJ[i,r],u] * W[CGL[i,r],u,YK[p],w]

Y is in GroupCOO grouped by kind: the rows of a group meet their kind's weights in one matrix product, as in a
convolution over kinds instead of offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import ELL, GroupCOO
from ..functional import insum
from .clebsch_gordan import Irreps
from .constants import Constants
from .paths import Instruction
from .slots import Slots

__all__ = ["ScalarTerm", "scalar_coefficients", "scalar_term"]

STATEMENT = "Z[YB[p,q],i,w] += YV[p,q] * CGV[i,r] * X[YB[p,q],CGJ[i,r],u] * W[CGL[i,r],u,YK[p],w]"


@dataclass(frozen=True)
class ScalarTerm:
    """`Z[YB[p,q],i,w] += YV[p,q] * CGV[i,r] * X[YB[p,q],CGJ[i,r],u] * W[CGL[i,r],u,YK[p],w]`.

    p counts groups of rows of one kind, r the paths into component i.
    """

    weight_shape: tuple[int, ...]  # paths, u, v, w
    tables: Constants  # CGV, CGJ, CGL: [i, r]

    def __call__(self, X: Tensor, Y: GroupCOO, W: Tensor, Z: Tensor | None, size: tuple[int, ...]) -> Tensor:
        X = X.unsqueeze(2) if X.dim() == 2 else X
        YB, YK = Y.coords
        assert YB is not None
        assert YK is not None
        tensors = {**self.tables.on(X.device, X.dtype), "X": X, "W": W.view(self.weight_shape)}
        tensors |= {"YB": YB, "YK": YK, "YV": Y.values}
        if Z is not None:
            tensors["Z"] = Z
        return insum(STATEMENT, size=size, **tensors)


def scalar_term(
    muls: tuple[int, int, int],
    places: tuple[int, int, int],
    paths: Sequence[Instruction],
    irreps: Sequence[Irreps],
    slots: Sequence[Slots],
) -> ScalarTerm:
    """Return one statement for fully connected paths that share multiplicities and slots; y is scalars."""
    CG = scalar_coefficients(places, paths, irreps, slots)
    _, CGJ, CGL = CG.coords
    assert CGJ is not None
    assert CGL is not None
    tables = Constants({"CGV": CG.values, "CGJ": CGJ, "CGL": CGL})
    return ScalarTerm((len(paths), *muls), tables)


def scalar_coefficients(
    places: tuple[int, int, int], paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> ELL:
    """Return CG[i,j,l], the weight of component j of X in component i of Z by path l, where y is scalars."""
    first, _, out = slots
    entries, values = [], []
    for number, path in enumerate(paths):
        dim = irreps[0][path.i_in1].ir.dim
        component = torch.arange(dim)
        Z, X = out.first[path.i_out] + component, first.first[path.i_in1] + component
        entries.append(torch.stack([Z, X, torch.full_like(Z, number)]))
        # x times a scalar is x: the coefficients are 1 / sqrt(dim), on the diagonal
        values.append(torch.full((dim,), path.path_weight * dim**-0.5, dtype=torch.float64))
    shape = (out.counts[places[2]], first.counts[places[0]], len(paths))
    return ELL.from_coo(torch.cat(entries, 1), torch.cat(values), shape, group_dim=0)
