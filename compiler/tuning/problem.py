"""A tuning problem: all that the fastest kernel of a statement depends on, and the candidates to run it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import groupby
from math import prod
from pathlib import Path
from platform import machine

import torch
from torch import Tensor

from ...formats import facts
from ...formats.facts import Fact, OwnedRows
from ..binding import Bound, bucket, kernel_strides, row_major, shape_class
from ..codegen import Config, Flags, emit
from ..language import Access, Var
from ..planning import (
    H200,
    Schedule,
    Strides,
    described_as,
    device_of,
    other_schedules,
    resized,
    schedules,
    strategies,
)
from ..runtime import TRITON_VERSION, Launcher, cache_dir, launcher, replace_file, sum_of_copies
from .cost import Cost
from .exemplars import EXEMPLARS, Exemplar
from .footprint import fitted
from .settings import tuning_mode
from .space import configs, spread
from .tuning_cache import Choices, Key

__all__ = [
    "Candidate",
    "Problem",
    "bucketed_lengths",
    "candidates",
    "choice_key",
    "device_name",
    "digest",
    "emitted_version",
    "generator_version",
    "is_uneven",
    "resize",
]

PREDICTED = 4  # configs of a schedule that the cost model adds to those of the measured tables
UNCUT_ROW = 32  # entries that a program walks without cutting them: DD, of rows up to 19, took 0.218 ms and not 0.227
EVICTING = 3  # configs that are also tried with results that leave the cache first
GENERATOR = Path(__file__).parents[1], Path(facts.__file__).parent  # all that a kernel's text depends on
EVEN = 1.05  # times the mean: rows up to this long count as of one length, and their order is not tuned


@dataclass(frozen=True)
class Problem:
    """All that the fastest kernel of a statement depends on."""

    bound: Bound
    strides: Strides
    names: tuple[str, ...]
    fact: Fact | None  # without its tensors, which a problem must not keep alive
    flags: Flags
    deterministic: bool
    rows: tuple[int, int] = (0, 0)  # of owned rows: how many there are, and the most groups of one
    has_order: bool = False  # the fact has the order of rows by their length
    in_order: tuple[str, ...] = ()  # index tensors that scatter and ascend: neighbours meet at one place

    def launcher(self, candidate: Candidate) -> Launcher:
        """Return the launcher of a candidate, which is not built yet."""
        kernel = emit(candidate.schedule, self.strides, candidate.config, self.flags)
        sum_dtype = candidate.schedule.sum_dtype(self.flags.sum_dtype)
        wants_winners = self.flags.wants_winners
        return _with_total(
            launcher(self.bound, candidate.schedule, kernel, self.strides, self.names, sum_dtype, wants_winners)
        )

    def resized(self, launcher: Launcher) -> Launcher:
        """Return a launcher of a problem of the same signature with the sizes of this one."""
        return resize(launcher, self.bound, self.fact)

    def cost(self, schedule: Schedule, config: Config, extents: Mapping[str, int] | None = None) -> Cost:
        """Return what a candidate costs, for these extents or those of the schedule."""
        extents = schedule.extents if extents is None else extents
        settings = device_of(self.bound.device), self.flags.precision, extents, self.in_order
        return Cost(schedule, config, self.strides, *settings)

    @cached_property
    def signature(self) -> object:
        """All that a kernel's source and its tuned config depend on; long sizes that vary count by their class.

        A tensor's first dimension varies from call to call, and no source holds how long it is: only whether blocks
        divide it, whether it is longer than they are, and whether addresses need 64 bits.
        """
        bound = self.bound
        shapes = [shape_class(shape, self.strides[name]) for name, shape in bound.shapes.items()]
        settings = self.names, self.fact, self.flags, self.deterministic, bound.is_seeded, bound.device, tuning_mode()
        winners = None if bound.statement.is_sum else bound.winner_dtype
        output = shape_class(bound.size, self.strides[""]), self.strides.get(" seed"), winners
        rows = *map(bucket, self.rows), self.has_order, self.is_uneven, self.in_order
        return id(bound.statement), settings, tuple(bound.dtypes.values()), *shapes, *output, *rows

    @cached_property
    def tried(self) -> tuple[Candidate, ...]:
        """The candidates that are worth trying by default, whether or not the device has the memory for them."""
        return _candidates(self, False)

    @cached_property
    def ways(self) -> tuple[Candidate, ...]:
        """The candidates that are tried by default, the most promising first."""
        return _fitted(self, self.tried)

    @cached_property
    def is_uneven(self) -> bool:
        return self.has_order and is_uneven(self.bound, self.fact, self.rows)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The extents as a key counts them: those that vary from call to call, and long ones, by their power of two."""
        bound, statement = self.bound, self.bound.statement
        accesses = *statement.index_accesses, *statement.accesses
        varying = {str(access.indices[0]) for access in accesses if access.indices}
        return {n: bucket(e) if n in varying or e > 4096 else e for n, e in sorted(bound.extents.items())}

    @cached_property
    def key(self) -> Key:
        """The key of a tuned config; lengths that vary from call to call count by their power of two."""
        bound, statement = self.bound, self.bound.statement
        layout = ";".join(
            f"{name}:{','.join(str(min(s, 2)) for s in self.strides[name])}" for name in sorted(self.strides)
        )
        return Key(
            f"{statement} seeded={bound.is_seeded} fact={self.fact or ''}{self._order}",
            f"{generator_version()} {digest(str(way.choices) for way in self.ways)}",
            tuple(f"{name}={dtype}" for name, dtype in bound.dtypes.items()),
            (
                *self.lengths.items(),
                *self.pointed_sizes,
                *zip((" rows", " longest"), map(bucket, self.rows)),
                (" uneven", int(self.is_uneven)),
            ),
            layout,
            device_name(bound.device),
            TRITON_VERSION,
            str(self.flags),
            self.deterministic,
        )

    @property
    def _order(self) -> str:
        return f" in order: {', '.join(self.in_order)}" if self.in_order else ""

    @property
    def pointed_sizes(self) -> tuple[tuple[str, int], ...]:
        """The lengths of the dimensions into which index tensors point: a few rows are kept on chip, many are not."""
        bound, statement = self.bound, self.bound.statement
        shapes = {**bound.shapes, "": bound.size}
        sizes = {
            (f"{access.name}[{dim}]", bucket(shapes["" if access is statement.output else access.name][dim]))
            for access in (statement.output, *statement.reads)
            for dim, index in enumerate(access.indices)
            if isinstance(index, Access)
        }
        return tuple(sorted(sizes))


def resize(launcher: Launcher, bound: Bound, fact: Fact | None) -> Launcher:
    """Return a launcher for tensors of other lengths, with the one that it has for captures."""
    result = _with_total(launcher.resized(bound, resized(launcher.schedule, bound, fact)))
    if launcher.captured is not None:
        result.captured = resize(launcher.captured, bound, fact)
    return result


def _with_total(launcher: Launcher) -> Launcher:
    """Return a launcher with the one that sums the copies of its output, if it has any."""
    copies = launcher.kernel.copies
    if copies > 1:
        launcher.total = sum_of_copies(launcher.bound, copies, launcher.sum_dtype)
    return launcher


def is_uneven(bound: Bound, fact: Fact | None, rows: tuple[int, int]) -> bool:
    """Whether some row has clearly more groups than the mean, so that the order of rows matters."""
    count, longest = rows
    return isinstance(fact, OwnedRows) and longest * count > EVEN * bound.shapes[fact.owner][0]


@cache
def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} sm_{properties.major}{properties.minor} {properties.multi_processor_count} SMs"


@dataclass(frozen=True)
class Candidate:
    """A schedule and a config that run a statement."""

    schedule: Schedule
    config: Config

    @property
    def choices(self) -> Choices:
        config = self.config
        return {
            "strategy": self.schedule.strategy,
            "dot": self.schedule.uses_dot,
            "unrolled": bool(self.schedule.tables),
            "form": self.schedule.form,
            **{f"block_{name}": block for name, block in config.blocks},
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **config.options,
        }

    def __str__(self) -> str:
        schedule = self.schedule
        product = "dot" if schedule.uses_dot else "fma" if schedule.is_sum else schedule.reduction
        product = "unrolled" if schedule.tables else product
        return " ".join(filter(None, [schedule.strategy, product, schedule.form, str(self.config)]))


def candidates(problem: Problem, full: bool = False) -> tuple[Candidate, ...]:
    """Return the candidates of a problem, the most promising first."""
    return _fitted(problem, _candidates(problem, True)) if full else problem.ways


def _candidates(problem: Problem, full: bool) -> tuple[Candidate, ...]:
    """Return the candidates, fitted to no device.

    A full search has every config of the schedules that rules prefer, then a handful of each other schedule.
    """
    return tuple(
        Candidate(schedule, config)
        for strategy in _strategies(problem, full)
        for arguments in [(problem.bound, problem.strides, strategy, problem.fact, problem.deterministic)]
        for preferred in [schedules(*arguments)]
        for schedule in (*preferred, *(other_schedules(*arguments) if full else ()))
        if not (schedule.has_copies and problem.flags.wants_winners)  # copies hold no positions
        for config in _configs(problem, schedule, full, schedule in preferred)
    )


def _strategies(problem: Problem, full: bool) -> tuple[str, ...]:
    """Return how results may reach the output, the most promising first.

    Pieces of rows are worth their atomic additions where some row is long, and there come first: whoever takes the
    longest row as a whole may take longer than all others together.
    """
    fact, ways = problem.fact, strategies(problem.bound, problem.fact, problem.deterministic, full)
    if not isinstance(fact, OwnedRows) or not fact.cut or not problem.rows[1]:
        return ways
    is_long, pieces = bucket(problem.rows[1]) > UNCUT_ROW, [way for way in ways if way == "store-or-atomic"]
    is_long |= fact.is_packed
    return (*(pieces if is_long else ()), *(way for way in ways if way not in pieces))


def _configs(problem: Problem, schedule: Schedule, full: bool, is_preferred: bool) -> Iterable[Config]:
    """Return the configs of a schedule: a handful, and of a full search all if rules prefer the schedule."""
    listed = configs(schedule, False, problem.has_order)
    if schedule.form == "rows":
        listed = _by_prediction(problem, schedule, listed)
    if _is_beyond_cache(problem, schedule):
        listed = (*[replace(config, evicts=True) for config in listed[:EVICTING]], *listed)
    if not is_preferred:
        return listed
    others = configs(schedule, True, problem.has_order) if full else ()
    return dict.fromkeys((*listed, *_predicted(problem, schedule, listed), *others))


def _by_prediction(problem: Problem, schedule: Schedule, listed: Iterable[Config]) -> tuple[Config, ...]:
    """Return configs in the order of the cost model, those that seem to spill last: the first is taken untimed."""
    lengths = _lengths(problem, schedule)
    costs = {config: problem.cost(schedule, config, lengths) for config in listed}
    return tuple(sorted(costs, key=lambda config: (costs[config].spills, costs[config].milliseconds)))


def _is_beyond_cache(problem: Problem, schedule: Schedule) -> bool:
    """Whether a statement moves so much that nobody finds its result in the cache: then it need not stay there."""
    bound, lengths = problem.bound, problem.lengths
    if not schedule.form or schedule.strategy != "store" or not schedule.covers_output:
        return False
    results = prod(lengths[index.name] for index in schedule.output.indices if isinstance(index, Var))
    return results * bound.dtype.itemsize > device_of(bound.device).l2_bytes


def _lengths(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """Return the extents of a schedule's names as a key counts them, so that all lengths of a key have one order."""
    lengths = {**schedule.extents, **problem.lengths}
    return lengths | {flat.name: prod(lengths[part] for part in flat.parts) for flat in schedule.flats}


def _predicted(problem: Problem, schedule: Schedule, listed: Collection[Config]) -> list[Config]:
    """Return configs that are not among those listed, and of all others are predicted to be the fastest.

    What was measured is at even sizes mostly: at odd ones four of ten tiles that are best there spill registers.
    """
    if problem.fact is not None:  # about rows, whose lengths the cost model does not know
        return []
    if schedule.along or (schedule.has_copies and not schedule.is_shared):  # listed by a model of their own
        return []
    lengths = _lengths(problem, schedule)
    costs = [
        (problem.cost(schedule, config, lengths), at, config)
        for at, config in enumerate(spread(schedule, device_of(problem.bound.device)))
        if config not in listed
    ]
    others = [(cost.milliseconds, at, config) for cost, at, config in costs if not cost.spills]
    by_tile = {config.blocks: config for *_, config in sorted(others, reverse=True)}  # each with its best warps
    return [config for *_, config in sorted(others) if by_tile[config.blocks] is config][:PREDICTED]


def _fitted(problem: Problem, ways: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the candidates with as many stages as the device has shared memory for, schedule by schedule."""
    device, precision = device_of(problem.bound.device), problem.flags.precision
    return tuple(
        Candidate(schedule, config)
        for _, neighbours in groupby(ways, key=lambda way: id(way.schedule))
        for schedule, configs_of_it in [_apart(neighbours)]
        for config in fitted(schedule, configs_of_it, device, precision)
    )


def _apart(candidates_of_it: Iterable[Candidate]) -> tuple[Schedule, tuple[Config, ...]]:
    """Return the schedule that candidates share, and their configs."""
    ways = tuple(candidates_of_it)
    return ways[0].schedule, tuple(way.config for way in ways)


def bucketed_lengths(bound: Bound) -> list[tuple[str, int]]:
    """Return the extents of a statement and the lengths of its output by their power of two, for a `choice_key`."""
    named = *bound.extents.items(), *((f"[{dim}]", length) for dim, length in enumerate(bound.size))
    return [(name, bucket(length)) for name, length in named]


def choice_key(
    what: str,
    tensors: Mapping[str, Tensor],
    lengths: Iterable[tuple[str, int]],
    settings: str,
    deterministic: bool,
    version: str | None = None,
) -> Key:
    """Return the key under which the tuning cache remembers which of several calls over these tensors is the fastest.

    `what` tells the calls, `lengths` the sizes that count, and `settings` what else the choice depends on. `version` is
    that of what is timed, by default that of the kernels.
    """
    return Key(
        what,
        generator_version() if version is None else version,
        tuple(f"{name}={tensor.dtype}" for name, tensor in tensors.items()),
        tuple(lengths),
        ";".join(f"{name}:{','.join(str(min(s, 2)) for s in tensor.stride())}" for name, tensor in tensors.items()),
        _place(next(iter(tensors.values())).device),
        TRITON_VERSION,
        settings,
        deterministic,
    )


def _place(device: torch.device) -> str:
    """Return what runs a call: of a CPU also which instructions and how many threads torch uses."""
    if device.type != "cpu":
        return device_name(device)
    return f"cpu {machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"


@cache
def generator_version() -> str:
    """Return the version of the code generator, to which tuned configs belong.

    Working it out takes a quarter of a second, so that the cache folder has it by the text of our own files.
    """
    files = sorted(path for folder in GENERATOR for path in folder.rglob("*.py"))
    kept_at = cache_dir() / "generator" / f"{digest([TRITON_VERSION, *[path.read_text() for path in files]])}.txt"
    with suppress(OSError, ValueError):
        version = kept_at.read_text("ascii")
        if len(version) == len(kept_at.stem):
            return version
    version = emitted_version()
    with suppress(OSError):
        replace_file(kept_at, version.encode())
    return version


def emitted_version() -> str:
    """Return a digest of the kernels and candidates of the `EXEMPLARS`: that of the code generator.

    It is none of our files, which may change without a change to any kernel. Of candidates that differ in sizes alone
    the first is emitted: a millisecond each. A problem's own candidates are in its key as well. Code that no exemplar
    reaches would not count, so a test compares the functions that exemplars call with those that the kernels of all
    other tests do. All is planned for one GPU, whatever is there or described.
    """
    with described_as(H200):
        return digest(text for exemplar in EXEMPLARS for text in _texts(exemplar))


def _texts(exemplar: Exemplar) -> Iterator[str]:
    """Yield the choices of an exemplar's candidates, and the source of the first of each kind."""
    bound = exemplar.bound
    strides = kernel_strides(bound, {name: row_major(shape) for name, shape in bound.shapes.items()})
    problem = Problem(
        bound, strides, tuple(bound.shapes), exemplar.fact, exemplar.flags, False, has_order=exemplar.has_order
    )
    emitted = set()
    for way in problem.tried:
        yield str(way.choices)
        kind = way.config.kind, way.schedule.strategy, str(way.schedule)
        if kind not in emitted:
            emitted.add(kind)
            yield emit(way.schedule, strides, way.config, problem.flags).source


def digest(texts: Iterable[str]) -> str:
    """Return a short digest of texts."""
    return sha256("\0".join(texts).encode()).hexdigest()[:16]
