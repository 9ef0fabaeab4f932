"""Kernel maps against a loop over all pairs of voxels and all taps."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import product

import pytest
import torch

from insum_ops.compiler.binding import SHORT_LENGTH
from insum_ops.formats import FormatError, KernelMap, kernel_map
from insum_ops.formats.voxels import map_tables

SHAPES = {1: [9], 2: [5, 7], 3: [4, 5, 6], 4: [3, 4, 3, 4]}
# kind, kernel_size, stride, padding, dilation, output_padding
GEOMETRIES = [
    ("subm", 1, 1, 0, 1, 0),
    ("subm", 3, 1, 0, 1, 0),
    ("subm", 3, 1, 5, 2, 0),
    ("strided", 2, 2, 0, 1, 0),
    ("strided", 3, 2, 1, 1, 0),
    ("strided", 3, 1, 1, 1, 0),
    ("strided", 2, 3, 1, 2, 0),
    ("strided", 1, 2, 0, 1, 0),
    ("transposed", 2, 2, 0, 1, 0),
    ("transposed", 3, 2, 1, 1, 1),
    ("transposed", 3, 1, 0, 2, 0),
]


def voxels(shape, batch=2, density=0.4):
    indices = (torch.rand(batch, *shape) < density).nonzero().int()
    return indices[torch.randperm(len(indices))]


def expected_pairs(indices, outputs, ndim, geometry):
    """(z, y, x) by trying every input with every output and every tap."""
    kind, kernel, stride, padding, dilation, _ = geometry
    if kind == "subm":
        padding = dilation * (kernel // 2)
    found = []
    for z, tap in enumerate(product(range(kernel), repeat=ndim)):
        for x, out in enumerate(outputs):
            for y, given in enumerate(indices):
                coarse, fine = (given, out) if kind == "transposed" else (out, given)
                meets = all(f == c * stride - padding + dilation * t for f, c, t in zip(fine[1:], coarse[1:], tap))
                if meets and out[0] == given[0]:
                    found.append((z, y, x))
    return found


def reached(indices, shape, ndim, geometry):
    """Every cell of the output grid that some input reaches, ascending."""
    kind, kernel, stride, padding, dilation, _ = geometry
    found = set()
    for batch, *position in indices:
        for tap in product(range(kernel), repeat=ndim):
            if kind == "transposed":
                cell = [c * stride - padding + dilation * t for c, t in zip(position, tap)]
            else:
                wide = [f + padding - dilation * t for f, t in zip(position, tap)]
                if any(w % stride for w in wide):
                    continue
                cell = [w // stride for w in wide]
            if all(0 <= c < size for c, size in zip(cell, shape)):
                found.add((batch, *cell))
    return sorted(found)


def made(indices, shape, geometry, batch=2) -> KernelMap:
    kind, kernel, stride, padding, dilation, extra = geometry
    return kernel_map(indices, shape, batch, kernel, stride, padding, dilation, kind, extra)


@pytest.mark.every_route
@pytest.mark.sampled
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_map_holds_the_pairs_that_meet(ndim, geometry):
    shape = SHAPES[ndim]
    indices = voxels(shape, density=0.25 if ndim == 3 else 0.4)
    found = made(indices, shape, geometry)
    outputs = found.out_indices.tolist()
    if geometry[0] == "subm":
        assert found.out_indices is indices
    else:
        assert outputs == [list(cell) for cell in reached(indices.tolist(), found.out_spatial_shape, ndim, geometry)]
    if len(outputs) < 150:
        pairs = expected_pairs(indices.tolist(), outputs, ndim, geometry)
        assert [tuple(pair) for pair in found.pairs.T.tolist()] == pairs


@pytest.mark.every_route
def test_four_axes_meet_too():
    indices = voxels(SHAPES[4], batch=1, density=0.15)
    geometry = ("strided", 2, 2, 1, 1, 0)
    found = made(indices, SHAPES[4], geometry, batch=1)
    assert [tuple(pair) for pair in found.pairs.T.tolist()] == expected_pairs(
        indices.tolist(), found.out_indices.tolist(), 4, geometry
    )


@pytest.mark.parametrize("kind", ["strided", "transposed"])
def test_output_grids_are_those_of_dense_convolutions(kind):
    options = dict(stride=(2, 1, 3), padding=(1, 0, 2), dilation=(1, 2, 1))
    extra = dict(output_padding=(1, 0, 2)) if kind == "transposed" else {}
    layer = torch.nn.Conv3d if kind == "strided" else torch.nn.ConvTranspose3d
    dense = layer(1, 1, (3, 2, 5), **options, **extra)(torch.zeros(1, 1, 7, 8, 9))
    found = kernel_map(torch.zeros(1, 4, dtype=torch.int32), [7, 8, 9], 1, (3, 2, 5), kind=kind, **options, **extra)
    assert found.out_spatial_shape == tuple(dense.shape[2:])


@pytest.mark.every_route
@pytest.mark.sampled
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("group_size", [1, 4, 128])
def test_groups_hold_the_same_pairs(geometry, group_size):
    found = made(voxels(SHAPES[2]), SHAPES[2], geometry)
    for one in (found, found.inverse):
        grouped = one.grouped(group_size)
        assert grouped.MAPX.shape == grouped.MAPY.shape == (len(grouped.MAPZ), group_size)
        assert {grouped.MAPX.dtype, grouped.MAPY.dtype, grouped.MAPZ.dtype} == {torch.int32}
        assert grouped.MAPZ.diff().ge(0).all()
        is_pair = grouped.MAPX >= 0
        assert torch.equal(is_pair, grouped.MAPY >= 0)
        assert is_pair.any(1).all()
        z = grouped.MAPZ[:, None].expand_as(is_pair)
        listed = torch.stack([z[is_pair].long(), grouped.MAPY[is_pair].long(), grouped.MAPX[is_pair].long()])
        assert sorted(listed.T.tolist()) == sorted(one.pairs.T.tolist())
        assert one.grouped(group_size).MAPX is grouped.MAPX
        groups = grouped.by_tap(one.volume)
        assert groups.dtype == torch.int32
        for tap, row in enumerate(groups.tolist()):
            expected = (tap == grouped.MAPZ).nonzero().flatten().tolist()
            assert row == expected + [-1] * (groups.shape[1] - len(expected))
        filled, count = one.grouped(group_size, multiple_of=16), len(grouped.MAPZ)
        assert len(filled.MAPZ) == (-(-count // 16) * 16 if count <= SHORT_LENGTH else count)
        for longer, shorter in zip(vars(filled).values(), vars(grouped).values()):
            assert torch.equal(longer[:count], shorter)
        assert filled.MAPX[count:].eq(-1).all()
        assert filled.MAPY[count:].eq(-1).all()
        assert filled.MAPZ[count:].eq(one.volume - 1).all()
        assert torch.equal(filled.by_tap(one.volume), groups)


@pytest.mark.every_route
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_inverse_swaps_inputs_and_outputs(geometry):
    found = made(voxels(SHAPES[3]), SHAPES[3], geometry)
    back = found.inverse
    z, y, x = found.pairs
    assert sorted(torch.stack([z, x, y]).T.tolist()) == sorted(back.pairs.T.tolist())
    assert back.indices is found.out_indices
    assert back.out_indices is found.indices
    assert back.spatial_shape == found.out_spatial_shape
    assert torch.equal(back.inverse.neighbours, found.neighbours)
    assert found.inverse is back
    assert (found.neighbours >= 0).sum(1).max() <= found.most_per_output
    assert (back.neighbours >= 0).sum(1).max() <= found.most_per_input


def test_the_neighbours_of_each_output_are_its_pairs():
    found = made(voxels(SHAPES[3]), SHAPES[3], ("strided", 3, 2, 1, 1, 0))
    NBR = torch.full((len(found.out_indices), 27), -1)
    z, y, x = found.pairs
    NBR[x, z] = y
    assert torch.equal(found.neighbours, NBR.int())
    assert found.volume == 27


@pytest.mark.every_route
@pytest.mark.parametrize("kind", ["subm", "strided", "transposed"])
def test_no_voxel_and_one_voxel_work(kind):
    none = kernel_map(torch.empty(0, 4, dtype=torch.int32), [3, 3, 3], 2, 3, kind=kind)
    assert none.neighbours.shape == (0, 27)
    assert none.inverse.neighbours.shape == (0, 27)
    assert none.pairs.shape == (3, 0)
    assert none.grouped(8).MAPX.shape == (0, 8)
    assert none.grouped(8).by_tap(none.volume).shape == (none.volume, 0)
    one = kernel_map(torch.tensor([[1, 1, 1, 1]]), [3, 3, 3], 2, 3, kind=kind)
    assert one.pairs.shape[1] == {"subm": 1, "strided": 1, "transposed": 27}[kind]


@pytest.mark.every_route
def test_an_empty_batch_entry_and_an_empty_batch_work():
    indices = torch.tensor([[2, 0, 1], [0, 0, 1]], dtype=torch.int32)
    found = kernel_map(indices, [2, 2], 3, 2, 2, kind="strided")
    assert found.out_indices.tolist() == [[0, 0, 0], [2, 0, 0]]
    assert len(kernel_map(indices[:0], [2, 2], 0, 2, 2, kind="strided").out_indices) == 0


@pytest.mark.every_route
def test_coordinates_need_not_lie_side_by_side_in_memory():
    indices = voxels(SHAPES[3])
    scattered = indices.T.contiguous().T
    assert torch.equal(
        made(scattered, SHAPES[3], GEOMETRIES[1]).neighbours, made(indices, SHAPES[3], GEOMETRIES[1]).neighbours
    )


@pytest.mark.every_route
def test_a_grid_past_32_bits_has_64_bit_keys():
    far = 100_000
    indices = torch.tensor([[0, far, far, far], [0, far, far, far + 1], [3, far, far, far]], dtype=torch.int32)
    found = kernel_map(indices, [2 * far] * 3, 4, 3)
    assert found.pairs.T.tolist() == [[12, 0, 1], [13, 0, 0], [13, 1, 1], [13, 2, 2], [14, 1, 0]]
    down = kernel_map(indices, [2 * far] * 3, 4, 2, 2, kind="strided")
    assert down.out_indices.tolist() == [[0, far // 2, far // 2, far // 2], [3, far // 2, far // 2, far // 2]]


@pytest.mark.every_route
def test_coordinates_past_32_bits_are_made_of_64_bit_ones():
    """The last cell that fits, and with int64 indices one past it."""
    at = torch.tensor([[0, 2**30 - 1]])
    found = kernel_map(at.int(), [2**30], 1, 2, 2, kind="transposed")
    assert found.out_indices.tolist() == [[0, 2**31 - 2], [0, 2**31 - 1]]
    found = kernel_map(at, [2**30], 1, 2, 4, kind="transposed")
    assert found.out_indices.tolist() == [[0, 2**32 - 4], [0, 2**32 - 3]]


def test_int64_indices_give_the_same_map():
    indices = voxels(SHAPES[3])
    for geometry in GEOMETRIES:
        found, wide = (made(given, SHAPES[3], geometry) for given in (indices, indices.long()))
        assert torch.equal(found.neighbours, wide.neighbours)
        assert wide.out_indices.dtype == torch.int64


def test_permuting_the_voxels_permutes_the_map():
    indices = voxels(SHAPES[3])
    order = torch.randperm(len(indices))
    found, other = (made(given, SHAPES[3], GEOMETRIES[1]) for given in (indices, indices[order]))
    place = order.argsort()  # where a row went
    expected = torch.where(found.neighbours[order] >= 0, place[found.neighbours[order].long()], -1)
    assert torch.equal(other.neighbours, expected.int())
    strided, permuted = (made(given, SHAPES[3], GEOMETRIES[4]) for given in (indices, indices[order]))
    assert torch.equal(strided.out_indices, permuted.out_indices)


@pytest.mark.every_route
@pytest.mark.parametrize("counts_a_version", [True, False])
def test_voxels_are_looked_at_again_after_a_change(counts_a_version):
    indices = voxels(SHAPES[2])
    for geometry in (GEOMETRIES[3], GEOMETRIES[1]):
        made(indices, SHAPES[2], geometry)
    changed = indices.clone()
    changed[0, 1] = SHAPES[2][0]
    if counts_a_version:
        indices.copy_(changed)
    else:
        indices.data = changed
    with pytest.raises(FormatError, match="outside"):
        made(indices, SHAPES[2], GEOMETRIES[1])


@pytest.mark.parametrize("whose", ["indices", "out_indices"])
def test_voxels_that_were_looked_at_are_saved_as_any_tensor(whose):
    """What is known of them stays behind: a file needs neither this library nor trust to be loaded."""
    found = getattr(made(voxels(SHAPES[2]), SHAPES[2], GEOMETRIES[3]), whose)
    file = io.BytesIO()
    torch.save(found, file)
    assert b"insum_ops" not in file.getvalue()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda indices: pickle.loads(pickle.dumps(indices))])
def test_a_copy_of_voxels_is_looked_at_itself(copied):
    indices = voxels(SHAPES[2])
    indices.add_(0).add_(0)
    made(indices, SHAPES[2], GEOMETRIES[3])
    other = copied(indices)
    other[0] = -1
    while other._version < indices._version:  # as many changes as there were to the first
        other.add_(0)
    with pytest.raises(FormatError, match=r"^indices\[0\] is \[-1, -1, -1\]"):
        made(other, SHAPES[2], GEOMETRIES[3])


@pytest.mark.cpu
def test_a_map_moves_with_its_tables():
    found = made(voxels(SHAPES[2]), SHAPES[2], GEOMETRIES[4])
    found.grouped(4)
    moved = found.to("cpu")
    assert torch.equal(moved.neighbours, found.neighbours)
    assert torch.equal(moved.inverse.neighbours, found.inverse.neighbours)


def test_a_map_prints_its_sizes():
    found = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], 1, 2, 2, kind="strided")
    assert repr(found) == (
        "KernelMap(strided, inputs=2, outputs=1, kernel_size=[2], stride=[2], padding=[0], dilation=[1])"
    )


GOOD = torch.tensor([[0, 1, 2], [1, 0, 0]], dtype=torch.int32)
MISTAKES = [
    (dict(kind="dense"), "kind is 'dense'; choose from subm, strided, transposed"),
    (dict(indices=[[0, 0, 0]]), "indices is of type list; pass an int32 tensor [N, 1 + axes]"),
    (
        dict(indices=GOOD.float()),
        "indices is torch.float32; coordinates are torch.int32 or torch.int64, as indices.int() is",
    ),
    (
        dict(indices=GOOD[:, 1:]),
        "indices is [2, 2] but spatial_shape is [3, 4]; it must be [N, 3], the batch and then a coordinate for "
        "each axis",
    ),
    (
        dict(indices=GOOD + torch.tensor([0, 0, 2], dtype=torch.int32)),
        "indices[0] is [0, 1, 4], whose coordinate 4 on axis 1 is outside spatial_shape [3, 4]; drop such voxels or "
        "enlarge spatial_shape",
    ),
    (
        dict(indices=GOOD - torch.tensor([0, 1, 0], dtype=torch.int32)),
        "indices[1] is [1, -1, 0], whose coordinate -1 on axis 0 is outside spatial_shape [3, 4]; drop such voxels or "
        "enlarge spatial_shape",
    ),
    (
        dict(batch_size=1),
        "indices[1] is [1, 0, 0], whose batch index 1 is outside batch_size 1; column 0 is the batch",
    ),
    (
        dict(indices=GOOD[[0, 1, 0]]),
        "indices[0] and indices[2] are both [0, 1, 2]; give each voxel once and merge the features of its points first",
    ),
    (dict(spatial_shape=[]), "spatial_shape is []; voxels have from 1 to 4 axes"),
    (dict(spatial_shape=[3, 0]), "spatial_shape is [3, 0]; each axis has at least one cell"),
    (dict(spatial_shape=[3.5, 4]), "spatial_shape is [3.5, 4]; it holds a whole number for each dimension"),
    (dict(batch_size=-1), "batch_size is -1; it is at least 0"),
    (dict(batch_size=1.5), "batch_size is 1.5; it is a whole number"),
    (
        dict(spatial_shape=[2**31, 2**31], batch_size=2),
        "batch_size 2 and spatial_shape [2147483648, 2147483648] make 9223372036854775808 cells, more than a 64-bit "
        "key can tell apart; crop the grid or use larger voxels",
    ),
    (
        dict(kernel_size=[3, 3, 3]),
        "kernel_size is [3, 3, 3] but there are 2 axes; give one number, or one for each axis",
    ),
    (dict(kernel_size=0), "kernel_size is [0, 0]; each number is at least 1"),
    (dict(kernel_size=[3, 1.5]), "kernel_size is [3, 1.5]; it must hold integers"),
    (dict(kernel_size=1.5), "kernel_size is [1.5, 1.5]; it must hold integers"),
    (dict(kind="strided", padding=-1), "padding is [-1, -1]; each number is at least 0"),
    (
        dict(kernel_size=2),
        "kernel_size is [2, 2]; a submanifold kernel has a centre, so each size is odd; use a strided convolution for "
        "even kernels",
    ),
    (
        dict(stride=2),
        "stride is [2, 2]; a submanifold convolution keeps its voxels, so its stride is 1; use a strided convolution "
        "to downsample",
    ),
    (
        dict(kind="strided", output_padding=1),
        "output_padding is [1, 1] but kind is 'strided'; only 'transposed' takes it",
    ),
    (
        dict(kind="strided", kernel_size=5),
        "a strided convolution with kernel_size [5, 5], stride [1, 1], padding [0, 0] and dilation [1, 1] leaves "
        "nothing of spatial_shape [3, 4]: its output would be [-1, 0]",
    ),
    (
        dict(kind="transposed", spatial_shape=[3, 2**30], stride=4),
        "indices is torch.int32, but a transposed convolution with stride [4, 4] and padding [0, 0] makes a grid of "
        "[11, 4294967295], whose coordinates pass it; use indices.long()",
    ),
]


@pytest.mark.every_route
@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_named(wrong, message):
    call = dict(indices=GOOD, spatial_shape=[3, 4], batch_size=2, kernel_size=3, kind="subm")
    with pytest.raises(FormatError) as caught:
        kernel_map(**{**call, **wrong})
    assert str(caught.value) == message


def test_a_group_holds_a_pair():
    with pytest.raises(FormatError, match=r"^group_size is 0; a group holds at least one pair$"):
        kernel_map(GOOD, [3, 4], 2, 3).grouped(0)
    with pytest.raises(FormatError, match=r"^multiple_of is 0; it divides the number of groups$"):
        kernel_map(GOOD, [3, 4], 2, 3).grouped(multiple_of=0)


def test_pairs_are_counted_once():
    line = torch.tensor([[0, 4], [0, 5], [0, 0]])
    found = kernel_map(line, [6], 1, kernel_size=3)
    assert found.num_pairs == found.pairs.shape[1] == 5
    assert found.inverse.num_pairs == 5


def test_a_map_and_its_inverse_share_groups():
    found = made(voxels(SHAPES[2]), SHAPES[2], ("strided", 3, 2, 1, 1, 0))
    back = found.inverse
    assert found.num_pairs == back.num_pairs == found.pairs.shape[1]
    for size in (1, 3, 64):
        assert back.grouped(size).MAPX is found.grouped(size).MAPY


@pytest.mark.kernels
@pytest.mark.skipif(not map_tables.INTERPRETED, reason="sorting reads as it goes")
@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[4]], ids=lambda geometry: geometry[0])
def test_faults_and_pairs_are_one_read(geometry, monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    indices = voxels(SHAPES[2])
    found = made(indices, SHAPES[2], geometry)
    for size in (16, 4):
        found.grouped(size)
    assert found.num_pairs == found.inverse.num_pairs == int((found.neighbours >= 0).sum())
    assert len(reads) == 1
    again = made(indices, SHAPES[2], geometry)  # checked before: nothing is read until pairs are asked for
    assert len(reads) == 1
    assert again.num_pairs == found.num_pairs
    assert len(reads) == 2
    assert torch.equal(again.neighbours, found.neighbours)


@pytest.mark.every_route
@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[4]], ids=lambda geometry: geometry[0])
def test_maps_made_in_inference_mode_are_good_for_training(geometry):
    indices = voxels(SHAPES[2])
    with torch.inference_mode():
        found = made(indices, SHAPES[2], geometry)
    held = [found.neighbours, found.inverse.neighbours, found.out_indices, *vars(found.grouped(16)).values()]
    assert not any(tensor.is_inference() for tensor in held)


@pytest.mark.cpu
def test_groups_without_a_count_count():
    found = made(voxels(SHAPES[2]), SHAPES[2], GEOMETRIES[1])
    grouped = found.grouped(5)
    assert found.num_pairs == (grouped.MAPX >= 0).sum() == found.pairs.shape[1]
    moved = found.to("cpu")
    assert moved.num_pairs == found.num_pairs
    assert torch.equal(moved.grouped(5).MAPX, grouped.MAPX)


def test_what_is_made_in_inference_mode_trains():
    found = made(voxels(SHAPES[2]), SHAPES[2], ("strided", 3, 2, 1, 1, 0))
    with torch.inference_mode():
        made_there = [found.neighbours, *vars(found.grouped(4)).values()]
        flipped = made(found.indices, SHAPES[2], GEOMETRIES[1]).inverse.neighbours
    assert not any(tensor.is_inference() for tensor in (*made_there, flipped))
