"""The paths of a tensor product: e3nn's instructions, their weights' shapes and their normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from operator import index
from typing import NamedTuple

from torch import Tensor

from ..compiler import OperandError, ShapeError, UnsupportedError
from .clebsch_gordan import Irreps

__all__ = ["LETTERS", "MODES", "Instruction", "fully_connected", "normalised", "path_shape"]

LETTERS = {  # mode: the second input's channel, the weight's, the output's
    "uvw": ("v", "uvw", "w"),
    "uvu": ("v", "uv", "u"),
    "uvv": ("v", "uv", "v"),
    "uuw": ("u", "uw", "w"),
    "uuu": ("u", "u", "u"),
    "uvuv": ("v", "uv", "uv"),
}
MODES = tuple(LETTERS)
IRREP_NORMALIZATIONS = ("component", "norm", "none")
PATH_NORMALIZATIONS = ("element", "path", "none")

Variances = Sequence[float] | Tensor | None


class Instruction(NamedTuple):
    """in1[i_in1] times in2[i_in2] into out[i_out]; field by field what e3nn calls an instruction.

    `path_weight` is the factor in front of the path, normalisation included.
    """

    i_in1: int
    i_in2: int
    i_out: int
    connection_mode: str
    has_weight: bool
    path_weight: float
    path_shape: tuple[int, ...]


def fully_connected(in1: Irreps, in2: Irreps, out: Irreps) -> list[tuple[int, int, int, str, bool, float]]:
    """Every path that angular momentum and parity allow, in e3nn's order."""
    return [
        (i, j, k, "uvw", True, 1.0)
        for i, (_, ir1) in enumerate(in1)
        for j, (_, ir2) in enumerate(in2)
        for k, (_, ir3) in enumerate(out)
        if ir3 in ir1 * ir2
    ]


def path_shape(mode: str, mul1: int, mul2: int, mul_out: int) -> tuple[int, ...]:
    """The shape of one path's weights."""
    sizes = {"u": mul1, "v": mul2, "w": mul_out}
    return tuple(sizes[letter] for letter in LETTERS[mode][1])


def normalised(
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    instructions: Iterable[Sequence[object]],
    variances: tuple[Variances, Variances, Variances] = (None, None, None),
    irrep_normalization: str | None = None,
    path_normalization: str | None = None,
) -> tuple[Instruction, ...]:
    """Checked instructions whose path weights keep the output's variance at 1.

    path_weight = sqrt(a / x * out_var * given), with a = dim(out) [component], dim(in1) * dim(in2) [norm] or 1,
    and x the variance that paths into one output block add up to [element], share evenly [path], or 1.
    """
    irrep_rule = _choice("irrep_normalization", irrep_normalization or "component", IRREP_NORMALIZATIONS)
    path_rule = _choice("path_normalization", path_normalization or "element", PATH_NORMALIZATIONS)
    names = ("in1_var", "in2_var", "out_var")
    var1, var2, var_out = (_variance(*item) for item in zip(names, variances, (in1, in2, out)))
    paths = [_checked(number, given, in1, in2, out) for number, given in enumerate(instructions)]
    summed = [var1[path.i_in1] * var2[path.i_in2] * _num_summed(path, in1, in2) for path in paths]
    found = []
    for path, own in zip(paths, summed):
        ir1, ir2, ir3 = in1[path.i_in1].ir, in2[path.i_in2].ir, out[path.i_out].ir
        size = {"component": ir3.dim, "norm": ir1.dim * ir2.dim, "none": 1}[irrep_rule]
        beside = [other for into, other in zip(paths, summed) if into.i_out == path.i_out]
        total = {"element": sum(beside), "path": own * len(beside), "none": 1}[path_rule]
        variance = (size / total if total > 0 else size) * var_out[path.i_out] * path.path_weight
        found.append(path._replace(path_weight=sqrt(variance)))
    return tuple(found)


def _choice(name: str, given: str, choices: tuple[str, ...]) -> str:
    if given not in choices:
        raise OperandError(f"{name} is {given!r}; choose one of {', '.join(map(repr, choices))}")
    return given


def _variance(name: str, given: Variances, irreps: Irreps) -> list[float]:
    if given is None:
        return [1.0] * len(irreps)
    if not isinstance(given, (list, tuple, Tensor)) or (isinstance(given, Tensor) and given.dim() != 1):
        raise OperandError(f"{name} is {given!r}; give a number for each of its irreps {irreps}")
    if len(given) != len(irreps):
        raise ShapeError(f"{name} holds {len(given)} numbers but its irreps {irreps} have {len(irreps)}; give one each")
    values = [_number(value) for value in given]
    for value, own in zip(values, given):
        if not 0 <= value < inf:
            raise OperandError(f"{name} holds {own!r}; a variance is a number of 0 or more")
    return values


def _number(given: object) -> float:
    """-1: it is none."""
    try:
        return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return -1.0


def _num_summed(path: Instruction, in1: Irreps, in2: Irreps) -> int:
    """How many products of channels one output channel of a path adds up."""
    mul1, mul2 = in1[path.i_in1].mul, in2[path.i_in2].mul
    known: dict[str, int] = {"uvw": mul1 * mul2, "uvu": mul2, "uvv": mul1, "uuw": mul1, "uuu": 1, "uvuv": 1}
    return known[path.connection_mode]


def _checked(number: int, given: Sequence[object], in1: Irreps, in2: Irreps, out: Irreps) -> Instruction:
    """One of the caller's tuples as an instruction that angular momentum, parity and multiplicities allow."""
    where = f"instruction {number}"
    fields = "(i_in1, i_in2, i_out, mode, has_weight) and perhaps a path weight"
    if not isinstance(given, (list, tuple)):
        raise OperandError(f"{where} is of type {type(given).__name__}; give {fields}")
    if len(given) not in (5, 6):
        raise OperandError(f"{where} has {len(given)} fields; give {fields}")
    mode, has_weight = given[3:5]
    i, j, k = (
        _place(where, *item) for item in (("in1", given[0], in1), ("in2", given[1], in2), ("out", given[2], out))
    )
    if mode not in MODES:
        raise UnsupportedError(f"{where} has connection mode {mode!r}; choose one of {', '.join(map(repr, MODES))}")
    if mode == "uvw" and not has_weight:
        raise UnsupportedError(f"{where} has mode 'uvw' without weights; give it weights, or take mode 'uvu' or 'uuu'")
    weight = _number(given[5]) if len(given) == 6 else 1.0
    if not 0 <= weight < inf:
        raise OperandError(f"{where} has path weight {given[5]}, but its root is taken; give one of 0 or more")
    (mul1, ir1), (mul2, ir2), (mul3, ir3) = in1[i], in2[j], out[k]
    if ir3 not in ir1 * ir2:
        raise OperandError(f"{where} takes {ir1} x {ir2} to {ir3}, but that product holds {_names(ir1 * ir2)} only")
    wanted: dict[str, bool] = {"uvu": mul1 == mul3, "uvv": mul2 == mul3, "uuu": mul1 == mul2 == mul3}
    wanted["uvuv"] = mul1 * mul2 == mul3
    wanted["uuw"] = mul1 == mul2 and (bool(has_weight) or mul3 == 1)
    if not wanted.get(str(mode), True):
        raise ShapeError(f"{where} has mode {mode!r}, which multiplicities {mul1} x {mul2} -> {mul3} do not fit")
    return Instruction(i, j, k, str(mode), bool(has_weight), weight, path_shape(str(mode), mul1, mul2, mul3))


def _place(where: str, name: str, at: object, irreps: Irreps) -> int:
    try:
        place = index(at)  # type: ignore[arg-type]
    except TypeError:
        place = -1
    if not 0 <= place < len(irreps):
        raise OperandError(f"{where} names block {at} of irreps_{name}, which has {len(irreps)}: {irreps}")
    return place


def _names(irreps: Iterable[object]) -> str:
    return " + ".join(map(str, irreps))
