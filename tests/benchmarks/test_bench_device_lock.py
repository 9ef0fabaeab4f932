"""One process at a time has the GPU: a lock that is held while it is used, and let go while kernels are built."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.device_lock import BUILDS, TIMES, DeviceLock, let_go_in_compilers

pytestmark = pytest.mark.cpu

fork = multiprocessing.get_context("fork")


def take_turns(folder: Path, rounds: int) -> None:
    """Say in a file who has the lock, and see that nobody else says so before it is let go."""
    lock, said = DeviceLock(folder / "lock"), folder / "said"
    for _ in range(rounds):
        with lock.held("measuring"):
            for _ in range(2):
                said.write_text(f"{os.getpid()}")
                time.sleep(0.001)
                assert said.read_text() == f"{os.getpid()}"
                with lock.let_go("building"):
                    time.sleep(0.001)


def test_only_one_process_has_the_lock(tmp_path):
    others = [fork.Process(target=take_turns, args=(tmp_path, 10)) for _ in range(3)]
    for each in others:
        each.start()
    for each in others:
        each.join(60)
    assert [each.exitcode for each in others] == [0, 0, 0]


def hold_for_ever(folder: Path) -> None:
    with DeviceLock(folder / "lock").held("measuring"):
        (folder / "ready").touch()
        time.sleep(600)


def test_a_process_that_is_killed_lets_go(tmp_path):
    other = fork.Process(target=hold_for_ever, args=(tmp_path,))
    other.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.005)
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    with DeviceLock(tmp_path / "lock").held("measuring"):
        pass
    other.join(60)


def is_free(folder: Path) -> bool:
    """Whether another process could take the lock now."""
    import fcntl

    with (folder / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_stages_inside_of_one_another_leave_what_they_found(tmp_path):
    lock, found = DeviceLock(tmp_path / "lock"), []
    with lock.let_go("building"):
        found.append(is_free(tmp_path))
    with lock.held("measuring"):
        with lock.held("measuring"):
            found.append(is_free(tmp_path))
        found.append(is_free(tmp_path))
        with lock.let_go("torch.compile"):
            found.append(is_free(tmp_path))
            with lock.let_go("building"), lock.held("torch's tuning"):
                found.append(is_free(tmp_path))
            found.append(is_free(tmp_path))
        found.append(is_free(tmp_path))
    assert found == [True, False, False, True, False, True, False]
    assert is_free(tmp_path)


def test_an_error_leaves_what_was_held(tmp_path):
    lock = DeviceLock(tmp_path / "lock")
    with lock.held("measuring"):
        with pytest.raises(ValueError, match="broken"), lock.let_go("building"):
            raise ValueError("broken")
        assert not is_free(tmp_path)
    with pytest.raises(ValueError, match="broken"), lock.held("measuring"):
        raise ValueError("broken")
    assert is_free(tmp_path)


def test_without_a_file_nothing_is_locked(tmp_path):
    lock = DeviceLock(None)
    with lock.held("measuring"), lock.let_go("building"), lock.held("measuring"):
        assert lock.taken() == {}
    assert list(tmp_path.iterdir()) == []


def test_the_seconds_of_stages_are_told_once(tmp_path):
    lock = DeviceLock(tmp_path / "lock")
    with lock.held("measuring"):
        time.sleep(0.01)
        with lock.let_go("building"):
            time.sleep(0.02)
    spent = lock.taken()
    assert spent["measuring"] >= 0.01
    assert spent["building"] >= 0.02
    assert lock.taken() == {}


@pytest.fixture
def patched(tmp_path, monkeypatch) -> DeviceLock:
    """A lock that compilers let go, which they no longer do after the test."""
    for module, owner, name in (
        *BUILDS,
        *TIMES,
        ("torch._dynamo.callback", "CompilationCallbackHandler", "install_callbacks"),
    ):
        place = importlib.import_module(module)
        place = getattr(place, owner, None) if owner else place
        if place is not None and name in vars(place):
            monkeypatch.setattr(place, name, vars(place)[name])
    lock = DeviceLock(tmp_path / "lock")
    let_go_in_compilers(lock)
    return lock


def test_what_is_patched_is_there():
    """In this version of torch and Triton; a name that is no more would be locked, or not, without a word."""
    pytest.importorskip("triton")
    for module, owner, name in (*BUILDS, *TIMES):
        place = importlib.import_module(module)
        assert name in vars(getattr(place, owner) if owner else place)


def test_others_have_the_gpu_while_torch_compiles(patched, tmp_path):
    found = {}

    def backend(graph, inputs):
        found["compiling"] = is_free(tmp_path)
        benchmarker = importlib.import_module("torch._inductor.runtime.benchmarking").benchmarker
        timed = lambda: found.setdefault("timing", is_free(tmp_path))
        benchmarker.benchmark(timed, device="cpu", warmup=0, rep=0)
        found["after timing"] = is_free(tmp_path)
        return graph.forward

    torch.compiler.reset()  # which forgets callbacks that were registered
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with patched.held("measuring"):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        found["after"] = is_free(tmp_path)
    assert found == {"compiling": True, "timing": False, "after timing": True, "after": False}


def test_others_have_the_gpu_while_kernels_are_built(patched, tmp_path, monkeypatch):
    autotune = importlib.import_module("insum_ops.compiler.tuning.autotune")
    found = []
    monkeypatch.setattr(
        autotune, "candidates", lambda *given: found.append(is_free(tmp_path)) or [SimpleNamespace(choices={})]
    )
    monkeypatch.setattr(autotune, "_build_all", lambda *given: [(None, f"{is_free(tmp_path)}")])
    monkeypatch.setattr(autotune, "_time_one", lambda *given: (None, f"{is_free(tmp_path)}"))
    monkeypatch.setattr(
        autotune, "Search", lambda *given: type("Search", (), {"batch": lambda self, times: [0][len(times) :]})()
    )
    monkeypatch.setattr(autotune, "_none_built", lambda problem, reasons: ValueError(*reasons))
    with patched.held("measuring"):
        with pytest.raises(ValueError, match="False"):  # the reason of what was timed: it was locked
            autotune._timed(None, [], None, False, None)
        assert not is_free(tmp_path)
    assert found == [True]
