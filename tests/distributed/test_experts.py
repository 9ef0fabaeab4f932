"""The example of experts over ranks: it equals one process, and learns."""

from __future__ import annotations

import expert_cases
import pytest
from ranks import failures, on_ranks

pytestmark = pytest.mark.cpu


def test_experts_over_ranks_equal_one_process_and_learn():
    results = on_ranks("expert_cases", 4, expert_cases.NAMES)
    assert not failures(results)
    for errors in results["the_example_learns"]:
        assert errors == results["the_example_learns"][0]
        assert errors[-1] < 0.8 * errors[0]
