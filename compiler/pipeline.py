"""The stages in order, memoised: parse, bind, then lower or (schedule, emit, tune, launch). Read this file first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..formats.facts import Fact, OwnedRows
from ..lru_cache import LRUCache
from .autotune import Timing, alike, choose
from .autotune import tune as time_all
from .bind import Bound, Kinds, Meta, bind, kinds_of, row_major, sized
from .cache import bucket
from .carried import resolved
from .codegen import Flags
from .differentiate import fresh_name
from .errors import OperandError, UnsupportedError
from .ir import Access, Statement, Var
from .launch import INTERPRETED, Launcher
from .lower import placeholders, program_for
from .parse import parse
from .problem import Candidate, Problem, candidates, is_uneven, rough
from .ranges import check_ranges, remembered_range, segment_lengths
from .runtime.plan import EPOCH
from .runtime.recording import active, paused
from .runtime.torch_state import HALF, is_capturing, is_deterministic, may_round_sums, rounds_float32
from .scatter import strategies
from .settings import tuning_mode

__all__ = [
    "Plan",
    "has_kernels",
    "plan_for",
    "problem_for",
    "refuse_freed",
    "run",
    "run_in_place",
    "run_with_winners",
    "tune",
    "ways_of",
]

PLANS = 2048  # kept, of about 5 kB each
KINS = 1024  # kept, of about 3 kB each
OLDEST_GPU = (7, 5)  # the least compute capability that Triton compiles for

_plans: LRUCache[Plan] = LRUCache(PLANS)
_kins: LRUCache[Kin] = LRUCache(KINS)
_warned: set[str] = set()  # statements of which it was said that no kernel runs them


def run(expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: Fact | None) -> Tensor:
    """Evaluate a statement over plain tensors; `names` joins their names with commas, in the order of `tensors`."""
    return plan_for(expr, names, size, tensors, fact)(tensors, fact)  # type: ignore[return-value]


def run_with_winners(
    expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor], fact: Fact | None
) -> tuple[Tensor, Tensor]:
    """The same for a `max` or `min`, and for each output element the position of the product that won; -1: none."""
    return plan_for(expr, names, size, tensors, fact, True)(tensors, fact)  # type: ignore[return-value]


def run_in_place(
    expr: str,
    names: str,
    size: tuple[int, ...],
    tensors: list[Tensor],
    fact: Fact | None,
    total: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Evaluate a statement into memory of the caller's, where a kernel can; the result tells where it is.

    `total` is the output tensor among `tensors`, which the caller gives away: a kernel that adds atomically adds to it
    where it is, any other makes a new tensor. `place` may be a part of a larger tensor, of less than 2**31 bytes: a
    kernel that writes all of its output writes it there; what another one makes is copied.
    """
    tensors = [resolved(tensor) for tensor in tensors]
    plan = plan_for(expr, names, size, tensors, fact)
    runner: Any = plan.runner_of(tensors, fact)
    passed = (*tensors, *(() if fact is None else fact.tensors))
    adds = total is not None and type(runner) is Launcher and runner.adds_in_place
    if total is not None and adds and total.stride() == runner.strides:
        runner.launch((*passed, total))
        return total
    if place is None:
        return runner(tensors, fact)  # type: ignore[no-any-return]
    placed = runner.placed(place.stride()) if type(runner) is Launcher and runner.can_be_placed else None
    if placed is not None:
        try:
            placed.launch((*passed, place))
            return place
        except UnsupportedError:  # for an output that lies like this it can't be built
            pass
    return place.copy_(runner(tensors, fact))


def ways_of(
    expr: str, tensors: Mapping[str, Tensor], size: Sequence[int] | None, fact: Fact | None
) -> tuple[Candidate, ...]:
    """The ways to run a statement, none where there is nothing to compute."""
    values = list(tensors.values())
    plan = plan_for(expr, ",".join(tensors), size, values, fact)
    return () if plan.bound.is_empty else candidates(plan.problem(values, fact))


def plan_for(
    expr: str,
    names: str,
    size: Sequence[int] | None,
    tensors: list[Tensor],
    fact: Fact | None,
    wants_winners: bool = False,
) -> Plan:
    """The plan of a call, made once for each shape, layout and setting."""
    call = _call(expr, names, fact, wants_winners)
    layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
    key = (*call, None if size is None else tuple(size), *layouts)
    plan = _plans.get(key)
    if plan is None:
        rougher = _rougher(call, tensors)
        kin = _kins.get(rougher) or _kin(rougher, expr, names, size, tensors)
        bound = sized(kin.statement, kin.kinds, dict(zip(kin.names, tensors)), size)
        told = None if fact is None else fact.without_tensors()
        plan = _plans[key] = Plan(bound, kin.names, told, wants_winners, kin)
    return plan


def _call(expr: str, names: str, fact: Fact | None, wants_winners: bool) -> tuple[object, ...]:
    """A call but for its tensors, under torch's settings; numbers alone have the default dtype."""
    settings = rounds_float32(), is_deterministic()
    return expr, names, wants_winners, None if fact is None else fact.key, *settings, torch.get_default_dtype()


def _rougher(call: tuple[object, ...], tensors: list[Tensor]) -> tuple[object, ...]:
    """Equal for calls whose tensors differ in the lengths of long first dimensions alone."""
    return (*call, *[(rough(t.shape, t.stride()), t.dtype, t.device) for t in tensors])


def _kin(key: object, expr: str, names: str, size: Sequence[int] | None, tensors: list[Tensor]) -> Kin:
    """The first of its kin: what later ones need not look at is checked."""
    statement, order = parse(expr), tuple(names.split(",")) if names else ()
    kin = _kins[key] = Kin(statement, order, kinds_of(statement, dict(zip(order, tensors)), size))
    return kin


def tune(plan: Plan, tensors: list[Tensor], fact: Fact | None, full: bool = False) -> tuple[Timing, ...]:
    """Time the ways to run a plan on these tensors and let it take the best from now on."""
    timings, best = time_all(plan.problem(tensors, fact), tensors, fact, full)
    plan.runners[plan.variant(tensors)] = best
    EPOCH.number += 1  # launch plans hold the kernels that were chosen before
    return timings


Result = Tensor | tuple[Tensor, Tensor]  # with the winners, where they are wanted
Runner = Callable[[list[Tensor], Fact | None], Result]


@dataclass(eq=False)
class Kin:
    """What plans have in common whose tensors differ in the lengths of long first dimensions, and in nothing else."""

    statement: Statement
    names: tuple[str, ...]
    kinds: Kinds

    def __post_init__(self) -> None:
        """Where index tensors point: a tensor's number, -1 for the output, and a dimension."""
        place, statement = self.names.index, self.statement
        self.pointed = [(place(p.name), -1 if p.is_output else place(p.into), p.dim) for p in statement.pointings]


@dataclass
class Plan:
    """A bound statement and what runs it, the FX graph or a launcher: one for each set of index tensors with a -1."""

    bound: Bound
    names: tuple[str, ...]
    fact: Fact | None  # without its tensors: each call brings its own
    wants_winners: bool
    kin: Kin
    runners: dict[object, Runner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size, shapes, names = self.bound.size, self.bound.shapes, self.names
        self.pointed = tuple(
            [(at, (size if into < 0 else shapes[names[into]])[dim]) for at, into, dim in self.kin.pointed]
        )
        self.is_half = self.bound.dtype in HALF
        self.is_sum = self.bound.statement.is_sum

    def __call__(self, tensors: list[Tensor], fact: Fact | None) -> Result:
        return self.runner_of(tensors, fact)(tensors, fact)

    def runner_of(self, tensors: list[Tensor], fact: Fact | None) -> Runner:
        """Return what runs the statement on these tensors; raise if an index is out of range."""
        for name, tensor in zip(self.names, tensors):
            refuse_freed(name, tensor)
        key = self.variant(tensors)
        return self.runners.get(key) or self.new_runner(key, tensors, fact)

    def new_runner(self, key: Any, tensors: list[Tensor], fact: Fact | None) -> Runner:
        """What runs from now on; what is found while a graph is captured, when nothing is tuned, runs for it alone."""
        runner = self.runner(key, tensors, fact)
        if self.bound.device.type != "cuda" or not is_capturing():
            self.runners[key] = runner
        return runner

    def variant(self, tensors: list[Tensor]) -> object:
        """Which index tensors hold a -1, and whether sums may be rounded on the way; raises on one out of range."""
        return self.with_rounding(self.padded(tensors)) if self.is_half else self.padded(tensors)

    def padded(self, tensors: list[Tensor]) -> tuple[bool, ...]:
        flags: tuple[bool, ...] = ()
        for number, extent in self.pointed:
            low, high = remembered_range(tensors[number])
            if high >= extent:
                check_ranges(self.bound, dict(zip(self.names, tensors)))
            flags += (low < 0,)
        recording = active()
        if recording is not None:
            for (number, extent), is_padded in zip(self.pointed, flags):
                recording.ranged(tensors[number], extent, is_padded)
        return flags

    def with_rounding(self, padded: tuple[bool, ...]) -> object:
        return padded, may_round_sums(self.bound.dtype)

    def problem(self, tensors: list[Tensor], fact: Fact | None) -> Problem:
        named = dict(zip(self.names, tensors))
        padded = check_ranges(self.bound, named)
        return problem_for(self.bound, named, fact, padded, self.wants_winners)

    def runner(self, key: Any, tensors: list[Tensor], fact: Fact | None) -> Runner:
        """What evaluates this variant of the statement on tensors like these."""
        if self.bound.is_empty or not has_kernels(self.bound.device):
            return self.graph(self.padding(key))
        try:
            kin = self.variant_kin(key, fact)
            launcher = alike(kin, self.bound, self.fact)
            if launcher is None:
                if not strategies(self.bound, self.fact, is_deterministic()):
                    return self.ordered(key) if self.is_sum else self.graph(self.padding(key))
                launcher = choose(self.problem(tensors, fact), tensors, fact, kin)
            launcher.build(tensors, fact)
            return launcher
        except UnsupportedError as error:
            name = str(self.bound.statement)
            if name not in _warned:
                _warned.add(name)
                warnings.warn(f"{error}; running it as separate torch operations instead", stacklevel=2)
            return self.graph(self.padding(key))

    def variant_kin(self, key: object, fact: Fact | None) -> tuple[object, ...]:
        """Equal for two plans only where their problems' signatures are, and worked out without a problem."""
        bound = self.bound
        winners = None if self.is_sum else bound.winner_dtype
        known = self.kin, key, tuning_mode(), rough(bound.size, row_major(bound.size)), winners
        rows, has_order = _rows(fact)
        return *known, *map(bucket, rows), has_order and is_uneven(bound, fact, rows)

    def padding(self, key: Any) -> frozenset[str]:
        """The index tensors that hold a -1 in a variant."""
        flags = key[0] if self.is_half else key
        return frozenset([self.names[number] for (number, _), flag in zip(self.pointed, flags) if flag])

    def graph(self, padded: frozenset[str]) -> Runner:
        """The statement's meaning in plain torch."""
        program = program_for(self.bound, padded, self.wants_winners)
        function, lengths = program.function, program.lengths_in(self.bound)
        order = [self.names.index(name) for name in placeholders(self.bound)]
        return lambda tensors, fact: _noted(function, *[tensors[at] for at in order], *lengths)

    def ordered(self, key: Any) -> Runner:
        """Deterministic without any fact: one kernel for the products, torch's own ordered sum for the scatter.

        Where sums may not be rounded on the way, half precision is made float32 before.
        """
        statement, bound = self.bound.statement, self.bound
        is_wide = self.is_half and not key[1]
        name = fresh_name("T", (*self.names, statement.output.name))
        products = Access(name, tuple(map(Var, statement.free)))
        first = Statement(products, statement.factors, "=")
        second = Statement(statement.output, (products,), statement.op)
        inner = tuple(bound.extents[index] for index in statement.free)

        dtypes = {own: torch.float32 if is_wide and dtype in HALF else dtype for own, dtype in bound.dtypes.items()}
        known = {own: Meta(bound.shapes[own], dtypes[own], bound.device) for own in self.names}
        made = Meta(inner, bind(first, {own: known[own] for own in first.tensor_names}, inner).dtype, bound.device)
        rest = [own for own in placeholders(bound) if own in (*second.tensor_names, statement.output.name)]
        scatter = bind(second, {**{own: known[own] for own in rest}, name: made}, bound.size)
        program = program_for(scatter, frozenset(access.name for access in second.index_accesses))
        add_up, lengths = program.function, program.lengths_in(scatter)

        def runner(tensors: list[Tensor], fact: Fact | None) -> Tensor:
            named = {own: tensor.to(dtypes[own]) for own, tensor in zip(self.names, tensors)}
            read = {own: named[own] for own in first.tensor_names}
            named[name] = run(str(first), ",".join(read), inner, list(read.values()), None)
            summed: Tensor = _noted(add_up, *[named[own] for own in placeholders(scatter)], *lengths)
            return summed.to(bound.dtype)

        return runner


def refuse_freed(name: str, tensor: Tensor) -> None:
    """Raise OperandError if the memory of a tensor was given back, which kernels would read all the same."""
    if not tensor.data_ptr() and tensor.numel() and not tensor.is_meta:
        raise OperandError(
            f"{name} {list(tensor.shape)} has no memory: it was freed by who shards the model's parameters, such as "
            "fully_shard, which gathers them for the forward and backward passes of the modules it was called on; "
            "call those modules, and let them return tensors where torch finds them"
        )


def _noted(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function of torch operations; for a launch plan it is one step."""
    recording = active()
    if recording is None:
        return function(*given)
    with paused():
        result = function(*given)
    recording.call(function, given, {}, result)
    return result


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_kernels(device: torch.device) -> bool:
    if INTERPRETED or device.type != "cuda":
        return INTERPRETED and device.type != "meta"  # where there is nothing to interpret
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
    """What a kernel for this statement on these tensors has to solve, under torch's current settings."""
    is_half = bound.dtype in HALF
    needs_wide = is_half and (not may_round_sums(bound.dtype) or (INTERPRETED and bound.dtype == torch.bfloat16))
    flags = Flags(
        precision="tf32" if rounds_float32() else "ieee",
        sum_dtype=torch.float32 if needs_wide else None,
        interpreted=INTERPRETED,
        padded=padded,
        wants_winners=wants_winners,
    )
    strides = {name: tensor.stride() for name, tensor in tensors.items()}
    strides[""] = row_major(bound.size)
    if bound.is_seeded:
        strides[" seed"] = strides[bound.statement.output.name]
    deterministic = is_deterministic()
    told = None if fact is None else fact.without_tensors()
    return Problem(bound, strides, tuple(tensors), told, flags, deterministic, *_rows(fact))


def _rows(fact: Fact | None) -> tuple[tuple[int, int], bool]:
    """Return how many rows are owned and the most groups of one, 0 if nothing tells; and whether it has their order."""
    if not isinstance(fact, OwnedRows) or fact.pointers is None:
        return (0, 0), False
    return segment_lengths(fact.pointers), fact.order is not None
