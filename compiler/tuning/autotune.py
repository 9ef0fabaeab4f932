"""Which strategy, schedule and config runs a statement fastest: time a few on scratch outputs and remember the best."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from ...formats.facts import Fact
from ...formats.torch_state import is_capturing
from ...lru_cache import LRUCache
from ..binding import Bound
from ..language import UnsupportedError
from ..planning import device_of
from ..runtime import INTERPRETED, Launcher, cache_dir, on_device, paused, reason_of
from .problem import Candidate, Problem, candidates, device_name, resize
from .settings import tuning_mode
from .tuning_cache import Config as Choices
from .tuning_cache import Entry, Key, TuningCache

__all__ = ["Timing", "choose", "fastest", "host_milliseconds", "known_launcher", "recall", "refusals", "tune"]


BUILDERS = 8  # threads that compile at once; Triton's passes release the interpreter lock
TIMED_CALLS = 10  # captured in one graph, so that launches do not count
TIMED_SECONDS = 0.02  # of replays per candidate
HOPELESS = 3.0  # a first call this many times slower than the best ends a candidate's timing
LAUNCHERS = 2048  # kept, of a few kB each; those of one kernel share its source
# Operations of a call on its stream, by what is done to its output before the launch: nothing, a memset, picked rows
# filled, which is reckoned. Tiny problems wait for the host, so they had better take one launch.
OPERATIONS = {"": 1, "zero": 2, "fill": 5}
CLEARLY = 0.9  # of the time that the best for eager calls takes: then captured graphs get a kernel of their own
BAR_AFTER = 1.0  # seconds before a progress bar appears
OUT_OF_MEMORY = "out of memory"  # why a candidate has no time, as the errors of torch, Triton and the driver put it


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


# by signature, and by what else tells that a problem has it; they keep the statements whose ids are in it
_launchers: LRUCache[Launcher] = LRUCache(LAUNCHERS)
# by signature: the candidates that could not be built, and why; those of which none could
_refused: LRUCache[list[Refusal]] = LRUCache(LAUNCHERS)
_hopeless: LRUCache[str] = LRUCache(LAUNCHERS)


@cache
def _cache(folder: str) -> TuningCache:
    return TuningCache()


def known_launcher(key: object, bound: Bound, fact: Fact | None) -> Launcher | None:
    """Return the launcher that `choose` was given this key for, for these lengths; None if there is none yet."""
    kept = _launchers.get(key)
    return None if kept is None else resize(kept, bound, fact)


def choose(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, key: object = None) -> Launcher:
    """The best launcher known for a problem, measured now if need be and allowed.

    From then on `known_launcher` finds it by `key`.
    """
    known = _launchers.get(problem.signature)
    if known is not None:
        found = problem.resized(known)
    else:
        hopeless = _hopeless.get(problem.signature)
        if hopeless is not None:  # found out before, at other sizes
            raise UnsupportedError(hopeless)
        captures = problem.bound.device.type == "cuda" and is_capturing()
        try:
            found = _choose(problem, tensors, fact, captures)
        except UnsupportedError as error:
            if not captures and not _is_out_of_memory(error):
                _hopeless[problem.signature] = str(error)
            raise
        if captures:  # which takes what it gets
            return found
    _launchers[problem.signature] = found
    if key is not None:
        _launchers[key] = found
    return found


def _forget() -> None:
    for memory in (_launchers, _refused, _hopeless):
        memory.clear()


def _choose(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, is_capturing: bool) -> Launcher:
    recalled = _recalled(problem, tensors, fact)
    if recalled is not None:
        return recalled
    if INTERPRETED or is_capturing or tuning_mode() == "off":
        return _first(problem, tensors, fact)
    with _cache(str(cache_dir())).lock(problem.key):
        recalled = _recalled(problem, tensors, fact)  # another process may have tuned it while this one waited
        if recalled is not None:
            return recalled
        return _measure(problem, tensors, fact, full=tuning_mode() == "full")[1]


def _first(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None) -> Launcher:
    """The most promising candidate that can be built."""
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
    """A candidate, built; or None and the reason why it can't be, which is noted."""
    try:
        launcher = problem.launcher(candidate)
        launcher.build(tensors, fact)
    except UnsupportedError as error:
        if _is_out_of_memory(error):  # which is no fault of the kernel, and may pass
            return None, OUT_OF_MEMORY
        reason = reason_of(error.__cause__ or error)
        noted = _refused.get(problem.signature) or []
        if (candidate.choices, reason) not in noted:
            _refused[problem.signature] = [*noted, (candidate.choices, reason)]
        return None, reason
    return launcher, ""


def _none_built(problem: Problem, reasons: Sequence[str]) -> UnsupportedError:
    """What to say where no candidate is left; the first of them is the most promising."""
    count = f"none of the {len(reasons)} kernels" if len(reasons) > 1 else "the kernel"
    where = device_name(problem.bound.device)
    return UnsupportedError(f"{count} of {problem.bound.statement} could be built for {where} ({reasons[0]})")


def refusals(problem: Problem) -> tuple[tuple[Candidate, str], ...]:
    """The candidates that could not be built, now or when a problem like this one was tuned, and why."""
    entry = _entry(problem)
    noted = [*(() if entry is None else entry.refused), *(_refused.get(problem.signature) or ())]
    return tuple(
        (candidate, reason)
        for candidate in candidates(problem)
        for reason in [reason for choices, reason in noted if choices == candidate.choices][-1:]
    )


def recall(problem: Problem) -> Candidate | None:
    """The candidate that was measured to be the best of those that can be built, if one was and tuning is on."""
    noted = [choices for choices, _ in (_refused.get(problem.signature) or ())]
    return next((candidate for candidate in _ranked(problem) if candidate.choices not in noted), None)


def _ranked(problem: Problem) -> Iterator[Candidate]:
    """Those that were measured, the choice first, then by their times; none where some are not ours any more."""
    entry = _entry(problem)
    if entry is not None:
        for choices in (entry.config, *[choices for choices, _ in entry.times if choices != entry.config]):
            candidate = _find(problem, choices)
            if candidate is None:
                return
            yield candidate


def _entry(problem: Problem) -> Entry | None:
    return None if INTERPRETED or tuning_mode() == "off" else _cache(str(cache_dir())).get(problem.key)


def _find(problem: Problem, choices: Choices) -> Candidate | None:
    for full in (False, True):
        for candidate in candidates(problem, full):
            if candidate.choices == choices:
                return candidate
    return None


def _recalled(problem: Problem, tensors: Sequence[Tensor], fact: Fact | None) -> Launcher | None:
    """What was measured to be the best, built; if that can't be any more, the next best."""
    for candidate in _ranked(problem):
        launcher, _ = _built(problem, candidate, tensors, fact)
        if launcher is not None:
            return _with_recalled_captures(launcher, problem, tensors, fact)
    return None


def _with_recalled_captures(
    launcher: Launcher, problem: Problem, tensors: Sequence[Tensor], fact: Fact | None
) -> Launcher:
    entry = _entry(problem)
    choices = None if entry is None else _for_captures(entry)
    other = None if choices is None else _find(problem, choices)
    quickest = None if other is None else _built(problem, other, tensors, fact)[0]
    return launcher if quickest is None else _with_captured(launcher, quickest)


def _for_captures(entry: Entry) -> Choices | None:
    """What takes the device clearly less than the choice for eager calls, which are ranked by the host's time too."""
    own = next((ms for choices, ms in entry.times if choices == entry.config), 0.0)
    quickest, ms = entry.times[0] if entry.times else (None, 0.0)
    return quickest if ms < CLEARLY * own else None


def _with_captured(best: Launcher, quickest: Launcher) -> Launcher:
    """For calls that give the output's memory away; what is captured may take more than a launch."""
    best.captured = quickest if best.is_plain else None
    return best


def tune(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool = False
) -> tuple[tuple[Timing, ...], Launcher]:
    """Time every candidate on outputs of its own and remember the best; times come back best first."""
    _forget()
    with _cache(str(cache_dir())).lock(problem.key):
        return _measure(problem, tensors, fact, full)


def _measure(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool
) -> tuple[tuple[Timing, ...], Launcher]:
    with paused():  # none of it is a part of the call
        return _timed(problem, tensors, fact, full)


def _timed(
    problem: Problem, tensors: Sequence[Tensor], fact: Fact | None, full: bool
) -> tuple[tuple[Timing, ...], Launcher]:
    ways = candidates(problem, full)
    built = list(_build_all(problem, ways, tensors, fact))
    is_clean_known = any(way is not None and not way.spills for way, _ in built)
    measured = []
    best_so_far = float("inf")
    for candidate, (way, reason) in zip(ways, built):
        if way is not None and way.spills and is_clean_known:
            way, reason = None, "spills"
        milliseconds = None
        if way is not None:
            try:
                with on_device(problem.bound.device):
                    milliseconds = _time(partial(way, tensors, fact), HOPELESS * best_so_far)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                reason = OUT_OF_MEMORY
        best_so_far = min(best_so_far, milliseconds or best_so_far)
        measured.append((Timing(candidate, milliseconds, reason), way, candidate.choices))
    measured.sort(key=lambda timed: _rank(*timed[:2]))
    timings, (_, winner, best) = tuple(timing for timing, *_ in measured), measured[0]
    if winner is None:
        raise _none_built(problem, [timing.reason for timing in timings])
    known = ((choices, timing.milliseconds) for timing, _, choices in measured)
    times = tuple(sorted([(choices, ms) for choices, ms in known if ms is not None], key=lambda pair: pair[1]))
    refused = tuple((way.choices, reason) for way, (made, reason) in zip(ways, built) if made is None)
    entry = Entry(best, times, refused)
    if all(timing.reason != OUT_OF_MEMORY for timing in timings):  # else the choice is for now
        _cache(str(cache_dir())).put(problem.key, entry)
    quickest = _for_captures(entry)
    for _, way, choices in measured:
        if way is not None and choices == quickest:
            _with_captured(winner, way)
    return timings, winner


def fastest(
    key: Key,
    ways: Collection[str],
    first: Sequence[str],
    others: Mapping[str, Sequence[str]],  # to be timed after one of the first that won
    start: Callable[[str], tuple[Callable[[], object], float]],
    times: dict[str, float] | None = None,
) -> str:
    """Of several calls that come to the same, by name, the one that takes the least; remembered as configs are.

    `ways` are all that there are: what a full search has found is good for those who search less. `start` gives a call
    and the milliseconds for which it keeps the host busy. Without the memory for all of them the choice is for now.
    Given a dictionary for their times, nothing that is remembered is asked.
    """
    known = _cache(str(cache_dir()))
    found = known.get(key) if times is None else None
    way = None if found is None else found.config.get("way")
    if way in ways:
        return str(way)
    times = {} if times is None else times
    names, best, has_room = first, first[0], True
    while names:
        for name in names:
            try:
                call, host = start(name)
                call()  # compiles and tunes
                with known.lock(key):
                    limit = HOPELESS * min(times.values(), default=float("inf"))
                    times[name] = max(_time(call, limit), host)  # in a graph, which has memory of its own
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                has_room = False  # what runs already must go on
        best = min(times, key=lambda name: times[name], default=best)
        names = [name for name in others.get(best, ()) if name not in times and has_room]
    if has_room:
        ranked = sorted(times.items(), key=lambda pair: pair[1])
        known.put(key, Entry({"way": best}, tuple(({"way": name}, ms) for name, ms in ranked)))
    return best


def _rank(timing: Timing, way: Launcher | None) -> tuple[bool, float, float]:
    """By what a call takes, of the device or the host, whichever is slower; of equal ones by the device's time.

    What has no time comes last, and what could not be built after it.
    """
    if timing.milliseconds is None or way is None:
        return True, float(way is None), 0.0
    host = host_milliseconds(way.device, way.preparation, way.is_wide)
    return False, max(timing.milliseconds, host), timing.milliseconds


def host_milliseconds(device: torch.device, preparation: str, is_wide: bool = False) -> float:
    """How long a call keeps the host busy, by what is done to its output before the launch.

    A sum in float32 of which half precision is made afterwards takes one more operation.
    """
    return device_of(device).host_milliseconds(OPERATIONS[preparation] + is_wide)


def _build_all(
    problem: Problem, ways: Sequence[Candidate], tensors: Sequence[Tensor], fact: Fact | None
) -> Iterator[tuple[Launcher | None, str]]:
    """Compile every candidate, several at once."""

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
    finally:  # an interrupt waits for what is being built, and not for what is still to be
        pool.shutdown(cancel_futures=True)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from or after, says that the GPU has no memory left.

    Triton and the driver say so in a RuntimeError, and a capture that has failed for it may end in yet another.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _time(call: Callable[[], object], hopeless: float) -> float:
    """Milliseconds of one call on the device, by replaying a graph of several."""
    call()
    single = _elapsed(call)
    if single > hopeless + 0.1:  # a lone call also waits about this long for its launch
        return single
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # torch's own stream for captures is of the first device that had one; other threads may allocate, as loaders do
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            for _ in range(TIMED_CALLS):
                call()
    finally:  # torch stays on the stream of a capture that could not be ended
        torch.cuda.set_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    start, best = perf_counter(), _elapsed(graph.replay) / TIMED_CALLS  # once, however long the host was busy otherwise
    while perf_counter() - start < TIMED_SECONDS:
        best = min(best, _elapsed(graph.replay) / TIMED_CALLS)
    return best


def _elapsed(call: Callable[[], object]) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
