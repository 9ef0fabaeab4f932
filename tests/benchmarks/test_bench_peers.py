"""How a peer is tuned: the search finds what a user would."""

from __future__ import annotations

import pytest

from bench.peers import BSR_CHOICES, BSR_TOGETHER, fits, searched

pytestmark = pytest.mark.cpu

TORCHS_OWN = (  # of torch's table for the A100, 4096^3 in float16 with blocks of 32, 64 and 128
    {"GROUP_SIZE_ROW": 4, "SPLIT_N": 16, "num_stages": 3, "num_warps": 8},
    {"GROUP_SIZE_ROW": 1, "SPLIT_N": 32, "num_stages": 3, "num_warps": 4},
    {"GROUP_SIZE_ROW": 2, "SPLIT_N": 32, "num_stages": 1, "num_warps": 4},
)


@pytest.mark.parametrize("best", TORCHS_OWN, ids=str)
def test_what_torchs_own_table_names_can_be_found(best: dict[str, int]) -> None:
    assert searched(BSR_CHOICES, BSR_TOGETHER, lambda each: sum(each[name] != best[name] for name in each)) == best


@pytest.mark.parametrize(("edge", "best"), [*zip((32, 64, 128), TORCHS_OWN)])
def test_what_torchs_own_table_names_fits(edge: int, best: dict[str, int]) -> None:
    assert fits(best, edge, 4096)


def test_sums_that_no_thread_can_hold_are_not_tried() -> None:
    assert fits({"SPLIT_N": 16, "num_warps": 8}, 128, 4096)
    assert not fits({"SPLIT_N": 8, "num_warps": 8}, 128, 4096)
    assert not fits({"SPLIT_N": 16, "num_warps": 4}, 128, 4096)


def test_names_that_depend_on_each_other_are_searched_together() -> None:
    costs = {(1, 1): 3.0, (1, 2): 4.0, (2, 1): 5.0, (2, 2): 1.0}
    tried = []

    def cost(each: dict[str, int]) -> float:
        tried.append((*each.values(),))
        return costs[each["a"], each["b"]] + each["c"]

    assert searched({"a": (1, 2), "b": (1, 2), "c": (7, 5)}, ("a", "b"), cost) == {"a": 2, "b": 2, "c": 5}
    assert len(tried) == len(set(tried)) == 5


def test_what_does_not_fit_is_not_chosen() -> None:
    assert searched({"a": (1, 2)}, (), lambda each: float("inf") if each["a"] == 1 else 1.0) == {"a": 2}
