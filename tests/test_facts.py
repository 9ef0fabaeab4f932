"""What formats say about their rows, against a loop over the groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.formats.facts import row_facts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
groups = st.integers(0, 9).flatmap(
    lambda num_rows: st.tuples(
        st.just(num_rows), st.lists(st.integers(0, num_rows - 1), max_size=20) if num_rows else st.just([])
    )
)


@given(groups, st.sampled_from([torch.int32, torch.int64]))
def test_facts_equal_those_of_a_loop(drawn, dtype):
    num_rows, rows = drawn
    rows = sorted(rows)
    facts = row_facts(torch.tensor(rows, dtype=dtype, device=DEVICE), num_rows)
    counts = [rows.count(row) for row in range(num_rows)]
    assert facts.pointers.tolist() == [sum(counts[:row]) for row in range(num_rows + 1)]
    assert facts.is_shared.tolist() == [counts[row] > 1 for row in rows]
    assert facts.rows_to_zero.tolist() == [row for row in range(num_rows) if counts[row] != 1]
    assert facts.order.tolist() == sorted(range(num_rows), key=lambda row: -counts[row])
    assert facts.order.dtype == torch.int32
    assert facts.pointers.dtype == torch.int32
    assert facts.is_shared.dtype == torch.bool
    assert facts.rows_to_zero.dtype == torch.int64


@pytest.mark.parametrize("group_dim", [0, 1, 2])
@pytest.mark.parametrize("kind", [COO, GroupCOO, BlockCOO, BlockGroupCOO])
def test_formats_have_the_facts_of_their_group_coordinate(kind, group_dim):
    dense = (torch.rand(5, 6, 7) < 0.2).double()
    block_size = (2, 3, 2) if kind.is_blocked else None
    A = kind.from_dense(dense, group_dim=group_dim, block_size=block_size)
    num_rows = -(-dense.shape[group_dim] // (block_size or (1, 1, 1))[group_dim])
    rows = A.coords[group_dim].tolist()
    assert A.facts.pointers.tolist() == [sum(r < row for r in rows) for row in range(num_rows + 1)]


def test_ell_needs_no_facts():
    assert ELL.from_dense(torch.eye(3)).facts is None


def test_facts_are_worked_out_once_per_pattern():
    A = GroupCOO.from_dense(torch.eye(3))
    B = A.with_values(2 * A.values)
    assert A.facts is A.facts
    assert B.facts is A.facts
    assert A.to(torch.float16).facts is A.facts
    assert A.T.facts is A.facts
    assert A.regroup(1).facts is B.regroup(1).facts
