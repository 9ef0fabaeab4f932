"""CUDA graphs of several calls, for timing; a capture that fails leaves torch as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

__all__ = ["captured"]


def captured(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `count` calls on the current device.

    Where the call can't be captured its error is raised, and torch's stream and random numbers are as they were.
    """
    graph, stream, is_captured = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), False
    try:
        _capture(graph, call, count)
        is_captured = True
    finally:
        torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that could not be ended
        if not is_captured:
            _end_capture(stream)
    return graph


def _end_capture(stream: torch.cuda.Stream) -> None:
    """Tell torch's random generator that a capture which could not be ended is over.

    Until 2.13 it believes that the capture goes on, and draws outside of one raise. Any capture that ends tells it
    otherwise. Where there is no memory for another, the error of the first says so.
    """
    with suppress(RuntimeError):
        number = torch.zeros(1, device=stream.device)
        _capture(torch.cuda.CUDAGraph(), number.zero_, 1)
    torch.cuda.set_stream(stream)


def _capture(graph: torch.cuda.CUDAGraph, call: Callable[[], object], count: int) -> None:
    # torch's own stream for captures is of the first device that had one; other threads may allocate, as loaders do
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for _ in range(count):
            call()
