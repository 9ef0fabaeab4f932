"""The tuner: times strategies, schedules and configs of a statement on scratch outputs, and remembers the fastest."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from ...formats.facts import Fact
from ...formats.torch_state import is_captured
from ...lru_cache import LRUCache
from ..binding import Bound
from ..language import UnsupportedError
from ..planning import device_of
from ..runtime import Launcher, on_device, paused, reason_of
from .clock import ALIKE, HOPELESS, OUT_OF_MEMORY, device_milliseconds, is_out_of_memory
from .problem import Candidate, Problem, candidates, device_name, resize
from .search import BUILDERS, Search
from .settings import is_tuning_on, may_be_timed, tuning_mode
from .tuning_cache import Choices, Entry, current_cache

__all__ = [
    "BUILDERS",
    "Timing",
    "cached_launcher",
    "choose",
    "host_milliseconds",
    "recall",
    "refusals",
    "tune",
]


LAUNCHERS = 2048  # kept, of a few kB each; those of one kernel share its source
# Operations of a call on its stream, by how its output is prepared before the launch: not at all, by a memset, or by
# filling picked rows, which is an estimate. Tiny problems wait for the host, so one launch is best for them.
OPERATIONS = {"": 1, "zero": 2, "fill": 5}
BAR_AFTER = 1.0  # seconds before a progress bar appears


Refusal = tuple[Choices, str]  # a candidate that can't be built for this GPU, and why


@dataclass(frozen=True)
class Timing:
    """A candidate, or another route by its name, and its time; None: it can't run on this GPU, `reason` says why."""

    candidate: Candidate | str
    milliseconds: float | None
    reason: str = ""

    def __str__(self) -> str:
        time = f"{self.milliseconds:10.4f} ms" if self.milliseconds is not None else f"{self.reason:>13}"
        return f"{time}  {self.candidate}"


# by signature, and by the keys that `choose` was given; launchers keep the statements whose ids are in the signature
_launchers: LRUCache[Launcher] = LRUCache(LAUNCHERS)
# by signature: the candidates that could not be built, and why; and the error of problems of which none could be built
_refused: LRUCache[list[Refusal]] = LRUCache(LAUNCHERS)
_hopeless: LRUCache[str] = LRUCache(LAUNCHERS)


def cached_launcher(key: object, bound: Bound, fact: Fact | None) -> Launcher | None:
    """Return the launcher that `choose` was given this key for, for these lengths; None if there is none yet."""
    kept = _launchers.get(key)
    return None if kept is None else resize(kept, bound, fact)


def choose(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, key: object = None, goal: float = 0.0
) -> Launcher:
    """Return the fastest launcher of a problem: cached, recalled from disk, or timed now if that is allowed.

    Afterwards `cached_launcher` finds it by `key`. `goal` is how many milliseconds the device takes to evaluate the
    statement without a kernel; 0: nothing else evaluates it. Raises UnsupportedError if no candidate can be built.
    """
    cached = _launchers.get(problem.signature)
    if cached is not None:
        launcher = problem.resized(cached)
    else:
        hopeless = _hopeless.get(problem.signature)
        if hopeless is not None:  # no candidate could be built at other sizes of this signature
            raise UnsupportedError(hopeless)
        captures = is_captured(problem.bound.device)
        try:
            launcher = _choose(problem, tensors, fact, goal)
        except UnsupportedError as error:
            if not captures and not is_out_of_memory(error):
                _hopeless[problem.signature] = str(error)
            raise
        if captures:  # the launcher was not timed, so it is not kept
            return launcher
    _launchers[problem.signature] = launcher
    if key is not None:
        _launchers[key] = launcher
    return launcher


def _forget() -> None:
    for memory in (_launchers, _refused, _hopeless):
        memory.clear()


def _choose(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, goal: float) -> Launcher:
    """Return the launcher that was tuned, now or earlier, or the most promising one where nothing may be timed."""
    recalled = _recalled(problem, tensors, fact)
    if recalled is not None:
        return recalled
    if not may_be_timed(problem.bound.device):
        return _first(problem, tensors, fact)
    with current_cache().lock(problem.key):
        recalled = _recalled(problem, tensors, fact)  # another process may have tuned it while this one waited
        if recalled is not None:
            return recalled
        is_full = tuning_mode() == "full"
        return _measure(problem, tensors, fact, is_full, None if is_full else goal)[1]


def _first(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None) -> Launcher:
    """Return the most promising candidate that can be built, built; raise UnsupportedError if none can."""
    reasons = []
    for candidate in candidates(problem):
        launcher, reason = _built(problem, candidate, tensors, fact)
        if launcher is not None:
            return launcher
        reasons.append(reason)
    raise _none_built(problem, reasons)


def _built(
    problem: Problem, candidate: Candidate, tensors: Sequence[Tensor], fact: Fact | None
) -> tuple[Launcher | None, str]:
    """Return the launcher of a candidate, or None and the reason why it can't be built, which `_refused` keeps."""
    try:
        launcher = problem.launcher(candidate)
        launcher.build(tensors, fact)
    except UnsupportedError as error:
        if is_out_of_memory(error):  # it may be built later, so nothing is kept
            return None, OUT_OF_MEMORY
        reason = reason_of(error.__cause__ or error)
        noted = _refused.get(problem.signature) or []
        if (candidate.choices, reason) not in noted:
            _refused[problem.signature] = [*noted, (candidate.choices, reason)]
        return None, reason
    return launcher, ""


def _none_built(problem: Problem, reasons: Sequence[str]) -> UnsupportedError:
    """Return the error for a problem of which no candidate can be built; the first reason is of the most promising."""
    count = f"none of the {len(reasons)} kernels" if len(reasons) > 1 else "the kernel"
    where = device_name(problem.bound.device)
    return UnsupportedError(f"{count} of {problem.bound.statement} could be built for {where} ({reasons[0]})")


def refusals(problem: Problem) -> tuple[tuple[Candidate, str], ...]:
    """Return the candidates that could not be built, now or when a problem of this key was tuned, and why."""
    entry = _entry(problem)
    noted = [*(() if entry is None else entry.refused), *(_refused.get(problem.signature) or ())]
    return tuple(
        (candidate, reason)
        for candidate in candidates(problem)
        for reason in [reason for choices, reason in noted if choices == candidate.choices][-1:]
    )


def recall(problem: Problem) -> Candidate | None:
    """Return the fastest measured candidate of those that can be built; None if none was, or if tuning is off."""
    noted = [choices for choices, _ in (_refused.get(problem.signature) or ())]
    return next((candidate for candidate in _ranked(problem) if candidate.choices not in noted), None)


def _ranked(problem: Problem) -> Iterator[Candidate]:
    """Yield the measured candidates, the chosen one first, then by their times.

    It ends at one that is no longer a candidate.
    """
    entry = _entry(problem)
    if entry is not None:
        for choices in (entry.config, *[choices for choices, _ in entry.times if choices != entry.config]):
            candidate = _find(problem, choices)
            if candidate is None:
                return
            yield candidate


def _entry(problem: Problem) -> Entry | None:
    """Return what the tuning cache holds for a problem; None if nothing, or if tuning is off."""
    return current_cache().get(problem.key) if is_tuning_on() else None


def _find(problem: Problem, choices: Choices) -> Candidate | None:
    """Return the candidate with these choices, of a full search too; None if there is none."""
    for full in (False, True):
        for candidate in candidates(problem, full):
            if candidate.choices == choices:
                return candidate
    return None


def _recalled(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None) -> Launcher | None:
    """Return the launcher of the measured candidate that is the fastest of those that can be built now.

    None if nothing was measured.
    """
    for candidate in _ranked(problem):
        launcher, _ = _built(problem, candidate, tensors, fact)
        if launcher is not None:
            return _with_recalled_captures(launcher, problem, tensors, fact)
    return None


def _with_recalled_captures(
    launcher: Launcher, problem: Problem, tensors: Sequence[Tensor], fact: Fact | None
) -> Launcher:
    """Return a recalled launcher with the one for captured graphs, if another candidate is clearly faster there."""
    entry = _entry(problem)
    choices = None if entry is None else _for_captures(entry)
    other = None if choices is None else _find(problem, choices)
    quickest = None if other is None else _built(problem, other, tensors, fact)[0]
    return launcher if quickest is None else _with_captured(launcher, quickest)


def _for_captures(entry: Entry) -> Choices | None:
    """Return the choices that take the device less time than those for eager calls, or None if these are alike.

    Eager calls are ranked by the host's time too, which a captured graph does not pay.
    """
    eager_ms = next((ms for choices, ms in entry.times if choices == entry.config), 0.0)
    quickest, ms = entry.times[0] if entry.times else (None, 0.0)
    return quickest if ALIKE * ms < eager_ms else None


def _with_captured(best: Launcher, quickest: Launcher) -> Launcher:
    """Return `best` with `quickest` for captured graphs, where preparing the output may take several operations.

    Only a plain launcher takes one.
    """
    best.captured = quickest if best.is_plain else None
    return best


def tune(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool = False
) -> tuple[tuple[Timing, ...], Launcher]:
    """Time every candidate on scratch outputs and remember the best; return all times, best first, and its launcher."""
    _forget()
    with current_cache().lock(problem.key):
        return _measure(problem, tensors, fact, full)


def _measure(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool, goal: float | None = None
) -> tuple[tuple[Timing, ...], Launcher]:
    with paused():  # a launch plan of the caller must not record the timed launches
        return _timed(problem, tensors, fact, full, goal)


def _timed(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool, goal: float | None
) -> tuple[tuple[Timing, ...], Launcher]:
    """Build and time candidates, put the result into the tuning cache, and return what `tune` returns.

    All of them are built if `goal` is None; else those that may be faster than what was found before (`Search`).
    Candidates that spill registers are not timed if another does not. Raises UnsupportedError if none can be built.
    """
    trials = _Trials(problem, candidates(problem, full), tensors, fact)
    search = Search(problem, trials.ways, goal)
    while batch := search.batch(trials.times):
        trials.build(batch)
        trials.time(batch)
    measured = sorted(trials.measured, key=lambda timed: _rank(*timed[:2]))
    timings, (_, winner, best) = tuple(timing for timing, *_ in measured), measured[0]
    if winner is None:
        raise _none_built(problem, [timing.reason for timing in timings])
    all_times = ((choices, timing.milliseconds) for timing, _, choices in measured)
    ranked = tuple(sorted([(choices, ms) for choices, ms in all_times if ms is not None], key=lambda pair: pair[1]))
    entry = Entry(best, ranked, trials.refused)
    if all(timing.reason != OUT_OF_MEMORY for timing in timings):  # else a later call tunes again
        current_cache().put(problem.key, entry)
    quickest = _for_captures(entry)
    for _, way, choices in measured:
        if way is not None and choices == quickest:
            _with_captured(winner, way)
    return timings, winner


class _Trials:
    """The candidates of a problem and what building and timing them has found so far, by their places."""

    def __init__(
        self, problem: Problem, ways: tuple[Candidate, ...], tensors: Sequence[Tensor], fact: Fact | None
    ) -> None:
        self.problem, self.ways, self.tensors, self.fact = problem, ways, tensors, fact
        self.built: dict[int, tuple[Launcher | None, str]] = {}  # None, and why it can't be built
        self.launchers: dict[int, Launcher | None] = {}  # of those that had their turn; None: it was not run
        self.times: dict[int, float | None] = {}
        self.reasons: dict[int, str] = {}

    def build(self, batch: Sequence[int]) -> None:
        """Build those of a batch, on all cores."""
        ways = [self.ways[at] for at in batch]
        self.built |= zip(batch, _build_all(self.problem, ways, self.tensors, self.fact))

    def time(self, batch: Sequence[int]) -> None:
        """Time those that were built of a batch, each unless it spills and another that was built does not."""
        is_clean_known = any(way is not None and not way.spills for way, _ in self.built.values())
        for at in batch:
            way, reason = self.built[at]
            if way is not None and way.spills and is_clean_known:
                way, reason = None, "spills"
            hopeless = HOPELESS * min([ms for ms in self.times.values() if ms is not None], default=float("inf"))
            timed = _time_one(self.problem, way, reason, self.tensors, self.fact, hopeless)
            self.launchers[at], (self.times[at], self.reasons[at]) = way, timed

    @property
    def measured(self) -> list[tuple[Timing, Launcher | None, Choices]]:
        """The time, launcher and choices of each candidate that had its turn."""
        return [
            (Timing(self.ways[at], self.times[at], self.reasons[at]), way, self.ways[at].choices)
            for at, way in sorted(self.launchers.items())
        ]

    @property
    def refused(self) -> tuple[tuple[Choices, str], ...]:
        """The choices of those that could not be built, and why."""
        return tuple((self.ways[at].choices, reason) for at, (way, reason) in sorted(self.built.items()) if way is None)


def _time_one(
    problem: Problem,
    way: Launcher | None,
    reason: str,
    tensors: Sequence[Tensor],
    fact: Fact | None,
    hopeless: float,
) -> tuple[float | None, str]:
    """Return the milliseconds of a candidate that was built; None and the reason if it has no time."""
    if way is None:
        return None, reason
    try:
        with on_device(problem.bound.device):
            return device_milliseconds(partial(way, tensors, fact), hopeless), reason
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, OUT_OF_MEMORY


def _rank(timing: Timing, way: Launcher | None) -> tuple[bool, float, float]:
    """Return a sort key: the time of a call on the device or the host, whichever is longer, then the device's time.

    A candidate without a time comes last, after it one that could not be built.
    """
    if timing.milliseconds is None or way is None:
        return True, float(way is None), 0.0
    host = host_milliseconds(way.device, way.preparation, way.is_wide)
    return False, max(timing.milliseconds, host), timing.milliseconds


def host_milliseconds(device: torch.device, preparation: str, is_wide: bool = False) -> float:
    """Return how long a call keeps the host busy, by how its output is prepared before the launch.

    A sum in float32 that is converted to half precision afterwards (`is_wide`) takes one more operation.
    """
    return device_of(device).host_milliseconds(OPERATIONS[preparation] + is_wide)


def _build_all(
    problem: Problem, ways: Sequence[Candidate], tensors: Sequence[Tensor], fact: Fact | None
) -> Iterator[tuple[Launcher | None, str]]:
    """Yield every candidate compiled, several at once, in the order of `ways`."""

    def build(candidate: Candidate) -> tuple[Launcher | None, str]:
        return _built(problem, candidate, tensors, fact)

    pool = ThreadPoolExecutor(BUILDERS)
    try:
        results = pool.map(build, ways)
        yield from tqdm(
            results,
            f"tuning {problem.bound.statement}",
            len(ways),
            leave=False,
            delay=BAR_AFTER,
            disable=not sys.stderr.isatty(),
        )
    finally:  # an interrupt waits for the builds that have begun, not for those still in the queue
        pool.shutdown(cancel_futures=True)
