"""The statements of each term of a tensor product: one forward, one for each gradient.

No graph is recorded here. Gradients are statements too, and only those that are wanted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..compiler import JointCall, has_kernels, parse, run_in_place, run_several, terms
from ..formats.facts import Fact
from .channels import MIXED, statement
from .contraction import NO_ROWS
from .multilinear import Multilinear
from .path_tables import TEXTS
from .shared_weights import Pairs, SharedTerm
from .single_channel import SingleTerm
from .table_terms import ColumnTerm, TableTerm
from .terms import PathTerm, path_statement

__all__ = [
    "Gradients",
    "Parts",
    "Statement",
    "Step",
    "column_step",
    "joint_call",
    "path_step",
    "run",
    "shared_step",
    "single_step",
    "table_step",
]

Wanted = Sequence[bool]  # of X, Y and W


class Parts(NamedTuple):
    """The operands of a step's statements."""

    X: Tensor  # [b, j, u] or, of columns, [b, c]; n for b with SRC
    Y: Tensor  # [b, k] or [b, k, v]
    W: Tensor | None
    SRC: Tensor | None  # [b]


class Gradients(NamedTuple):
    """What a pass backward has found so far; None for what is not wanted, or is not there yet."""

    dX: Tensor | None = None
    dY: Tensor | None = None
    dW: Tensor | None = None


class Step(Protocol):
    """A term for tensors of one layout, forward and backward."""

    @property
    def has_v(self) -> bool:
        """Whether Y is [b, k, v] rather than [b, k]."""

    @property
    def reads_columns(self) -> bool:
        """Whether X may be columns [b, c] as they are, in the order of the irreps."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of one sample's weights."""

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return Z with the term added, and what to save for backward."""

    def backward(self, parts: Parts, kept: Tensor | None, dZ: Tensor, wanted: Wanted, totals: Gradients) -> Gradients:
        """Return dX and dY of `totals` with the term's gradients added, and dW, written to its own if that is there."""

    def summand(self, name: str) -> Statement | None:
        """Return a statement of Z, dX or dY that a kernel may add to those of other steps, if there is one."""


class Statement(NamedTuple):
    """A statement, the tensors that it reads and where they are found."""

    text: str
    reads: tuple[tuple[str, int], ...]  # a tensor's name and its place, of those below
    fixed: Mapping[str, Tensor]
    fact: Fact | None = None


def joint_call(
    statement: Statement, size: Sequence[int], operands: Sequence[Any], place: Tensor | None = None
) -> JointCall:
    """Return a statement with its tensors, as one of several that run together; its result is written to `place`."""
    tensors = {**{name: operands[at] for name, at in statement.reads}, **statement.fixed}
    return JointCall(statement.text, ",".join(tensors), tuple(size), [*tensors.values()], statement.fact, place)


X, Y, W, SRC, DZ, TURNED = range(6)  # the last is W with its two channels exchanged
PLACES = {"Z": DZ, "X": X, "Y": Y, "W": W}


def run(
    statement: Statement,
    size: Sequence[int],
    operands: Sequence[Any],
    total: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Return the statement's value, added to `total`, which is overwritten, or written to `place`."""
    text, names, shape, tensors, fact = joint_call(statement, size, operands).statement
    if total is not None:
        names, tensors = f"{names},{parse(text).output.name}", [*tensors, total]
    return run_in_place(text, names, shape, tensors, fact, total, place)


@dataclass(frozen=True)
class StatedStep:
    """A term that is one statement, and one for each gradient."""

    has_v: bool
    weight_shape: tuple[int, ...]
    product: Statement
    gradients: tuple[Statement, ...]  # of X, Y and, where there is one, W; none where nothing ever learns
    scatter: Statement | None = None  # of dX, where its own statement gives a row for each b
    reads_turned: bool = False  # W with its last two dimensions exchanged, for dX
    reads_columns: bool = False

    def summand(self, name: str) -> Statement | None:
        return None

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return run(self.product, size, parts, Z), None

    def backward(self, parts: Parts, kept: Tensor | None, dZ: Tensor, wanted: Wanted, totals: Gradients) -> Gradients:
        operands, (dX, dY, place), dW = (*parts, dZ), totals, None
        if wanted[0]:
            dX = self.scattered(self.gradient("X", operands, dX), operands, dX)
        if wanted[1]:
            dY = self.gradient("Y", operands, dY)
        if wanted[2] and parts.W is not None:
            dW = self.gradient("W", operands, None, place)
        return Gradients(dX, dY, dW)

    def gradient(
        self, name: str, operands: tuple[Any, ...], total: Tensor | None = None, place: Tensor | None = None
    ) -> Tensor:
        """Return dX, dY or dW, added to `total` or written to `place`; if rows of dX are scattered, one for each b."""
        if name == "X":
            total = total if self.scatter is None else None
            operands = (*operands, operands[W].mT) if self.reads_turned and operands[W] is not None else operands
        return run(self.gradients[PLACES[name]], self.size(name, operands), operands, total, place)

    def size(self, name: str, operands: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the size of what `gradient` returns."""
        own = operands[PLACES[name]].shape
        return (len(operands[DZ]), *own[1:]) if name == "X" and self.scatter is not None else tuple(own)

    def scattered(self, dX: Tensor, operands: tuple[Any, ...], total: Tensor | None) -> Tensor:
        """Return dX of the rows of X, of what `gradient` returned."""
        if self.scatter is None:
            return dX
        return run(self.scatter, operands[X].shape, (dX, operands[SRC]), total)


def path_step(term: PathTerm, x: Tensor, weight: Tensor | None, is_gathered: bool) -> Step:
    """Return the step of a plain term, whose gradients are derived from its statement."""
    mode, muls, is_weighted, _ = term.key
    has_v = muls[1] > 1 or mode not in ("uvw", "uvu")
    is_each = weight is not None and weight.dim() == 2
    text = path_statement(mode, has_v, is_weighted, is_each, is_gathered, False)
    tables = term.tables.on(x.device, x.dtype)
    places = {"X": X, "Y": Y, **({"W": W} if is_weighted else {}), **({"SRC": SRC} if is_gathered else {})}
    gradients = []
    for name in ("X", "Y", "W")[: 3 if is_weighted else 2]:
        ((derived, upstream, others),) = terms(text, name)
        gradients.append(_statement(derived, {upstream: DZ, **places}, others, tables, upstream))
    letters = term.weight_shape if has_v else (muls[0], *term.weight_shape[2:])
    product = _statement(text, places, (*places, *tables), tables)
    return StatedStep(has_v, (term.num_paths, *letters), product, tuple(gradients))


def _statement(
    text: str, places: Mapping[str, int], names: Sequence[str], tables: Mapping[str, Tensor], upstream: str = ""
) -> Statement:
    """Return a statement with those of `places` and `tables` that it reads by name."""
    read = {upstream, *names}
    fixed = {name: table for name, table in tables.items() if name in read}
    return Statement(text, tuple((name, at) for name, at in places.items() if name in read), fixed)


@dataclass(frozen=True)
class TableStep:
    """A term by its tables of components, whose statements have coefficients in a kernel's source or in memory."""

    term: TableTerm
    statements: Mapping[tuple[str, bool], Statement]  # by what is made, and whether a kernel holds the coefficients
    scatter: Statement | None
    has_v: bool = False
    reads_columns: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.term.tables.shapes["W"]

    def summand(self, name: str) -> Statement | None:
        """Return the statement whose coefficients a kernel holds, unless its rows are added to those of X by `SRC`."""
        return None if name == "X" and self.scatter is not None else self.statements.get((name, True))

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return run(self.stated("Z", parts, None), size, parts, Z), None

    def backward(self, parts: Parts, kept: Tensor | None, dZ: Tensor, wanted: Wanted, totals: Gradients) -> Gradients:
        product = self.statements["Z", False] if ("Z", False) in self.statements else self.statements["Z", True]
        # a statement that is not wanted does not run: nothing is timed for it
        gradients = tuple(
            self.stated(name, parts, dZ) if is_wanted else product for name, is_wanted in zip("XYW", wanted)
        )
        step = StatedStep(False, self.weight_shape, product, gradients, self.scatter, reads_turned=True)
        joint = self._jointly(step, (*parts, dZ), wanted, totals)
        return step.backward(parts, kept, dZ, wanted, totals) if joint is None else joint

    def _jointly(
        self, step: StatedStep, operands: tuple[Any, ...], wanted: Wanted, totals: Gradients
    ) -> Gradients | None:
        """Return the gradients where one kernel, which holds their coefficients, may compute several; else None."""
        held = {name: self.statements.get((name, True)) for name, is_wanted in zip("XYW", wanted) if is_wanted}
        if len(held) < 2 or totals.dX is not None or totals.dY is not None:
            return None
        calls = []
        for name, own in held.items():
            if own is None:
                return None
            place = totals.dW if name == "W" else None
            call = joint_call(own, step.size(name, operands), operands, place)
            calls.append(call._replace(alone=partial(step.gradient, name, operands, None, place)))
        found = dict(zip(held, run_several(calls)))
        if "X" in found:
            found["X"] = step.scattered(found["X"], operands, None)
        return Gradients(found.get("X"), found.get("Y"), found.get("W"))

    def stated(self, name: str, parts: Parts, dZ: Tensor | None) -> Statement:
        """Return the faster statement of Z, dX, dY or dW for tensors like these."""
        operands = {
            other: tensor
            for other, tensor in (("Z", dZ), ("X", parts.X), ("Y", parts.Y), ("W", parts.W))
            if other != name and tensor is not None
        }
        is_held = self.term.tables.takes_held(name, operands, None if name == "X" else parts.SRC)
        stated = self.statements.get((name, is_held))
        return self.statements[name, not is_held] if stated is None else stated


def table_step(term: TableTerm, x: Tensor, is_gathered: bool) -> Step:
    """Return the step of a term by its tables of components."""
    term.tables.prepare(x.device, x.dtype)
    stated = {
        (name, is_held): statement
        for name in PLACES
        for is_held in (True, False)
        if (statement := _path_statement(term, name, x, is_gathered, is_held)) is not None
    }
    scatter = Statement(TEXTS.dX, (("D", 0), ("SRC", 1)), {}) if is_gathered else None
    return TableStep(term, stated, scatter)


def _path_statement(term: TableTerm, name: str, x: Tensor, is_gathered: bool, is_held: bool) -> Statement | None:
    """Return the statement of Z, dX, dY or dW, with coefficients in a kernel's source or in tables in memory.

    It is None if the term has no such coefficients.
    """
    tables, at = term.tables, int(is_gathered)
    row = (("SRC", SRC),) if is_gathered and name != "X" else ()
    if is_held:
        sides = None if tables.known is None else tables.known.on(x.device, x.dtype)
        if sides is None:
            return None
        reads = (*((other, place) for other, place in PLACES.items() if other != name), *row)
        return Statement(statement(name, MIXED, bool(row), False), reads, *sides[name, ""][:2])
    if tables.in_memory is None:
        return None
    forward, swapped, as_weights = (side.on(x.device, x.dtype) for side in tables.in_memory)
    if name == "Z":
        reads = (("X", X), ("Y", Y), ("W", W), *row)
        return Statement(TEXTS.product[at], reads, forward.fixed, forward.fact)
    if name == "X":
        reads = (("X", DZ), ("Y", Y), ("W", TURNED))
        return Statement(TEXTS.product[0], reads, swapped.fixed, swapped.fact)
    if name == "Y":
        return Statement(TEXTS.dY[at], (("X", X), ("W", W), ("dZ", DZ), *row), as_weights.fixed)
    return Statement(TEXTS.dW[at], (("X", X), ("Y", Y), ("dZ", DZ), *row), as_weights.fixed)


def column_step(term: ColumnTerm, x: Tensor, is_gathered: bool) -> Step:
    """Return the step of a term by its tables of columns, which has no gradients."""
    fixed, fact, _ = term.side.on(x.device, x.dtype)
    reads = (("X", X), ("Y", Y), ("W", W), *((("SRC", SRC),) if is_gathered else ()))
    product = Statement(term.texts[int(is_gathered)], reads, fixed, fact)
    return StatedStep(False, (term.plain.num_paths, *term.plain.weight_shape[::2]), product, ())


@dataclass(frozen=True)
class MultilinearStep:
    """A term around coefficients in a format, by which each of its tensors is contracted from the others."""

    weight_shape: tuple[int, ...]
    product: Multilinear
    has_v = False
    reads_columns = False

    def summand(self, name: str) -> Statement | None:
        return None

    def contract(self, name: str, operands: Mapping[str, Any], size: tuple[int, ...]) -> Tensor:
        """Return the named tensor, contracted from the others and the coefficients."""
        return self.product.run(name, operands, None, NO_ROWS, size)


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

    def backward(self, parts: Parts, kept: Tensor | None, dZ: Tensor, wanted: Wanted, totals: Gradients) -> Gradients:
        assert kept is not None
        assert parts.W is not None
        dX, dY, _ = totals
        dW = self.contract("W", {"Z": dZ, "T": kept}, tuple(parts.W.shape)) if wanted[2] else None
        if wanted[0] or wanted[1]:
            dT = self.contract("T", {"Z": dZ, "W": parts.W}, tuple(kept.shape))
            term_dX, term_dY = self.pairs.gradients(parts.X, parts.Y, parts.SRC, dT, wanted[:2])
            dX = term_dX if dX is None or term_dX is None else dX.add_(term_dX)
            dY = term_dY if dY is None or term_dY is None else dY.add_(term_dY)
        return Gradients(dX, dY, dW)


class SingleStep(MultilinearStep):
    """A term of one statement."""

    def forward(self, parts: Parts, Z: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        seed = {} if Z is None else {"Z": Z}
        return self.contract("Z", {"X": parts.X, "Y": parts.Y, "W": parts.W, **seed}, size), None

    def backward(self, parts: Parts, kept: Tensor | None, dZ: Tensor, wanted: Wanted, totals: Gradients) -> Gradients:
        assert parts.W is not None
        (dX, dY, place), dW = totals, None
        if wanted[0]:
            term_grad = self.contract("X", {"Z": dZ, "Y": parts.Y, "W": parts.W}, tuple(parts.X.shape))
            dX = term_grad if dX is None else dX.add_(term_grad)
        if wanted[1]:
            term_grad = self.contract("Y", {"Z": dZ, "X": parts.X, "W": parts.W}, tuple(parts.Y.shape))
            dY = term_grad if dY is None else dY.add_(term_grad)
        if wanted[2]:
            dW = self.contract("W", {"Z": dZ, "X": parts.X, "Y": parts.Y}, tuple(parts.W.shape))
            dW = dW if place is None else place.copy_(dW)
        return Gradients(dX, dY, dW)


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
    return SharedStep(shape, term.mixed.on(x.device, x.dtype), term.pairs, rows, reads_columns)


def single_step(term: SingleTerm, x: Tensor) -> Step:
    """Return the step of a term whose inputs have one channel each, for tensors like x."""
    return SingleStep(term.weight_shape, term.product.on(x.device, x.dtype))
