"""Which route a statement over plain tensors takes: torch's operations, smaller statements, groups, copies, one kernel.

Where tuning is on, the routes that a statement has are timed against each other and the choice is kept as tuned configs
are, so that no statement is slower than plain torch. Where nothing may be timed, an estimate of work and bytes decides
between one kernel, several statements, and tiles of equal index.

Products that are grouped by an index tensor need tables of it, which are remembered with the tensor. So there is a
second choice, for an index tensor that was not met before, with the time in which its tables are made, and a third one
for captured graphs, with the time in which a graph makes sure at each replay that its tables still hold.

Routes are ranked by what they take of the device. The host's time is hidden as soon as calls are queued or captured in
a graph, and an estimate of it chose one kernel of 0.020 ms where torch's product takes 0.007; it decides between routes
that the device finds equally good. A call with a new index tensor is never captured and has waited for the range of the
tensor, so that its routes are ranked by the time until the result is there: tables are many short launches.

A route that torch offers is missing here for one of two reasons: `torch.bincount` reads its largest number back, which
no captured graph can; a sparse factor made dense would multiply what is absent by 0, and 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import ne
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import Fact
from ...formats.torch_state import (
    is_deterministic,
    is_watched,
    may_round_sums,
    unseen_saving,
    uses_tensor_cores,
    wants_gradient,
)
from ...lru_cache import LRUCache
from ..binding import Bound
from ..planning import Grouping, Split, device_of
from ..reference import USUAL, Way, numbers_held, sums_in_half
from ..runtime import Launcher, active, on_device, paused
from ..tuning import (
    NEAR,
    Key,
    bucketed_lengths,
    choice_key,
    fastest,
    floor_milliseconds,
    host_milliseconds,
    is_put_off,
    may_be_timed,
    tuning_mode,
)
from .aligned import AlignedRunner, aligned_of
from .grouped import GroupedRunner, Kernel, RunnerByCapture, RunnerByIndex, groupings_of
from .prepared import PreparedStatement, Runner
from .steps import LEAST_GAIN, Step, evaluated, split_of, steps_of

__all__ = [
    "ALIGNED",
    "CLEAR",
    "GROUPED",
    "KERNEL",
    "STATEMENTS",
    "TORCH",
    "chosen_route",
    "fastest_program",
    "fastest_route",
    "fastest_way",
    "grad_like",
]

KERNEL, STATEMENTS, TORCH = "one kernel", "several statements", "torch operations"
GROUPED, ALIGNED = "tiles of equal index", "aligned copies"
NEW_INDEX = "route until the result with a new index of"
CAPTURED = "route in a captured graph of"
CLEAR = 2.0  # times faster by an estimate that knows neither tiles nor caches: then nothing slower is timed
SHARE = 0.25  # of a GPU's free memory: what torch operations, or tensors between statements, may take
NEAR_BEST = 1.1  # times the best: programs from which others are varied, one choice at a time
CHOICES = 2048

Maker = Callable[[float], Runner]  # is given the least milliseconds of the routes that were timed before


class _Choice(NamedTuple):
    route: str
    parts: Split | None
    new_index: str  # the route for an index tensor that was not met before
    captured: str  # the route while a graph is captured


@dataclass(frozen=True)
class _Call:
    """A statement and its tensors, and what there is to evaluate it."""

    statement: PreparedStatement
    variant: Any
    tensors: list[Tensor]
    fact: Fact | None
    run: Callable[..., Any]  # evaluates a statement over plain tensors
    kernel_of: Kernel  # the runner of a statement as one kernel
    parts: Split | None
    ways: Sequence[Grouping]

    def kernel(self, ms: float) -> Runner:
        """Return the runner of this statement as one kernel."""
        return self.kernel_of(self.statement, self.variant, self.tensors, self.fact, ms)

    @property
    def may_be_timed(self) -> bool:
        return may_be_timed(self.statement.bound.device)


_choices: LRUCache[_Choice] = LRUCache(CHOICES)  # by what statements have in common that one kernel runs


def fastest_route(
    statement: PreparedStatement,
    variant: Any,
    tensors: list[Tensor],
    fact: Fact | None,
    run: Callable[..., Any],
    kernel: Kernel,
    times: dict[str, float] | None = None,
) -> Runner:
    """Return the runner that evaluates a statement over tensors like these the fastest.

    `run` evaluates a statement over plain tensors; `kernel` returns the runner of one as one kernel, of which it need
    not try many if another route takes so many milliseconds that none can take fewer. If `times` is a dictionary,
    all routes are timed anew, and it is filled with their milliseconds.
    """
    key = statement.kernel_key(variant, fact)
    choice = _choices.get(key)
    parts = _split_of(statement, variant, fact) if choice is None else choice.parts
    ways = groupings_of(statement, tensors, fact)  # which know how many values there are now
    call = _Call(statement, variant, tensors, fact, run, kernel, parts, ways)
    if not call.may_be_timed:
        return _untimed(call)(0.0)
    if choice is None or times is not None:
        makers = {route: maker for route, make in ROUTES.items() if (maker := make(call)) is not None}
        choice = _choices[key] = _chosen(call, makers, times)
        runner = makers[choice.route](0.0)
    else:
        runner = (ROUTES[choice.route](call) or _untimed(call))(0.0)
    return _by_call(call, choice, runner) if isinstance(runner, GroupedRunner) else runner


def _by_call(call: _Call, choice: _Choice, grouped: GroupedRunner) -> Runner:
    """Return a runner that groups products where that is the fastest: of a known index, and in a graph or not."""
    runner: Runner = grouped
    new = None if choice.new_index == GROUPED else ROUTES[choice.new_index](call) or _kernel(call)
    captured = None if choice.captured == GROUPED else ROUTES[choice.captured](call) or _kernel(call)
    if new is not None:
        runner = RunnerByIndex(grouped.at, runner, new(0.0))
    return runner if captured is None else RunnerByCapture(runner, captured(0.0))


def _chosen(call: _Call, makers: Mapping[str, Maker], times: dict[str, float] | None) -> _Choice:
    """Return the routes that take the least of those that a statement has."""
    route = next(iter(makers)) if len(makers) == 1 else _timed(call, makers, times)
    if route != GROUPED:
        return _Choice(route, call.parts, route, route)
    others = [_timed(call, makers, None, what) if len(makers) > 1 else route for what in (NEW_INDEX, CAPTURED)]
    return _Choice(route, call.parts, *others)


def chosen_route(statement: PreparedStatement, variant: Any, fact: Fact | None) -> str | None:
    """Return the route that was timed to be the fastest for statements like this one; None if none was timed."""
    choice = _choices.get(statement.kernel_key(variant, fact))
    return None if choice is None else choice.route


def _split_of(statement: PreparedStatement, variant: Any, fact: Fact | None) -> Split | None:
    """Return the smaller statements of a sum; None too where a fact is known, which is one about the whole."""
    if fact is not None or not statement.is_sum:
        return None
    return split_of(statement.bound, statement.padding(variant), LEAST_GAIN)


def fastest_program(statement: PreparedStatement, variant: Any, tensors: list[Tensor]) -> Runner:
    """Return the runner of a statement that no kernel runs: torch's operations in the way that takes the least."""
    way = fastest_way(statement, variant, tensors)
    return statement.runner((variant, way), lambda: statement.graph(variant, way=way))


def fastest_way(statement: PreparedStatement, variant: Any, tensors: list[Tensor]) -> Way:
    """Return the way in which torch's operations take the least for a statement that no kernel runs.

    That is the likeliest way in a call that is timed itself, until it has proved to be worth more. What torch
    differentiates is of its own operations alone.
    """
    learns, recording = wants_gradient(tensors), active()
    way = statement.ways_taken.get((variant, learns))
    if way is None:
        way = _settled_way(statement, variant, tensors, learns)
        if way is not None:
            statement.ways_taken[variant, learns] = way
        elif recording is not None:
            recording.postpone()
    return USUAL._replace(by_rows=not learns) if way is None else way


def _settled_way(statement: PreparedStatement, variant: Any, tensors: list[Tensor], learns: bool) -> Way | None:
    """Return the fastest way, None if the choice is put off.

    Where nothing may be timed, or results must not depend on it, that is the likeliest way.
    """
    bound = statement.bound
    is_fixed = tuning_mode() == "off" or is_deterministic() or is_watched()
    usual = USUAL._replace(by_rows=not learns)
    if bound.device.type != "cpu" or bound.is_empty or is_fixed:
        return usual
    if statement.program(variant, way=usual).choices <= ({"by_rows"} if learns else set()):
        return usual  # there is no other
    operands = [tensor.detach().requires_grad_() if learns and tensor.requires_grad else tensor for tensor in tensors]
    key = _program_key(statement, variant, operands)
    if is_put_off(key):
        return None
    programs = statement.programs(variant, learns)
    names = list(programs)
    runners = {name: statement.running(program) for name, program in programs.items()}
    wanted = [tensor for tensor in operands if tensor.requires_grad]
    upstream = grad_like(statement.bound.size, statement.bound.dtype) if learns else None

    def start(name: str) -> tuple[Callable[[], object], float]:
        value = lambda: runners[name](operands, None)
        call = (lambda: torch.autograd.grad(value(), wanted, upstream)) if learns else value
        return call, float(names.index(name))

    def varied(best: str, times: Mapping[str, float]) -> list[str]:
        """Return the ways that differ by one choice from one that takes little more than the best."""
        near = [programs[name].way for name, ms in times.items() if ms <= NEAR_BEST * times[best]]
        return [name for name in names if any(sum(map(ne, programs[name].way, way)) == 1 for way in near)]

    with paused(), unseen_saving(), torch.set_grad_enabled(learns):  # none of it is a part of the call
        first = [names[0], *varied(names[0], {names[0]: 0.0})]
        way = fastest(key, names, first, start, is_waited_for=True, others=varied)
        return programs[way].way


def grad_like(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return numbers to stand for the gradient of a result on a CPU.

    They differ from each other: a processor may convert equal ones in a third of the time. None is drawn at random,
    which batches of gradients do not allow.
    """
    steps = torch.arange(prod(size), dtype=torch.float64, device="cpu")
    return steps.mul_(0.6180339887).frac_().to(dtype).reshape(tuple(size))


def _program_key(statement: PreparedStatement, variant: Any, tensors: list[Tensor]) -> Key:
    """Return the tuning key of a statement's fastest program; lengths count by their power of two."""
    bound, named = statement.bound, dict(zip(statement.names, tensors))
    padding = ",".join(sorted(statement.padding(variant)))
    learning = ",".join(name for name, tensor in named.items() if tensor.requires_grad)
    rounds = f"; rounds: {may_round_sums(bound.dtype)}" if statement.is_half else ""
    winners = f"winners: {statement.wants_winners}{rounds}; by {', '.join(Way._fields)}"
    settings = f"-1 in {padding}; gradients of {learning}; {winners}"
    return choice_key(
        f"program of {bound.statement}", named, bucketed_lengths(bound), settings, False, torch.__version__
    )


# the routes: each returns what makes its runner, or None where a statement does not have it


def _torch(call: _Call) -> Maker | None:
    bound = call.statement.bound
    if not _fits_in_memory(bound, call.statement.wants_winners):
        return None
    return lambda _: call.statement.graph(call.variant, sums_in_half=sums_in_half(bound))


def _statements(call: _Call) -> Maker | None:
    parts, bound = call.parts, call.statement.bound
    if parts is None or not _has_room(bound.device, sum(map(prod, parts.sizes)) * bound.compute_dtype.itemsize):
        return None
    if parts.estimate and max((way.gain for way in call.ways), default=0.0) > CLEAR * parts.estimate:
        return None  # such as all experts for all tokens
    return lambda _: _in_turn(call.statement, parts, call.run)


def _grouped(call: _Call) -> Maker | None:
    return partial(_fastest_groups, call) if call.ways else None


def _aligned(call: _Call) -> Maker | None:
    statement = call.statement
    way = aligned_of(statement, call.tensors) if call.fact is None and statement.is_sum else None
    if way is None or not _has_room(statement.bound.device, way.numbers_held * statement.bound.dtype.itemsize):
        return None
    return lambda _: AlignedRunner(statement, way, call.run, call.kernel_of)


def _kernel(call: _Call) -> Maker | None:
    return None if max(_gains(call).values(), default=0.0) > CLEAR else call.kernel


# in the order in which they are timed: first what needs no kernel built, so that few are built where none can win, and
# last what needs one for each step
ROUTES: Mapping[str, Callable[[_Call], Maker | None]] = {
    TORCH: _torch,
    GROUPED: _grouped,
    ALIGNED: _aligned,
    KERNEL: _kernel,
    STATEMENTS: _statements,
}


def _gains(call: _Call) -> dict[str, float]:
    """Return how many times faster than one kernel other routes are by estimates that know neither tiles nor caches."""
    gains = {} if call.parts is None else {STATEMENTS: call.parts.gain}
    return {**gains, GROUPED: max(way.gain for way in call.ways)} if call.ways else gains


def _untimed(call: _Call) -> Maker:
    """Return the route that is taken where nothing may be timed."""
    gains = _gains(call)
    best = max(gains, key=lambda route: gains[route], default=KERNEL)
    return _kernel(call) or ROUTES[best](call) or call.kernel  # one of the first two always is


def _fastest_groups(call: _Call, ms: float) -> GroupedRunner:
    """Return the runner of the fastest way to group a statement's products by an index tensor.

    Other routes take `ms` milliseconds, 0 if none was timed.
    """

    def made(way: Grouping, least: float) -> GroupedRunner:
        known = min([each for each in (least, ms) if each], default=0.0)
        return GroupedRunner(call.statement, way, call.kernel_of, known)

    ways = {str(way): way for way in call.ways}
    if len(ways) == 1 or not call.may_be_timed:
        return made(max(call.ways, key=lambda way: way.gain), ms)
    fastest_one = _timed(call, {name: partial(made, way) for name, way in ways.items()}, None, "groups of")
    return made(ways[fastest_one], ms)


def _in_turn(statement: PreparedStatement, parts: Split, run: Callable[..., Any]) -> Runner:
    """Return what evaluates the smaller statements one after the other."""
    steps = steps_of(statement.bound, parts)

    def run_step(step: Step, tensors: list[Tensor]) -> Tensor:
        return run(step.text, ",".join(step.names), step.size, tensors, None, False)  # type: ignore[no-any-return]

    return lambda tensors, _: evaluated(steps, dict(zip(statement.names, tensors)), run_step, keeps=False)[0]


def _timed(call: _Call, makers: Mapping[str, Maker], times: dict[str, float] | None, what: str = "route of") -> str:
    """Return the route that takes the least, measured now unless it is remembered.

    Groups are timed with tables that are made beforehand, with new ones if `what` is about a new index, and with those
    that a graph looks after if it is about captured ones: what is timed is captured.
    """
    statement, fact = call.statement, call.fact
    bound = statement.bound
    device, is_new, times = device_of(bound.device), times is not None, {} if times is None else times

    settings = bound, device, uses_tensor_cores(bound.dtype)
    floors = dict.fromkeys(makers, floor_milliseconds(*settings))
    if call.parts is not None:
        floors[STATEMENTS] = floor_milliseconds(*settings, call.parts.sizes)

    def start(name: str) -> tuple[Callable[[], object], float] | None:
        least = min(times.values(), default=0.0)
        if 0 < NEAR * least <= floors[name] and not is_new:
            return None  # there is nothing left to win
        runner = makers[name](least)
        if isinstance(runner, Launcher):
            host = host_milliseconds(bound.device, runner.preparation, runner.is_wide)
        else:  # an operation for each factor, about
            own = runner.launches if isinstance(runner, AlignedRunner) else len(bound.statement.accesses)
            host = device.host_milliseconds(own)
        if isinstance(runner, GroupedRunner):
            if what == NEW_INDEX:
                return lambda: runner.anew(call.tensors, fact), host
            if what == CAPTURED:
                return lambda: runner(call.tensors, fact), host
            tables = runner.tables(call.tensors)
            return lambda: runner.over(tables, call.tensors, fact), host
        return lambda: runner(call.tensors, fact), host

    problem = statement.problem(call.tensors, fact)
    key = replace(problem.key, statement=f"{what} {problem.key.statement}")
    with on_device(bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        return fastest(key, list(makers), list(makers), start, times, is_new, what == NEW_INDEX)


def _fits_in_memory(bound: Bound, wants_winners: bool) -> bool:
    """Return whether the torch operations of a statement take no more than their share of a GPU's free memory."""
    held = numbers_held(bound, wants_winners) * bound.compute_dtype.itemsize
    return bound.device.type == "cuda" and _has_room(bound.device, held)


def _has_room(device: torch.device, held: int) -> bool:
    """Return whether so many bytes are no more than one statement's share of a GPU's free memory."""
    return device.type != "cuda" or held <= SHARE * torch.cuda.mem_get_info(device)[0]
