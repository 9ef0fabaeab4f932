"""Several sums over the same tensors, such as the gradients of a statement: in one kernel, or one after the other.

So are several statements whose results are added up: each by itself would read what those before it have written.

Where tuning is on, both are timed and the choice is kept as tuned configs are. Where nothing may be timed, each
statement is evaluated by itself. On a CPU they are one program of torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.facts import ConstantTables, Fact
from ...lru_cache import LRUCache
from ..codegen import Config
from ..language import fresh_name, renamed
from ..planning import holds_sums, resized
from ..reference import Part, joint_program_for, placeholders
from ..runtime import JointLauncher, on_device, paused
from ..tuning import (
    JointProblem,
    Problem,
    Search,
    candidates,
    digest,
    fastest,
    joint_problem,
    may_be_timed,
    next_batch,
    summed_problem,
    tuning_mode,
)
from .choice import fastest_way
from .prepared import PreparedStatement, as_one_step, has_kernels, prepare

__all__ = ["JointCall", "run_jointly", "sum_jointly"]

APART = "apart"
CHOICES = 1024

Run = Callable[..., Any]  # (expr, names, size, tensors, fact, wants_winners)


class JointCall(NamedTuple):
    """One of several statements over plain tensors."""

    expr: str
    names: str  # of the tensors, joined by commas
    size: tuple[int, ...]
    tensors: list[Tensor]
    fact: Fact | None = None
    place: Tensor | None = None  # memory for the result, which may be a part of a larger tensor
    alone: Callable[[], Tensor] | None = None  # evaluates it by itself; None: as any statement

    @property
    def statement(self) -> tuple[str, str, tuple[int, ...], list[Tensor], Fact | None]:
        """The statement and its tensors, without where its result goes and how it may be evaluated."""
        return self[:5]

    def placed(self, value: Tensor) -> Tensor:
        """Return the result in the memory that there is for it."""
        return value if self.place is None or value is self.place else self.place.copy_(value)


class _Choice(NamedTuple):
    launcher: JointLauncher | None  # None: each statement has a kernel of its own
    places: tuple[int, ...] = ()  # the statements that the joint kernel runs


_choices: LRUCache[_Choice] = LRUCache(CHOICES)  # by what calls have in common that the same kernels run


def run_jointly(calls: Sequence[JointCall], run: Run) -> list[Tensor]:
    """Return the values of several statements over plain tensors; `run` evaluates one of them."""
    device, are_several = calls[0].tensors[0].device, len(calls) > 1
    by_kernels = has_kernels(device)
    if are_several and device.type == "cpu" and not (by_kernels or any(call.alone for call in calls)):
        return [call.placed(value) for value, call in zip(_in_one_program(calls, run), calls)]
    choice = _choice(calls, run) if are_several and by_kernels and _share_names(calls) else _Choice(None)
    return _run(calls, choice.launcher, choice.places, run)


def sum_jointly(calls: Sequence[JointCall], in_turn: Callable[[], Tensor]) -> Tensor:
    """Return the sum of several statements' values by one kernel if that is the fastest, else by `in_turn`.

    All of them have one place, if any.
    """
    own = None
    if len(calls) > 1 and has_kernels(calls[0].tensors[0].device):
        own = _with_own_names(calls)
    choice = _Choice(None) if own is None else _sum_choice(own, in_turn)
    if own is None or choice.launcher is None:
        return calls[0].placed(in_turn())
    return choice.launcher([call.tensors for call in own], [calls[0].place])[0]


def _alone(call: JointCall, run: Run) -> Tensor:
    """Return the value of one statement by itself."""
    return call.placed(run(*call.statement, False) if call.alone is None else call.alone())


def _key(statement: PreparedStatement, variant: object, call: JointCall) -> tuple[object, ...]:
    """Return a key that is equal only for calls that the same kernel runs."""
    return *statement.kernel_key(variant, call.fact), None if call.place is None else call.place.stride()


def _problem(statement: PreparedStatement, call: JointCall) -> Problem:
    """Return the tuning problem of one of several statements, whose result lies as its place does."""
    problem = statement.problem(call.tensors, call.fact)
    return problem if call.place is None else replace(problem, strides={**problem.strides, "": call.place.stride()})


def _with_own_names(calls: Sequence[JointCall]) -> list[JointCall] | None:
    """Return statements in which a name stands for one tensor, or one length; None if they have several outputs."""
    statements = [prepare(*call.statement) for call in calls]
    outputs = {(str(each.bound.statement.output), each.bound.size) for each in statements}
    if len(outputs) > 1 or any([each.bound.is_seeded or each.bound.is_empty for each in statements]):
        return None
    known, taken, own_calls = dict[tuple[str, int], str](), set[str](), []

    def own_names(stands_for: Mapping[str, int]) -> dict[str, str]:
        """Return a name for each, which is the same in another statement if it stands for the same there."""
        for name, what in stands_for.items():
            if (name, what) not in known:
                known[name, what] = fresh_name(f"{name}_{len(known)}", taken) if name in taken else name
                taken.add(known[name, what])
        return {name: known[name, what] for name, what in stands_for.items()}

    for prepared, call in zip(statements, calls):
        statement, tensors = prepared.bound.statement, dict(zip(prepared.names, call.tensors))
        taken |= {statement.output.name, *statement.free}
        indices = own_names({name: prepared.bound.extents[name] for name in statement.summed})
        names = own_names({name: id(tensor) for name, tensor in tensors.items()})
        fact = call.fact
        if isinstance(fact, ConstantTables):
            fact = ConstantTables({names[name]: table for name, table in fact.numbers.items()})
        text = str(renamed(statement, indices, names))
        read = ",".join(names[name] for name in tensors)
        own_calls.append(call._replace(expr=text, names=read, fact=fact))
    return own_calls


def _sum_choice(calls: Sequence[JointCall], in_turn: Callable[[], Tensor]) -> _Choice:
    """Return the kernel that adds up statements over tensors like these, if it is faster than one after the other."""
    statements = [prepare(*call.statement) for call in calls]
    variants = [statement.variant(call.tensors) for statement, call in zip(statements, calls)]
    key = "sum", *map(_key, statements, variants, calls)
    choice = _choices.get(key)
    if choice is None:
        if not may_be_timed(calls[0].tensors[0].device):
            return _Choice(None)
        choice = _choices[key] = _timed_sum(calls, statements, in_turn)
    return choice if choice.launcher is None else _Choice(fitted(choice.launcher, statements))


def _timed_sum(
    calls: Sequence[JointCall],
    statements: Sequence[PreparedStatement],
    in_turn: Callable[[], Tensor],
) -> _Choice:
    """Return the kernel of a sum that takes the least, none if one after the other does."""
    problem = summed_problem([*map(_problem, statements, calls)])
    if problem is None:
        return _Choice(None)
    tensors = [call.tensors for call in calls]
    configs, (together_ms, apart_ms) = {str(config): config for config in problem.configs}, problem.host_milliseconds
    built = cache(lambda: problem.built(tensors, [*configs.values()]))  # unless the choice is remembered
    times = dict[str, float]()

    def start(name: str) -> tuple[Callable[[], object], float] | None:
        if name == APART:  # for which each statement is tuned by itself: not where none of them could be fast enough
            is_hopeless = problem.apart_floor >= min(times.values(), default=float("inf"))
            return None if is_hopeless else (lambda: calls[0].placed(in_turn()), apart_ms)
        launcher = built().get(name)
        return None if launcher is None else (lambda: launcher(tensors, [calls[0].place]), together_ms)

    with on_device(statements[0].bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        names = [*configs, APART]
        name = fastest(problem.key, names, names, start, times)
        if name == APART:
            return _Choice(None)
        launcher = problem.launcher(configs[name])
        launcher.build(tensors)
    return _Choice(launcher)


def _in_one_program(calls: Sequence[JointCall], run: Run) -> list[Tensor]:
    """Return the values of several sums by torch's operations, each in its own way, with what they share done once."""
    statements = [prepare(*call.statement) for call in calls]
    if any([each.bound.is_empty or not each.is_sum for each in statements]):
        return [run(*call.statement, False) for call in calls]
    tensors, parts = dict[int, Tensor](), []
    for statement, call in zip(statements, calls):
        named, variant = dict(zip(statement.names, call.tensors)), statement.variant(call.tensors)
        operands = [named[name] for name in placeholders(statement.bound)]
        tensors.update({id(tensor): tensor for tensor in operands})
        numbers = tuple([[*tensors].index(id(tensor)) for tensor in operands])
        way = fastest_way(statement, variant, call.tensors)
        parts.append(Part(statement.bound, statement.padding(variant), way, numbers))
    program = joint_program_for(parts)
    return [*as_one_step(program.function, *tensors.values(), *program.lengths_in(parts))]


def _run(calls: Sequence[JointCall], launcher: JointLauncher | None, places: Sequence[int], run: Run) -> list[Tensor]:
    """Return the values of statements of which a joint kernel runs those at `places`."""
    results = dict[int, Tensor]()
    if launcher is not None:
        joint = [calls[at] for at in places]
        results = dict(zip(places, launcher([call.tensors for call in joint], [call.place for call in joint])))
    return [results[at] if at in results else _alone(call, run) for at, call in enumerate(calls)]


def _share_names(calls: Sequence[JointCall]) -> bool:
    """Whether a name stands for one tensor in all calls; constant tables are in the source, whatever their names."""
    tables = [call.fact.numbers if isinstance(call.fact, ConstantTables) else {} for call in calls]
    tensors: dict[str, Tensor] = {}
    for call, own in zip(calls, tables):
        for name, tensor in zip(call.names.split(","), call.tensors):
            if name not in own and tensors.setdefault(name, tensor) is not tensor:
                return False
    return not any(name in tensors for own in tables for name in own)


def _choice(calls: Sequence[JointCall], run: Run) -> _Choice:
    """Return the joint kernel for tensors like these, of all statements or of some, if it is faster than their own."""
    statements = [prepare(*call.statement) for call in calls]
    variants = [statement.variant(call.tensors) for statement, call in zip(statements, calls)]
    key = tuple(map(_key, statements, variants, calls))
    choice = _choices.get(key)
    if choice is None:
        if not may_be_timed(calls[0].tensors[0].device):
            return _Choice(None)
        choice = _choices[key] = _timed(calls, statements, run)
    if choice.launcher is None:
        return choice
    return _Choice(fitted(choice.launcher, [statements[at] for at in choice.places]), choice.places)


def fitted(launcher: JointLauncher, statements: Sequence[PreparedStatement]) -> JointLauncher:
    """Return a launcher for the lengths of these statements' tensors."""
    bounds = [statement.bound for statement in statements]
    lengths = {name: extent for bound in bounds for name, extent in bound.extents.items()}
    return launcher.resized(bounds, lengths | resized(launcher.kernel.schedule, bounds[0], None))


def _timed(calls: Sequence[JointCall], statements: Sequence[PreparedStatement], run: Run) -> _Choice:
    """Return the joint kernel that takes the least, none if separate ones do; measured now unless it is remembered."""
    problems = [*map(_problem, statements, calls)]
    joints = _joints(problems, _groups(problems)) or _joints(problems, _of_shorter_sums(problems))
    if not joints:
        return _Choice(None)
    with on_device(statements[0].bound.device), paused(), torch.no_grad():  # none of it is a part of the call
        way = _fastest(joints, problems, calls, run)
        if way is None:
            return _Choice(None)
        launcher = joints[way.places].launcher(way.config)
        launcher.build([calls[at].tensors for at in way.places])
    return _Choice(launcher, way.places)


def _joints(
    problems: Sequence[Problem], groups: Mapping[tuple[int, ...], Collection[int]]
) -> dict[tuple[int, ...], JointProblem]:
    """Return those groups of statements that a kernel may run, by their places; see `_groups`."""
    joints = {places: joint_problem([problems[at] for at in places], in_order) for places, in_order in groups.items()}
    return {places: joint for places, joint in joints.items() if joint is not None}


def _of_shorter_sums(problems: Sequence[Problem]) -> dict[tuple[int, ...], Collection[int]]:
    """Return groups of statements without those that sum over more names than a program can hold with the others."""
    summed = [{*problem.bound.statement.summed} for problem in problems]
    groups = {tuple(at for at, own in enumerate(summed) if own < most): () for most in summed}
    return {places: in_order for places, in_order in groups.items() if len(places) > 1}


def _groups(problems: Sequence[Problem]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return which may share a kernel: all statements; all that do not scatter by a sorted index; all that store.

    With each group come those of it, by their numbers there, that scatter by a sorted index. A scatter adds up its
    neighbours of one place, which follow each other then; by itself it may also take them in such an order. The same
    groups come without sums that are too long for a program, whose parts many programs would add to a few places.
    """
    everything = tuple(range(len(problems)))
    scatters = {at: own for at in everything if (own := problems[at].bound.statement.output.indirections)}
    in_order = {at for at, own in scatters.items() if all(access.name in problems[at].in_order for access in own)}
    long = {at for at in everything if not holds_sums(problems[at].bound)}
    apart = [left_out | more for more in (set[int](), long) for left_out in (set[int](), in_order, {*scatters})]
    groups = dict.fromkeys(tuple(at for at in everything if at not in left_out) for left_out in apart)
    return {
        places: tuple(number for number, at in enumerate(places) if at in in_order)
        for places in groups
        if len(places) > 1
    }


class _Way(NamedTuple):
    """A joint kernel of the statements at some places; the others have kernels of their own."""

    places: tuple[int, ...]
    config: Config


def _fastest(
    joints: Mapping[tuple[int, ...], JointProblem], problems: Sequence[Problem], calls: Sequence[JointCall], run: Run
) -> _Way | None:
    """Return the fastest way, None if that is a kernel for each statement.

    Those come first that are predicted to take the least, each tile with its best number of warps. Ways in which some
    statement has a kernel of its own, which is tuned by itself, are tried where they are predicted to win.
    """
    ways = {
        f"{'' if len(places) == len(calls) else f'{places} alone: '}{config}": _Way(places, config)
        for places, joint in joints.items()
        for config in joint.configs
    }
    names, predicted = [*ways, APART], _predicted(joints, problems, ways.values())
    order = _order(list(ways.values()), predicted)
    launchers: dict[_Way, JointLauncher | None] = {}
    first = next(iter(joints.values()))
    apart_ms = first.host_milliseconds[1]
    batch: list[str] = []
    begun: list[str] = []

    def following(best: str, times: Mapping[str, float]) -> Sequence[str]:
        tried = {at: times.get(name) for at, name in enumerate(names) if name in begun}
        batch[:] = [names[at] for at in next_batch(order, predicted, tried)]
        if not begun:
            batch[:] = [name for name in batch if name != APART and len(ways[name].places) == len(calls)] or batch
        begun.extend(batch)
        return tuple(batch)

    def start(name: str) -> tuple[Callable[[], object], float] | None:
        if name == APART:
            return lambda: _run(calls, None, (), run), apart_ms
        way = ways[name]
        if way not in launchers:
            launchers.update(dict.fromkeys(new := [ways[own] for own in dict.fromkeys([*batch, name]) if own != APART]))
            launchers.update(_built(joints, calls, new))
        launcher = launchers[way]
        together_ms, own_ms = joints[way.places].host_milliseconds
        return (
            None
            if launcher is None
            else (
                lambda: _run(calls, launcher, way.places, run),
                together_ms + apart_ms - own_ms,
            )
        )

    key = replace(first.key, codegen=digest(joint.key.codegen for joint in joints.values()))
    if tuning_mode() == "full":
        batch[:] = begun[:] = names
    return ways.get(fastest(key, names, begun or following("", {}), start, others=following))


def _order(ways: Sequence[_Way], predicted: Sequence[float]) -> list[int]:
    """Return the numbers of ways and, as the last number, of a kernel for each statement, in the order of trying."""
    by_time = sorted(range(len(predicted)), key=lambda at: predicted[at])
    tiles = [(way.places, way.config.blocks, way.config.run) for way in ways]
    best = {tiles[at]: at for at in reversed(by_time) if at < len(ways)}
    most = max(len(way.places) for way in ways)
    is_whole = lambda at: at < len(ways) and len(ways[at].places) == most
    return sorted(by_time, key=lambda at: (not is_whole(at), at < len(ways) and best[tiles[at]] != at))


def _predicted(
    joints: Mapping[tuple[int, ...], JointProblem], problems: Sequence[Problem], ways: Iterable[_Way]
) -> list[float]:
    """Return the milliseconds that ways are predicted to take, and after them those of a kernel for each statement.

    A statement that no kernel runs counts for nothing: it is evaluated by itself in all of them.
    """
    alone = [min(Search(problem, candidates(problem), 0.0).predicted, default=0.0) for problem in problems]
    left = lambda places: sum(ms for at, ms in enumerate(alone) if at not in places)
    together = [joints[places].predicted_milliseconds(config) + left(places) for places, config in ways]
    return [*together, sum(alone)]


def _built(
    joints: Mapping[tuple[int, ...], JointProblem], calls: Sequence[JointCall], ways: Collection[_Way]
) -> Iterator[tuple[_Way, JointLauncher]]:
    """Yield the launchers of those joint kernels that can be built for these tensors."""
    for places, joint in joints.items():
        configs = [way.config for way in ways if way.places == places]
        built = joint.built([calls[at].tensors for at in places], configs)
        yield from ((_Way(places, config), built[str(config)]) for config in configs if str(config) in built)
