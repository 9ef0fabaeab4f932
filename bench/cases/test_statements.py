"""Statements of many families at sizes drawn from `--seed`, forward and backward, beside torch and torch.compile."""

from __future__ import annotations

from functools import lru_cache

import pytest

from ..case import OURS, Case, on
from ..conftest import FOUND, Note
from ..suite import SUITE
from ..suite_times import EXPERIMENT, PASSES, Measured, measure_workload, providers
from ..workload import HOST, SETS, Workload


def scale_of(config: pytest.Config) -> str:
    return str(config.getoption("--scale") or on("full", "cpu"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every set of sizes on a GPU; on a CPU one of them, and a set so small that the host's part is all there is.

    The odd set comes first, and of each the forward passes: a run that is cut short has those of all statements.
    """
    sets = SETS[::-1] if scale_of(metafunc.config) == "full" else (SETS[-1], HOST)
    seed = metafunc.config.getoption("--seed")
    cases = [
        pytest.param(workload, sizes, pass_, provider, id=f"{workload.id}-{sizes}-{pass_}-seed{seed}-{provider}")
        for sizes in sets
        for pass_ in PASSES
        for workload in SUITE
        for provider in providers(workload)
    ]
    metafunc.parametrize(("workload", "sizes", "pass_", "provider"), cases)


@lru_cache(maxsize=1)
def measured(workload_id: str, sizes: str, pass_: str, seed: int, scale: str) -> Measured:
    (workload,) = (each for each in SUITE if each.id == workload_id)
    return measure_workload(workload, sizes, pass_, seed, scale)


@pytest.mark.holds
def test_statement(
    workload: Workload, sizes: str, pass_: str, provider: str, note: Note, request: pytest.FixtureRequest
) -> None:
    seed, scale = request.config.getoption("--seed"), scale_of(request.config)
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
    note(case, provider, found.ms[provider], "ms", found.timing[provider], found.queued.get(provider))
