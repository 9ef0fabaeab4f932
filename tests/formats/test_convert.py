"""Sorting, adding duplicates and padding, against Python loops over the entries."""

from __future__ import annotations

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from hypothesis import given
from hypothesis import strategies as st

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.formats.convert import Entries, Gather, merge, sort_order

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def listed(draw):
    """A shape of 1 to 4 dimensions, a dimension of it, and unsorted entries with duplicates."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    entries = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in shape)), max_size=25))
    group_dim = draw(st.integers(0, len(shape) - 1))
    coords = torch.tensor(entries, dtype=torch.int64, device=DEVICE).reshape(len(entries), len(shape)).T
    values = torch.arange(1.0, len(entries) + 1, dtype=torch.float64, device=DEVICE)
    return shape, group_dim, entries, coords, values


def added_up(entries, values, group_dim):
    """{position: sum}, in the order of `merge`."""
    sums: dict[tuple[int, ...], float] = {}
    for position, value in zip(entries, values.tolist(), strict=True):
        sums[position] = sums.get(position, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: (item[0][group_dim], item[0])))


@given(listed())
def test_merging_sorts_by_the_group_dimension_and_adds_duplicates(drawn):
    shape, group_dim, entries, coords, values = drawn
    merged = merge(Entries(coords, values), shape, group_dim)
    expected = added_up(entries, values, group_dim)
    assert list(map(tuple, merged.coords.T.tolist())) == list(expected)
    assert merged.values.tolist() == list(expected.values())


@given(listed())
def test_coo_lists_the_merged_entries(drawn):
    shape, group_dim, entries, coords, values = drawn
    A = COO.from_coo(coords, values, shape, group_dim=group_dim)
    expected = added_up(entries, values, group_dim)
    assert list(zip(*(c.tolist() for c in A.coords), strict=True)) == list(expected)
    assert A.values.tolist() == list(expected.values())


@given(listed(), st.integers(1, 9))
def test_groups_hold_one_row_and_only_the_last_is_padded(drawn, group_size):
    shape, group_dim, entries, coords, values = drawn
    group_size = 1 if len(shape) == 1 else group_size
    A = GroupCOO.from_coo(coords, values, shape, group_dim=group_dim, group_size=group_size)
    rows: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for position, value in added_up(entries, values, group_dim).items():
        rows.setdefault(position[group_dim], []).append((position, value))
    groups = [
        (row, held[start : start + group_size])
        for row, held in rows.items()
        for start in range(0, len(held), group_size)
    ]
    assert A.coords[group_dim].tolist() == [row for row, _ in groups]
    padding = [((-1,) * len(shape), 0.0)] * group_size
    filled = [(held + padding)[:group_size] for _, held in groups]
    assert A.values.tolist() == [[value for _, value in held] for held in filled]
    for dim in range(len(shape)):
        if dim != group_dim:
            assert A.coords[dim].tolist() == [[position[dim] for position, _ in held] for held in filled]


@given(listed())
def test_ell_has_one_p_per_row_as_wide_as_the_fullest(drawn):
    shape, group_dim, entries, coords, values = drawn
    A = ELL.from_coo(coords, values, shape, group_dim=group_dim)
    expected = added_up(entries, values, group_dim)
    rows = [[p for p in expected if p[group_dim] == row] for row in range(shape[group_dim])]
    width = max(map(len, rows)) if len(shape) > 1 else 1
    assert A.coords[group_dim] is None
    assert A.values.tolist() == [[expected[p] for p in held] + [0.0] * (width - len(held)) for held in rows]
    for dim in range(len(shape)):
        if dim != group_dim:
            assert A.coords[dim].tolist() == [[p[dim] for p in held] + [-1] * (width - len(held)) for held in rows]


@pytest.mark.parametrize("shape", [(2**62, 2**62, 2**62), (2**40, 3, 2**40), (2**33, 5, 2)])
def test_entries_sort_where_positions_overflow_int64(shape):
    positions = [(s0, s1, s2) for s0 in (shape[0] - 1, 0, 7) for s1 in (2, 0) for s2 in (1, shape[2] - 1, 0)]
    coords = torch.tensor(positions, device=DEVICE).T
    for group_dim in range(3):
        order = sort_order(coords, shape, group_dim).tolist()
        assert [positions[e] for e in order] == sorted(positions, key=lambda p, d=group_dim: (p[d], p))


@pytest.mark.parametrize("kind", [COO, GroupCOO, ELL])
def test_coordinates_are_int64_only_where_a_size_needs_it(kind):
    coords = torch.tensor([[1, 0, 1], [2**40, 5, 7]], device=DEVICE)
    A = kind.from_coo(coords, torch.tensor([1.0, 2.0, 3.0], device=DEVICE), (2, 2**41))
    assert A.coords[1].dtype == torch.int64
    assert 2**40 in A.coords[1].flatten().tolist()
    if kind is not ELL:
        assert A.coords[0].dtype == torch.int32
        B = A.regroup(1)
        assert (B.coords[0].dtype, B.coords[1].dtype) == (torch.int32, torch.int64)
        assert B.coords[1].tolist() == [5, 7, 2**40]


def test_large_blocked_dimensions_have_small_coordinates():
    coords = torch.tensor([[2**33 - 1, 0], [3, 1]], device=DEVICE)
    A = BlockCOO.from_coo(coords, torch.ones(2, device=DEVICE), (2**33, 4), block_size=(16, 2))
    assert [c.tolist() for c in A.coords] == [[0, 2**29 - 1], [0, 1]]
    assert A.coords[0].dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_coordinates_may_be_any_integers(dtype):
    coords = torch.tensor([[0, 2, 1], [1, 0, 0]], dtype=dtype)
    A = COO.from_coo(coords, torch.tensor([1.0, 2.0, 3.0]), (3, 2))
    assert [c.dtype for c in A.coords] == [torch.int32, torch.int32]
    assert A.to_dense().tolist() == [[0.0, 1.0], [3.0, 0.0], [2.0, 0.0]]


def test_nan_is_a_nonzero():
    dense = torch.zeros(4, 4)
    dense[1, 2] = float("nan")
    for kind, options in ((COO, {}), (GroupCOO, {}), (ELL, {}), (BlockGroupCOO, {"block_size": (2, 3)})):
        A = kind.from_dense(dense, **options)
        assert A.nnz == (6 if kind is BlockGroupCOO else 1)
        torch.testing.assert_close(A.to_dense(), dense, equal_nan=True)


@pytest.mark.parametrize("is_padding", [None, torch.tensor([[False, True], [False, False]])])
def test_gathering_values_is_differentiable_twice(is_padding):
    gather = Gather(torch.tensor([[2, 1], [0, 1]]), is_padding)
    for block in ((), (2, 3)):
        values = torch.randn(3, *block, dtype=torch.float64, requires_grad=True)
        gradcheck(gather, values)
        gradgradcheck(gather, values)


def test_gathered_padding_is_zero_whatever_it_reads():
    gather = Gather(torch.tensor([0, 1]), torch.tensor([True, False]))
    assert gather(torch.tensor([float("nan"), 2.0])).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("kind", [COO, GroupCOO, ELL, BlockCOO, BlockGroupCOO])
def test_duplicates_add_with_gradients(kind):
    coords = torch.tensor([[2, 0, 2, 1, 2], [1, 0, 1, 2, 0]])
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    block_size = (2, 2) if kind.is_blocked else None

    def dense(values):
        return kind.from_coo(coords, values, (3, 3), block_size=block_size).to_dense()

    expected = torch.zeros(3, 3, dtype=torch.float64)
    for e in range(5):
        expected[coords[0, e], coords[1, e]] += values[e].detach()
    torch.testing.assert_close(dense(values).detach(), expected)
    gradcheck(dense, values)
