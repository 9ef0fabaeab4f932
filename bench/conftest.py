"""The `measure` fixture: check, warm up and tune, then time; what a results file says beside the times."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from time import perf_counter, time
from typing import Any, Protocol

import pytest
import torch

from .case import DEVICE, OURS, PEER_FAILURES, Call, Case, forget, in_tf32, is_ours, ours_beside
from .data import DataError
from .device_lock import device_lock, let_go_in_compilers
from .harness import Times, check, cold_times, device_times, queued_in_turns
from .inputs import origins
from .machine import machine
from .results import contradiction, load
from .row_file import append, finished, rows_path, time_table
from .suite_times import Measured, measured_of, summary
from .workload import SCALES

STATISTICS = ("min", "max", "mean", "stddev", "median", "rounds")
ROUNDS = (10, 200)  # of the wall time: at least and at most
SECONDS = 0.1  # to spend on them
QUEUED, MOST_QUEUED = 4e-3, 200  # seconds, and calls, of a queue: the first calls after a wait are slow for the host
ATTEMPTS = 3  # at times on the device and of calls that do not contradict each other
KEPT_BYTES = 2**29  # of the GPU's memory that a process may keep for its next case
LONG = 2e-3  # seconds of a call from which on fewer of them are queued or captured at a time
COMMIT = "INSUM_BENCH_COMMIT"  # names the commit where the code is a copy without its history
LIMIT_SECONDS = "INSUM_BENCH_SECONDS"  # after which no case begins
FEW_ROUNDS = "INSUM_BENCH_ROUNDS"  # of the wall time, whatever they take: a few show that a case runs
SLOWDOWN = "INSUM_BENCH_SLOWDOWN"  # for tests: how many times ours does its work
BEGAN = "INSUM_BENCH_BEGAN"  # when the first of several processes did, which the others are told


STARTED = float(os.environ.setdefault(BEGAN, str(time())))
# our calls, full float32 and tf32, until another case's: peers are timed in turns with them
_last: dict[str, tuple[tuple[str, str], Call]] = {}


FOUND: pytest.StashKey[list[Measured]] = pytest.StashKey()  # what test_statements.py has measured
BEGUN: pytest.StashKey[str] = pytest.StashKey()  # the case whose rows are measured now


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("statements", "bench/cases/test_statements.py")
    group.addoption("--seed", type=int, default=0, help="from which sizes and operands are drawn")
    group.addoption(
        "--in-order", nargs="+", metavar="PATTERN", help="rows by their names, in this order, and no others"
    )
    group.addoption("--scale", choices=SCALES, help="of the sizes; by default full on a GPU and cpu on a CPU")


def pytest_configure(config: pytest.Config) -> None:
    """A peer may warn as it likes; ours is held to silence by the tests."""
    try:
        rows_path()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[FOUND] = []
    config.stash[BEGUN] = ""
    if device_lock.path is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        _share_the_device()
    for line in ("default", "ignore:Sparse CSR tensor", "ignore:Sparse invariant", "ignore:index_reduce"):
        config.addinivalue_line("filterwarnings", line)
    config.addinivalue_line("markers", "holds: takes the lock of the GPU itself, for as long as it needs it")


def _share_the_device() -> None:
    """Let other processes build kernels while this one times, and the other way round.

    Each has a tuning cache of its own: to wait for another's entry with the GPU in hand, which the other waits for,
    would be for ever.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    folder = os.environ.get("INSUM_CACHE_DIR") or f"{device_lock.path}-tuned"
    os.environ["INSUM_CACHE_DIR"] = os.path.join(folder, worker)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    let_go_in_compilers()
    if DEVICE == "cuda":  # what a process does once, before any of them waits
        square = torch.zeros(8, 8, device=DEVICE)
        square @ square
        importlib.import_module("triton.runtime").driver.active.get_current_device()


def case_of(name: str) -> str:
    """The case of a row, by its name: all but the provider, which comes last.

    >>> case_of("cases/test_host.py::test_host[spmm-torch.mm]"), case_of("cases/test_ablation.py::test_ablation[COO]")
    ('cases/test_host.py::test_host[spmm', 'cases/test_ablation.py::test_ablation')
    """
    place, _, words = name.partition("[")
    return f"{place}[{words.rpartition('-')[0]}" if "-" in words else place


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process measures all rows of a case, since peers are timed beside ours; cases are begun in their order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByCase(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return case_of(nodeid)

    config.option.loadscopereorder = False
    return ByCase(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases whose rows the file of rows has, all of them, and beside others what times the host.

    `--in-order` leaves out what none of its patterns is found in, and begins with what the first is found in.
    """
    path = rows_path()
    known = set() if path is None else finished(path)
    is_beside = hasattr(config, "workerinput")
    patterns = config.getoption("--in-order") or [""]
    wanted = {
        item: next((at for at, pattern in enumerate(patterns) if re.search(pattern, item.nodeid)), None)
        for item in items
        if not (is_beside and item.get_closest_marker("alone"))
    }
    left = {case_of(item.nodeid) for item, at in wanted.items() if at is not None and item.nodeid not in known}
    kept = [item for item in items if wanted.get(item) is not None and case_of(item.nodeid) in left]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=wanted.__getitem__)  # type: ignore[arg-type]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say in the file of rows, once, which machine and commit they are of."""
    path, config = rows_path(), session.config
    if path is None or hasattr(config, "workerinput") or config.getoption("collectonly"):
        return
    about = config._benchmarksession.get_machine_info()  # type: ignore[attr-defined]
    known = config.hook.pytest_benchmark_generate_commit_info(config=config)
    now = datetime.now(timezone.utc).isoformat()
    append(path, {"head": {"machine_info": about, "commit_info": _commit(known), "datetime": now}})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note in the file of rows what a peer has not, so that nobody tries it again."""
    path = rows_path()
    if path is None or not report.skipped or "PYTEST_XDIST_WORKER" in os.environ:
        return
    why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    if LIMIT_SECONDS not in why:
        append(path, {"left_out": report.nodeid, "why": why[:300]})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of statements, if they ran, what was not reached, and which inputs it was, whatever else is shown."""
    path = rows_path()
    has_rows = path is not None and path.exists() and any(True for _ in finished(path))
    found = config.stash[FOUND] or (measured_of(load(path)) if has_rows and path is not None else [])
    if found:
        for line in summary(found, config.getoption("--seed")):
            terminalreporter.write_line(line)
    if has_rows and path is not None:
        for line in time_table(path):
            terminalreporter.write_line(line)
    late = [report for report in terminalreporter.getreports("skipped") if LIMIT_SECONDS in str(report.longrepr)]
    if late:
        names = dict.fromkeys(case_of(report.nodeid) for report in late)
        terminalreporter.write_line(f"not reached in time: {len(names)} cases, of {len(late)} rows")
        for name in names:
            terminalreporter.write_line(f"  {name}")
    try:
        lines = origins()
    except DataError as error:  # collecting failed for it, too
        lines = [str(error)]
    for line in lines:
        terminalreporter.write_line(line)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    cpu = machine_info.get("cpu", {}).get("brand_raw", "unknown")
    machine_info.clear()  # a results file may be published: no host's name
    machine_info.update(machine(), cpu=cpu, python=platform.python_version(), system=platform.system())


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict[str, Any]) -> None:
    """Medians and quartiles stay; single times would make the file a hundred times as long."""
    output_json["commit_info"] = _commit(output_json["commit_info"])
    for entry in output_json["benchmarks"]:
        entry["stats"] = {name: entry["stats"][name] for name in STATISTICS}
        for name in ("options", "params", "param"):
            entry.pop(name, None)


def _commit(known: Mapping[str, Any]) -> dict[str, Any]:
    if COMMIT in os.environ:
        return {"id": os.environ[COMMIT], "time": None, "dirty": False}
    return {key: known.get(key) for key in ("id", "time", "dirty")}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest) -> None:
    """Begin no case that a run has no time for; the rows of one that has begun are measured, peers beside ours."""
    case = case_of(request.node.nodeid)
    if case != request.config.stash[BEGUN]:
        skip_if_late()
    request.config.stash[BEGUN] = case


def skip_if_late() -> None:
    """What a run has no time for is skipped, so that what it measured is written."""
    limit = float(os.environ.get(LIMIT_SECONDS, "inf"))
    if time() - STARTED > limit:
        pytest.skip(f"{LIMIT_SECONDS} is {limit:g}, and they are over")


@pytest.fixture(autouse=True)
def _with_the_device(_in_time: None, request: pytest.FixtureRequest) -> Iterator[None]:
    is_its_own = request.node.get_closest_marker("holds") is not None
    with nullcontext() if is_its_own else device_lock.held("measuring"):
        yield
        if device_lock.path is not None and DEVICE == "cuda" and torch.cuda.memory_allocated() > KEPT_BYTES:
            gc.collect()  # operands in cycles, which other processes have no room beside
            torch.cuda.empty_cache()
    path = rows_path()
    if path is not None and device_lock.path is not None:
        append(path, {"of": case_of(request.node.nodeid), "spent": device_lock.taken()})


@pytest.fixture(autouse=True, scope="module")
def _operands_are_dropped() -> Iterator[None]:
    yield
    forget()
    _last.clear()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


class Measure(Protocol):
    def __call__(self, case: Case, provider: str, make: Callable[[], Call]) -> None: ...


class Note(Protocol):
    def __call__(
        self, case: Case, provider: str, value: float, unit: str, timing: str = "", queued_ms: float | None = None
    ) -> None: ...


@pytest.fixture
def measure(_kept: Any) -> Measure:
    return partial(measured, _kept)


@pytest.fixture
def note(_kept: Any) -> Note:
    return partial(noted, _kept)


@pytest.fixture
def _kept(benchmark: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """pytest-benchmark's fixture, whose row is added to the file of rows at once.

    It refuses to measure in one of several processes, since it can't know that the GPU is locked.
    """
    path = rows_path()
    if path is not None:
        benchmark.disabled = False
    yield benchmark
    if path is not None and benchmark.stats is not None:
        times = benchmark.stats.stats
        stats = {"min": times.min, "median": times.median, "rounds": times.rounds}
        info = {**benchmark.extra_info}
        append(path, {"row": {"fullname": request.node.nodeid, "extra_info": info, "stats": stats}})


def measured(benchmark: Any, case: Case, provider: str, make: Callable[[], Call]) -> None:
    """Make a provider's call, check its result, time it, and leave a row in the results."""
    _describe(benchmark, case, provider)
    try:
        call = make()
        call = _slowed(call) if provider == OURS else call
        benchmark.extra_info["facts"].update(call.facts)
        name, beside = (case.experiment, case.name), ours_beside(provider)
        of, ours = _last.get(beside, (None, None))
        _measure(benchmark, case, call, ours if of == name and provider != beside else None)
        if provider in (OURS, in_tf32(OURS)):
            for other in [known for known, (of, _) in _last.items() if of != name]:
                del _last[other]  # with its operands
            _last[provider] = name, call
    except PEER_FAILURES as error:  # a wrong or broken peer gets no time and stops nobody
        if is_ours(provider):
            raise
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            pytest.skip(f"{provider} needs more memory than this machine has")
        pytest.skip(f"{provider} fails here: {type(error).__name__}: {error}")


def noted(
    benchmark: Any,
    case: Case,
    provider: str,
    value: float,
    unit: str,
    timing: str = "",
    queued_ms: float | None = None,
) -> None:
    """Leave a row for a figure that was measured otherwise: a first call, bytes, a time of the suite's."""
    _describe(benchmark, case, provider)
    benchmark.extra_info.update(value=value, unit=unit, **({"timing": timing} if timing else {}))
    if queued_ms is not None:
        benchmark.extra_info.update(queued_ms=queued_ms, queued_p20=queued_ms)
    benchmark.pedantic(lambda: None, rounds=1)


def _describe(benchmark: Any, case: Case, provider: str) -> None:
    info = benchmark.extra_info
    info.update(experiment=case.experiment, case=case.name, provider=provider, device=DEVICE)
    info.update(x=case.x, flops=case.flops, traffic=case.traffic, facts=dict(case.facts))
    benchmark.group = f"{case.experiment}: {case.name}"


def _measure(benchmark: Any, case: Case, call: Call, ours: Call | None) -> None:
    info = benchmark.extra_info
    if case.expected is not None:
        result = call.result or call.run
        info["error"] = check(result(), case.expected, call.limit or case.limit)  # type: ignore[arg-type]
    settled = _settled(call.run)
    settled()
    start = perf_counter()
    settled()
    once = perf_counter() - start
    rounds = int(os.environ.get(FEW_ROUNDS, 0)) or round(min(max(SECONDS / max(once, 1e-7), ROUNDS[0]), ROUNDS[1]))
    if DEVICE == "cuda":  # before the row is made, since it may be refused
        _time_on_device(info, call, ours, once)
    benchmark.pedantic(settled, rounds=rounds, warmup_rounds=1)


def _time_on_device(info: dict[str, Any], call: Call, ours: Call | None, once: float) -> None:
    """The times of calls and of their work on the device; what contradicts itself again and again gets no row."""
    calls = max(2, round(10 * min(1, LONG / max(once, 1e-7))))
    several = min(max(calls, round(QUEUED / max(once, 1e-7))), MOST_QUEUED)
    for _ in range(ATTEMPTS):
        queued, *beside = queued_in_turns([call.run, *([] if ours is None else [ours.run])], several)
        _note(info, "queued", queued)
        for times in beside:
            _note(info, "ours", times)
        info["timing"] = "graph" if call.is_capturable and _time_captured(info, call, calls) else "queue"
        if info["timing"] == "queue":
            _note(info, "device", queued)
        problem = contradiction(info["device_ms"], info["queued_ms"])
        if problem is None:
            return
    pytest.skip(f"measured {ATTEMPTS} times and left out: {info['provider']} {problem}")


def _time_captured(info: dict[str, Any], call: Call, calls: int) -> bool:
    """Whether it can be captured; what waits for the device on its way can't, and its row says so."""
    try:
        _note(info, "device", device_times(call.run, calls))
        _note(info, "cold", cold_times(call.run))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return False
    return True


def _note(info: dict[str, Any], name: str, times: Times) -> None:
    info[f"{name}_ms"], info[f"{name}_p20"], info[f"{name}_p80"] = times.median, times.p20, times.p80


def _settled(run: Callable[[], object]) -> Callable[[], object]:
    """A call that returns once its work is done."""
    if DEVICE != "cuda":
        return run

    def settled() -> None:
        run()
        torch.cuda.synchronize()

    return settled


def _slowed(call: Call) -> Call:
    times = int(os.environ.get(SLOWDOWN, "1"))
    if times == 1:
        return call

    def run() -> object:
        for _ in range(times - 1):
            call.run()
        return call.run()

    return replace(call, run=run)
