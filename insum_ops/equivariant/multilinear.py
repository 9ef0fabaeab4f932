"""A statement around fixed coefficients whose gradients are statements around the same ones, each grouped for itself.

    Z[b,i,w] += T[b,r,n] * W[l,n,w] * A[i,r,l]        rows of A by i
    T[b,r,n] += Z[b,i,w] * W[l,n,w] * A[i,r,l]        by r: each is written once, without atomics
    W[l,n,w] += Z[b,i,w] * T[b,r,n] * A[i,r,l]        by i: sums over b are long dots

Which grouping is best depends on more than `insum` looks at, so it is stated. Any of the tensors is made from the
others by such a line, so gradients have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..formats import ELL
from ..formats.torch_state import is_transformed
from ..functional import insum
from .constants import Memory, copy_on
from .contraction import NO_ROWS, Contractions, Rows, outside_autocast

__all__ = ["Multilinear"]

Forms = dict[str, ELL]


@dataclass(frozen=True)
class Multilinear(Contractions):
    """`Z[...] += X[...] * Y[...] * CG[...]`, and each of X and Y from Z and the other."""

    coefficients: str  # their name, "CG"
    texts: Mapping[str, str]  # the statement that computes each tensor
    forms: Forms  # the coefficients grouped for that statement
    copies: dict[tuple[torch.device, torch.dtype], Multilinear] = field(default_factory=Memory, repr=False)

    @classmethod
    def grouped(cls, accesses: Mapping[str, str], group_dims: Mapping[str, int], fixed: str, CG: ELL) -> Multilinear:
        """Return the product of tensors read by `accesses` with coefficients read by `fixed`, such as "CG[i,j,l]".

        `group_dims` says along which dimension of CG the coefficients are grouped where that tensor is computed.
        """
        texts = {}
        for target, access in accesses.items():
            factors = [other for name, other in accesses.items() if name != target]
            # coefficients last: of equal choices for a dot's depth the first is taken, and theirs are short
            texts[target] = f"{access} += {' * '.join([*factors, fixed])}"
        forms = {name: CG.regroup(dim) for name, dim in group_dims.items()}
        return cls(fixed.partition("[")[0], texts, forms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.texts)

    def on(self, device: torch.device, dtype: torch.dtype) -> Multilinear:
        """Return the product over coefficients on a device, in all groupings: a tracer may meet gradients' first."""
        return self.copies.get((device, dtype)) or copy_on(self.copies, device, dtype, self.copied)

    def copied(self, device: torch.device, dtype: torch.dtype) -> Multilinear:
        """Return the product over coefficients on a device, copied there now."""
        forms = {name: form.to(device, dtype) for name, form in self.forms.items()}
        return Multilinear(self.coefficients, self.texts, forms, self.copies)

    def __call__(self, tensors: Mapping[str, Tensor], seed: Tensor | None, size: tuple[int, ...]) -> Tensor:
        """Return the first of `names`, contracted from the others and added to `seed`."""
        target = self.names[0]

        def contracted(operands: Mapping[str, Tensor]) -> Tensor:
            others = {name: tensor for name, tensor in operands.items() if name != target}
            first = next(iter(others.values()))
            return self.on(first.device, first.dtype).contract(target, others, operands.get(target), NO_ROWS, size)

        return outside_autocast(contracted, tensors if seed is None else {**tensors, target: seed})

    def contract(
        self,
        name: str,
        operands: Mapping[str, Tensor],
        seed: Tensor | None = None,
        rows: Rows = NO_ROWS,
        size: tuple[int, ...] = (),
    ) -> Tensor:
        """Return what `run` returns, with gradients of any order; a transform follows the statement itself."""
        run = self.run if is_transformed() else super().contract
        return run(name, operands, seed, rows, size)

    def run(
        self, name: str, operands: Mapping[str, Tensor], seed: Tensor | None, rows: Rows, size: tuple[int, ...]
    ) -> Tensor:
        """Return the named tensor, contracted from the others and the coefficients; see `on`."""
        factors: dict[str, Any] = {**operands, self.coefficients: self.forms[name]}
        if seed is not None:
            factors[name] = seed
        return insum(self.texts[name], size=size, **factors)
