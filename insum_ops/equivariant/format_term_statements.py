"""What terms whose coefficients are in a format do in one call, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compiler import evaluate, gradients_of
from ..functional import insum
from .multilinear import Multilinear
from .shared_weights import PAIRED, SharedTerm
from .single_channel import SingleTerm
from .term_statements import Parts, Step, Wanted

__all__ = ["shared_step", "single_step"]


@dataclass(frozen=True)
class MultilinearStep:
    """A term around coefficients in a format, by which each of its tensors is made of the others."""

    weight_shape: tuple[int, ...]
    product: Multilinear
    forms: Mapping[str, Any]  # of the coefficients, for each result
    has_v = False

    def made(self, name: str, given: Mapping[str, Any], size: tuple[int, ...]) -> Tensor:
        return insum(self.product.texts[name], size=size, **given, **{self.product.coefficients: self.forms[name]})


@dataclass(frozen=True)
class SharedStep(MultilinearStep):
    """A term of two statements: what is between them is kept."""

    paired: str
    CG: Any  # a format
    rows: tuple[int, ...]  # of T, without b

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        T = insum(self.paired, size=(size[0], *self.rows), CG=self.CG, **self.paired_reads(parts))
        seed = {} if Z is None else {"Z": Z}
        return self.made("Z", {"T": T, "W": parts.W, **seed}, size), T

    def paired_reads(self, parts: Parts) -> dict[str, Any]:
        given = {"X": parts.X, "Y": parts.Y}
        if parts.SRC is not None:
            given["SRC"] = parts.SRC
        return given

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
        dW = self.made("W", {"Z": dZ, "T": kept}, tuple(parts.W.shape)) if wanted[2] else None
        if wanted[0] or wanted[1]:
            dT = self.made("T", {"Z": dZ, "W": parts.W}, tuple(kept.shape))
            dense = self.paired_reads(parts)
            asked = (False, wanted[0], wanted[1], False)[: 1 + len(dense)]
            _, own_x, own_y, *_ = gradients_of(evaluate, self.paired, "CG", self.CG, dense, dT, asked)
            dX = own_x if dX is None or own_x is None else dX.add_(own_x)
            dY = own_y if dY is None or own_y is None else dY.add_(own_y)
        return dX, dY, dW


class SingleStep(MultilinearStep):
    """A term of one statement."""

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        seed = {} if Z is None else {"Z": Z}
        return self.made("Z", {"X": parts.X, "Y": parts.Y, "W": parts.W, **seed}, size), None

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
            own = self.made("X", {"Z": dZ, "Y": parts.Y, "W": parts.W}, tuple(parts.X.shape))
            dX = own if dX is None else dX.add_(own)
        if wanted[1]:
            own = self.made("Y", {"Z": dZ, "X": parts.X, "W": parts.W}, tuple(parts.Y.shape))
            dY = own if dY is None else dY.add_(own)
        if wanted[2]:
            dW = self.made("W", {"Z": dZ, "X": parts.X, "Y": parts.Y}, tuple(parts.W.shape))
            dW = dW if place is None else place.copy_(dW)
        return dX, dY, dW


def shared_step(term: SharedTerm, x: Tensor, is_gathered: bool) -> Step | None:
    """None: the second input has channels too, and is written out over pairs of them."""
    _, (mul1, mul2, mul_out), _, _ = term.key
    if mul2 > 1:
        return None
    CG, forms = term.on(x.device, x.dtype), term.mixed.on(x.device, x.dtype)
    shape, rows = (term.num_paths, mul1, mul_out), (CG.shape[0], mul1)
    return SharedStep(shape, term.mixed, forms, PAIRED[int(is_gathered)], CG, rows)


def single_step(term: SingleTerm, x: Tensor) -> Step:
    return SingleStep(term.weight_shape, term.product, term.product.on(x.device, x.dtype))
