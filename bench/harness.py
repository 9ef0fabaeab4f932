"""Timing on the device and from the host, and one table row per measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time

import torch
from torch import Tensor

from insum_ops.compiler.tuning.captured import captured

__all__ = [
    "Times",
    "check",
    "cold_times",
    "device_ms",
    "device_times",
    "enough",
    "geomean",
    "host_us",
    "host_us_in_turns",
    "peak_mib",
    "queued_in_turns",
    "table",
    "wall_in_turns",
    "wall_ms",
]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median, and where the middle three fifths lie."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Times:
        ordered = sorted(milliseconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


CALLS, ROUNDS = 10, (5, 15)  # in a row at most; how often at least and at most
LONG_MS = 2.0  # of a call from which on there are fewer in a row
ROW_MS = 300.0  # that a row may take, where the least number of rounds does not take more


def enough(call_ms: float) -> tuple[int, int]:
    """How many calls in a row, and how many rounds of them, make a median without keeping the device long.

    >>> enough(0.01), enough(2.0), enough(6.0), enough(100.0)
    ((10, 15), (10, 15), (3, 15), (1, 5))
    """
    calls = max(1, round(CALLS * min(1.0, LONG_MS / max(call_ms, 1e-4))))
    least, most = ROUNDS
    return calls, max(least, min(most, int(ROW_MS / (calls * max(call_ms, 1e-4)))))


def device_times(call: Callable[[], object], calls: int = CALLS, replays: int = ROUNDS[1], warm: int = 3) -> Times:
    """One call on the device: back-to-back calls captured in a graph, replayed."""
    replay = _captured(call, calls, warm)
    return Times.of([_elapsed(replay) / calls for _ in range(replays)])


def cold_times(call: Callable[[], object], replays: int = 15) -> Times:
    """One captured call on the device that finds nothing of its operands in L2."""
    replay = _captured(call, 1, 3)
    room = torch.empty(4 * _l2_bytes(), dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(replays):
        room.zero_()
        times.append(_elapsed(replay))
    return Times.of(times)


def queued_in_turns(
    each: Sequence[Callable[[], object]], calls: int = CALLS, rounds: int = ROUNDS[1], warm: int = 3
) -> list[Times]:
    """One call of each among several queued ones, a round of each after the other.

    Launches count where they are the slower part, and a host that slows down for a while does so for all.
    """
    for call in each:
        _several(call, warm)
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in each]
    for _ in range(rounds):
        for call, own in zip(each, times):
            own.append(_elapsed(partial(_several, call, calls)) / calls)
    return [Times.of(own) for own in times]


def wall_in_turns(each: Sequence[Callable[[], object]], seconds: float = 0.02, rounds: int = 11) -> list[Times]:
    """One call of each on a CPU, a round of each after the other, so that a busy while is one for all.

    A round is of so many calls as take a tenth of `seconds`, after one that is not timed: it finds memory and caches as
    another one's calls have left them. If torch has one thread, the time is that which the thread was running: work of
    others does not count.
    """
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    counts = []
    for call in each:
        call()
        start = clock()
        call()
        counts.append(max(1, round(0.1 * seconds / max(clock() - start, 1e-7))))
    times: list[list[float]] = [[] for _ in each]
    for _ in range(rounds):
        for call, count, own in zip(each, counts, times):
            call()
            start = clock()
            _several(call, count)
            own.append((clock() - start) / count * 1e3)
    return [Times.of(own) for own in times]


def _several(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def _captured(call: Callable[[], object], calls: int, warm: int) -> Callable[[], None]:
    _several(call, warm)
    torch.cuda.synchronize()
    graph = captured(call, calls)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _elapsed(call: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def _l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def device_ms(call: Callable[[], object], calls: int = 10, replays: int = 15) -> float:
    """Median milliseconds of one call on the device: back-to-back calls captured in a graph, replayed."""
    return device_times(call, calls, replays).median


def host_us(call: Callable[[], object], calls: int = 1000) -> float:
    """Median microseconds that one call keeps the host busy."""
    (own,) = host_us_in_turns([call], calls)
    return own


def host_us_in_turns(each: Sequence[Callable[[], object]], calls: int = 1000) -> list[float]:
    """Median microseconds that one call of each keeps the host busy, a round of each after the other.

    A host that slows down for a while does so for all; a round's work on the device is done before the next begins.
    """
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for call in each:
        _several(call, 50)
    wait()
    times: list[list[float]] = [[] for _ in each]
    for left in range(calls, 0, -100):
        for call, own in zip(each, times):
            for _ in range(min(left, 100)):
                start = perf_counter()
                call()
                own.append(perf_counter() - start)
            wait()
    return [statistics.median(own) * 1e6 for own in times]


def wall_ms(call: Callable[[], object], calls: int = 20, rounds: int = 7) -> float:
    """Median milliseconds of one call among many in a row: what a user waits, for host or device."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((perf_counter() - start) / calls)
    return statistics.median(times) * 1e3


def peak_mib(call: Callable[[], object]) -> float:
    """The most memory that a call needs beyond what was allocated before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def check(
    result: Tensor | Sequence[Tensor], reference: Tensor | Sequence[Tensor], limit: float | Sequence[float]
) -> float:
    """The relative error of a result, of several the largest; a wrong one gets no time.

    Each is measured by the norm of its own reference, so that none hides behind a larger one and a scale is seen.
    """
    results, references = ([each] if isinstance(each, Tensor) else each for each in (result, reference))
    limits = limit if isinstance(limit, Sequence) else [limit] * len(references)
    errors = []
    for own, expected, most in zip(results, references, limits, strict=True):
        error = float((own.double() - expected.double()).norm() / expected.double().norm())
        if not error <= most:
            raise AssertionError(f"relative error {error:.2e} is above {most:.0e}")
        errors.append(error)
    return max(errors)


def geomean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned text."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [
        max(len(header[at]), *(len(row[at]) for row in cells)) if cells else len(header[at])
        for at in range(len(header))
    ]
    lines = ["  ".join(name.rjust(width) for name, width in zip(header, widths))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells]
    return "\n".join([f"== {title}", *lines])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
