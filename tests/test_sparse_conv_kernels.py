"""The generated kernels and the voxel hash on small clouds; `make test-interpreter` runs them on CPU tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch.nn import functional

from insum_ops import nn, sparse_conv3d
from insum_ops.formats import FormatError, kernel_map, voxel_sort
from insum_ops.formats import kernel_map as build

kernel_maps = sys.modules["insum_ops.formats.kernel_map"]
needs_hash = pytest.mark.skipif(
    not IS_INTERPRETED and DEVICE == "cpu", reason="the hash needs a GPU or the interpreter"
)
# kind, kernel_size, stride, padding, dilation
GEOMETRIES = [
    ("subm", 3, 1, 0, 1),
    ("subm", (1, 3, 5), 1, 0, 2),
    ("strided", 2, 2, 0, 1),
    ("strided", (3, 1, 2), (2, 3, 1), (1, 0, 1), (1, 1, 2)),
    ("transposed", 2, 2, 0, 1),
    ("transposed", 3, (1, 2, 1), 1, 1),
]


def voxels(shape=(4, 5, 6), batch=2, density=0.2):
    indices = (torch.rand(batch, *shape) < density).nonzero().int()
    return indices[torch.randperm(len(indices))].to(DEVICE)


@needs_hash
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_hashing_finds_what_sorting_finds(monkeypatch, geometry, dtype):
    kind, *sizes = geometry
    indices = voxels().to(dtype).T.contiguous().T
    found = build(indices, [4, 5, 6], 2, *sizes, kind=kind)
    monkeypatch.setattr(kernel_maps, "_maker", lambda indices: voxel_sort)
    expected = build(indices.clone(), [4, 5, 6], 2, *sizes, kind=kind)
    assert torch.equal(found.out_indices, expected.out_indices)
    assert torch.equal(found.neighbours, expected.neighbours)
    assert torch.equal(found.inverse.neighbours, expected.inverse.neighbours)
    assert found.neighbours.dtype == torch.int32


@needs_hash
@pytest.mark.parametrize("ndim", [1, 2, 4])
def test_hashing_knows_other_numbers_of_axes(monkeypatch, ndim):
    shape = [3, 4, 3, 4][:ndim]
    indices = voxels(shape, density=0.3)
    found = [build(indices, shape, 2, 3, kind="subm"), build(indices, shape, 2, 2, 2, kind="strided")]
    monkeypatch.setattr(kernel_maps, "_maker", lambda indices: voxel_sort)
    expected = [build(indices, shape, 2, 3, kind="subm"), build(indices, shape, 2, 2, 2, kind="strided")]
    for one, other in zip(found, expected):
        assert torch.equal(one.neighbours, other.neighbours)
        assert torch.equal(one.out_indices, other.out_indices)


@needs_hash
def test_hashing_finds_the_same_mistakes():
    indices = voxels()
    twice = torch.cat([indices, indices[3:4]])
    for kind, stride in (("subm", 1), ("strided", 2)):
        with pytest.raises(FormatError) as caught:
            kernel_map(twice.clone(), [4, 5, 6], 2, 3, stride, 1, kind=kind)
        assert str(caught.value) == (
            f"indices[3] and indices[{len(indices)}] are both {indices[3].tolist()}; give each voxel once and merge "
            "the features of its points first"
        )
        with pytest.raises(FormatError, match="is outside batch_size 1; column 0 is the batch"):
            kernel_map(indices.clone(), [4, 5, 6], 1, 3, stride, 1, kind=kind)
        with pytest.raises(FormatError, match=r"on axis 2 is outside spatial_shape \[4, 5, 5\]"):
            kernel_map(indices.clone(), [4, 5, 5], 2, 3, stride, 1, kind=kind)


@needs_hash
def test_hashing_takes_grids_past_32_bits_and_no_voxels():
    far = 100_000
    indices = torch.tensor([[0, far, far, far], [3, far, far, far], [0, far, far, far + 1]], device=DEVICE).int()
    found = kernel_map(indices, [2 * far] * 3, 4, 3)
    assert found.pairs.T.tolist() == [[12, 0, 2], [13, 0, 0], [13, 1, 1], [13, 2, 2], [14, 2, 0]]
    assert kernel_map(indices[:0], [3, 3, 3], 1, 3).neighbours.shape == (0, 27)
    assert kernel_map(indices[:0], [3, 3, 3], 1, 3, 2, kind="strided").out_indices.shape == (0, 4)


@pytest.mark.parametrize("deterministic", [False, True], ids=["grouped", "stationary"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["subm", "strided"])
def test_kernels_compute_the_dense_convolution_and_its_gradients(kind, groups, deterministic):
    shape, stride = [3, 3], 1 if kind == "subm" else 2
    indices = voxels(shape, density=0.6)
    found = kernel_map(indices, shape, 2, 3, stride, 1, kind=kind)
    leaves = [
        torch.randn(*size, device=DEVICE, requires_grad=True)
        for size in ((len(indices), 4), (4, 3, 3, 4 // groups), (4,))
    ]
    features, weight, bias = leaves
    torch.use_deterministic_algorithms(deterministic)
    try:
        y = sparse_conv3d(features, weight, found, bias, groups)
        upstream = torch.randn_like(y)
        actual = torch.autograd.grad(y, leaves, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    batch, *position = indices.long().T
    dense = torch.zeros(2, *shape, 4, device=DEVICE, dtype=torch.float64).index_put(
        (batch, *position), features.double()
    )
    made = functional.conv2d(dense.movedim(-1, 1), weight.double().movedim(-1, 1), bias.double(), stride, 1, 1, groups)
    batch, *position = found.out_indices.long().T
    expected = made.movedim(1, -1)[(batch, *position)]
    assert_matches(y, expected)
    for one, other in zip(actual, torch.autograd.grad(expected, leaves, upstream.double())):
        assert_matches(one, other.double())


def test_a_small_network_trains_on_this_route():
    indices = voxels((4, 4), density=0.5)
    x = nn.SparseConvTensor(torch.randn(len(indices), 4, device=DEVICE), indices, [4, 4], 2)
    model = nn.SparseSequential(
        nn.SubMConv2d(4, 4, 3, indice_key="a"),
        torch.nn.ReLU(),
        nn.SparseConv2d(4, 4, 2, 2, indice_key="down"),
        nn.SparseInverseConv2d(4, 4, 2, "down"),
        nn.SparseMaxPool2d(2),
        nn.SparseAvgPool2d(1),
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        loss = model(x).features.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
