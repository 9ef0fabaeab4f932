"""The statements of terms whose coefficients are in a format, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compiler import has_kernels
from ..functional import insum
from .multilinear import Multilinear
from .shared_weights import Pairs, SharedTerm
from .single_channel import SingleTerm
from .term_statements import Parts, Step, Wanted

__all__ = ["shared_step", "single_step"]


@dataclass(frozen=True)
class MultilinearStep:
    """A term around coefficients in a format, by which each of its tensors is contracted from the others."""

    weight_shape: tuple[int, ...]
    product: Multilinear
    forms: Mapping[str, Any]  # the format of the coefficients for each result
    has_v = False
    reads_columns = False

    def contract(self, name: str, operands: Mapping[str, Any], size: tuple[int, ...]) -> Tensor:
        """Return the named tensor, contracted from the others and the coefficients."""
        return insum(self.product.texts[name], size=size, **operands, **{self.product.coefficients: self.forms[name]})


@dataclass(frozen=True)
class SharedStep(MultilinearStep):
    """A term of two statements. The tensor T between them is saved for backward."""

    pairs: Pairs
    rows: tuple[int, ...]  # of T, without b
    reads_columns: bool = False

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        T = self.pairs(parts.X, parts.Y, parts.SRC, (size[0], *self.rows))
        seed = {} if Z is None else {"Z": Z}
        return self.contract("Z", {"T": T, "W": parts.W, **seed}, size), T

    def backward(
        self,
        parts: Parts,
        kept: Tensor | None,
        dZ: Tensor,
        wanted: Wanted,
        dX: Tensor | None,
        dY: Tensor | None,
        place: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        assert kept is not None
        assert parts.W is not None
        dW = self.contract("W", {"Z": dZ, "T": kept}, tuple(parts.W.shape)) if wanted[2] else None
        if wanted[0] or wanted[1]:
            dT = self.contract("T", {"Z": dZ, "W": parts.W}, tuple(kept.shape))
            term_dX, term_dY = self.pairs.gradients(parts.X, parts.Y, parts.SRC, dT, wanted[:2])
            dX = term_dX if dX is None or term_dX is None else dX.add_(term_dX)
            dY = term_dY if dY is None or term_dY is None else dY.add_(term_dY)
        return dX, dY, dW


class SingleStep(MultilinearStep):
    """A term of one statement."""

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        seed = {} if Z is None else {"Z": Z}
        return self.contract("Z", {"X": parts.X, "Y": parts.Y, "W": parts.W, **seed}, size), None

    def backward(
        self,
        parts: Parts,
        kept: Tensor | None,
        dZ: Tensor,
        wanted: Wanted,
        dX: Tensor | None,
        dY: Tensor | None,
        place: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        assert parts.W is not None
        dW = None
        if wanted[0]:
            term_grad = self.contract("X", {"Z": dZ, "Y": parts.Y, "W": parts.W}, tuple(parts.X.shape))
            dX = term_grad if dX is None else dX.add_(term_grad)
        if wanted[1]:
            term_grad = self.contract("Y", {"Z": dZ, "X": parts.X, "W": parts.W}, tuple(parts.Y.shape))
            dY = term_grad if dY is None else dY.add_(term_grad)
        if wanted[2]:
            dW = self.contract("W", {"Z": dZ, "X": parts.X, "Y": parts.Y}, tuple(parts.W.shape))
            dW = dW if place is None else place.copy_(dW)
        return dX, dY, dW


def shared_step(term: SharedTerm, x: Tensor, is_gathered: bool) -> Step | None:
    """Return the step of a term with shared weights.

    None if the second input has several channels: it is then written out over pairs of channels, call by call.
    """
    _, (mul1, mul2, mul_out), _, _ = term.key
    if mul2 > 1:
        return None
    # rows that edges gather are fewer than edges, and are put in order before
    reads_columns = term.pairs.flat is not None and not is_gathered and has_kernels(x.device)
    shape, rows = (term.num_paths, mul1, mul_out), (term.pairs.CG.shape[0], mul1)
    return SharedStep(shape, term.mixed, term.mixed.on(x.device, x.dtype), term.pairs, rows, reads_columns)


def single_step(term: SingleTerm, x: Tensor) -> Step:
    """Return the step of a term whose inputs have one channel each, for tensors like x."""
    return SingleStep(term.weight_shape, term.product, term.product.on(x.device, x.dtype))
