"""Rows in tiles that need the same taps, against loops; `make test-interpreter` runs the kernels on CPU tensors."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED
from voxel_tables import by_sorting, makers, table_of, wrong_numbers_in_fresh_memory  # noqa: F401 - a fixture

from insum_ops.formats import FormatError, kernel_map
from insum_ops.formats.voxels import sort as voxel_sort
from insum_ops.formats.voxels import tiles as voxel_tiles
from insum_ops.formats.voxels.geometry import Geometry
from insum_ops.formats.voxels.kernel_map import MOST_TAPS

every_maker = makers(voxel_tiles)
# rows, taps, share of pairs
TABLES = [
    (1, 1, 1.0),
    (1, 27, 0.5),
    (7, 1, 0.4),
    (64, 2, 0.5),
    (40, 27, 0.1),
    (33, 31, 0.2),
    (20, 32, 0.7),
    (9, 40, 0.3),
]
# STRETCH, MOST_STRETCHES
STRETCHES = [(4, 3), (1, 100), (16, 2), (2, 32)]
NAMES = ("ROW", "TILE", "NBR", "TAP", "pointers")


def ranks(volume):
    return tuple(torch.randperm(volume).tolist())


def listed(table, bits, size, stretch):
    """The five tensors, tile by tile."""
    rows = table.tolist()
    keys = [(x // stretch, sum(1 << bit for bit, y in zip(bits, row) if y >= 0)) for x, row in enumerate(rows)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    ROW, TILE, NBR, TAP, pointers = [], [], [], [], [0]
    for t, first in enumerate(range(0, len(order), size)):
        held = order[first : first + size]
        empty = [-1] * (size - len(held))
        ROW.append(held + empty)
        for z in range(len(bits)):
            found = [rows[x][z] for x in held]
            if max(found) >= 0:
                TILE.append(t)
                TAP.append(z)
                NBR.append(found + empty)
        pointers.append(len(TILE))
    return ROW, TILE, NBR, TAP, pointers


def check_tiles(maker, table, bits, size, stretch=65_536):
    found = maker.tile(table, bits, size)
    for name, one, other in zip(NAMES, found, listed(table, bits, size, stretch), strict=True):
        assert one.dtype == torch.int32, name
        shape = (len(other), size) if name in ("ROW", "NBR") else (len(other),)
        assert torch.equal(one.cpu(), torch.tensor(other, dtype=torch.int32).view(shape)), name


@pytest.mark.sampled
@every_maker
@pytest.mark.parametrize("table", TABLES, ids=str)
@pytest.mark.parametrize("size", [1, 4, 16, 128])
def test_tiles_are_those_of_a_loop(maker, table, size):
    check_tiles(maker, table_of(*table), ranks(table[1]), size)


@every_maker
def test_any_number_of_taps_up_to_the_most_makes_tiles(maker):
    for volume in range(1, MOST_TAPS + 1):
        table = table_of(10, volume, 0.5)
        table[:3] = 7  # a key of all bits
        table[4] = -1
        check_tiles(maker, table, ranks(volume), 4)


@pytest.mark.sampled
@every_maker
@pytest.mark.parametrize("volume", [3, 27, 31, 40])
@pytest.mark.parametrize("lengths", STRETCHES, ids=str)
def test_rows_of_a_stretch_are_sorted_among_themselves(maker, monkeypatch, lengths, volume):
    """With 27 taps the number of a stretch leaves 32 bits behind for some of these lengths, for others not."""
    least, most = lengths
    monkeypatch.setattr(voxel_sort, "STRETCH", least)
    monkeypatch.setattr(voxel_sort, "MOST_STRETCHES", most)
    stretch = least
    while stretch * most < 70:
        stretch *= 2
    assert voxel_sort.stretch(70) == stretch
    table = table_of(70, volume, 0.3)
    check_tiles(maker, table, ranks(volume), 8, stretch)
    ROW, *_ = maker.tile(table, ranks(volume), 8)
    places = ROW.flatten()[:70] // stretch
    assert torch.equal(places, places.sort().values)


@pytest.mark.kernels
@pytest.mark.parametrize("volume", [1, 27, 31])
def test_wide_keys_sort_as_narrow_ones_do(monkeypatch, volume):
    table, bits = table_of(30, volume, 0.4), ranks(volume)
    narrow = voxel_tiles.tile(table, bits, 8)
    monkeypatch.setattr(voxel_tiles, "INT32_BITS", 0)
    for one, other in zip(voxel_tiles.tile(table, bits, 8), narrow):
        assert torch.equal(one, other)


@pytest.mark.kernels
def test_the_kernels_give_the_same_every_time():
    table, bits = table_of(100, 27, 0.4), ranks(27)
    first, again = (voxel_tiles.tile(table, bits, 16) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again))


@every_maker
def test_no_rows_make_no_tiles(maker):
    ROW, TILE, NBR, TAP, pointers = maker.tile(torch.empty(0, 27, dtype=torch.int32, device=DEVICE), ranks(27), 16)
    assert ROW.shape == NBR.shape == (0, 16)
    assert TILE.shape == TAP.shape == (0,)
    assert pointers.tolist() == [0]


@every_maker
def test_rows_without_pairs_are_in_tiles_without_taps(maker):
    ROW, TILE, NBR, TAP, pointers = maker.tile(table_of(5, 8, 0.0), ranks(8), 4)
    assert ROW.tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert len(TILE) == len(TAP) == len(NBR) == 0
    assert pointers.tolist() == [0, 0, 0]


@every_maker
def test_rows_with_the_same_taps_lie_side_by_side(maker):
    table = table_of(32, 5, 0.0)
    table[::2, 1], table[1::2, 3] = 7, 9
    _, TILE, NBR, TAP, _ = maker.tile(table, (0, 1, 2, 3, 4), 16)
    assert (TILE.tolist(), TAP.tolist()) == ([0, 1], [1, 3])
    assert NBR.tolist() == [[7] * 16, [9] * 16]


# tiles of a kernel map

# kind, kernel_size, stride, padding, dilation
GEOMETRIES = [("subm", 3, 1, 0, 1), ("subm", 3, 1, 0, 2), ("strided", 2, 2, 0, 1), ("strided", 2, 1, 1, 2)]
GEOMETRIES += [("transposed", 2, 2, 0, 1), ("transposed", 2, 1, 1, 1)]
KERNELS = {4: [3, 1, 3, 3]}  # 81 taps are too many


def voxels(shape, density=0.4):
    indices = (torch.rand(2, *shape) < density).nonzero().int()
    return indices[torch.randperm(len(indices))].to(DEVICE)


def made(ndim, geometry, indices=None):
    kind, kernel, *rest = geometry
    shape = [6, 4, 3, 3][:ndim]
    kernel = KERNELS.get(ndim, kernel) if kind == "subm" else kernel
    return kernel_map(voxels(shape) if indices is None else indices, shape, 2, kernel, *rest, kind=kind)


def check_map(found, size):
    """Every pair is there once, every output has one place, and the places without one are the last."""
    tiled = found.tiled(size)
    rows = tiled.ROW.flatten().tolist()
    assert sorted(rows[: found.num_outputs]) == list(range(found.num_outputs))
    assert set(rows[found.num_outputs :]) <= {-1}
    assert len(rows) - found.num_outputs < size
    TILE, TAP, NBR = tiled.TILE.tolist(), tiled.TAP.tolist(), tiled.NBR.tolist()
    assert sorted(TILE) == TILE
    lengths = [TILE.count(t) for t in range(len(tiled.ROW))]
    assert tiled.order.tolist() == sorted(range(len(lengths)), key=lambda t: -lengths[t])
    assert tiled.pointers.tolist() == [sum(t < u for t in TILE) for u in range(len(tiled.ROW) + 1)]
    assert all(max(row) >= 0 for row in NBR)
    pairs = [(z, y, x) for t, z, near in zip(TILE, TAP, NBR) for x, y in zip(tiled.ROW[t].tolist(), near) if y >= 0]
    assert sorted(pairs) == sorted(map(tuple, found.pairs.T.tolist()))
    assert len(pairs) == found.num_pairs > 0


@pytest.mark.every_route
@pytest.mark.sampled
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_a_map_and_its_inverse_hold_every_pair_once(ndim, geometry):
    found = made(ndim, geometry)
    for one in (found, found.inverse):
        for size in (16,) if IS_INTERPRETED else (2, 16, 128):  # an interpreted tile takes 15 ms
            check_map(one, size)


@pytest.mark.sampled
@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["subm", "strided", "transposed"])
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_both_routes_make_the_same_tiles(ndim, kind):
    geometry = next(geometry for geometry in GEOMETRIES if geometry[0] == kind)
    found = made(ndim, geometry)
    tiles = found.tiled(16), found.inverse.tiled(16)
    with by_sorting():
        expected = made(ndim, geometry, found.indices.clone())
        for one, other in zip(tiles, (expected.tiled(16), expected.inverse.tiled(16))):
            for name, wanted in vars(other).items():
                assert torch.equal(getattr(one, name), wanted), name


@pytest.mark.every_route
@pytest.mark.parametrize("is_inverse_first", [False, True])
def test_a_submanifold_and_its_inverse_share_rows_and_neighbours(is_inverse_first):
    found = made(3, GEOMETRIES[0])
    if is_inverse_first:
        found.inverse.tiled(8)
    one, other = found.tiled(8), found.inverse.tiled(8)
    assert one.ROW is other.ROW
    assert one.NBR is other.NBR
    assert one.TILE is other.TILE
    assert one.pointers is other.pointers
    assert torch.equal(one.TAP + other.TAP, torch.full_like(one.TAP, 26))


def test_tiles_are_made_once_and_not_moved_with_a_map():
    found = made(2, ("strided", 2, 2, 0, 1))
    assert found.tiled(8) is found.tiled(8)
    assert found.inverse.tiled(8) is found.inverse.tiled(8)
    assert found.tiled(8) is not found.inverse.tiled(8)
    assert found.tiled(4) is not found.tiled(8)
    moved = found.to(DEVICE)
    assert not moved.has_tiles(8)
    assert torch.equal(moved.tiled(8).ROW, found.tiled(8).ROW)


@pytest.mark.every_route
@pytest.mark.parametrize("kind", ["subm", "strided", "transposed"])
def test_no_voxel_and_one_voxel_make_tiles(kind):
    none = kernel_map(torch.empty(0, 4, dtype=torch.int32, device=DEVICE), [3, 3, 3], 2, 3, kind=kind)
    assert none.tiled(8).ROW.shape == none.inverse.tiled(8).ROW.shape == (0, 8)
    one = kernel_map(torch.tensor([[1, 1, 1, 1]], device=DEVICE), [3, 3, 3], 2, 3, kind=kind)
    check_map(one, 8)
    check_map(one.inverse, 8)


def test_tiles_made_in_inference_are_good_for_training():
    with torch.inference_mode():
        tiled = made(2, GEOMETRIES[0]).tiled(8)
    assert not any(tensor.is_inference() for tensor in vars(tiled).values())


def test_too_many_taps_are_refused():
    found = kernel_map(torch.tensor([[0, 1, 1, 1]], device=DEVICE), [3, 3, 3], 1, 5)
    with pytest.raises(FormatError) as caught:
        found.tiled()
    assert str(caught.value) == "the kernel has 125 taps; tiles are made for at most 40"
    assert kernel_map(torch.tensor([[0, 1, 1]], device=DEVICE), [3, 3], 1, [5, 8], kind="transposed").tiled(8)


@pytest.mark.parametrize("size", [0, -8, 6, 100])
def test_a_tile_size_that_is_no_power_of_two_is_refused(size):
    with pytest.raises(FormatError) as caught:
        made(2, GEOMETRIES[0]).tiled(size)
    assert str(caught.value) == f"tile_size is {size}; a tile holds a power of two of voxels"


@pytest.mark.parametrize("kernel", [(1,), (3,), (4,), (3, 5), (2, 2, 2), (3, 3, 3), (1, 3, 5), (3, 1, 3, 3)], ids=str)
def test_taps_are_rarer_the_farther_they_are_from_the_centre(kernel):
    ones = (1,) * len(kernel)
    rarity = Geometry(kernel, ones, ones, ones).rarity
    taps = list(product(*map(range, kernel)))
    assert sorted(rarity) == list(range(len(taps)))
    by_rank = sorted(range(len(taps)), key=rarity.__getitem__)
    far = [sum(abs(at - (size - 1) / 2) for at, size in zip(taps[tap], kernel)) for tap in by_rank]
    assert far == sorted(far)
    if all(size % 2 for size in kernel):
        assert rarity[len(taps) // 2] == 0
    corners = [tap for tap, place in enumerate(taps) if all(at in (0, size - 1) for at, size in zip(place, kernel))]
    assert sorted(rarity[tap] for tap in corners) == list(range(len(taps) - len(corners), len(taps)))


def test_ranks_of_a_row_and_of_a_square():
    assert Geometry((5,), (1,), (2,), (1,)).rarity == (3, 1, 0, 2, 4)
    assert Geometry((3, 3), (1, 1), (1, 1), (1, 1)).rarity == (5, 1, 6, 2, 0, 3, 7, 4, 8)
