"""The paths of a tensor product: e3nn's instructions, their weights' shapes and their normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, sqrt
from operator import index
from typing import Literal, NamedTuple, cast, get_args

from torch import Tensor

from ..compiler import OperandError, ShapeError, UnsupportedError
from .clebsch_gordan import Irreps

__all__ = [
    "LETTERS",
    "MODES",
    "ConnectionMode",
    "Instruction",
    "IrrepNormalization",
    "PathNormalization",
    "fully_connected",
    "normalised",
    "path_shape",
]

ConnectionMode = Literal["uvw", "uvu", "uvv", "uuw", "uuu", "uvuv"]
IrrepNormalization = Literal["component", "norm", "none"]
PathNormalization = Literal["element", "path", "none"]
LETTERS = {  # mode: the second input's channel, the weight's, the output's
    "uvw": ("v", "uvw", "w"),
    "uvu": ("v", "uv", "u"),
    "uvv": ("v", "uv", "v"),
    "uuw": ("u", "uw", "w"),
    "uuu": ("u", "u", "u"),
    "uvuv": ("v", "uv", "uv"),
}
MODES = tuple(LETTERS)
IRREP_NORMALIZATIONS = get_args(IrrepNormalization)
PATH_NORMALIZATIONS = get_args(PathNormalization)

Variances = Sequence[float] | Tensor | None


class Instruction(NamedTuple):
    """in1[i_in1] times in2[i_in2] into out[i_out]; field by field what e3nn calls an instruction.

    `path_weight` is the factor in front of the path, normalisation included.
    """

    i_in1: int
    i_in2: int
    i_out: int
    connection_mode: ConnectionMode
    has_weight: bool
    path_weight: float
    path_shape: tuple[int, ...]


def fully_connected(in1: Irreps, in2: Irreps, out: Irreps) -> list[tuple[int, int, int, str, bool, float]]:
    """Return every path that angular momentum and parity allow, in e3nn's order."""
    return [
        (i, j, k, "uvw", True, 1.0)
        for i, (_, ir1) in enumerate(in1)
        for j, (_, ir2) in enumerate(in2)
        for k, (_, ir3) in enumerate(out)
        if ir3 in ir1 * ir2
    ]


def path_shape(mode: str, mul1: int, mul2: int, mul_out: int) -> tuple[int, ...]:
    """Return the shape of one path's weights."""
    sizes = {"u": mul1, "v": mul2, "w": mul_out}
    return tuple(sizes[letter] for letter in LETTERS[mode][1])


def normalised(
    in1: Irreps,
    in2: Irreps,
    out: Irreps,
    instructions: Iterable[Sequence[object]],
    variances: tuple[Variances, Variances, Variances] = (None, None, None),
    irrep_normalization: IrrepNormalization | None = None,
    path_normalization: PathNormalization | None = None,
) -> tuple[Instruction, ...]:
    """Return checked instructions whose path weights keep the output's variance at 1.

    path_weight = sqrt(a / x * out_var * w), with w the caller's path weight, a = dim(out) [component],
    dim(in1) * dim(in2) [norm] or 1, and x the variance that paths into one output block add up to [element], share
    evenly [path], or 1.
    """
    irrep_rule = _choice("irrep_normalization", irrep_normalization or "component", IRREP_NORMALIZATIONS)
    path_rule = _choice("path_normalization", path_normalization or "element", PATH_NORMALIZATIONS)
    names = ("in1_var", "in2_var", "out_var")
    var1, var2, var_out = (_variance(*item) for item in zip(names, variances, (in1, in2, out)))
    paths = [_checked(number, instruction, in1, in2, out) for number, instruction in enumerate(instructions)]
    summed = [var1[path.i_in1] * var2[path.i_in2] * _num_summed(path, in1, in2) for path in paths]
    weighted = []
    for path, path_variance in zip(paths, summed):
        ir1, ir2, ir3 = in1[path.i_in1].ir, in2[path.i_in2].ir, out[path.i_out].ir
        size = {"component": ir3.dim, "norm": ir1.dim * ir2.dim, "none": 1}[irrep_rule]
        beside = [other for into, other in zip(paths, summed) if into.i_out == path.i_out]
        total = {"element": sum(beside), "path": path_variance * len(beside), "none": 1}[path_rule]
        variance = (size / total if total > 0 else size) * var_out[path.i_out] * path.path_weight
        weighted.append(path._replace(path_weight=sqrt(variance)))
    return tuple(weighted)


def _choice(name: str, choice: str, choices: tuple[str, ...]) -> str:
    """Return the argument if it is one of the choices; refuse it otherwise."""
    if choice not in choices:
        raise OperandError(f"{name} is {choice!r}; choose one of {', '.join(map(repr, choices))}")
    return choice


def _variance(name: str, variances: Variances, irreps: Irreps) -> list[float]:
    """Return a variance for each block of irreps, 1 where the caller gave none; refuse other numbers of them."""
    if variances is None:
        return [1.0] * len(irreps)
    if not isinstance(variances, (list, tuple, Tensor)) or (isinstance(variances, Tensor) and variances.dim() != 1):
        raise OperandError(f"{name} is {variances!r}; give a number for each of its irreps {irreps}")
    if len(variances) != len(irreps):
        counts = f"{len(variances)} numbers but its irreps {irreps} have {len(irreps)}"
        raise ShapeError(f"{name} holds {counts}; give one each")
    values = [_number(value) for value in variances]
    for value, variance in zip(values, variances):
        if not 0 <= value < inf:
            raise OperandError(f"{name} holds {variance!r}; a variance is a number of 0 or more")
    return values


def _number(value: object) -> float:
    """Return a value as a float, or -1 if it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return -1.0


def _num_summed(path: Instruction, in1: Irreps, in2: Irreps) -> int:
    """Return how many products of channels one output channel of a path adds up."""
    mul1, mul2 = in1[path.i_in1].mul, in2[path.i_in2].mul
    counts: dict[str, int] = {"uvw": mul1 * mul2, "uvu": mul2, "uvv": mul1, "uuw": mul1, "uuu": 1, "uvuv": 1}
    return counts[path.connection_mode]


def _checked(number: int, instruction: Sequence[object], in1: Irreps, in2: Irreps, out: Irreps) -> Instruction:
    """Return one of the caller's tuples as an instruction.

    Raises OperandError, UnsupportedError or ShapeError where fields are missing, or where angular momentum, parity or
    multiplicities forbid the path.
    """
    where = f"instruction {number}"
    fields = "(i_in1, i_in2, i_out, mode, has_weight) and perhaps a path weight"
    if not isinstance(instruction, (list, tuple)):
        raise OperandError(f"{where} is of type {type(instruction).__name__}; give {fields}")
    if len(instruction) not in (5, 6):
        raise OperandError(f"{where} has {len(instruction)} fields; give {fields}")
    mode, has_weight = instruction[3:5]
    blocks = zip(("in1", "in2", "out"), instruction[:3], (in1, in2, out))
    i, j, k = (_place(where, *block) for block in blocks)
    if mode not in MODES:
        raise UnsupportedError(f"{where} has connection mode {mode!r}; choose one of {', '.join(map(repr, MODES))}")
    if mode == "uvw" and not has_weight:
        raise UnsupportedError(f"{where} has mode 'uvw' without weights; give it weights, or take mode 'uvu' or 'uuu'")
    weight = _number(instruction[5]) if len(instruction) == 6 else 1.0
    if not 0 <= weight < inf:
        raise OperandError(f"{where} has path weight {instruction[5]}, but its root is taken; give one of 0 or more")
    (mul1, ir1), (mul2, ir2), (mul3, ir3) = in1[i], in2[j], out[k]
    if ir3 not in ir1 * ir2:
        raise OperandError(f"{where} takes {ir1} x {ir2} to {ir3}, but that product holds {_names(ir1 * ir2)} only")
    fits: dict[str, bool] = {"uvu": mul1 == mul3, "uvv": mul2 == mul3, "uuu": mul1 == mul2 == mul3}
    fits["uvuv"] = mul1 * mul2 == mul3
    fits["uuw"] = mul1 == mul2 and (bool(has_weight) or mul3 == 1)
    if not fits.get(str(mode), True):
        raise ShapeError(f"{where} has mode {mode!r}, which multiplicities {mul1} x {mul2} -> {mul3} do not fit")
    connection_mode = cast(ConnectionMode, str(mode))
    shape = path_shape(connection_mode, mul1, mul2, mul3)
    return Instruction(i, j, k, connection_mode, bool(has_weight), weight, shape)


def _place(where: str, name: str, at: object, irreps: Irreps) -> int:
    """Return the number of a block of irreps; refuse one that irreps do not have."""
    try:
        place = index(at)  # type: ignore[arg-type]
    except TypeError:
        place = -1
    if not 0 <= place < len(irreps):
        raise OperandError(f"{where} names block {at} of irreps_{name}, which has {len(irreps)}: {irreps}")
    return place


def _names(irreps: Iterable[object]) -> str:
    return " + ".join(map(str, irreps))
