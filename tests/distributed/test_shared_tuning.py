"""Ranks that have tuned for themselves take the first one's configs."""

from __future__ import annotations

import pytest
import shared_tuning_cases
from ranks import failures, on_ranks

pytestmark = pytest.mark.cpu


def test_ranks_agree_on_configs_and_none_waits_for_another():
    results = on_ranks("shared_tuning_cases", 3, shared_tuning_cases.NAMES)
    assert not failures(results)
    assert results["ranks_take_what_the_first_has"] == [[2, 16, None, 32, "off"]] * 3
    assert results["nothing_is_shared_where_nothing_was_tuned"] == [0] * 3
    first, *others = results["a_warm_up_that_fails"]
    assert first == "out of luck"
    for rank, text in enumerate(others, 1):
        assert text == (f"warm_up failed on rank 0, whose own error says why, so rank {rank} has nothing to take over")
