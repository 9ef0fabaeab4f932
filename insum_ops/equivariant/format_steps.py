"""What terms whose coefficients are in a format do in one call, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..compiler.autograd import evaluate
from ..compiler.gradients import gradients_of
from ..compiler.ready import find, find_backward
from ..functional import insum
from .multilinear import Multilinear
from .shared import PAIRED, SharedTerm
from .singles import SingleTerm
from .steps import Calls, Parts, Step, Wanted

__all__ = ["shared_step", "single_step"]


@dataclass(frozen=True)
class MultilinearStep:
    """A term around coefficients in a format, by which each of its tensors is made of the others."""

    number: int
    weight_shape: tuple[int, ...]
    product: Multilinear
    forms: Mapping[str, Any]  # of the coefficients, for each result
    has_v = False

    def made(self, calls: Calls, name: str, given: Mapping[str, Any], size: tuple[int, ...]) -> Tensor:
        key, coefficients = (self.number, name, len(given)), self.product.coefficients
        operands = {**given, coefficients: self.forms[name]}
        return _run_sparse(calls, key, self.product.texts[name], coefficients, operands, size)


@dataclass(frozen=True)
class SharedStep(MultilinearStep):
    """A term of two statements: what is between them is kept."""

    paired: str
    CG: Any  # a format
    rows: tuple[int, ...]  # of T, without b

    def forward(
        self, calls: Calls, parts: Parts, Z: Tensor | None, size: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        given = {"CG": self.CG, **self.paired_reads(parts)}
        T = _run_sparse(calls, (self.number, "T"), self.paired, "CG", given, (size[0], *self.rows))
        seed = {} if Z is None else {"Z": Z}
        return self.made(calls, "Z", {"T": T, "W": parts.W, **seed}, size), T

    def paired_reads(self, parts: Parts) -> dict[str, Any]:
        given = {"X": parts.X, "Y": parts.Y}
        if parts.SRC is not None:
            given["SRC"] = parts.SRC
        return given

    def backward(
        self,
        calls: Calls,
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
        dW = self.made(calls, "W", {"Z": dZ, "T": kept}, tuple(parts.W.shape)) if wanted[2] else None
        if wanted[0] or wanted[1]:
            dT = self.made(calls, "T", {"Z": dZ, "W": parts.W}, tuple(kept.shape))
            dense = self.paired_reads(parts)
            asked = (False, wanted[0], wanted[1], False)[: 1 + len(dense)]
            _, own_x, own_y, *_ = _gradients(calls, (self.number, "dX"), self.paired, "CG", self.CG, dense, dT, asked)
            dX = own_x if dX is None else dX.add_(own_x)
            dY = own_y if dY is None else dY.add_(own_y)
        return dX, dY, dW


class SingleStep(MultilinearStep):
    """A term of one statement."""

    def forward(
        self, calls: Calls, parts: Parts, Z: Tensor | None, size: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        seed = {} if Z is None else {"Z": Z}
        return self.made(calls, "Z", {"X": parts.X, "Y": parts.Y, "W": parts.W, **seed}, size), None

    def backward(
        self,
        calls: Calls,
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
            own = self.made(calls, "X", {"Z": dZ, "Y": parts.Y, "W": parts.W}, tuple(parts.X.shape))
            dX = own if dX is None else dX.add_(own)
        if wanted[1]:
            own = self.made(calls, "Y", {"Z": dZ, "X": parts.X, "W": parts.W}, tuple(parts.Y.shape))
            dY = own if dY is None else dY.add_(own)
        if wanted[2]:
            dW = self.made(calls, "W", {"Z": dZ, "X": parts.X, "Y": parts.Y}, tuple(parts.W.shape))
            dW = dW if place is None else place.copy_(dW)
        return dX, dY, dW


def _run_sparse(
    calls: Calls, key: object, expr: str, name: str, given: Mapping[str, Any], size: tuple[int, ...]
) -> Tensor:
    """The statement, in which `name` is the format."""
    call = calls.get(key)
    if call is not None:
        form = given[name]
        tensors = [operand.values if operand is form else operand for operand in given.values()]
        return call(form, tensors)  # type: ignore[no-any-return]
    made = insum(expr, size=size, **given)
    found = find(expr, given, size)
    if found is not None:
        calls[key] = found[0]
    return made


def _gradients(
    calls: Calls,
    key: object,
    expr: str,
    name: str,
    form: Any,
    dense: Mapping[str, Tensor],
    upstream: Tensor,
    wanted: tuple[bool, ...],
) -> list[Any]:
    call = calls.get(key)
    if call is not None:
        return call(form, dense, upstream)  # type: ignore[no-any-return]
    made = gradients_of(evaluate, expr, name, form, dense, upstream, wanted)
    _, found = find_backward(expr, form, dense, upstream, wanted)
    if found is not None:
        calls[key] = found
    return made


def shared_step(term: SharedTerm, number: int, x: Tensor, is_gathered: bool) -> Step | None:
    """None: the second input has channels too, and is written out over pairs of them."""
    _, (mul1, mul2, mul_out), _, _ = term.key
    if mul2 > 1:
        return None
    CG, forms = term.on(x.device, x.dtype), term.mixed.on(x.device, x.dtype)
    shape, rows = (term.num_paths, mul1, mul_out), (CG.shape[0], mul1)
    return SharedStep(number, shape, term.mixed, forms, PAIRED[int(is_gathered)], CG, rows)


def single_step(term: SingleTerm, number: int, x: Tensor) -> Step:
    return SingleStep(number, term.weight_shape, term.product, term.product.on(x.device, x.dtype))
