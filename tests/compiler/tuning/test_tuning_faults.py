"""What may befall tuning: no memory left, an interrupt, another current device. The user's call still works."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from insum_ops.compiler.binding.bind import bind
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.routes.prepared import problem_for
from insum_ops.compiler.runtime import launch
from insum_ops.compiler.runtime.cache_folder import cache_dir
from insum_ops.compiler.runtime.launch import Launcher
from insum_ops.compiler.tuning import autotune, captured, clock, settings, tuning_cache
from insum_ops.compiler.tuning.autotune import choose, recall
from insum_ops.compiler.tuning.choice import fastest
from insum_ops.compiler.tuning.problem import Problem, candidates
from insum_ops.compiler.tuning.tuning_cache import Entry, TuningCache

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
)
MOMENTS = ("eager", "captured")
PATIENCE = 60.0  # seconds until a test that waits for another thread gives up and fails


@dataclass
class FakeGPU:
    """As much of a GPU as tuning uses: a clock, the current stream, captures, and kernels that take time or fail."""

    clock: float = 0.0
    stream: object = "the user's"
    captured: float | None = None  # milliseconds, while a graph is captured
    is_invalid: bool = False  # a capture in which something failed
    milliseconds: dict[str, float] = field(default_factory=dict)  # by source; 1 for others
    fail: Callable[[str, str], None] = lambda source, moment: None  # before each run
    runs: int = 0

    def run(self, source: str) -> None:
        self.runs += 1
        try:
            self.fail(source, "eager" if self.captured is None else "captured")
        except RuntimeError:
            self.is_invalid = self.captured is not None
            raise
        taken = self.milliseconds.get(source, 1.0)
        if self.captured is None:
            self.clock += taken
        else:
            self.captured += taken

    def install(self, patch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = gpu.clock

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            taken = 0.0

            def replay(self) -> None:
                gpu.clock += self.taken

        class Capture:
            """As torch.cuda.graph: where ending a capture fails, its stream stays the current one."""

            def __init__(self, graph: Graph, stream: object, capture_error_mode: str) -> None:
                self.graph, self.stream = graph, stream

            def __enter__(self) -> None:
                self.before, gpu.stream, gpu.captured = gpu.stream, self.stream, 0.0

            def __exit__(self, *error: object) -> None:
                self.graph.taken, gpu.captured = gpu.captured or 0.0, None
                if gpu.is_invalid:
                    gpu.is_invalid = False
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                gpu.stream = self.before

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", Capture)
        patch.setattr(torch.cuda, "Stream", lambda: "one for a capture")
        patch.setattr(torch.cuda, "current_stream", lambda: gpu.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(gpu, "stream", stream))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(clock, "TIMED_SECONDS", 1e-6)
        patch.setattr(settings, "INTERPRETED", False)
        patch.setattr(Launcher, "build", lambda self, tensors, fact: None)
        patch.setattr(Launcher, "__call__", lambda self, tensors, fact=None: gpu.run(self.kernel.source))


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """A GPU on which nothing is known yet."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("INSUM_TUNE", raising=False)
    made = FakeGPU()
    made.install(monkeypatch)
    monkeypatch.setattr(captured, "_end_capture", lambda stream: None)  # of torch's random numbers
    autotune._launchers.clear()
    yield made
    autotune._launchers.clear()


@pytest.fixture
def problem(gpu: FakeGPU) -> Problem:
    tensors = {"A": torch.randn(40, 50), "B": torch.randn(50, 60)}
    return problem_for(bind(parse("C[i,j] += A[i,k] * B[k,j]"), tensors), tensors)


def sources(problem: Problem) -> list[str]:
    return [problem.launcher(candidate).kernel.source for candidate in candidates(problem)]


def stored() -> list[Path]:
    return list(cache_dir().rglob("*.json"))


def raising(error: BaseException, at: str, *only: str) -> Callable[[str, str], None]:
    """What fails at a moment, eager or captured, for these sources or for all."""

    def fail(source: str, moment: str) -> None:
        if moment == at and (source in only or not only):
            raise error

    return fail


def is_usable(gpu: FakeGPU) -> bool:
    return gpu.captured is None and gpu.stream == "the user's"


def test_the_fastest_is_found_and_kept(gpu: FakeGPU, problem: Problem) -> None:
    best = sources(problem)[2]
    gpu.milliseconds = {best: 0.5}
    assert choose(problem, [], None).kernel.source == best
    assert is_usable(gpu)
    (entry,) = stored()
    assert json.loads(entry.read_text())["times"][0][1] == 0.5


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "driver", "triton"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_there_is_no_memory_for_is_passed_over(
    gpu: FakeGPU, problem: Problem, moment: str, error: RuntimeError
) -> None:
    """The best of the others runs, for now: who has the memory later finds what is the best of all."""
    best, second, *_ = sources(problem)
    gpu.milliseconds, gpu.fail = {best: 0.25, second: 0.5}, raising(error, moment, best)
    assert choose(problem, [], None).kernel.source == second
    assert is_usable(gpu)
    assert stored() == []
    autotune._launchers.clear()
    gpu.fail = lambda source, moment: None
    assert choose(problem, [], None).kernel.source == best
    assert len(stored()) == 1


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "driver", "triton"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_with_no_memory_to_measure_anything_the_default_runs(
    gpu: FakeGPU, problem: Problem, moment: str, error: RuntimeError
) -> None:
    gpu.fail = raising(error, moment)
    assert choose(problem, [], None).kernel.source == sources(problem)[0]
    assert is_usable(gpu)
    assert stored() == []
    runs = gpu.runs
    assert choose(problem, [], None).kernel.source == sources(problem)[0]
    assert gpu.runs == runs  # the process does not try again and again
    timings, _ = autotune.tune(problem, [], None)
    assert {(timing.milliseconds, timing.reason) for timing in timings} == {(None, "out of memory")}


def test_what_can_not_be_built_is_no_default(gpu: FakeGPU, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it remembered that another was the best, where the driver had no memory left for a kernel's code."""
    first, second, *_ = sources(problem)

    def build(self: Launcher, tensors: object, fact: object) -> None:
        if self.kernel.source == first:
            raise UnsupportedError("the kernel could not be built") from OUT_OF_MEMORY[2]

    monkeypatch.setattr(Launcher, "build", build)
    assert choose(problem, [], None).kernel.source == second
    assert stored() == []
    autotune._launchers.clear()
    gpu.fail = raising(OUT_OF_MEMORY[0], "eager")
    assert choose(problem, [], None).kernel.source == second


@pytest.mark.parametrize("moment", MOMENTS)
def test_other_errors_of_a_kernel_are_not_hidden(gpu: FakeGPU, problem: Problem, moment: str) -> None:
    gpu.fail = raising(RuntimeError("CUDA error: an illegal memory access was encountered"), moment)
    with pytest.raises(RuntimeError, match=r"^CUDA error: (an illegal memory access|operation failed due)"):
        choose(problem, [], None)
    assert is_usable(gpu)
    assert stored() == []


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["torch", "driver", "triton"])
def test_of_forms_too_those_are_passed_over_that_have_no_memory(
    gpu: FakeGPU, problem: Problem, error: RuntimeError
) -> None:
    gpu.fail = raising(error, "captured", "table")
    start = lambda name: (lambda: gpu.run(name), 0.0)
    assert fastest(problem.key, {"table", "groups"}, ["table", "groups"], start) == "groups"
    assert is_usable(gpu)
    assert stored() == []
    gpu.fail = raising(error, "captured")
    assert fastest(problem.key, {"table", "groups"}, ["table", "groups"], start) == "table"


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_passes_through_and_the_next_call_tunes(gpu: FakeGPU, problem: Problem, moment: str) -> None:
    best = sources(problem)[1]
    gpu.milliseconds, gpu.fail = {best: 0.5}, raising(KeyboardInterrupt(), moment)
    with pytest.raises(KeyboardInterrupt):
        choose(problem, [], None)
    assert is_usable(gpu)
    assert stored() == []
    gpu.fail = lambda source, moment: None
    assert choose(problem, [], None).kernel.source == best  # and so the lock is free
    assert len(stored()) == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, even if the tests were started where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("gpu", "interruptible")
def test_an_interrupt_does_not_wait_for_builds_that_have_not_begun(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly the interrupt arrives: no build ends before it has reached the place that calls the others off."""
    begun: list[str] = []
    is_waiting, is_called_off = threading.Event(), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_called_off.set()
            super().shutdown(wait=wait)

    def build(self: Launcher, tensors: object, fact: object) -> None:
        begun.append(self.kernel.source)
        if self.kernel.source == begun[0]:
            is_waiting.wait(PATIENCE)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        is_called_off.wait(PATIENCE)

    def bar(results: Iterator[object], *title: object, **settings: object) -> Iterator[object]:
        """A progress bar which is busy with itself when the interrupt comes."""
        is_waiting.set()
        for _ in range(int(PATIENCE / 0.01)):
            is_called_off.wait(0.01)  # one long wait may begin just after a signal that would have ended it
        yield from results

    monkeypatch.setattr(autotune, "BUILDERS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "build", build)
        patch.setattr(autotune, "ThreadPoolExecutor", Pool)
        patch.setattr(autotune, "tqdm", bar)
        with pytest.raises(KeyboardInterrupt):
            choose(problem, [], None)
    assert len(begun) <= 2 < len(sources(problem))
    assert stored() == []
    choose(problem, [], None)
    assert len(stored()) == 1


WILD = ({}, {"num_warps": -1}, {"num_warps": 2**70}, {"__import__": "os"}, {"num_warps": "4; import os"})


@pytest.mark.parametrize("wild", WILD, ids=str)
def test_a_config_that_somebody_made_up_is_not_used(gpu: FakeGPU, problem: Problem, wild: dict) -> None:
    """Neither as the best nor among the times, of which the least is for captured graphs."""
    best, *_ = candidates(problem)
    for config in (wild, {**best.choices, **wild}) if wild else (wild,):
        TuningCache().put(problem.key, Entry(config, ((config, 0.5),)))
        tuning_cache._cache_of.cache_clear()
        assert recall(problem) is None
        TuningCache().put(problem.key, Entry(best.choices, ((config, 0.1), (best.choices, 0.5))))
        tuning_cache._cache_of.cache_clear()
        autotune._launchers.clear()
        found = choose(problem, [], None)
        assert (found.kernel.source, found.captured) == (problem.launcher(best).kernel.source, None)


def test_a_kernel_is_built_and_launched_on_the_device_of_its_tensors(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton builds for the current device and loads onto it, whatever the tensors are on."""
    current, seen = [0], []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    def compiled(self: Launcher, tensors: object) -> Callable[..., None]:
        seen.append(("built", current[-1]))
        return lambda programs, arguments: seen.append(("launched", current[-1]))

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(launch, "SEVERAL_GPUS", True)
    monkeypatch.setattr(Launcher, "compile", compiled)
    found = problem.launcher(candidates(problem)[0])
    found.device = torch.device("cuda", 1)
    pool = torch.randn(40, 50), torch.randn(50, 60), torch.empty(40, 60)
    for _ in range(2):
        found.launch(pool)
    assert seen == [("built", 1), ("launched", 1), ("launched", 1)]
    assert current == [0]
