"""How well the cost model ranks kernels, as a table."""

from __future__ import annotations

import math

import pytest
import torch

from bench.rank import correlation, rank_statements, table_of
from bench.results import ResultsError


def test_equal_numbers_share_their_ranks():
    assert correlation([1, 2, 2, 3], [1, 2, 2, 3]) == 1
    assert correlation([1, 2, 3], [3, 2, 1]) == -1
    assert math.isnan(correlation([1, 1, 1], [1, 2, 3]))


def test_the_table_says_what_was_lost_by_trusting_the_model():
    rows = [
        {"statement": "dense-matmul", "predicted": [1.0, 2.0, 3.0], "measured": [2.0, 1.0, 4.0]},
        {"statement": "too-few", "predicted": [1.0, 2.0], "measured": [2.0, 1.0]},
    ]
    _, row, mean = table_of(rows)
    assert row.split() == ["dense-matmul", "3", "0.50", "2.00", "1.00"]
    assert mean.split() == ["mean", "1", "0.50", "2.00", "1.00"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_ranked(tmp_path):
    with pytest.raises(ResultsError, match=r"^ranking kernels needs a GPU that torch can use$"):
        rank_statements(tmp_path / "rank.json", 1)
