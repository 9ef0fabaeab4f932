"""Layers train under DistributedDataParallel and fully_shard as they do alone, by two processes over gloo."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import wrapped_training
from tolerances import TOLERANCE
from wrapped_training import CASES, PROCESSES, train_alone

TIMEOUT = 300  # seconds; all cases take some twenty on an idle core


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have written what they got, started once for all cases."""
    folder = tmp_path_factory.mktemp("processes")
    script = Path(wrapped_training.__file__)
    runs = [
        subprocess.Popen([sys.executable, "-W", "error::UserWarning", str(script), str(rank), str(folder)])
        for rank in range(PROCESSES)
    ]
    try:
        assert [run.wait(TIMEOUT) for run in runs] == [0] * PROCESSES
    finally:
        for run in runs:
            run.kill()
    return folder


@cache
def trained_alone(*alike):
    """Many cases want the same numbers."""
    return train_alone(*alike)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(folder, name):
    case = CASES[name]
    expected = trained_alone(case.model, case.parts, case.computes_in, case.shares_buffers)
    for rank in range(PROCESSES):
        steps = torch.load(folder / f"{list(CASES).index(name)}-{rank}.pt")
        assert not isinstance(steps, str), steps
        assert len(steps) == len(expected[rank])
        for number, (found, wanted) in enumerate(zip(steps, expected[rank])):
            assert_same_step(found, wanted, TOLERANCE[case.computes_in], f"step {number}")


def assert_same_step(found, wanted, tolerance, where):
    (gradients, outputs), (expected_gradients, expected_outputs) = found, wanted
    assert gradients.keys() == expected_gradients.keys()
    has_gradient = {name: gradient is not None for name, gradient in gradients.items()}
    assert has_gradient == {name: gradient is not None for name, gradient in expected_gradients.items()}, where
    names = [name for name in gradients if has_gradient[name]]
    actual = outputs + [gradients[name] for name in names]
    expected = expected_outputs + [expected_gradients[name] for name in names]
    torch.testing.assert_close(
        [tensor.double() for tensor in actual],
        [tensor.double() for tensor in expected],
        **tolerance,
        msg=lambda text: f"{where}, of {len(outputs)} outputs and the gradients of {names}: {text}",
    )
