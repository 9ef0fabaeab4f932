"""Kernels of random statements are built in a process of their own; `make fuzz` builds thousands."""

from __future__ import annotations

import pytest
from fuzz import Job, Sample, Tensor, jobs, run
from statements import IS_INTERPRETED, IS_THOROUGH

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)

KERNELS = 50 if IS_THOROUGH else 16


@pytest.mark.parametrize("seed", [0, 1, 2] if IS_THOROUGH else [0])
def test_kernels_of_random_statements_are_built(seed):
    """A worker that dies, at the first of them, is a finding, and another goes on."""
    bad = Sample("C[i] = A[", {"A": Tensor((64,), (1,), "float32")}, (64,))
    report = run([Job(-1, bad, 90, 1, False), *jobs(seed, kernels=KERNELS, most=2 if IS_THOROUGH else 1)], workers=1)
    (finding,) = report.dead
    assert finding.startswith("died with status 1 on sm_90: before the first candidate of C[i] = A[\n")
    assert "ParseError" in finding
    assert not report.is_sound
    assert not report.left_without, "\n".join(report.left_without)
    assert sum(report.built.values()) + sum(report.refused.values()) == KERNELS
    assert sum(report.built.values()) >= 0.9 * KERNELS, str(report)
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= {*report.built}


def test_one_seed_draws_the_same_statements_again():
    assert list(jobs(3, kernels=40)) == list(jobs(3, kernels=40))
