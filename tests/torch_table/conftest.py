"""A whole run of the table stores what its cells gave, and writes the page of the documentation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

_found: dict[tuple[str, str], tuple[str, str, str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a cell, in the process that collects what all workers report."""
    cell = dict(report.user_properties).get("cell") if report.when == "call" else None
    if isinstance(cell, list):
        name, column, state, why = cell
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
        _found[name, column] = state, why, f"torch {torch.__version__.split('+')[0]} on {device}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("INSUM_TESTS") != "torch" or hasattr(session.config, "workerinput") or not _found:
        return
    from entry_cases import CASES
    from stored_cells import merged, read, write

    write(merged(read(), _found, CASES))
