"""Kernels lay matrices out as torch's operations do, which are their reference."""

from __future__ import annotations

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE, IS_INTERPRETED

from insum_ops.formats import COO, FormatError, GroupCOO, convert, sources
from insum_ops.formats import row_facts as finder
from insum_ops.formats.group_size import gpu_group_size, pieces_of
from insum_ops.formats.row_facts import row_facts
from insum_ops.formats.sources import torch_entries

pytestmark = [
    SPARSE_WARNINGS,
    pytest.mark.kernels,
    pytest.mark.skipif(DEVICE == "cpu" and not IS_INTERPRETED, reason="kernels run on a GPU or in the interpreter"),
]

SHAPES = [(1, 1), (90, 40), (3, 400)]


def by_torch(monkeypatch, make):
    """What `make` returns without kernels."""
    with monkeypatch.context() as patched:
        for module in (convert, finder, sources):
            patched.setattr(module, "runs_kernels", lambda *_: False)
        return make()


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    for module in (convert, finder, sources):
        monkeypatch.setattr(module, "runs_kernels", lambda *_: True)


def entries(shape, count, is_distinct, is_sorted):
    places = torch.randperm(shape[0] * shape[1])[:count]
    if not is_distinct:
        places = torch.cat([places, places[: count // 3]])
    places = places.sort().values if is_sorted else places
    return torch.stack([places // shape[1], places % shape[1]]).to(DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group_size", [None, 5])
@pytest.mark.parametrize(("is_distinct", "is_sorted"), [(True, True), (True, False), (False, False)])
def test_a_matrix_is_laid_out_as_by_torch(shape, group_size, is_distinct, is_sorted, monkeypatch):
    torch.manual_seed(shape[0])
    coords = entries(shape, min(shape[0] * shape[1], 300), is_distinct, is_sorted)
    values = torch.randn(coords.shape[1], dtype=torch.float64, device=DEVICE)
    for group_dim in (0, 1):
        own = GroupCOO.from_coo(coords, values, shape, group_dim=group_dim, group_size=group_size)
        if group_size is None:
            counts = torch.bincount(own._entries().coords[group_dim], minlength=1)
            assert own.group_size == gpu_group_size(counts)
        make = lambda dim=group_dim, size=own.group_size: GroupCOO.from_coo(
            coords, values, shape, group_dim=dim, group_size=size
        )
        expected = by_torch(monkeypatch, make)
        for one, other in zip((*own.coords, own.values), (*expected.coords, expected.values)):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        assert_same_facts(own.facts, by_torch(monkeypatch, lambda expected=expected: expected.facts))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [*SHAPES, (60, 4)])  # the last has short rows, which are groups
def test_a_list_in_any_order_is_laid_out_as_by_torch(shape, dtype, monkeypatch):
    torch.manual_seed(shape[0])
    coords = entries(shape, min(shape[0] * shape[1], 300), False, False).to(dtype)
    for group_dim in (0, 1):
        grid, refuse = (shape[group_dim], shape[1 - group_dim]), lambda: pytest.fail("nothing is outside")
        own = convert.lay_out_listed(coords[group_dim], coords[1 - group_dim], grid, refuse).layout.along(group_dim)
        size, (_, order) = own.gather.source.shape[1], convert._keys(coords.long(), shape, group_dim).sort(stable=True)
        make = lambda dim=group_dim, size=size, order=order: convert.lay_out_groups(
            coords.long()[:, order], shape, dim, size
        )
        expected = by_torch(monkeypatch, make)
        for one, other in zip(own.coords, expected.coords):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        is_padding = own.gather.is_padding
        source = expected.gather.after(order).source
        if is_padding is None:
            assert expected.gather.is_padding is None
            assert torch.equal(own.gather.source, source)
        else:
            assert torch.equal(is_padding, expected.gather.is_padding)
            assert torch.equal(own.gather.source[~is_padding], source[~is_padding])
        rows, columns = expected.coords[group_dim], expected.coords[1 - group_dim].flatten()
        pieces = (*pieces_of(len(rows), shape[group_dim]), columns) if size == 1 else ()
        make = lambda rows=rows, count=shape[group_dim], pieces=pieces: row_facts(rows, count, *pieces)
        assert_same_facts(own.facts, by_torch(monkeypatch, make))


@pytest.mark.parametrize("shape", [*SHAPES, (60, 4), (400, 60)])  # the last has rows so short that pieces have several
@pytest.mark.parametrize("group_size", [None, 4])
def test_a_matrix_is_regrouped_as_by_torch(shape, group_size, monkeypatch):
    torch.manual_seed(shape[0])
    coords = entries(shape, min(shape[0] * shape[1], 300), True, True)
    values = torch.randn(coords.shape[1], dtype=torch.float64, device=DEVICE)
    for group_dim in (0, 1):
        A = GroupCOO.from_coo(coords, values, shape, group_dim=group_dim, group_size=group_size)
        own = A.regroup(1 - group_dim)
        expected = by_torch(
            monkeypatch, lambda A=A, own=own: A.with_values(A.values).regroup(A.group_dim - 1, own.group_size)
        )
        for one, other in zip((*own.coords, own.values), (*expected.coords, expected.values)):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
        assert_same_facts(own.facts, by_torch(monkeypatch, lambda expected=expected: expected.facts))


@pytest.mark.parametrize("shape", [(1, 1), (90, 40), (400, 6)])
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_a_compressed_matrix_is_listed_as_by_torch(shape, layout, monkeypatch):
    coords = entries(shape, min(shape[0] * shape[1], 300), True, True)
    A = torch.sparse_coo_tensor(coords, torch.ones(coords.shape[1], device=DEVICE), shape).to_sparse(layout=layout)
    own, expected = torch_entries(A)[0], by_torch(monkeypatch, lambda: torch_entries(A)[0])
    assert torch.equal(own, expected)
    names = ("crow_indices", "col_indices") if layout is torch.sparse_csr else ("ccol_indices", "row_indices")
    pointers, others = (getattr(A, name)() for name in names)
    for place in (0, len(pointers) // 2, -1):
        broken = pointers.clone()
        broken[place] -= 1 + len(others) * (place > 0)
        parts = broken, others, A.values(), shape
        with pytest.raises(FormatError, match=r"_indices\(\) must ascend from 0 to \d+, its entries; mend its indices"):
            torch_entries(torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False))


@pytest.mark.parametrize("shape", [(90, 40), (60, 4), (400, 60)])
def test_entries_that_are_listed_twice_are_one(shape):
    coords = entries(shape, 150, False, False)
    refuse = lambda: pytest.fail("nothing is outside")
    listed = convert.lay_out_listed(coords[0], coords[1], shape, refuse, adds=True)
    distinct, into = torch.unique(coords, dim=1, return_inverse=True)
    assert torch.equal(listed.merged[0], distinct)
    assert torch.equal(listed.merged[1], into)
    own = convert.lay_out_listed(*distinct, shape, refuse, is_sorted=True).layout
    for one, other in zip((*listed.layout.coords, listed.layout.gather.source), (*own.coords, own.gather.source)):
        assert torch.equal(one, other)
    assert_same_facts(listed.layout.facts, own.facts)


def assert_same_facts(own, expected):
    for name in ("pointers", "is_shared", "rows_to_zero", "order", "pieces"):
        one, other = getattr(own, name), getattr(expected, name)
        if other is None:
            assert one is None
            continue
        assert torch.equal(one, other), name
        assert one.dtype == other.dtype, name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [1, 37, 250])
def test_facts_are_those_of_torch(dtype, num_rows, monkeypatch):
    torch.manual_seed(0)
    for count in (1, 200):
        rows = torch.randint(num_rows, (count,), dtype=dtype).sort().values.to(DEVICE)
        make = lambda rows=rows: row_facts(rows, num_rows)
        assert_same_facts(make(), by_torch(monkeypatch, make))


@pytest.mark.parametrize(("cut", "is_packed"), [(3, False), (8, False), (1, True), (5, True)])
def test_pieces_of_rows_are_those_of_torch(cut, is_packed, monkeypatch):
    torch.manual_seed(cut)
    for num_rows, skew, dtype in ((1, 1, torch.int32), (37, 1, torch.int64), (90, 5, torch.int32)):
        rows = (torch.rand(150) ** skew * num_rows).to(dtype).sort().values.to(DEVICE)
        columns = torch.randint(20, (150,), dtype=dtype, device=DEVICE)
        for order in (columns, None):
            make = lambda rows=rows, num_rows=num_rows, order=order: row_facts(rows, num_rows, cut, is_packed, order)
            assert_same_facts(make(), by_torch(monkeypatch, make))


def test_of_many_pieces_neighbours_read_the_same_columns(monkeypatch):
    torch.manual_seed(0)
    rows, columns = torch.randint(900, (2400,)).sort().values.to(DEVICE), torch.randint(300, (2400,), device=DEVICE)
    make = lambda: row_facts(rows, 900, 4, False, columns)
    assert_same_facts(make(), by_torch(monkeypatch, make))


@pytest.mark.parametrize("place", [(0, -1), (0, 7), (1, -3), (1, 5)])
def test_a_coordinate_outside_is_named(place):
    coords = entries((7, 5), 20, True, False)
    coords[place[0], 11] = place[1]
    dim, size = place[0], (7, 5)[place[0]]
    text = rf"coords\[{dim}, 11\] is {place[1]}; along dimension {dim} it is at least 0 and less than {size}"
    with pytest.raises(FormatError, match=text):
        COO.from_coo(coords, torch.ones(20, device=DEVICE), (7, 5))
