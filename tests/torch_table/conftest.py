"""A run of `make test-torch` stores what its cells gave, and writes the page of the documentation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from entry_cases import CASES  # noqa: E402
from stored_cells import merged, read, write  # noqa: E402


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Store a cell as soon as it is known, in the process to which all workers report."""
    cell = dict(report.user_properties).get("cell") if report.when == "call" else None
    is_whole = os.environ.get("INSUM_TESTS") == "torch" and "PYTEST_XDIST_WORKER" not in os.environ
    if not is_whole or not isinstance(cell, list):
        return
    name, column, state, why = cell
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    place = f"torch {torch.__version__.split('+')[0]} on {device}"
    write(merged(read(), {(name, column): (state, why, place)}, CASES))
