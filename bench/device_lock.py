"""One lock of the GPU for many processes: who uses the GPU holds it, and lets it go while only the host is at work.

A benchmark spends nearly all of its time on the host: torch.compile traces, Triton builds. With `INSUM_BENCH_LOCK=file`
several processes do that at once, while what is timed has the GPU to itself. The lock is the system's on a file, so
that a process that ends, however it does, has let it go.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

__all__ = ["BUILDS", "LOCK", "TIMES", "DeviceLock", "device_lock", "let_go_in_compilers"]

LOCK = "INSUM_BENCH_LOCK"  # the file; without it nothing is locked
WAITING = "waiting"
SPARE_BYTES = 2**30  # of the GPU's memory that a process keeps for later: to free it and ask again takes long, too
T = TypeVar("T")
# What only the host does, by module, class and name, and what runs on the GPU amid that: our tuning and torch's. Which
# of them there are depends on torch's version.
BUILDS = (
    ("insum_ops.compiler.tuning.autotune", "", "_timed"),
    ("insum_ops.compiler.tuning.joint", "JointProblem", "built"),
    ("triton.compiler.compiler", "", "compile"),
    ("triton.compiler", "", "compile"),
    ("triton", "", "compile"),
)
TIMES = (
    ("insum_ops.compiler.tuning.autotune", "_Trials", "time"),
    ("torch._inductor.runtime.benchmarking", "Benchmarker", "benchmark"),
    ("torch._inductor.runtime.benchmarking", "Benchmarker", "benchmark_gpu_with_cuda_graph"),
    ("torch._inductor.runtime.benchmarking", "TritonBenchmarker", "benchmark_gpu"),
    ("torch._inductor.runtime.benchmarking", "InductorBenchmarker", "benchmark_gpu"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "benchmark_example_value"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "benchmark_in_current_process"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "benchmark_all_configs"),
)


class DeviceLock:
    """A lock that this process holds or not, whichever of its threads asks; without a file it is never waited for.

    `spent` has the seconds of each stage and those of waiting.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self.spent: Counter[str] = Counter()
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._is_held = False
        self._changing = threading.Lock()
        self._stage, self._since = "", perf_counter()

    @contextmanager
    def held(self, stage: str) -> Iterator[None]:
        """Hold the lock inside, and afterwards again or no longer, as before."""
        with self._during(stage, is_held=True):
            yield

    @contextmanager
    def let_go(self, stage: str) -> Iterator[None]:
        """Let others use the GPU inside; what was held is waited for at the end."""
        with self._during(stage, is_held=False):
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds inside as another stage, where the lock is held."""
        with self._changing:
            outer, is_counted = self._stage, self._is_held
            if is_counted:
                self._enter(name)
        try:
            yield
        finally:
            with self._changing:
                if is_counted and self._is_held:
                    self._enter(outer)

    @contextmanager
    def _during(self, stage: str, is_held: bool) -> Iterator[None]:
        # Of several threads in one stage the first changes what is held and, once it is done, changes it back: builds
        # of the others then go on while the lock is held, which is harmless.
        with self._changing:
            before, outer = self._is_held, self._stage
            is_changed = self._file is not None and before != is_held and not _captures()
            if is_changed:
                self._turn(is_held, stage)
        try:
            yield
        finally:
            if is_changed:
                with self._changing:
                    self._turn(before, outer)

    def _turn(self, is_held: bool, stage: str) -> None:
        assert self._file is not None
        if is_held:
            self._enter(WAITING)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        elif torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > SPARE_BYTES:
                torch.cuda.empty_cache()  # what this process does not use now is for the others
        self._enter(stage)
        if not is_held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._is_held = is_held

    def _enter(self, stage: str) -> None:
        now = perf_counter()
        self.spent[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def taken(self) -> dict[str, float]:
        """The seconds of each stage since this was asked the last time."""
        self._enter(self._stage)
        found = {stage: round(seconds, 3) for stage, seconds in self.spent.items() if stage and seconds > 1e-3}
        self.spent.clear()
        return found


def _captures() -> bool:
    """Whether a CUDA graph is recorded, which nothing may wait in."""
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


device_lock = DeviceLock(os.environ.get(LOCK) or None)


def let_go_in_compilers(lock: DeviceLock = device_lock) -> None:
    """Let the lock go wherever a kernel is built or torch traces, and hold it where torch's compiler times kernels."""
    for place in BUILDS:
        _around(*place, functools.partial(lock.let_go, "building"))
    for place in TIMES:
        _around(*place, functools.partial(lock.held, "tuning" if "insum" in place[0] else "torch's tuning"))
    handler = importlib.import_module("torch._dynamo.callback").CompilationCallbackHandler
    install = handler.install_callbacks

    @contextmanager
    def installed(self: Any, trigger: Any, *arguments: Any, **options: Any) -> Iterator[None]:
        """Around each compilation; recording of CUDA graphs is told of in the same way."""
        with install(self, trigger, *arguments, **options):
            if trigger.name not in ("DYNAMO", "LAZY_BACKWARD"):
                yield
                return
            with lock.let_go("torch.compile"):
                yield

    handler.install_callbacks = installed


def _around(module: str, owner: str, name: str, context: Callable[[], Any]) -> None:
    """Let a function or method run in a context, if there is one of that name."""
    try:
        place: Any = importlib.import_module(module)
    except ImportError:  # Triton, on a system that it has no build for
        return
    place = getattr(place, owner, None) if owner else place
    known = vars(place).get(name) if place is not None else None
    if known is None:
        return
    function: Callable[..., Any] = known.__func__ if isinstance(known, (classmethod, staticmethod)) else known

    @functools.wraps(function)
    def inside(*arguments: Any, **options: Any) -> Any:
        with context():
            return function(*arguments, **options)

    setattr(place, name, type(known)(inside) if function is not known else inside)
