"""A statement to be measured at sizes that nobody chose: drawn from a seed, with operands described by their shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import opt_einsum
import torch
from torch import Tensor

from insum_ops.compiler.language.ir import Access, Statement, Var
from insum_ops.compiler.language.parse import parse

__all__ = ["HOST", "SCALES", "SETS", "Given", "Range", "Work", "Workload", "work"]

SETS = ("first", "second", "odd")  # of sizes; in the last of them every size is odd
HOST = "host"  # a set of sizes that are small at every scale: what is timed then is the host's part of a call
SCALES = ("small", "cpu", "full")  # a few numbers; where plain torch takes 0.2 to 2 ms on one core; a GPU's sizes
STEP = 8  # sizes of the first two sets are multiples of it, where they can be


@dataclass(frozen=True)
class Range:
    """The least and the most that a size may be, at full scale and at small scale."""

    low: int
    high: int
    small_low: int
    small_high: int

    def draw(self, source: random.Random, share: float, is_odd: bool) -> int:
        """Draw a size, each ratio being as likely as any other, so far by ratio from small scale to full scale."""
        low = round(self.small_low ** (1 - share) * self.low**share)
        high = round(self.small_high ** (1 - share) * self.high**share)
        size = round(math.exp(source.uniform(math.log(low), math.log(high))))
        if is_odd:
            return size | 1
        return max(STEP, size - size % STEP) if low >= STEP else size


@dataclass(frozen=True)
class Given:
    """The operands of one workload, by the statement's names; the first of `indices` is among them."""

    operands: Mapping[str, Tensor]
    size: tuple[int, ...] | None
    indices: tuple[Mapping[str, Tensor], ...] = ()  # others of the same kind, where the index changes at every call


@dataclass(frozen=True)
class Workload:
    """A statement, what its operands are, and the same in plain torch.

    `operands` gives each tensor by its sizes: "n h d" is floating, "e < n" has positions below n, and "e < n sorted"
    has them ascending. `plain` takes the operands by their names, and `size`, the result's, if the workload has one.
    """

    family: str
    name: str
    expr: str
    sizes: Mapping[str, Range]
    operands: Mapping[str, str]
    plain: Callable[..., Tensor]
    size: str | None = None  # of the result, in the names of `sizes`
    dtype: torch.dtype = torch.float32
    fixed: tuple[str, ...] = ()  # floating operands that get no gradient
    is_changing: bool = False  # index tensors are others at every call: what is checked or sorted is so at each
    traced: Callable[..., Tensor] | None = None  # what torch.compile is given, if not `plain`
    library: tuple[str, Callable[..., Tensor]] | None = None  # a routine of torch for this very purpose
    as_formats: Callable[..., Mapping[str, Any]] | None = None  # our operands, where one of them is a sparse format
    indirect: str | None = None  # the statement without a format, by which work is counted
    scaled: Mapping[str, str] = field(default_factory=dict)  # values divided by the root of a size, so that sums fit
    regrouped: tuple[str, ...] = ()  # tensors met by indirection of which a tile, or a program, can share each read
    cpu_share: float = 0.5  # how far by ratio a CPU's sizes are from small ones to full ones

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"

    @property
    def meaning(self) -> Statement:
        return parse(self.indirect or self.expr)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The operands that get a gradient."""
        floating = (name for name, text in self.operands.items() if "<" not in text)
        return tuple(name for name in floating if name not in self.fixed)

    def drawn(self, seed: int, sizes: str, scale: str) -> dict[str, int]:
        """Draw the extents of a set: the same for the same seed, on every machine."""
        source = random.Random(f"{seed} {self.id} {sizes}")
        share = {"small": 0.0, "cpu": self.cpu_share, "full": 1.0}["small" if sizes == HOST else scale]
        return {name: each.draw(source, share, sizes in ("odd", HOST)) for name, each in self.sizes.items()}

    def make(
        self, extents: Mapping[str, int], seed: int, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> Given:
        """Draw the operands for some extents."""
        source = torch.Generator(device).manual_seed(seed)
        dtype = dtype or self.dtype
        operands = {}
        for name, text in self.operands.items():
            if "<" in text:
                operands[name] = _positions(text, extents, source)
                continue
            shape = _shape(text, extents)
            values = torch.randn(shape, generator=source, device=device)
            if not self.meaning.is_sum:  # without ties, whose gradient is divided in one way or another
                along = _competing(self.meaning, name)
                values = values.argsort(along) / shape[along] + 0.25
            root = extents[self.scaled[name]] ** 0.5 if name in self.scaled else 1.0
            operands[name] = (values / root).to(dtype)
        size = None if self.size is None else _shape(self.size, extents)
        indices: tuple[Mapping[str, Tensor], ...] = ()
        if self.is_changing:
            pointing = {name: text for name, text in self.operands.items() if "<" in text}
            others = [{name: _positions(text, extents, source) for name, text in pointing.items()} for _ in range(2)]
            indices = ({name: operands[name] for name in pointing}, *others)
        return Given(operands, size, indices)


def _competing(statement: Statement, name: str) -> int:
    """The dimension along which elements of an operand compete in a maximum or minimum."""
    (access,) = (access for access in statement.accesses if access.name == name)
    kept = [index for index in statement.output.indices if isinstance(index, Var)]
    return next(dim for dim, index in enumerate(access.indices) if index not in kept)


def _shape(text: str, extents: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else extents[word] for word in text.split())


def _positions(text: str, extents: Mapping[str, int], source: torch.Generator) -> Tensor:
    shape, _, below = text.partition("<")
    most, *order = below.split()
    high = int(most) if most.isdigit() else extents[most]
    drawn = torch.randint(0, high, _shape(shape, extents), generator=source, device=source.device)
    return drawn.sort().values if order == ["sorted"] else drawn


@dataclass(frozen=True)
class Work:
    """What any implementation must do at least, as far as a statement tells."""

    distinct: float  # bytes that are read or written, each once
    gathered: float  # bytes that are read by indirection, repeats included
    flops: float


def work(workload: Workload, given: Given, is_backward: bool = False) -> Work:
    """Count the bytes and operations of a statement, or of it and of all its gradients.

    A row that no index points to is not read. Backward reads the gradient of the result and writes one of each
    operand, once; each gradient gathers what the statement gathers, its own operand aside, and as many operations.
    """
    statement, operands = workload.meaning, given.operands
    extents = _extents(statement, operands)
    written = _numel(statement.output, extents) if given.size is None else math.prod(given.size)
    width = workload.dtype.itemsize
    read: dict[str, float] = {}
    gathers = {}
    for place, access in enumerate(statement.accesses):
        for index in _indirections(access):
            read[index.name] = operands[index.name].nbytes
        own = width * (_touched(access, operands, extents) if access.is_indirect else _numel(access, extents))
        read[access.name] = max(own, read.get(access.name, 0))
        gathers[place] = width * _repeated(access, workload, extents)
    for index in _indirections(statement.output):
        read[index.name] = operands[index.name].nbytes
    flops = _flops(statement, extents)
    distinct, gathered = sum(read.values()) + width * written, sum(gathers.values())
    if is_backward:
        scattered = width * _repeated(statement.output, workload, extents)
        distinct += width * (written + sum(operands[name].numel() for name in workload.gradients))
        wanted = [place for place, access in enumerate(statement.accesses) if access.name in workload.gradients]
        gathered += sum(sum(gathers.values()) - gathers[place] + scattered for place in wanted)
        flops *= 1 + len(wanted)
    return Work(distinct, gathered, flops)


def _indirections(access: Access) -> list[Access]:
    return [inner for each in access.indirections for inner in (each, *_indirections(each))]


def _extents(statement: Statement, operands: Mapping[str, Tensor]) -> dict[str, int]:
    extents = {}
    of_output = _indirections(statement.output)
    inner = [each for access in statement.accesses for each in _indirections(access)]
    for access in (*statement.accesses, *of_output, *inner):
        for index, extent in zip(access.indices, operands[access.name].shape):
            if isinstance(index, Var):
                extents[index.name] = extent
    return extents


def _numel(access: Access, extents: Mapping[str, int]) -> int:
    """The elements that an access meets, as often as it meets them."""
    return math.prod(extents[name] for name in access.names)


def _repeated(access: Access, workload: Workload, extents: Mapping[str, int]) -> int:
    """The elements that are read by indirection, repeats included."""
    return _numel(access, extents) if access.is_indirect and access.name not in workload.regrouped else 0


def _touched(access: Access, operands: Mapping[str, Tensor], extents: Mapping[str, int]) -> int:
    """How many elements an access by indirection meets, each counted once."""
    names = dict.fromkeys(name for index in access.indirections for name in index.names)
    at = torch.zeros([1] * len(names), dtype=torch.int64, device=operands[access.name].device)
    for index, extent in zip(access.indices, operands[access.name].shape):
        if isinstance(index, Access):
            own = operands[index.name].permute([index.names.index(name) for name in names if name in index.names])
            at = at * extent + own.reshape([extents[name] if name in index.names else 1 for name in names])
    direct = [index.name for index in access.indices if isinstance(index, Var) and index.name not in names]
    return at.unique().numel() * math.prod(extents[name] for name in direct)


def _flops(statement: Statement, extents: Mapping[str, int]) -> float:
    """Two for each product of a statement with indirections; of a dense one, those of the best order of its factors."""
    loops = math.prod(extents.values())
    if len(statement.accesses) < 2:
        return float(loops)
    if statement.output.is_indirect or any(access.is_indirect for access in statement.accesses):
        return 2.0 * loops
    letters = {name: opt_einsum.get_symbol(at) for at, name in enumerate(extents)}
    terms = ["".join(letters[name] for name in access.names) for access in (*statement.accesses, statement.output)]
    shapes = [tuple(extents[name] for name in access.names) for access in statement.accesses]
    equation = f"{','.join(terms[:-1])}->{terms[-1]}"
    _, plan = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="optimal")
    return float(plan.opt_cost)
