"""A dense second input of scalars, such as a one-hot float tensor: each of its columns has a weight matrix.

In one statement where products with weights are few,

    Z[b,i,w] += X[b,j,u] * Y[b,v] * W[l,u,v,w] * CG[i,j,l]

or first a matrix for each sample, which every component of a path then shares:

    V[b,m] += Y[b,v] * W[v,m]                        m counts (l,u,w)
    Z[b,i,w] += CG[i,j,l] * X[b,j,u] * V[b,l,u,w]    as with weights of their own for each sample

With 89 kinds, degrees 0 to 2 and 128 channels the second way takes a third of the products: 3 matrices instead of 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler import device_of
from ..formats.torch_state import asked_once
from .clebsch_gordan import Irreps, read_irreps
from .constants import Constants
from .multilinear import Multilinear
from .paths import Instruction
from .slots import Slots, make_slots
from .sparse_scalars import scalar_coefficients
from .table_terms import TableTerm, with_tables
from .terms import Key, WithFallback, gathered, path_term

__all__ = ["SpeciesTerm", "species_term"]

FUSED = {"Z": "Z[b,i,w]", "X": "X[b,j,u]", "Y": "Y[b,v]", "W": "W[l,u,v,w]"}
GROUP_DIMS = {"Z": 0, "X": 1, "Y": 0, "W": 0}

MOST_BYTES = 1 << 30  # of the samples' matrices at a time


@dataclass(frozen=True)
class SpeciesTerm(WithFallback):
    """`Z[b,i,w] += X[b,j,u] * Y[b,v] * W[l,u,v,w] * CG[i,j,l]`, in the order that takes the fewest products."""

    fused: Multilinear
    each: TableTerm | None  # the product with matrices for each sample, where these may come first
    products: tuple[int, int]  # of each channel of a sample: as one statement, and with such matrices
    one: Constants  # the second input of `each`, a single 1

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.plain.prepare(device, dtype)
        self.fused.on(device, dtype)
        self.one.on(device, dtype)
        if self.each is not None and self.has_matrices(device):
            self.each.prepare(device, dtype)

    def has_matrices(self, device: torch.device) -> bool:
        """Whether computing a matrix for each sample first is faster on a device."""
        return self.each is not None and _moving_pays(*self.products, self.num_paths, device)

    def __call__(
        self,
        X: Tensor,  # [b, j, u], [n, j, u] with SRC; without u if that is 1
        Y: Tensor,  # [b, 1, v], without v if that is 1; or the position of the one that is 1, [b]
        W: Tensor | None,  # [weight_numel]
        Z: Tensor | None,  # what to start from
        size: tuple[int, ...],  # of Z
        SRC: Tensor | None,  # [b]
    ) -> Tensor:
        if Y.dim() == 1:
            return self.plain(X, Y, W, Z, size, SRC)
        assert W is not None
        X = X.unsqueeze(2) if X.dim() == 2 else X
        weights = W.view(self.num_paths, *self.plain.weight_shape)
        if self.each is not None and self.has_matrices(Y.device):
            return self.with_matrices(self.each, X, Y.flatten(1), weights, Z, size, SRC)
        return self.fused({"X": gathered(X, SRC, size[0]), "Y": Y.flatten(1), "W": weights}, Z, size)

    def with_matrices(
        self,
        per_sample: TableTerm,
        X: Tensor,
        Y: Tensor,  # [b, v]
        W: Tensor,  # [l, u, v, w]
        Z: Tensor | None,
        size: tuple[int, ...],
        SRC: Tensor | None,
    ) -> Tensor:
        """Return Z by way of a matrix for each sample, for as many samples at a time as `MOST_BYTES` has room for."""
        W = W.permute(2, 0, 1, 3).flatten(1)
        one = self.one.on(Y.device, Y.dtype)["one"]
        rows = max(1, MOST_BYTES // (per_sample.weight_numel * W.element_size()))

        def part(X: Tensor, Y: Tensor, Z: Tensor | None, SRC: Tensor | None) -> Tensor:
            V = Y @ W  # a plain matrix product: torch has the kernels
            return per_sample(X, one.expand(Y.shape[0], 1), V, Z, (Y.shape[0], *size[1:]), SRC)

        if size[0] <= rows:
            return part(X, Y, Z, SRC)
        parts = []
        for start in range(0, size[0], rows):
            samples = slice(start, start + rows)
            seed = None if Z is None else Z[samples]
            if SRC is None:
                parts.append(part(X[samples], Y[samples], seed, None))
            else:
                parts.append(part(X, Y[samples], seed, SRC[samples]))
        return torch.cat(parts)


KindsTerm = SpeciesTerm  # as pickles of version 0.1.0 call it


def species_term(
    key: Key, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> SpeciesTerm:
    """Return the term of paths that share a key and have one block of scalars for their second input."""
    CG = scalar_coefficients(key[3], paths, irreps, slots)
    fused = Multilinear.grouped(FUSED, GROUP_DIMS, "CG[i,j,l]", CG)
    components, matrices, kinds = sum(irreps[0][path.i_in1].ir.dim for path in paths), len(paths), key[1][1]
    products = components * kinds, matrices * kinds + components
    per_sample = _per_sample_term(key, paths, irreps, slots) if products[1] < products[0] else None
    one = Constants({"one": torch.ones(1, 1, dtype=torch.float64)})
    return SpeciesTerm(path_term(key, paths, irreps, slots), fused, per_sample, products, one)


def _moving_pays(fused: int, with_matrices: int, matrices: int, device: torch.device) -> bool:
    """Return whether matrices save more products than a device makes while it writes and reads one number of each.

    Reckoned for float32, not measured: one H200 makes 56 products meanwhile.
    """
    return with_matrices + matrices * _products_per_move(device) < fused


@asked_once
def _products_per_move(device: torch.device) -> float:
    """Return the products of a device while it writes and reads a number."""
    return 2 * device_of(device).products_per_number(torch.float32.itemsize)


def _per_sample_term(
    key: Key, paths: Sequence[Instruction], irreps: Sequence[Irreps], slots: Sequence[Slots]
) -> TableTerm | None:
    """Return the paths as a term with one scalar for their second input and weights for each sample.

    None if tables would not make such a term faster.
    """
    mode, (mul1, _, mul_out), has_weight, (at1, _, at3) = key
    scalar = read_irreps("irreps_in2", "0e")
    alone, places = (irreps[0], scalar, irreps[2]), (slots[0], make_slots(scalar, "mul_ir"), slots[2])
    scalar_paths = [path._replace(path_shape=(mul1, 1, mul_out)) for path in paths]
    single = path_term((mode, (mul1, 1, mul_out), has_weight, (at1, 0, at3)), scalar_paths, alone, places)
    term = with_tables(single, scalar_paths, alone, places)
    return term if isinstance(term, TableTerm) else None
