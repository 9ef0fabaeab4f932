"""Pairs counted, grouped and swapped, against loops; `make test-interpreter` runs the kernels on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE
from voxel_tables import by_sorting, makers, table_of, wrong_numbers_in_fresh_memory  # noqa: F401 - a fixture

from insum_ops.formats import kernel_map
from insum_ops.formats.voxels import pairs as voxel_pairs

every_maker = makers(voxel_pairs)
# rows, taps, share of pairs
TABLES = [(1, 1, 1.0), (1, 27, 0.5), (7, 1, 0.4), (150, 27, 0.3), (20, 33, 0.7), (9, 125, 0.1), (3, 343, 0.2)]
# TILE, MOST_TAPS, MOST_BLOCKS: more than one tile of taps, block of rows, step of a block and step over earlier blocks
TILINGS = [(8, 4, 5), (16, 16, 3), (4, 1, 100), (8, 8, 1)]


def one_to_one(rows, volume, inputs):
    """For each tap any pairing of some outputs with some inputs."""
    table = torch.full((rows, volume), -1, dtype=torch.int32)
    for tap in range(volume):
        count = int(torch.randint(0, min(rows, inputs) + 1, ()))
        table[torch.randperm(rows)[:count], tap] = torch.randperm(inputs)[:count].int()
    return table.to(DEVICE)


def listed(table, group_size):
    """The three maps, group by group."""
    MAPX, MAPY, MAPZ = [], [], []
    for z, column in enumerate(table.T.tolist()):
        pairs = [(x, y) for x, y in enumerate(column) if y >= 0]
        for first in range(0, len(pairs), group_size):
            held = pairs[first : first + group_size]
            held += [(-1, -1)] * (group_size - len(held))
            MAPX.append([x for x, _ in held])
            MAPY.append([y for _, y in held])
            MAPZ.append(z)
    return MAPX, MAPY, MAPZ


def check_groups(maker, table, group_size):
    expected = listed(table, group_size)
    counts = maker.count(table)
    assert counts[0].tolist() == [sum(y >= 0 for y in column) for column in table.T.tolist()]
    for more in (0, 3) if expected[2] else (0,):  # groups that no pair is left for
        total = len(expected[2]) + more
        found = maker.group(table, counts, total, group_size)
        absent = [-1] * group_size
        filled = [
            expected[0] + [absent] * more,
            expected[1] + [absent] * more,
            expected[2] + [table.shape[1] - 1] * more,
        ]
        for one, other, shape in zip(found, filled, ((-1, group_size), (-1, group_size), (-1,))):
            assert one.dtype == torch.int32
            assert torch.equal(one.cpu(), torch.tensor(other, dtype=torch.int32).view(total, *shape[1:]))


@pytest.mark.sampled
@every_maker
@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("group_size", [1, 3, 128, 5000])
def test_groups_are_those_of_a_loop(maker, table, group_size):
    check_groups(maker, table_of(*table), group_size)


@pytest.mark.sampled
@pytest.mark.kernels
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("group_size", [1, 4, 50])
def test_a_table_may_be_divided_in_any_way(monkeypatch, tiling, group_size):
    for name, value in zip(("TILE", "MOST_TAPS", "MOST_BLOCKS"), tiling):
        monkeypatch.setattr(voxel_pairs, name, value)
    check_groups(voxel_pairs, table_of(41, 9, 0.4), group_size)


@pytest.mark.kernels
def test_a_table_of_many_rows_is_divided_into_few_blocks():
    taps, step, span, grid = voxel_pairs._tiling(3_000_000, 27)
    assert grid[0] * taps >= 27
    assert grid[1] <= voxel_pairs.MOST_BLOCKS
    assert (grid[1] - 1) * span < 3_000_000 <= grid[1] * span
    assert span % step == 0


@every_maker
def test_no_rows_and_no_pairs_make_no_groups(maker):
    for table in (torch.empty(0, 27, dtype=torch.int32, device=DEVICE), table_of(5, 8, 0.0)):
        counts = maker.count(table)
        assert counts[0].tolist() == [0] * table.shape[1]
        MAPX, MAPY, MAPZ = maker.group(table, counts, 0, 16)
        assert MAPX.shape == MAPY.shape == (0, 16)
        assert MAPZ.shape == (0,)


@every_maker
@pytest.mark.parametrize("sizes", [(1, 1, 1), (9, 4, 5), (60, 27, 80), (5, 3, 0), (0, 3, 4)], ids=str)
def test_swapping_tells_inputs_where_they_are_read(maker, sizes):
    rows, volume, inputs = sizes
    table = one_to_one(*sizes)
    expected = [[-1] * volume for _ in range(inputs)]
    for x, row in enumerate(table.tolist()):
        for z, y in enumerate(row):
            if y >= 0:
                expected[y][z] = x
    found = maker.swap(table, inputs)
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu(), torch.tensor(expected, dtype=torch.int32).view(inputs, volume))
    assert torch.equal(maker.swap(found, rows), table)


@pytest.mark.sampled
@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["subm", "strided", "transposed"])
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_both_routes_make_the_same_map(ndim, kind):
    shape = [5, 4, 3, 3][:ndim]
    indices = (torch.rand(2, *shape) < 0.4).nonzero().int()
    indices = indices[torch.randperm(len(indices))].to(DEVICE)
    sizes = (3, 1, 0, 1) if kind == "subm" else (2, 2, 1, 1)
    found = kernel_map(indices, shape, 2, *sizes, kind=kind)
    assert len(found.grouped(6).MAPZ) * 6 >= found.num_pairs > 0
    with by_sorting():
        expected = kernel_map(indices.clone(), shape, 2, *sizes, kind=kind)
        assert found.num_pairs == expected.num_pairs == expected.pairs.shape[1]
        for one, other in ((found, expected), (found.inverse, expected.inverse)):
            assert torch.equal(one.neighbours, other.neighbours)
            for made, wanted in zip(vars(one.grouped(6)).values(), vars(other.grouped(6)).values()):
                assert torch.equal(made, wanted)


@pytest.mark.kernels
def test_the_kernels_give_the_same_every_time():
    table = table_of(300, 27, 0.4)
    counts = voxel_pairs.count(table)
    groups = len(listed(table, 16)[2])
    first, again = (voxel_pairs.group(table, voxel_pairs.count(table), groups, 16) for _ in range(2))
    assert torch.equal(voxel_pairs.count(table), counts)
    assert all(torch.equal(one, other) for one, other in zip(first, again))
