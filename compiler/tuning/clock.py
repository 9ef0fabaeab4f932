"""How long one call takes: on the device, or until its result is there."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch

from .captured import captured

__all__ = [
    "ALIKE",
    "HOPELESS",
    "LONG_CALL",
    "OUT_OF_MEMORY",
    "device_milliseconds",
    "is_out_of_memory",
    "waited_milliseconds",
]

TIMED_CALLS = 10  # captured in one graph, so that launches do not count
TIMED_SECONDS = 0.02  # of a device per candidate
TIMED_HERE_SECONDS = 0.01  # of calls per candidate on a CPU
FEWEST_CALLS = 5  # of them, if they take no longer
LONG_CALL = 10.0  # milliseconds, beside which a launch does not count
LAUNCH = 0.02  # milliseconds, more than a kernel needs to begin after the host has asked for it
HOPELESS = 3.0  # a first call this many times slower than the best ends a candidate's timing
ALIKE = 1.03  # times the least: calls that the device finds equally good, by what two runs of one differ
OUT_OF_MEMORY = "out of memory"  # why a candidate has no time, as the errors of torch, Triton and the driver put it


def device_milliseconds(call: Callable[[], object], hopeless: float) -> float:
    """Return the milliseconds of one call on the device, by replaying a graph of several.

    A call that takes long, or longer than `hopeless`, is timed twice, without a graph: another process may have had
    the device meanwhile. While the host prepares a lone call the device waits, so only what the call takes beyond that
    is surely the device's.
    """
    call()
    torch.cuda.synchronize()
    single, host = _elapsed_with_host(call)
    limit = min(hopeless + LAUNCH, LONG_CALL)
    if single - host > limit:
        again, host = _elapsed_with_host(call)
        if again - host > limit:
            return min(single, again)
    graph = captured(call, TIMED_CALLS)
    graph.replay()
    torch.cuda.synchronize()
    start, best = perf_counter(), _elapsed(graph.replay) / TIMED_CALLS  # once, however long the host was busy otherwise
    while perf_counter() - start < TIMED_SECONDS:
        best = min(best, _elapsed(graph.replay) / TIMED_CALLS)
    return best


def waited_milliseconds(call: Callable[[], object], hopeless: float, unsettled: int = 0) -> float:
    """Return the milliseconds until the result of one call is there, with all that the host does for it.

    A call that takes longer than `hopeless` is timed once; so is one on a CPU that takes longer than all are timed, and
    a short one there a few times. Where torch computes in the caller's thread alone, the time is that which the thread
    was running, so that other work does not count. The first `unsettled` calls are not timed, of short ones: they make
    a launch plan.
    """
    has_gpu = torch.cuda.is_initialized()
    clock = thread_time if not has_gpu and torch.get_num_threads() == 1 else perf_counter
    finish = torch.cuda.synchronize if has_gpu else lambda: None  # a CPU's operations are done when they return
    seconds, fewest = (TIMED_SECONDS, 1) if has_gpu else (TIMED_HERE_SECONDS, FEWEST_CALLS)
    for _ in range(unsettled):
        before = clock()
        call()
        if clock() - before > seconds:
            break
    least, calls, start = float("inf"), 0, clock()
    while not calls or (clock() - start < seconds and (calls < fewest or least <= hopeless)):
        finish()
        before = clock()
        call()
        finish()
        least, calls = min(least, 1e3 * (clock() - before)), calls + 1
    return least


def _elapsed(call: Callable[[], object]) -> float:
    """Return the milliseconds between two events around a call."""
    return _elapsed_with_host(call)[0]


def _elapsed_with_host(call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds between two events around a call, and those that the host was busy with it."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start = perf_counter()
    before.record()
    call()
    after.record()
    host = 1e3 * (perf_counter() - start)
    after.synchronize()
    return float(before.elapsed_time(after)), host


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from or after, says that the GPU has no memory left.

    Triton and the driver say so in a RuntimeError, and a capture that has failed for it may end in yet another.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
