"""Statements of many families at sizes drawn from `--seed`, forward and backward, beside torch and torch.compile."""

from __future__ import annotations

from functools import lru_cache

import pytest

from ..case import OURS, Case, on
from ..conftest import FOUND, Note
from ..suite import SUITE
from ..suite_times import BACKWARD, PASSES, Measured, measure_workload, prepare, providers
from ..workload import SETS, Workload

EXPERIMENT = "statements"
CASES = [
    pytest.param(workload, sizes, pass_, provider, id=f"{workload.id}-{sizes}-{pass_}-{provider}")
    for workload in SUITE
    for sizes in SETS
    for pass_ in PASSES
    if workload.is_trained or pass_ != BACKWARD
    for provider in providers(workload)
]


@lru_cache(maxsize=1)
def measured(workload_id: str, sizes: str, pass_: str, seed: int, scale: str) -> Measured:
    (workload,) = (each for each in SUITE if each.id == workload_id)
    return measure_workload(workload, sizes, pass_, seed, scale)


@pytest.mark.parametrize(("workload", "sizes", "pass_", "provider"), CASES)
def test_statement(
    workload: Workload, sizes: str, pass_: str, provider: str, note: Note, request: pytest.FixtureRequest
) -> None:
    option = request.config.getoption
    seed, scale = option("--seed"), option("--scale") or on("full", "small")
    if option("--prepare"):
        if provider == OURS:
            prepare(workload, sizes, pass_, seed, scale)
        return
    found = measured(workload.id, sizes, pass_, seed, scale)
    if provider == OURS:
        request.config.stash[FOUND].append(found)
    if provider in found.failures:
        error = found.failures[provider]
        if provider == OURS:
            raise error
        pytest.skip(f"{provider} fails here: {type(error).__name__}: {str(error)[:200]}")
    words = ", ".join(f"{name} = {size}" for name, size in found.extents.items())
    facts = {"series": pass_, "sizes": words, "seed": seed, "floor_ms": found.floor_ms, "error": found.errors[provider]}
    if provider == OURS:
        facts["route"] = found.route
    case = Case(EXPERIMENT, f"{workload.family}, {workload.name}, {pass_}, {sizes}: {words}", facts=facts)
    note(case, provider, found.ms[provider], "ms")
