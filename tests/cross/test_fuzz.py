"""Fifty kernels of random statements are built in a process of their own; `make fuzz` builds thousands."""

from __future__ import annotations

import pytest
from fuzz import Job, Sample, Tensor, jobs, run
from statements import IS_INTERPRETED, IS_THOROUGH

pytestmark = pytest.mark.skipif(
    IS_INTERPRETED, reason="a process that interprets kernels can't compile them: run `make test-cross`"
)


@pytest.mark.parametrize("seed", [0, 1, 2] if IS_THOROUGH else [0])
def test_kernels_of_random_statements_are_built(seed):
    report = run(jobs(seed, kernels=50, most=3), workers=1)
    assert report.is_sound, "\n".join((*report.dead, *report.left_without))
    assert sum(report.built.values()) + sum(report.refused.values()) == 50
    assert sum(report.built.values()) >= 45, str(report)
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= {*report.built}


def test_one_seed_draws_the_same_statements_again():
    assert list(jobs(3, kernels=40)) == list(jobs(3, kernels=40))


def test_a_worker_that_dies_is_a_finding_and_others_go_on():
    bad, good = (Sample(expr, {"A": Tensor((64,), (1,), "float32")}, (64,)) for expr in ("C[i] = A[", "C[i] = A[i]"))
    report = run([Job(0, bad, 90, 1, False), Job(1, good, 90, 1, False)], workers=1)
    (finding,) = report.dead
    assert finding.startswith("died with status 1 on sm_90: before the first candidate of C[i] = A[\n")
    assert "ParseError" in finding
    assert report.built == {"sm_90": 1}
    assert not report.is_sound
