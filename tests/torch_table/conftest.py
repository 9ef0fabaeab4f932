"""A run of `make test-torch` stores what its cells gave, and writes the page of the documentation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from entry_cases import CASES  # noqa: E402
from rank_columns import COLUMNS as RANKED  # noqa: E402
from stored_cells import COLUMNS, merged, read, write  # noqa: E402

IS_WHOLE = os.environ.get("INSUM_TESTS") == "torch"
# by a cell's id in its test's name: a row's cells share a process, those of a column over ranks a pair of them
GROUPS = {f"{name}-{column}": column if column in RANKED else name for name in CASES for column in COLUMNS}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker takes all cells of a group; pytest 9.2 does not see what pytest-xdist 3.8 makes of a mark for it."""
    if not IS_WHOLE:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUPS.get(nodeid.partition("[")[2].removesuffix("]"), nodeid)

    return Groups(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Store a cell as soon as it is known, in the process to which all workers report."""
    cell = dict(report.user_properties).get("cell") if report.when == "call" else None
    if not IS_WHOLE or "PYTEST_XDIST_WORKER" in os.environ or not isinstance(cell, list):
        return
    name, column, state, why = cell
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    place = f"torch {torch.__version__.split('+')[0]} on {device}"
    write(merged(read(), {(name, column): (state, why, place)}, CASES))
