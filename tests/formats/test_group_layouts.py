"""Kernels lay matrices out as torch's operations do, which are their reference."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED

from insum_ops.formats import COO, FormatError, GroupCOO, convert
from insum_ops.formats import row_facts as finder
from insum_ops.formats.group_size import gpu_group_size
from insum_ops.formats.row_facts import row_facts

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(DEVICE == "cpu" and not IS_INTERPRETED, reason="kernels run on a GPU or in the interpreter"),
]

SHAPES = [(1, 1), (90, 40), (3, 400)]


def by_torch(monkeypatch, make):
    """What `make` returns without kernels."""
    with monkeypatch.context() as patched:
        for module in (convert, finder):
            patched.setattr(module, "runs_kernels", lambda *_: False)
        return make()


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch):
    for module in (convert, finder):
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
        own = convert.lay_out_unsorted(coords, shape, group_dim, lambda: pytest.fail("nothing is outside"))
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
        if size == 1:  # pieces of rows are found when a product asks for them
            assert own.facts is None
            continue
        parts = expected.coords[group_dim], shape[group_dim]
        make = lambda parts=parts: row_facts(*parts)
        assert_same_facts(own.facts, by_torch(monkeypatch, make))


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


@pytest.mark.parametrize("place", [(0, -1), (0, 7), (1, -3), (1, 5)])
def test_a_coordinate_outside_is_named(place):
    coords = entries((7, 5), 20, True, False)
    coords[place[0], 11] = place[1]
    dim, size = place[0], (7, 5)[place[0]]
    text = rf"coords\[{dim}, 11\] is {place[1]}; along dimension {dim} it is at least 0 and less than {size}"
    with pytest.raises(FormatError, match=text):
        COO.from_coo(coords, torch.ones(20, device=DEVICE), (7, 5))
