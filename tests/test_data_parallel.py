"""Layers train under DistributedDataParallel and fully_shard as they do alone, by two processes over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache

import pytest
import torch
import wrapped_training
from statements import IS_THOROUGH
from tolerances import TOLERANCE
from wrapped_training import CASES, PROCESSES, train_alone

VIEWS = "error:FSDP2-wrapped module:UserWarning"  # of outputs on which a hook may be lost
TIMEOUT = 300  # seconds; all cases take some twenty on two idle cores


@pytest.mark.cpu
def test_two_processes_train_as_one(tmp_path):
    """One test for all cases, so that no more than two processes are started, whoever runs it."""
    names = [*CASES] if IS_THOROUGH else some_of(CASES)
    command = [sys.executable, "-W", VIEWS, wrapped_training.__file__, str(tmp_path), *names]
    with subprocess.Popen(command, start_new_session=True) as run:
        try:
            expected = {name: trained_alone(*CASES[name].alone) for name in names}
            assert run.wait(TIMEOUT) == 0
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    failures = {}
    for number, (name, case) in enumerate(CASES.items()):
        for rank in range(PROCESSES if name in names else 0):
            found = torch.load(tmp_path / f"{number}-{rank}.pt")
            problem = found if isinstance(found, str) else difference(found, expected[name][rank], case.computes_in)
            if problem:
                failures[f"{name}, process {rank}"] = problem
    assert not failures, "\n\n".join([f"{name}: {problem}" for name, problem in failures.items()])


def some_of(cases):
    """As few as have every model, every wrapper, and gradients of one and of several batches."""
    parts = {name: {("model", case.model), ("wrapper", case.wrapper), case.alone[1]} for name, case in cases.items()}
    found, lacking = [], set().union(*parts.values())
    while lacking:
        found.append(max(parts, key=lambda name: len(parts[name] & lacking)))
        lacking -= parts[found[-1]]
    return found


@cache
def trained_alone(*alike):
    """Many cases want the same numbers."""
    return train_alone(*alike)


def difference(found, expected, dtype):
    """In words, what outputs or gradients of some step are wrong; "" if none is."""
    assert len(found) == len(expected)
    for step, ((gradients, outputs), (wanted, wanted_outputs)) in enumerate(zip(found, expected)):
        pairs = {f"output {number}": pair for number, pair in enumerate(zip(outputs, wanted_outputs, strict=True))}
        pairs |= {name: (gradients[name], wanted[name]) for name in gradients.keys() | wanted.keys()}
        for name, (actual, reference) in pairs.items():
            if actual is None or reference is None:
                if actual is not reference:
                    return f"step {step}, {name}: {actual} instead of {reference}"
            else:
                error, largest = (actual.double() - reference.double()).abs().max(), reference.double().abs().max()
                if not error <= TOLERANCE[dtype]["rtol"] * largest:  # gradients may all be small
                    return f"step {step}, {name}: is wrong by {error:.3g}, where {largest:.3g} is the largest"
    return ""
