"""Tuning on a CPU with a draw in the place of the clock: every way that would be timed runs, any may win."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import pytest
from process_caches import forget

from insum_ops.compiler import routes
from insum_ops.compiler.autograd import torch_gradients

__all__ = ["drawn", "drawn_programs"]


def drawn(
    key: object,
    ways: Collection[str],
    first: Sequence[str],
    start: Callable[[str], tuple[Callable[[], object], float] | None],
    **_: object,
) -> str:
    """Return one of the ways, the same in each run for the same key, after all of them have run twice."""
    for name in first:
        started = start(name)
        if started is not None:
            started[0]()
            started[0]()
    return first[crc32(str(key).encode()) % len(first)]


@contextmanager
def drawn_programs() -> Iterator[None]:
    """Tuning is on, nothing is known before, and what wins is drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INSUM_TUNE", "default")
        for module in (routes, torch_gradients):
            patch.setattr(module, "fastest", drawn)
        forget()
        yield
    forget()
