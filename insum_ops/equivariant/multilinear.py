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

from ..compiler import outside_transforms, owned, unbatch_gradients, wanted_gradients
from ..formats import ELL
from ..formats.guard import may_keep
from ..formats.torch_state import (
    as_autocast,
    autocast_dtype,
    is_autocast_enabled,
    is_compiling,
    is_transformed,
    may_autocast,
    records_gradient,
)
from ..functional import insum
from .constants import Memory

__all__ = ["Multilinear"]

Forms = dict[str, ELL]


@dataclass(frozen=True)
class Multilinear:
    """`Z[...] += X[...] * Y[...] * CG[...]`, and each of X and Y from Z and the other."""

    names: tuple[str, ...]  # of the tensors; a call computes the first
    coefficients: str  # their name, "CG"
    texts: Mapping[str, str]  # the statement that computes each tensor
    forms: Forms  # the coefficients grouped for that statement
    copies: dict[tuple[torch.device, torch.dtype], Forms] = field(default_factory=Memory, repr=False)

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
        return cls(tuple(accesses), fixed.partition("[")[0], texts, forms)

    def on(self, device: torch.device, dtype: torch.dtype) -> Forms:
        """Return the coefficients on a device, in all groupings: a tracer may meet those of gradients first."""
        forms = self.copies.get((device, dtype))
        if forms is None:
            with outside_transforms():
                forms = {name: form.to(device, dtype) for name, form in self.forms.items()}
            if all([may_keep(form.values, *form.coords) for form in forms.values()]):
                self.copies[device, dtype] = forms
        return forms

    def __call__(self, tensors: dict[str, Tensor], seed: Tensor | None, size: tuple[int, ...]) -> Tensor:
        """Return the first of `names`, contracted from the others and added to `seed`."""
        target = self.names[0]
        device = next(iter(tensors.values())).device
        if (is_compiling() or may_autocast()) and is_autocast_enabled(device.type):
            dtype = autocast_dtype(device.type)
            tensors = {name: as_autocast(tensor, dtype) for name, tensor in tensors.items()}
            seed = None if seed is None else as_autocast(seed, dtype)
            with torch.autocast(device.type, enabled=False):
                return self.contract(target, tensors, seed, size)
        return self.contract(target, tensors, seed, size)

    def contract(self, target: str, tensors: dict[str, Tensor], seed: Tensor | None, size: tuple[int, ...]) -> Tensor:
        """Return `target`, contracted from the other tensors and added to `seed`, with gradients of any order."""
        first = next(iter(tensors.values()))
        forms = self.on(first.device, first.dtype)
        inputs = [*tensors.values()] if seed is None else [*tensors.values(), seed]
        if records_gradient(inputs) and not is_transformed():
            return _Contraction.apply(self, forms, target, tuple(tensors), size, seed, *tensors.values())  # type: ignore[no-any-return]
        return self.run(forms, target, tensors, seed, size)

    def run(
        self, forms: Forms, target: str, tensors: dict[str, Tensor], seed: Tensor | None, size: tuple[int, ...]
    ) -> Tensor:
        """Return what `contract` returns, without a graph."""
        operands = {**tensors, self.coefficients: forms[target]}
        if seed is not None:
            operands[target] = seed
        return insum(self.texts[target], size=size, **operands)


class _Contraction(torch.autograd.Function):
    """One of the tensors, contracted from the others. Its gradients are such contractions too."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Multilinear,
        forms: Forms,
        target: str,
        names: tuple[str, ...],
        size: tuple[int, ...],
        seed: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rest = product, target, names
        return owned(product.run(forms, target, dict(zip(names, tensors)), seed, size))

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        product, target, names = ctx.rest
        operands = dict(zip(names, ctx.saved_tensors))
        operands[target] = upstream
        grads: list[Tensor | None] = []
        wants_seed, *wanted = wanted_gradients(ctx)[5:]
        for name, is_wanted in zip(names, wanted):
            if not is_wanted:
                grads.append(None)
                continue
            others = {other: operands[other] for other in product.names if other != name}
            grad = product.contract(name, others, None, tuple(operands[name].shape))
            grads.append(grad if grad.dtype == operands[name].dtype else grad.to(operands[name].dtype))
        seeded = upstream if wants_seed else None
        return None, None, None, None, None, seeded, *grads
