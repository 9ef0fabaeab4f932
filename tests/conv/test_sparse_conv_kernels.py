"""The generated kernels and the voxel hash on small clouds; `make test-interpreter` runs them on CPU tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches
from torch.nn import functional
from voxel_tables import by_sorting

from insum_ops import nn, sparse_conv3d
from insum_ops.conv import forms as conv_forms
from insum_ops.formats import FormatError, kernel_map
from insum_ops.formats import kernel_map as build

functionals = sys.modules["insum_ops.functional"]
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


@pytest.mark.sampled
@pytest.mark.kernels
@needs_hash
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_hashing_finds_what_sorting_finds(geometry, dtype):
    kind, *sizes = geometry
    indices = voxels().to(dtype).T.contiguous().T
    found = build(indices, [4, 5, 6], 2, *sizes, kind=kind)
    with by_sorting():
        expected = build(indices.clone(), [4, 5, 6], 2, *sizes, kind=kind)
    assert torch.equal(found.out_indices, expected.out_indices)
    assert torch.equal(found.neighbours, expected.neighbours)
    assert torch.equal(found.inverse.neighbours, expected.inverse.neighbours)
    assert found.neighbours.dtype == torch.int32


@pytest.mark.kernels
@needs_hash
@pytest.mark.parametrize("ndim", [1, 2, 4])
def test_hashing_knows_other_numbers_of_axes(ndim):
    shape = [3, 4, 3, 4][:ndim]
    indices = voxels(shape, density=0.3)
    found = [build(indices, shape, 2, 3, kind="subm"), build(indices, shape, 2, 2, 2, kind="strided")]
    with by_sorting():
        expected = [build(indices, shape, 2, 3, kind="subm"), build(indices, shape, 2, 2, 2, kind="strided")]
    for one, other in zip(found, expected):
        assert torch.equal(one.neighbours, other.neighbours)
        assert torch.equal(one.out_indices, other.out_indices)


@pytest.mark.kernels
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


@pytest.mark.kernels
@needs_hash
def test_hashing_takes_grids_past_32_bits_and_no_voxels():
    far = 100_000
    indices = torch.tensor([[0, far, far, far], [3, far, far, far], [0, far, far, far + 1]], device=DEVICE).int()
    found = kernel_map(indices, [2 * far] * 3, 4, 3)
    assert found.pairs.T.tolist() == [[12, 0, 2], [13, 0, 0], [13, 1, 1], [13, 2, 2], [14, 2, 0]]
    assert kernel_map(indices[:0], [3, 3, 3], 1, 3).neighbours.shape == (0, 27)
    assert kernel_map(indices[:0], [3, 3, 3], 1, 3, 2, kind="strided").out_indices.shape == (0, 4)


@pytest.mark.sampled
@pytest.mark.kernels
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


@pytest.mark.kernels
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


# outputs in tiles that need the same taps: an interpreted step of a loop takes 15 ms, hence the few voxels

LAYERS = [
    pytest.param(nn.SubMConv2d, 16, dict(kernel_size=3), id="submanifold"),
    pytest.param(nn.SubMConv2d, 16, dict(kernel_size=3, bias=False), id="without bias"),
    pytest.param(nn.SparseConv2d, 16, dict(kernel_size=2, stride=2), id="strided"),
    pytest.param(nn.SparseConvTranspose2d, 16, dict(kernel_size=2, stride=2), id="transposed"),
    pytest.param(nn.SubMConv1d, 32, dict(kernel_size=3, groups=2), id="groups"),
    pytest.param(nn.SubMConv1d, 4, dict(kernel_size=3), id="too narrow for a dot"),
    pytest.param(nn.SubMConv1d, 4, dict(kernel_size=3, groups=4), id="depthwise"),
    pytest.param(nn.SparseConv1d, 4, dict(kernel_size=2, stride=2, groups=4), id="depthwise strided"),
]


@pytest.fixture
def tiles(monkeypatch):
    """Convolutions take tiles of 16, whatever the map and the device."""
    monkeypatch.setattr(conv_forms, "TILE_SIZE", 16)
    monkeypatch.setattr(conv_forms, "form_of", lambda *given: conv_forms.TILED)


def small_cloud(channels=16, ndim=2):
    """20 voxels: a full tile and one that is not."""
    indices = voxels({1: (14,), 2: (4, 4)}[ndim], density=0.9)[:20]
    assert len(indices) == 20
    features = torch.randn(20, channels, dtype=torch.float64, device=DEVICE, requires_grad=True)
    return nn.SparseConvTensor(features, indices, {1: [14], 2: [4, 4]}[ndim], 2)


def made(kind, channels, **options):
    return kind(channels, channels, indice_key="own", **options).double().to(DEVICE)


def by_pairs(features, kernel, bias, pairs, outputs, groups=1):
    """The convolution pair by pair."""
    z, y, x = pairs
    taps = kernel.flatten(1, -2).unflatten(0, (groups, -1))[:, :, z]  # [g, M / g, pair, C / g]
    each = torch.einsum("pgc,gmpc->pgm", features.unflatten(1, (groups, -1))[y], taps).flatten(1)
    start = each.new_zeros(outputs, each.shape[1]) if bias is None else bias.expand(outputs, -1)
    return start.index_add(0, x, each)


def expected_of(layer, y, features):
    found = y.indice_dict["own"].kernel_map
    return by_pairs(features, layer.kernel, layer.bias, found.pairs, found.num_outputs, layer.groups)


def assert_gradients_match(actual, wanted, leaves, **options):
    upstream = torch.randn_like(wanted)
    found = torch.autograd.grad(actual, leaves, upstream, **options)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, upstream, **options), strict=True):
        assert_matches(one, other)
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "channels", "options"), LAYERS)
def test_tiles_compute_every_pair_and_their_gradients(tiles, kind, channels, options):
    layer = made(kind, channels, **options)
    x = small_cloud(channels, layer.ndim)
    y = layer(x)
    wanted = expected_of(layer, y, x.features)
    assert_matches(y.features, wanted)
    assert_gradients_match(y.features, wanted, [x.features, *layer.parameters()])
    found = y.indice_dict["own"].kernel_map
    assert ("tiles", 16) in found.memory
    assert ("tiles", 16) in found.inverse.memory


@pytest.mark.kernels
@pytest.mark.parametrize("channels", [16, 2], ids=["dot", "fma"])
def test_tiles_have_second_derivatives(tiles, channels):
    layer, x = made(nn.SubMConv1d, channels, kernel_size=3), small_cloud(channels, 1)
    leaves = [x.features, layer.weight, layer.bias]
    y = layer(x)
    wanted = expected_of(layer, y, x.features)
    upstream = torch.randn_like(wanted)
    first, reference = (
        torch.autograd.grad(result, leaves[:2], upstream, create_graph=True) for result in (y.features, wanted)
    )
    for one, other in zip(first, reference):
        assert_matches(one, other)
    assert_gradients_match(*(sum(g.square().sum() for g in each) for each in (first, reference)), leaves[:2])


@pytest.mark.kernels
def test_a_remembered_call_over_tiles_sees_changes_in_place(tiles):
    """The same tensors with other numbers in them, and other tensors of the same shape."""
    layer, x = made(nn.SubMConv2d, 16, kernel_size=3), small_cloud()
    for _ in range(3):  # worked out, recorded, replayed
        layer(x)
    with torch.no_grad():
        x.features.mul_(-3)
        layer.weight.add_(1)
        layer.bias.mul_(2)
    for given in (x, x.replace_feature(torch.randn_like(x.features))):
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                y = layer(given)
            assert_matches(y.features, expected_of(layer, y, given.features))


@pytest.mark.kernels
def test_tiles_follow_an_index_tensor_that_is_changed(tiles):
    """Two rows of a tile trade places."""
    layer, x = made(nn.SubMConv2d, 16, kernel_size=3), small_cloud()
    with torch.no_grad():
        before = layer(x).features
        ROW = x.indice_dict["own"].kernel_map.tiled(16).ROW
        ROW[0, :2] = ROW[0, :2].flip(0)
        after = layer(x).features
    order = torch.arange(20, device=DEVICE)
    one, other = ROW[0, :2].long()
    order[one], order[other] = other, one
    assert torch.equal(after, before[order])


@pytest.mark.kernels
def test_tiles_without_gradients(tiles):
    layer, x = made(nn.SubMConv2d, 16, kernel_size=3), small_cloud()
    wanted = None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
        assert not y.features.requires_grad
        wanted = expected_of(layer, y, x.features) if wanted is None else wanted
        assert_matches(y.features, wanted)
    y = layer(x)  # and after that with them
    assert_gradients_match(y.features, wanted, [x.features, *layer.parameters()])


@pytest.mark.kernels
def test_a_transform_takes_the_statement_itself(tiles):
    x, layer = small_cloud(16, 1), made(nn.SubMConv1d, 16, kernel_size=3)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(features, parameters):
        return torch.func.functional_call(layer, parameters, (x.replace_feature(features),)).features.square().sum()

    found = torch.func.grad(loss, argnums=(0, 1))(x.features.detach(), parameters)
    y = layer(x)
    wanted = expected_of(layer, y, x.features).square().sum()
    references = torch.autograd.grad(wanted, [x.features, *layer.parameters()])
    for one, other in zip((found[0], *found[1].values()), references, strict=True):
        assert_matches(one, other)


@pytest.mark.kernels
def test_tangents_are_carried_through_tiles(tiles):
    x = small_cloud(16, 1)
    found = build(x.indices, x.spatial_shape, 2, 3)
    weight, tangent = (torch.randn(16, 3, 16, dtype=torch.float64, device=DEVICE) for _ in range(2))
    features = x.features.detach()
    _, moved = torch.func.jvp(lambda w: sparse_conv3d(features, w, found), (weight,), (tangent,))
    assert_matches(moved, by_pairs(features, tangent, None, found.pairs, 20))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "options"), [(nn.SubMConv2d, dict(kernel_size=3)), (nn.SparseConv2d, dict(kernel_size=2, stride=2))]
)
def test_tiles_are_deterministic(tiles, kind, options):
    layer, x = made(kind, 16, **options), small_cloud()
    leaves = [x.features, *layer.parameters()]
    torch.use_deterministic_algorithms(True)
    try:
        y, again = layer(x), layer(x)
        wanted = expected_of(layer, y, x.features)
        assert_matches(y.features, wanted)
        upstream = torch.randn_like(wanted)
        first, second = (torch.autograd.grad(one.features, leaves, upstream) for one in (y, again))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(y.features, again.features)
    for one, other, reference in zip(first, second, torch.autograd.grad(wanted, leaves, upstream), strict=True):
        assert torch.equal(one, other)
        assert_matches(one, reference)


@pytest.mark.kernels
def test_no_voxels_have_no_tiles(tiles):
    layer = made(nn.SubMConv2d, 16, kernel_size=3)
    none = torch.zeros(0, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = layer(nn.SparseConvTensor(none, voxels((4, 4))[:0], [4, 4], 2)).features
    assert y.shape == (0, 16)
    y.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.skipif(IS_INTERPRETED, reason="traced alike with and without kernels")
def test_tiles_are_known_to_a_tracer_unless_it_differentiates(tiles):
    torch._dynamo.reset()
    x = small_cloud()
    found = build(x.indices, x.spatial_shape, 2, 3)
    features, weight = x.features, torch.randn(16, 3, 3, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def call(features, weight):
        return sparse_conv3d(features, weight, found)

    call(features, weight).sum().backward()  # makes the tiles of both maps
    wanted = by_pairs(features, weight, None, found.pairs, 20)
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(features, weight)
    assert_matches(y, wanted)
    assert_gradients_match(y, wanted, [features, weight])
    gradient = torch.func.grad(lambda weight: call(features.detach(), weight).square().sum())
    wanted = by_pairs(features, weight, None, found.pairs, 20)
    (expected,) = torch.autograd.grad(wanted.square().sum(), weight)
    assert_matches(torch.compile(gradient, backend="aot_eager")(weight.detach()), expected)
