"""What comes before the first result, on one room: compile, tune, convert; and what each call costs after that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..case import DEVICE, OURS, Case
from ..conftest import Note

pytestmark = pytest.mark.alone
UNITS = {"import": "s", "compile": "s", "tune": "s", "tuned before": "s", "convert": "ms", "run": "ms"}


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Measured by processes that find every cache empty, and by one that finds what they left."""
    if DEVICE == "cpu":
        return _first_call({})
    folder = tmp_path_factory.mktemp("caches")
    variables = {"INSUM_CACHE_DIR": str(folder / "insum"), "TRITON_CACHE_DIR": str(folder / "triton")}
    untuned = _first_call({**variables, "INSUM_TUNE": "off"})
    tuned = _first_call({name: f"{value}-tuned" for name, value in variables.items()})
    again = _first_call({name: f"{value}-tuned" for name, value in variables.items()})
    tuned["compile"] = untuned["first"]
    tuned["tune"] = max(tuned["first"] - untuned["first"], 0.0)
    tuned.update({"import": again["import"], "tuned before": again["first"]})
    return tuned


def _first_call(variables: dict[str, str]) -> dict[str, float]:
    answer = subprocess.run(
        [sys.executable, "-m", "bench.first_call"],
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": ""},  # compiled sources are a cache too
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip())
    return {name: float(value) for name, value in json.loads(answer.stdout).items()}


@pytest.mark.parametrize("step", UNITS)
def test_cost(step: str, costs: dict[str, float], note: Note) -> None:
    if step not in costs:
        pytest.skip("nothing is compiled or tuned on a CPU")
    note(Case("cost", step), OURS, costs[step], UNITS[step])
