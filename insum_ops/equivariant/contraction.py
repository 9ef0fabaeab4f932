"""Any tensor of a product, contracted from its others: one autograd function, whose gradients are such contractions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compiler import cast_operands, owned, unbatch_gradients, wanted_gradients
from ..formats.torch_state import is_compiling, may_autocast, records_gradient

__all__ = ["NO_ROWS", "Contractions", "Rows", "outside_autocast"]

Rows = tuple[Tensor | None, Tensor | None]  # SRC and DST: the rows of X, and of Z, that belong to each edge
NO_ROWS: Rows = (None, None)


class Contractions(ABC):
    """A product of tensors, each of which is contracted from all the others by a statement of its own."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tensors, in the order in which statements are given them; a call computes the first."""

    @abstractmethod
    def run(
        self, name: str, operands: Mapping[str, Tensor], seed: Tensor | None, rows: Rows, size: tuple[int, ...]
    ) -> Tensor:
        """Return the named tensor, of a size, contracted from the others and added to `seed`, without a graph."""

    def contract(
        self,
        name: str,
        operands: Mapping[str, Tensor],
        seed: Tensor | None = None,
        rows: Rows = NO_ROWS,
        size: tuple[int, ...] = (),
    ) -> Tensor:
        """Return what `run` returns, with gradients of any order."""
        if records_gradient([*operands.values()] if seed is None else [*operands.values(), seed]):
            call = self, name, tuple(operands), size
            return _Contraction.apply(call, *rows, seed, *operands.values())  # type: ignore[no-any-return]
        return self.run(name, operands, seed, rows, size)

    def gradients(self, wanted: Sequence[str], operands: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
        """Return the wanted tensors, each contracted from the other `operands` and of the size of its own."""
        grads = {}
        for name in wanted:
            others = {other: operands[other] for other in self.names if other != name and other in operands}
            grads[name] = self.gradient(name, others, rows, tuple(operands[name].shape))
        return grads

    def gradient(self, name: str, others: Mapping[str, Tensor], rows: Rows, size: tuple[int, ...]) -> Tensor:
        """Return the named tensor, contracted from the others."""
        return self.contract(name, others, None, rows, size)


class _Contraction(torch.autograd.Function):
    """One tensor of a product, contracted from the others and added to a seed."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Contractions, str, tuple[str, ...], tuple[int, ...]],
        SRC: Tensor | None,
        DST: Tensor | None,
        seed: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(SRC, DST, *tensors)
        product, target, names, size = call
        ctx.rest = product, target, names
        return owned(product.run(target, dict(zip(names, tensors)), seed, (SRC, DST), size))

    @staticmethod
    @unbatch_gradients
    def backward(ctx: Any, upstream: Tensor) -> Any:
        SRC, DST, *tensors = ctx.saved_tensors
        product, target, names = ctx.rest
        operands = {target: upstream, **dict(zip(names, tensors))}
        wants_seed, *wants = wanted_gradients(ctx)[3:]
        wanted = [name for name, is_wanted in zip(names, wants) if is_wanted]
        # backward computes in the dtypes of forward, whatever autocast says where it is called
        is_cast = not is_compiling() and may_autocast()
        with torch.autocast(upstream.device.type, enabled=False) if is_cast else nullcontext():
            grads = product.gradients(wanted, operands, (SRC, DST))
        return None, None, None, upstream if wants_seed else None, *[grads.get(name) for name in names]


def outside_autocast(run: Callable[[Mapping[str, Tensor]], Tensor], operands: Mapping[str, Tensor]) -> Tensor:
    """Return what `run` computes of operands, which autocast casts before and not inside: its graph has their types."""
    cast = cast_operands(operands)
    if cast is None:
        return run(operands)
    kind, operands = cast
    with torch.autocast(kind, enabled=False):
        return run(operands)
