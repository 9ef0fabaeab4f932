"""The group size from row counts, against trying every size."""

from __future__ import annotations

import math
from statistics import geometric_mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from insum_ops.formats import GroupCOO, group_size
from insum_ops.formats.group_size import (
    MEASURED_PIECES,
    gpu_group_size,
    group_size_candidates,
    packs_rows,
    piece_size,
)

row_counts = st.lists(st.integers(0, 300), max_size=30)


def indirect_accesses(occ: list[int], g: int) -> int:
    """A scatter for each group, and a gather for each of its g slots."""
    groups = sum(math.ceil(count / g) for count in occ)
    return groups + groups * g


@given(row_counts)
def test_candidates_are_powers_of_two_around_the_square_root_of_the_mean(occ):
    candidates = group_size_candidates(occ)
    filled = [count for count in occ if count]
    assert all(g & (g - 1) == 0 for g in candidates)
    if not filled:
        assert candidates == (1,)
        return
    best = math.sqrt(sum(filled) / len(filled))
    cap = 1 << (max(filled) - 1).bit_length()
    assert candidates[0] <= best < 2 * candidates[0]
    assert candidates[1:] == ((2 * candidates[0],) if 2 * candidates[0] <= cap else ())


@given(row_counts)
def test_the_chosen_candidate_has_the_fewest_accesses(occ):
    candidates = group_size_candidates(occ)
    assert group_size(occ) in candidates
    assert indirect_accesses(occ, group_size(occ)) == min(indirect_accesses(occ, g) for g in candidates)


@given(row_counts)
def test_empty_rows_do_not_count(occ):
    assert group_size(occ) == group_size([count for count in occ if count])


@pytest.mark.parametrize(
    ("occ", "expected"),
    [([], 1), ([0, 0], 1), ([1] * 9, 1), ([3, 1, 1, 2], 1), ([16] * 4, 8), ([2, 2], 2), ([1000], 32)],
)
def test_known_sizes(occ, expected):
    assert group_size(occ) == expected


def test_ties_go_to_the_smaller_size():
    assert group_size_candidates([3]) == (1, 2)
    assert indirect_accesses([3], 1) == indirect_accesses([3], 2) == 6
    assert group_size([3]) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_counts_may_be_a_tensor_or_a_list(dtype):
    occ = [40, 30, 20, 10]
    assert group_size(torch.tensor(occ, dtype=dtype)) == group_size(occ) == 8


@pytest.mark.cpu
def test_group_coo_takes_the_heuristic_size():
    A = torch.zeros(5, 100)
    for row, count in enumerate([40, 30, 0, 20, 10]):
        A[row, :count] = 1
    assert GroupCOO.from_dense(A).group_size == 8
    assert GroupCOO.from_dense(A).num_groups == 5 + 4 + 3 + 2


@given(row_counts)
def test_on_a_gpu_most_rows_are_one_group(occ):
    g = gpu_group_size(occ)
    filled = [count for count in occ if count]
    assert g & (g - 1) == 0
    assert 1 <= g <= 16
    if filled and g > 1:
        mean = sum(filled) / len(filled)
        assert g >= min(1.5 * mean, max(filled))
        assert g < 3 * mean  # half of it would have been too small


@pytest.mark.parametrize(
    ("occ", "expected"),
    [
        ([8] * 10, 8),  # whole groups
        ([6] * 10, 8),  # 1.3 slots for each entry
        ([4, 4, 5, 6, 7], 8),  # 1.54
        ([4, 4, 4, 5, 7], 1),  # 1.67
        ([16, 4, 2, 2], 1),  # 2.7: short rows are walked entry by entry
        ([64, 2, 2, 2, 2, 2, 2, 2, 2, 2], 16),  # a long one would be waited for
        ([16] * 10, 1),  # rows that are longer than groups are cut
        ([1] * 10, 1),
    ],
)
def test_on_a_gpu_short_rows_are_not_mostly_padding(occ, expected):
    assert gpu_group_size(occ) == expected


@pytest.mark.cpu
def test_pieces_of_rows_are_about_as_long_as_was_measured_to_be_best():
    worse = []
    for _, entries, rows, _, _, by_size in MEASURED_PIECES:
        size = piece_size(entries, packs_rows(entries, rows))
        worse.append(by_size[size] / min(by_size.values()))
    assert max(worse) < 1.15
    assert geometric_mean(worse) < 1.03
