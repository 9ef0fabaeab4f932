"""Threads share formats, layers and all that is kept of calls; each gets its own result.

Python may give another thread its turn anywhere, but seldom does where it matters. Here it often does, at lines of the
package or at the steps that lines consist of, so that a few calls meet what thousands would.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from entry_points import CALLERS, ENTRY_POINTS
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED, IS_THOROUGH
from tolerances import assert_matches

import insum_ops
from insum_ops import compiler, explain, formats, spmm
from insum_ops.formats import GroupCOO

THREADS = 8 if IS_THOROUGH else CALLERS + 1  # two of them have the same inputs
FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (insum_ops, compiler, formats))

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="Triton's interpreter patches triton.language for all threads while a kernel runs"
)

SOME = [*ENTRY_POINTS][:: 1 if IS_THOROUGH else 5]


@contextmanager
def turns(at_steps: bool) -> Iterator[None]:
    """Threads that start in here take turns at lines of the package, or at the steps that lines consist of."""
    draw = Random(0).random

    def at_place(frame: Any, event: str, given: object) -> Any:
        chance = draw()
        if chance < 0.01:  # the others get on
            time.sleep(3e-4)
        elif chance < 0.2:
            time.sleep(0)
        return at_place

    def at_call(frame: Any, event: str, given: object) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = at_steps, not at_steps
        return at_place

    interval, before = sys.getswitchinterval(), threading.gettrace()
    sys.setswitchinterval(1e-5)
    threading.settrace(at_call)
    try:
        yield
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
        sys.setswitchinterval(interval)


def together(work: Callable[[int], None], rounds: int, at_steps: bool = False) -> None:
    """The work of every thread at once, all of them from the start; what one of them raises is raised."""
    barrier, raised = threading.Barrier(THREADS), list[BaseException]()

    def run(thread: int) -> None:
        try:
            barrier.wait()
            for _ in range(rounds):
                work(thread)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    with turns(at_steps):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]


def check_each(name: str, rounds: int, at_steps: bool = False) -> None:
    """Each thread's results are those of its own inputs, and what all have left behind is right for one thread."""
    exact = ENTRY_POINTS[name](torch.float64)
    expected = [exact.run(caller) for caller in range(CALLERS)]
    shared = ENTRY_POINTS[name](torch.float32)  # nothing like it was called before

    def check(caller: int) -> None:
        for part, right in zip(shared.run(caller), expected[caller % CALLERS], strict=True):
            assert_matches(part, right)

    together(check, rounds, at_steps)
    for caller in range(CALLERS):
        check(caller)


@SPARSE_WARNINGS
@pytest.mark.parametrize("name", SOME)
def test_each_thread_gets_its_own_result(name):
    check_each(name, rounds=2)


@pytest.mark.parametrize("name", ["insum gather", "insum max", "spmm edges of several sizes"])
def test_the_same_where_threads_take_turns_within_a_line(name):
    check_each(name, rounds=3, at_steps=True)


def test_threads_that_bring_other_weights_for_one_graph_do_not_get_each_others():
    edge_index = torch.randint(0, 9, (2, 30), device=DEVICE)
    B = torch.randn(9, 2, device=DEVICE)
    weights = [torch.randn(30, device=DEVICE) for _ in range(2)]
    sources, targets = edge_index.cpu()

    def check(thread: int) -> None:
        weight = weights[thread % 2]
        messages = weight.cpu().double()[:, None] * B.cpu().double()[sources]
        expected = messages.new_zeros(9, 2).index_add(0, targets, messages)
        assert_matches(spmm((edge_index, weight), B), expected)

    together(check, rounds=15, at_steps=True)


def test_explanations_are_the_same_in_every_thread():
    X, at = torch.randn(10, 3, device=DEVICE), torch.randint(0, 10, (7,), device=DEVICE)
    A = GroupCOO.from_dense(torch.randn(6, 10, device=DEVICE).relu())
    asked = [("C[i,c] += X[I[i],c]", {"X": X, "I": at}), ("C[m,c] += A[m,k] * X[k,c]", {"A": A, "X": X})]
    expected = [str(explain(expr, **given)) for expr, given in asked]

    def check(thread: int) -> None:
        expr, given = asked[thread % 2]
        assert str(explain(expr, **given)) == expected[thread % 2]

    together(check, rounds=1)
