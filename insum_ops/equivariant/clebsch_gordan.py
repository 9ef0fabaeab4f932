"""Irreps as e3nn reads them, and its Clebsch-Gordan coefficients in float64."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..compiler import OperandError
from ..formats.guard import may_keep

__all__ = ["Irreps", "clebsch_gordan", "e3nn_o3", "read_irreps"]

Irreps = Any  # e3nn.o3.Irreps; e3nn ships no types

ZERO = 1e-12  # e3nn computes coefficients in float64 by sums whose zeros come out as rounding errors


@cache
def e3nn_o3() -> Any:
    """Return the module `e3nn.o3`, imported by the first call because that takes over a second.

    Raises ImportError if e3nn, which is an extra, is not installed.
    """
    try:
        return importlib.import_module("e3nn.o3")
    except ModuleNotFoundError as error:
        if error.name not in ("e3nn", "e3nn.o3"):
            raise
        raise ImportError(
            "equivariant tensor products read irreps with e3nn, which is not installed; "
            "install it with pip install 'insum_ops[e3nn]'"
        ) from None


def read_irreps(name: str, irreps: object) -> Irreps:
    """Return irreps from all that e3nn takes: its own class, a string, a list of (multiplicity, (l, parity)).

    Raises OperandError, in which the irreps have the given name, where e3nn can't read them.
    """
    o3 = e3nn_o3()
    if isinstance(irreps, o3.Irreps):
        return irreps
    try:
        return o3.Irreps(irreps)
    except (ValueError, TypeError, AssertionError):  # e3nn asserts
        remedy = "write multiplicities, degrees and parities, as in '16x0e + 8x1o'"
        kind = type(irreps)
        if kind.__module__ != "builtins":  # irreps of cuequivariance, which print as those of e3nn do
            remedy = f"it is {kind.__module__.partition('.')[0]}'s {kind.__name__}, so pass str({name})"
        raise OperandError(f"{name} is {irreps!r}, which e3nn can't read as irreps; {remedy}") from None


def clebsch_gordan(l1: int, l2: int, l3: int) -> tuple[Tensor, Tensor]:
    """Return the nonzeros of C[i,j,k], of norm 1 in e3nn's real basis: positions [3, n] and values [n], float64."""
    return (_cached_coefficients if may_keep() else _cached_coefficients.__wrapped__)(l1, l2, l3)


@cache
def _cached_coefficients(l1: int, l2: int, l3: int) -> tuple[Tensor, Tensor]:
    dense = e3nn_o3().wigner_3j(l1, l2, l3, dtype=torch.float64, device="cpu")
    positions = (dense.abs() > ZERO).nonzero().T
    return positions, dense[tuple(positions)]
