"""Timing on the device and from the host, and one table row per measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

__all__ = ["check", "device_ms", "geomean", "host_us", "peak_mib", "table", "wall_ms"]


def device_ms(call: Callable[[], object], calls: int = 10, replays: int = 15) -> float:
    """Median milliseconds of one call on the device: back-to-back calls captured in a graph, replayed."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def host_us(call: Callable[[], object], calls: int = 1000) -> float:
    """Median microseconds that one call keeps the host busy."""
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    times = []
    for at in range(calls):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
        if at % 100 == 99:
            torch.cuda.synchronize()
    return statistics.median(times) * 1e6


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


def check(result: Tensor, reference: Tensor, limit: float) -> float:
    """The relative error of a result; a wrong one gets no time."""
    error = float((result.double() - reference.double()).norm() / reference.double().norm())
    if not error <= limit:
        raise AssertionError(f"relative error {error:.2e} is above {limit:.0e}")
    return error


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
