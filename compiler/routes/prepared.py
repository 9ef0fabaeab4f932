"""A statement over tensors of one layout, parsed and bound once, and what there is to run it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...formats.facts import ConstantTables, Fact, OwnedRows
from ...formats.guard import is_freed
from ...formats.torch_state import (
    HALF,
    OLDEST_GPU,
    asked_once,
    default_dtype,
    is_captured,
    is_deterministic,
    may_round_sums,
    rounds_float32,
)
from ...lru_cache import LRUCache
from ..binding import Bound, Kinds, Meta, bind, bucket, kernel_strides, kinds_of, row_major, shape_class, sized
from ..codegen import Flags
from ..language import Access, OperandError, Statement, UnsupportedError, Var, fresh_name, parse
from ..planning import device_of
from ..reference import USUAL, Program, Way, placeholders, program_for, programs_for
from ..runtime import (
    INTERPRETED,
    TRITON_VERSION,
    active,
    ascends,
    check_ranges,
    paused,
    remembered_ranges,
    segment_lengths,
)
from ..tuning import Candidate, Problem, candidates, is_uneven, tuning_mode

__all__ = [
    "PreparedStatement",
    "Result",
    "Runner",
    "as_one_step",
    "has_kernels",
    "prepare",
    "problem_for",
    "refuse_freed",
    "ways_of",
]

PREPARED = 2048  # kept, of about 5 kB each
SHAPE_CLASSES = 1024  # kept, of about 3 kB each

_prepared: LRUCache[PreparedStatement] = LRUCache(PREPARED)
_shape_classes: LRUCache[ShapeClass] = LRUCache(SHAPE_CLASSES)
_warned: set[str] = set()  # statements of which it was said that no kernel runs them

Result = Tensor | tuple[Tensor, Tensor]  # with the winners, where they are wanted
Runner = Callable[[list[Tensor], Fact | None], Result]


@dataclass(eq=False)
class ShapeClass:
    """What statements have in common whose tensors differ in nothing but the lengths of long first dimensions."""

    statement: Statement
    names: tuple[str, ...]
    kinds: Kinds

    def __post_init__(self) -> None:
        """Work out where each index tensor points: its number, a tensor's number or -1 for the output, a dimension."""
        place, statement = self.names.index, self.statement
        self.pointed = [(place(p.name), -1 if p.is_output else place(p.into), p.dim) for p in statement.pointings]


@dataclass
class PreparedStatement:
    """A statement bound to tensors of one layout, and what runs it, by variant: an FX graph or a launcher.

    A variant says which index tensors hold a -1, which of those that scatter ascend and, in half precision, whether
    sums may be rounded on the way.
    """

    bound: Bound
    names: tuple[str, ...]
    fact: Fact | None  # without its tensors: each call brings its own
    wants_winners: bool
    shape_class: ShapeClass
    runners: dict[object, Runner] = field(default_factory=dict)
    ways_taken: dict[object, Way] = field(default_factory=dict)  # of a CPU, by variant and whether torch differentiates

    def __post_init__(self) -> None:
        size, shapes, names = self.bound.size, self.bound.shapes, self.names
        self.pointed = tuple(
            [(at, (size if into < 0 else shapes[names[into]])[dim]) for at, into, dim in self.shape_class.pointed]
        )
        told = _scattering(self.bound, self.fact)
        self.scattering = tuple([place for place, (at, _) in enumerate(self.pointed) if names[at] in told])
        self.is_half = self.bound.dtype in HALF
        self.is_sum = self.bound.statement.is_sum

    def runner(self, key: object, find: Callable[[], Runner]) -> Runner:
        """Return the runner that is kept by a key; at first what `find` returns.

        That is kept too, unless a CUDA graph is captured: nothing is tuned meanwhile, so it is for the graph alone.
        """
        runner = self.runners.get(key)
        if runner is None:
            runner = find()
            if not is_captured(self.bound.device):
                self.runners[key] = runner
        return runner

    def variant(self, tensors: list[Tensor]) -> object:
        """Return which index tensors hold a -1, which of those that scatter ascend, and how half precision is summed.

        Raises:
            IndexRangeError: if an index is out of range.
            OperandError: if the memory of a tensor was given back.
        """
        for name, tensor in zip(self.names, tensors):
            refuse_freed(name, tensor)
        facts = self._index_facts(tensors)
        return (facts, may_round_sums(self.bound.dtype)) if self.is_half else facts

    def _index_facts(self, tensors: list[Tensor]) -> tuple[bool, ...]:
        """Return which index tensors hold a -1, then which of those at `scattering` ascend.

        Raises IndexRangeError if one is out of range.
        """
        padded: tuple[bool, ...] = ()
        ranges = remembered_ranges(*[tensors[number] for number, _ in self.pointed], ordered=self.scattering)
        for (_, extent), (low, high) in zip(self.pointed, ranges):
            if high >= extent:
                check_ranges(self.bound, dict(zip(self.names, tensors)))
            padded += (low < 0,)
        in_order = {place: ascends(tensors[self.pointed[place][0]]) for place in self.scattering}
        recording = active()
        if recording is not None:
            for place, ((number, extent), is_padded) in enumerate(zip(self.pointed, padded)):
                recording.ranged(tensors[number], extent, is_padded, in_order.get(place))
        return padded + tuple(in_order.values())

    def problem(self, tensors: list[Tensor], fact: Fact | None) -> Problem:
        """Return the tuning problem of the statement on these tensors; raise IndexRangeError if one is out of range."""
        named = dict(zip(self.names, tensors))
        padded = check_ranges(self.bound, named)
        return problem_for(self.bound, named, fact, padded, self.wants_winners)

    def kernel_key(self, variant: object, fact: Fact | None) -> tuple[object, ...]:
        """Return a key that is equal only for statements which the same kernel runs, whatever their lengths.

        It is worked out without a problem, and is finer than a problem's signature.
        """
        bound = self.bound
        winners = None if self.is_sum else bound.winner_dtype
        fixed = self.shape_class, variant, tuning_mode(), shape_class(bound.size, row_major(bound.size)), winners
        rows, has_order = _rows(fact)
        return *fixed, *map(bucket, rows), has_order and is_uneven(bound, fact, rows)

    def padding(self, variant: Any) -> frozenset[str]:
        """Return the index tensors that hold a -1 in a variant."""
        flags = variant[0] if self.is_half else variant
        return frozenset([self.names[number] for (number, _), flag in zip(self.pointed, flags) if flag])

    def programs(self, variant: Any, by_torch: bool) -> dict[str, Program]:
        """Return the programs by which a CPU may run the statement, by the names of their ways; first the likeliest.

        If `by_torch`, they are of operations that torch differentiates.
        """
        return programs_for(self.bound, self.padding(variant), self.wants_winners, by_torch)

    def program(self, variant: Any, sums_in_half: bool = False, way: Way = USUAL) -> Program:
        """Return the statement's meaning in plain torch; half precision is made float32 first unless `sums_in_half`."""
        return program_for(self.bound, self.padding(variant), self.wants_winners, sums_in_half, way)

    def graph(self, variant: Any, sums_in_half: bool = False, way: Way = USUAL) -> Runner:
        """Return the runner of `program`; products that a fact counts come in that order."""
        run, fact = self.running(self.program(variant, sums_in_half, way)), self.fact
        if not (self.wants_winners and isinstance(fact, OwnedRows) and fact.counted_by):
            return run
        rows, counted = self.names.index(fact.rows), self.names.index(fact.counted_by)

        def in_order(tensors: list[Tensor], fact: Fact | None) -> Result:
            tensors = list(tensors)
            tensors[counted], tensors[rows] = as_one_step(_ascending, tensors[counted], tensors[rows])
            return run(tensors, fact)

        return in_order

    def running(self, program: Program) -> Runner:
        """Return the runner of one of the statement's programs."""
        function, lengths = program.function, program.lengths_in(self.bound)
        order = [self.names.index(name) for name in placeholders(self.bound)]
        if program.is_torch and not lengths:  # a plan has a step for each operation, but for those without effect
            return lambda tensors, fact: function(*[tensors[at] for at in order])
        return lambda tensors, fact: as_one_step(function, *[tensors[at] for at in order], *lengths)

    def graph_instead(self, variant: Any, error: UnsupportedError) -> Runner:
        """Return the statement's meaning in plain torch, with one warning that says why no kernel runs."""
        name = str(self.bound.statement)
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"{error}; running it as separate torch operations instead", stacklevel=2)
        return self.graph(variant)

    def ordered(self, variant: Any, run: Callable[..., Any]) -> Runner:
        """Return a deterministic runner: one kernel for the products, and torch's ordered sum for the scatter.

        If sums may not be rounded on the way, half precision is made float32 before. `run` evaluates the products.
        A max or min is evaluated by torch's own functions.
        """
        if not self.is_sum:
            return self.graph(variant)
        statement, bound = self.bound.statement, self.bound
        is_wide = self.is_half and not variant[1]
        products_name = fresh_name("T", (*self.names, statement.output.name))
        products = Access(products_name, tuple(map(Var, statement.free)))
        first = Statement(products, statement.factors, "=")
        second = Statement(statement.output, (products,), statement.op)
        inner = tuple(bound.extents[index] for index in statement.free)

        dtypes = {name: torch.float32 if is_wide and dtype in HALF else dtype for name, dtype in bound.dtypes.items()}
        metas = {name: Meta(bound.shapes[name], dtypes[name], bound.device) for name in self.names}
        products_dtype = bind(first, {name: metas[name] for name in first.tensor_names}, inner).dtype
        scatter_names = [name for name in placeholders(bound) if name in (*second.tensor_names, statement.output.name)]
        scatter_operands = {name: metas[name] for name in scatter_names}
        scatter_operands[products_name] = Meta(inner, products_dtype, bound.device)
        scatter = bind(second, scatter_operands, bound.size)
        program = program_for(scatter, frozenset(access.name for access in second.index_accesses))
        add_up, lengths = program.function, program.lengths_in(scatter)

        def runner(tensors: list[Tensor], fact: Fact | None) -> Tensor:
            named = {name: tensor.to(dtypes[name]) for name, tensor in zip(self.names, tensors)}
            read = {name: named[name] for name in first.tensor_names}
            named[products_name] = run(str(first), ",".join(read), inner, list(read.values()), None, False)
            summed: Tensor = as_one_step(add_up, *[named[name] for name in placeholders(scatter)], *lengths)
            return summed.to(bound.dtype)

        return runner


def prepare(
    expr: str,
    names: str,
    size: Sequence[int] | None,
    tensors: list[Tensor],
    fact: Fact | None,
    wants_winners: bool = False,
) -> PreparedStatement:
    """Parse and bind a statement over plain tensors, once for each shape, layout and setting.

    `names` joins the names of the tensors with commas, in their order.
    """
    call_key = _call_key(expr, names, fact, wants_winners)
    layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    key = (*call_key, None if size is None else tuple(size), *layouts)
    prepared = _prepared.get(key)
    if prepared is None:
        common = _shape_class(call_key, expr, names, size, tensors)
        bound = sized(common.statement, common.kinds, dict(zip(common.names, tensors)), size)
        fact_kind = None if fact is None else fact.without_tensors()
        prepared = _prepared[key] = PreparedStatement(bound, common.names, fact_kind, wants_winners, common)
    return prepared


def _call_key(expr: str, names: str, fact: Fact | None, wants_winners: bool) -> tuple[object, ...]:
    """Return the cache key of a call without its tensors: torch's settings, and the dtype of a product of numbers."""
    settings = rounds_float32(), is_deterministic()
    return expr, names, wants_winners, None if fact is None else fact.key, *settings, default_dtype()


def _shape_class(
    call_key: tuple[object, ...], expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor]
) -> ShapeClass:
    """Return what a call shares with those that differ in the lengths of long first dimensions; check the first."""
    key = (*call_key, *[(shape_class(t.shape, t.stride()), t.dtype, t.device) for t in tensors])
    common = _shape_classes.get(key)
    if common is None:
        statement, order = parse(expr), tuple(names.split(",")) if names else ()
        kinds = kinds_of(statement, dict(zip(order, tensors)), size)
        common = _shape_classes[key] = ShapeClass(statement, order, kinds)
    return common


def ways_of(
    expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None, fact: Fact | None
) -> tuple[Candidate, ...]:
    """Return the candidate kernels of a statement, none if there is nothing to compute."""
    values = list(tensors.values())
    prepared = prepare(expr, ",".join(tensors), size, values, fact)
    return () if prepared.bound.is_empty else candidates(prepared.problem(values, fact))


def refuse_freed(name: str, tensor: Tensor) -> None:
    """Raise OperandError if the memory of a tensor was given back, which kernels would read all the same."""
    if is_freed(tensor):
        raise OperandError(
            f"{name} {list(tensor.shape)} has no memory: it was freed by who shards the model's parameters, such as "
            "fully_shard, which gathers them for the forward and backward passes of the modules it was called on; "
            "call those modules, and let them return tensors where torch finds them"
        )


def as_one_step(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function of torch operations; for a launch plan the call is one step."""
    recording = active()
    if recording is None:
        return function(*args)
    with paused():
        result = function(*args)
    recording.call(function, args, {}, result)
    return result


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@asked_once
def has_kernels(device: torch.device) -> bool:
    """Return whether generated kernels run on a device; warn if a GPU is too old or Triton is missing."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETED and device.type != "meta"  # where there is nothing to interpret
    if TRITON_VERSION == "none":
        remedy = "a torch for Linux brings it, with CUDA as triton and with ROCm as triton-rocm"
        warnings.warn(
            f"Triton is not installed, so statements run as separate torch operations; {remedy}", stacklevel=2
        )
        return False
    capability = _capability(device)
    if capability < OLDEST_GPU:
        name = torch.cuda.get_device_name(device)
        warnings.warn(
            f"{name} is too old for generated kernels; statements run as separate torch operations",
            stacklevel=2,
        )
    return capability >= OLDEST_GPU


def problem_for(
    bound: Bound,
    tensors: Mapping[str, Tensor],
    fact: Fact | None = None,
    padded: frozenset[str] | None = None,
    wants_winners: bool = False,
) -> Problem:
    """Return the tuning problem of this statement on these tensors, under torch's current settings."""
    is_half = bound.dtype in HALF
    needs_wide = is_half and (not may_round_sums(bound.dtype) or (INTERPRETED and bound.dtype == torch.bfloat16))
    flags = Flags(
        precision="tf32" if rounds_float32() else "ieee",
        sum_dtype=torch.float32 if needs_wide else None,
        interpreted=INTERPRETED,
        padded=padded,
        wants_winners=wants_winners,
        warp_width=device_of(bound.device).warp_width,
    )
    strides = kernel_strides(bound, {name: tensor.stride() for name, tensor in tensors.items()})
    deterministic = is_deterministic()
    fact_kind = None if fact is None else fact.without_tensors()
    in_order = tuple([name for name in _scattering(bound, fact) if ascends(tensors[name])])
    return Problem(bound, strides, tuple(tensors), fact_kind, flags, deterministic, *_rows(fact), in_order)


def _ascending(numbers: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers in ascending order, and the values that stood with them."""
    ascending, order = numbers.sort()
    return ascending, values[order]


def _scattering(bound: Bound, fact: Fact | None) -> tuple[str, ...]:
    """Return the index tensors by whose order a kernel is chosen: those that scatter; a fact about rows knows it."""
    is_known = fact is not None and not isinstance(fact, ConstantTables)
    if is_known or not (INTERPRETED or bound.device.type == "cuda"):
        return ()
    accesses = bound.statement.output.indirections
    scatters = [own.name for own in accesses if len(own.indices) == 1 and isinstance(own.indices[0], Var)]
    return tuple(dict.fromkeys(scatters))


def _rows(fact: Fact | None) -> tuple[tuple[int, int], bool]:
    """Return how many rows are owned and the most groups of one, 0 if nothing tells; and whether it has their order."""
    if not isinstance(fact, OwnedRows) or fact.pointers is None:
        return (0, 0), False
    return segment_lengths(fact.pointers), fact.order is not None
