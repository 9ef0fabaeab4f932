"""Workloads timed: ours, plain torch, torch.compile and a routine of torch, checked in float64; the table of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from statistics import median

import torch
from torch import Tensor

from insum_ops import explain, insum

from .case import DEVICE, LIMIT, OURS, PEER_FAILURES
from .device_lock import device_lock
from .harness import Times, check, enough, geomean, queued_in_turns, table, wall_in_turns
from .results import ResultsError, Run, contradiction
from .roofs import floor_ms, roofs
from .statement_times import COMPILED, TORCH, timed
from .suite import SUITE
from .workload import HOST, Given, Workload, work

__all__ = [
    "BACKWARD",
    "EXPERIMENT",
    "FORWARD",
    "LIBRARY",
    "PASSES",
    "Measured",
    "calls",
    "measure_workload",
    "measured_of",
    "summary",
]

EXPERIMENT = "statements"
LIBRARY = "torch's routine"
FORWARD, BACKWARD = PASSES = ("forward", "backward")
MODE = "max-autotune-no-cudagraphs"
BEHIND = 0.95  # of the best other's speed: what is slower than that is named below the table

Call = Callable[[], "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Measured:
    """One workload at one set of sizes: what every provider took, or why it has no time."""

    workload: Workload
    pass_: str
    sizes: str
    extents: Mapping[str, int]
    floor_ms: float = float("nan")
    route: str = ""
    ms: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)  # relative, of what was timed
    timing: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, Exception] = field(default_factory=dict)
    seed: int = 0  # of the sizes
    queued: Mapping[str, float] = field(default_factory=dict)  # ms of a call among several, where one was not captured

    @property
    def rival(self) -> str:
        """The best provider that is not ours; "" if none has a time."""
        order = self.over if OURS in self.ms else self.ms.__getitem__
        return min((provider for provider in self.ms if provider != OURS), key=order, default="")

    @property
    def best_other(self) -> float:
        """The milliseconds of the best provider that is not ours."""
        return self.ms.get(self.rival, float("nan"))

    @property
    def ratio(self) -> float:
        """How many times ours is as fast as the best other."""
        return self.over(self.rival)

    def over(self, provider: str) -> float:
        """How many times ours is as fast as a provider: as both were timed, or as both are called."""
        is_alike = self.timing.get(OURS) == self.timing.get(provider)
        times = self.ms if is_alike or not {OURS, provider} <= self.queued.keys() else self.queued
        return times[provider] / times[OURS] if {OURS, provider} <= times.keys() else float("nan")

    @property
    def is_of_host(self) -> bool:
        """Whether sizes are so small that the host's part of a call is what was measured."""
        return self.sizes == HOST and self.ratio > 0

    @property
    def share(self) -> float:
        """Which part of our time the floor is."""
        return self.floor_ms / self.ms[OURS] if OURS in self.ms else float("nan")


def providers(workload: Workload) -> tuple[str, ...]:
    """Who computes a workload; nothing is compiled on a CPU, where all that is asked is to be no slower than torch."""
    compiled = (COMPILED,) if _is_compiled() else ()
    return OURS, TORCH, *compiled, *([LIBRARY] if workload.library else [])


def _is_compiled() -> bool:
    """Whether torch.compile is beside ours, which takes most of a run: `INSUM_BENCH_COMPILED=0` leaves it out."""
    return DEVICE == "cuda" and os.environ.get("INSUM_BENCH_COMPILED") != "0"


def functions(workload: Workload) -> dict[str, Callable[..., Tensor]]:
    """How each provider computes a workload, of its operands and `size`, by the provider's name."""

    def with_format(size: tuple[int, ...] | None = None, **operands: Tensor) -> Tensor:
        assert workload.as_formats is not None
        return insum(workload.expr, **workload.as_formats(**operands))

    # called as torch's functions are, without one of ours around it
    ours = partial(insum, workload.expr) if workload.as_formats is None else with_format
    known: dict[str, Callable[..., Tensor]] = {OURS: ours, TORCH: workload.plain}
    if _is_compiled():
        torch.compiler.reset()  # a function is compiled for each set of sizes, and torch gives up after some
        known[COMPILED] = torch.compile(workload.traced or workload.plain, mode=MODE, dynamic=False)
    if workload.library is not None:
        known[LIBRARY] = workload.library[1]
    return known


def calls(workload: Workload, given: Given, pass_: str, upstream: Tensor) -> dict[str, tuple[Call, Call]]:
    """What is timed and what is checked of each provider, by its name.

    Where the index changes, each timed call has a tensor that was not there before; what is checked has the first.
    A format is made beforehand, unless the index changes. Results are contiguous, as those of a statement are, and
    gradients, as an optimiser reads them: torch.compile may return rows with gaps between them.
    """
    found = {}
    for provider, function in functions(workload).items():
        options = {} if given.size is None else {"size": given.size}
        operands = dict(given.operands)
        leaves: tuple[Tensor, ...] = ()
        if pass_ == BACKWARD:
            own = {name: operands[name].clone().requires_grad_() for name in workload.gradients}
            operands, leaves = {**operands, **own}, tuple(own.values())
        if provider == OURS and workload.as_formats is not None and not workload.is_changing:
            ready = workload.as_formats(**operands)
            function, operands, options = partial(insum, workload.expr), ready, {}
        found[provider] = _pair(function, operands, options, leaves, upstream, given.indices)
    return found


def _pair(
    function: Callable[..., Tensor],
    operands: Mapping[str, Tensor],
    options: Mapping[str, tuple[int, ...]],
    leaves: tuple[Tensor, ...],
    upstream: Tensor,
    indices: Sequence[Mapping[str, Tensor]],
) -> tuple[Call, Call]:
    def run(changed: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        result = function(**{**operands, **changed}, **options)
        if not leaves:
            return result.contiguous()
        return tuple(each.contiguous() for each in torch.autograd.grad(result, leaves, upstream))

    if not indices:
        return (lambda: run({})), (lambda: run({}))
    turns = cycle(indices)
    return (lambda: run({name: each.clone() for name, each in next(turns).items()})), (lambda: run({}))


def expected(workload: Workload, given: Given, pass_: str) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    """The result in float64, by plain torch, and what is passed into a backward pass."""
    doubles = {name: each.double() if each.is_floating_point() else each for name, each in given.operands.items()}
    options = {} if given.size is None else {"size": given.size}
    leaves = {name: doubles[name].requires_grad_() for name in workload.gradients} if pass_ == BACKWARD else {}
    result = workload.plain(**doubles, **options)
    source = torch.Generator(result.device).manual_seed(result.numel())
    upstream = torch.randn(result.shape, generator=source, device=result.device).to(workload.dtype)
    if not leaves:
        return result, upstream
    return torch.autograd.grad(result, tuple(leaves.values()), upstream.double()), upstream


def measure_workload(workload: Workload, sizes: str, pass_: str, seed: int, scale: str) -> Measured:
    """Check every provider's result and time it; what fails, or is wrong, has its error in the place of a time."""
    if DEVICE == "cuda" and device_lock.path is not None:
        with device_lock.let_go("warming up"):
            _load_kernels(workload, pass_, seed)
    with device_lock.held("measuring"):
        return _measured(workload, sizes, pass_, seed, scale)


def _load_kernels(workload: Workload, pass_: str, seed: int) -> None:
    """Have torch load what it uses of its own kernels, by calls of a few numbers, which takes nobody's time."""
    with suppress(*PEER_FAILURES):
        given = workload.make(workload.drawn(seed, HOST, "small"), seed, DEVICE)
        reference, upstream = expected(workload, given, pass_)
        options = {} if given.size is None else {"size": given.size}
        own = {name: given.operands[name].clone().requires_grad_(pass_ == BACKWARD) for name in workload.gradients}
        result = workload.plain(**{**given.operands, **own}, **options)
        grads = torch.autograd.grad(result, tuple(own.values()), upstream) if pass_ == BACKWARD else result
        check(grads, reference, float("inf"))
        work(workload, given, pass_ == BACKWARD)


def _measured(workload: Workload, sizes: str, pass_: str, seed: int, scale: str) -> Measured:
    torch.manual_seed(seed)
    extents = workload.drawn(seed, sizes, scale)
    with device_lock.stage("operands"):
        given = workload.make(extents, seed, DEVICE)
        reference, upstream = expected(workload, given, pass_)
        pairs = calls(workload, given, pass_, upstream)
    sound: dict[str, Call] = {}
    errors: dict[str, float] = {}
    failures: dict[str, Exception] = {}
    for provider in providers(workload):
        run, result = pairs[provider]
        try:
            with device_lock.stage(f"first call, {provider}"):
                found = result()
            with device_lock.stage("checking"):
                errors[provider] = check(found, reference, LIMIT[workload.dtype])
                del found
                run()
            sound[provider] = run
        except PEER_FAILURES as error:
            failures[provider] = error
    seconds = 0.005 if sizes == HOST or scale == "small" else 0.05
    with device_lock.stage("timing"):
        times = _times(sound, workload.is_changing, seconds)
    with device_lock.stage("floor"):
        least = floor_ms(work(workload, given, pass_ == BACKWARD), roofs(workload.dtype))
    with device_lock.stage("explaining"):
        route = _route(workload, given)
    # where the host counts, what is least disturbed by other work: with three times as many busy processes as cores
    # medians were about ten times that
    ms = {provider: own.median if timing == "graph" else own.p20 for provider, (own, timing) in times.items()}
    how = {provider: timing for provider, (_, timing) in times.items()}
    queued = _queued(sound, ms, how)
    return Measured(workload, pass_, sizes, extents, least, route, ms, errors, how, failures, seed, queued)


def measured_of(run: Run) -> list[Measured]:
    """The cases of a results file, of which each is a row for each provider."""
    known = {workload.id: workload for workload in SUITE}
    found = []
    for rows in run.cases(EXPERIMENT):
        first = rows.get(OURS) or next(iter(rows.values()))
        family, name, pass_, rest = first.case.split(", ", 3)
        workload = known.get(f"{family}-{name}")
        if workload is None:
            raise ResultsError(f"{first.case}: there is no such statement in the suite; take its rows out")
        extents = dict(part.split(" = ") for part in str(first.facts["sizes"]).split(", "))
        found.append(
            Measured(
                workload,
                pass_,
                rest.split(":")[0],
                {each: int(size) for each, size in extents.items()},
                float(str(first.facts["floor_ms"])),
                str(first.facts.get("route", "")),
                {provider: row.value for provider, row in rows.items()},
                {provider: float(str(row.facts["error"])) for provider, row in rows.items()},
                {provider: row.timing for provider, row in rows.items()},
                seed=int(str(first.facts["seed"])),
                queued={provider: row.queued_ms for provider, row in rows.items() if row.queued_ms is not None},
            )
        )
    return found


def _queued(sound: Mapping[str, Call], ms: Mapping[str, float], how: Mapping[str, str]) -> dict[str, float]:
    """Times of calls in turns where one provider can't be captured and ours can: on that basis all can be compared."""
    if how.get(OURS) != "graph" or "queue" not in how.values():
        return {}
    with device_lock.stage("timing"):
        times = queued_in_turns(list(sound.values()), *enough(sum(ms.values()) / len(ms)), warm=1)
    found = {provider: own.p20 for provider, own in zip(sound, times)}
    return {provider: called for provider, called in found.items() if contradiction(ms[provider], called) is None}


def _times(sound: Mapping[str, Call], is_changing: bool, seconds: float) -> dict[str, tuple[Times, str]]:
    if DEVICE != "cuda":
        return {provider: (own, "wall") for provider, own in zip(sound, wall_in_turns([*sound.values()], seconds))}
    if is_changing:  # checks of a new index wait for the device, and nothing is checked while a graph is captured
        every = list(sound.values())
        first = sum(times.median for times in queued_in_turns(every, calls=1, rounds=3))
        times = queued_in_turns(every, *enough(first / max(len(every), 1)), warm=1)
        return {provider: (own, "queue") for provider, own in zip(sound, times)}
    found = {}
    for provider, call in sound.items():
        row = timed(call)
        found[provider] = Times(row["device_ms"], row["p20"], row["p80"]), row["timing"]
    return found


def _route(workload: Workload, given: Given) -> str:
    operands = given.operands if workload.as_formats is None else workload.as_formats(**given.operands)
    size = given.size if workload.as_formats is None else None
    return "FX graph" if DEVICE != "cuda" else explain(workload.expr, size=size, **operands).route


def summary(found: Sequence[Measured], seed: int | str) -> list[str]:
    """The lines of a table of all that was measured, in the suite's order, and of what it comes to."""
    header = ("family", "statement", "pass", "sizes", "ours", "torch", "compiled", "routine", "ratio", "floor", "route")
    rows = [
        (
            each.workload.family,
            each.workload.name,
            each.pass_,
            " ".join(f"{name}={size}" for name, size in each.extents.items()),
            *(each.ms.get(provider, "") for provider in (OURS, TORCH, COMPILED, LIBRARY)),
            each.ratio,
            each.share,
            each.route,
        )
        for each in found
    ]
    lines = table(f"{EXPERIMENT}, seed {seed}, milliseconds on {DEVICE}", header, rows).split("\n")
    for pass_ in PASSES:
        ratios = [each.ratio for each in found if each.pass_ == pass_ and each.sizes != HOST and each.ratio > 0]
        if ratios:
            behind = sum(ratio < BEHIND for ratio in ratios)
            what = f"{len(ratios)} cases, {geomean(ratios):.2f}x the best other as geometric mean"
            lines.append(f"{pass_}: {what}, least {min(ratios):.2f}x, {behind} below {BEHIND}x")
        more = [1e3 * (each.ms[OURS] - each.best_other) for each in found if each.pass_ == pass_ and each.is_of_host]
        if more:
            what = f"{len(more)} cases of a few numbers, whose ratios say nothing of larger ones"
            lines.append(
                f"{pass_}: {what}: {median(more):.0f} us more than the best other as median, {max(more):.0f} most"
            )
    return lines
