"""Fully connected paths from inputs of single channels, weights for each sample: only components are summed over.

    Z[b,i,w] += X[b,j,u] * Y[b,k] * W[b,l,u,w] * CG[i,j,k,l]

u is 1, so a dot would be one deep and is not worth it. A row of coefficients for each output component stores its
result once, where a row for each path would add to memory with every coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler import has_kernels
from ..formats import ELL
from ..formats.torch_state import is_transformed
from .clebsch_gordan import Irreps
from .multilinear import Multilinear
from .paths import Instruction
from .slots import Slots
from .terms import PathTerm, WithFallback, coefficients, gathered

__all__ = ["SingleTerm", "with_single_channels"]

ACCESSES = {"Z": "Z[b,i,w]", "X": "X[b,j,u]", "Y": "Y[b,k]", "W": "W[b,l,u,w]"}
GROUP_DIMS = {"Z": 0, "X": 1, "Y": 2, "W": 3}  # each result has a row of coefficients: all are stored once


@dataclass(frozen=True)
class SingleTerm(WithFallback):
    """`Z[b,i,w] += X[b,j,u] * Y[b,k] * W[b,l,u,w] * CG[i,j,k,l]` where kernels run, else `plain`."""

    product: Multilinear

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape (paths, u, w) of one sample's weights."""
        return self.num_paths, *self.plain.weight_shape[::2]

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.plain.prepare(device, dtype)
        self.product.on(device, dtype)

    def __call__(
        self,
        X: Tensor,  # [b, j], [n, j] with SRC
        Y: Tensor,  # [b, k]; or the position of the one that is 1, [b]
        W: Tensor | None,  # flat, [b, weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        if W is None or W.dim() != 2 or Y.dim() != 2 or is_transformed() or not has_kernels(X.device):
            return self.plain(X, Y, W, Z, size, SRC)
        X = gathered(X.unsqueeze(2) if X.dim() == 2 else X, SRC, size[0])
        return self.product({"X": X, "Y": Y, "W": W.view(W.shape[0], *self.weight_shape)}, Z, size)


def with_single_channels(
    term: PathTerm, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> PathTerm | SingleTerm:
    """Return the term with rows by output component if its inputs have one channel each, else as it is."""
    mode, (mul1, mul2, _), has_weight, places = term.key
    if mode != "uvw" or mul1 != 1 or mul2 != 1 or not has_weight:
        return term
    entries, values = [], []
    for number, path in enumerate(paths):
        (j, k, i), path_values = coefficients(path, irreps)
        at = (path.i_out, path.i_in1, path.i_in2)
        first = [slots[side].first[place] for side, place in zip((2, 0, 1), at)]
        entries.append(torch.stack([first[0] + i, first[1] + j, first[2] + k, torch.full_like(i, number)]))
        values.append(path_values)
    count1, count2, count3 = (slot.counts[place] for slot, place in zip(slots, places))
    CG = ELL.from_coo(torch.cat(entries, 1), torch.cat(values), (count3, count1, count2, len(paths)), group_dim=0)
    return SingleTerm(term, Multilinear.grouped(ACCESSES, GROUP_DIMS, "CG[i,j,k,l]", CG))
