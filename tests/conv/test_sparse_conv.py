"""Convolutions against torch's dense ones in float64: values, every gradient, and the laws that hold for them."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from tolerances import assert_matches
from torch.nn import functional

from insum_ops import nn, sparse_conv3d
from insum_ops.compiler.language.errors import OperandError, ShapeError
from insum_ops.compiler.runtime import ranges
from insum_ops.conv import forms as conv_forms
from insum_ops.formats import kernel_map

SHAPES = {1: [11], 2: [6, 7], 3: [4, 5, 6]}
CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def voxels(shape, batch=2, density=0.4):
    indices = (torch.rand(batch, *shape) < density).nonzero().int()
    return indices[torch.randperm(len(indices))]


def cloud(channels, ndim=3, dtype=torch.float64, **options):
    indices = voxels(SHAPES[ndim], **options)
    features = torch.randn(len(indices), channels, dtype=dtype, requires_grad=True)
    return nn.SparseConvTensor(features, indices, SHAPES[ndim], options.get("batch", 2))


def picked(dense, indices):
    """Rows of [batch, C, *shape] at the voxels."""
    batch, *position = indices.long().T
    return dense.movedim(1, -1)[(batch, *position)]


def dense_result(x, layer):
    """What the layer computes, by torch's own convolution of the dense grid."""
    dense = torch.zeros(x.batch_size, *x.spatial_shape, x.features.shape[1], dtype=torch.float64)
    batch, *position = x.indices.long().T
    dense = dense.index_put((batch, *position), x.features.double()).movedim(-1, 1)
    kernel, bias = layer.kernel.double().movedim(-1, 1), None if layer.bias is None else layer.bias.double()
    ndim = layer.ndim
    if layer.kind == "subm":
        padding = [d * (k // 2) for d, k in zip(layer.dilation, layer.kernel_size)]
        made = CONV[ndim](dense, kernel, bias, 1, padding, layer.dilation, layer.groups)
    elif layer.kind == "strided":
        made = CONV[ndim](dense, kernel, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    else:
        # torch's transposed weight is [in, out / groups, ...]
        split = layer.kernel.double().unflatten(0, (layer.groups, -1)).movedim(-1, 1).flatten(0, 1)
        options = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        made = TRANSPOSED[ndim](dense, split, bias, *options)
    return made


def gradients(result, weights, tensors):
    return torch.autograd.grad((result * weights).sum(), tensors, allow_unused=True)


def assert_equals_dense(x, layer):
    y = layer(x)
    made = dense_result(x, layer)
    assert y.spatial_shape == list(made.shape[2:])
    expected = picked(made, y.indices)
    assert_matches(y.features, expected)
    wanted = [x.features, *layer.parameters()]
    weights = torch.randn_like(expected)
    for actual, reference in zip(gradients(y.features, weights, wanted), gradients(expected, weights, wanted)):
        assert_matches(actual, reference)
    return y, made


SUBMANIFOLD = [
    dict(kernel_size=1),
    dict(kernel_size=3),
    dict(kernel_size=5, bias=False),
    dict(kernel_size=3, dilation=2, padding=1),
    dict(kernel_size=3, groups=2),
    dict(kernel_size=3, groups=4),
    dict(kernel_size=1, groups=2),
]
STRIDED = [
    dict(kernel_size=1),
    dict(kernel_size=1, stride=2),
    dict(kernel_size=2, stride=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=3, padding=1, bias=False),
    dict(kernel_size=3, stride=3, padding=2),
    dict(kernel_size=2, dilation=2, padding=1),
    dict(kernel_size=5, stride=2, padding=2),
    dict(kernel_size=3, stride=2, padding=1, groups=2),
]
TRANSPOSE = [
    dict(kernel_size=2, stride=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=3, stride=2, padding=1, output_padding=1),
    dict(kernel_size=3, dilation=2, padding=1),
    dict(kernel_size=2, stride=2, groups=2, bias=False),
]


@pytest.mark.parametrize("options", SUBMANIFOLD, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_submanifold_convolution_is_the_dense_one_at_its_voxels(ndim, options):
    x = cloud(4, ndim)
    layer = getattr(nn, f"SubMConv{ndim}d")(4, 8, **options).double()
    y, _ = assert_equals_dense(x, layer)
    assert y.indices is x.indices


@pytest.mark.parametrize("options", STRIDED, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_strided_convolution_is_the_dense_one(ndim, options):
    x = cloud(4, ndim)
    layer = getattr(nn, f"SparseConv{ndim}d")(4, 6, **options).double()
    y, made = assert_equals_dense(x, layer)
    elsewhere = made.detach() - (0 if layer.bias is None else layer.bias.view(-1, *[1] * ndim))
    if not layer.is_pointwise:
        elsewhere.movedim(1, -1)[tuple(y.indices.long().T)] = 0
        assert not elsewhere.any()  # every cell that a voxel reaches is an output


def test_a_kernel_of_one_heeds_output_padding():
    layer = nn.SparseConvTranspose1d(4, 6, 1, dilation=2, output_padding=1).double()
    y, _ = assert_equals_dense(cloud(4, 1), layer)
    assert y.spatial_shape == [12]


@pytest.mark.parametrize(
    "layer",
    [
        nn.SubMConv2d(4, 4, 3),
        nn.SparseConv2d(4, 4, 2, stride=2),
        nn.SparseConvTranspose2d(4, 4, 2, stride=2),
        nn.SparseAvgPool2d(2, 2),
        nn.SparseMaxPool2d(2, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_maps_made_in_inference_mode_serve_training(layer):
    x = cloud(4, 2, dtype=torch.float32)
    with torch.inference_mode():
        expected = layer(x).features.clone()
    y = layer(x)
    torch.testing.assert_close(y.features.detach(), expected.clone())
    y.features.sum().backward()
    assert x.features.grad is not None
    assert not y.indices.is_inference()


@pytest.mark.parametrize("options", TRANSPOSE, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_transposed_convolution_is_the_dense_one(ndim, options):
    x = cloud(4, ndim)
    assert_equals_dense(x, getattr(nn, f"SparseConvTranspose{ndim}d")(4, 6, **options).double())


@pytest.mark.parametrize(
    "options", [dict(kernel_size=(3, 1, 3)), dict(kernel_size=(1, 3, 3), dilation=(1, 2, 1))], ids=str
)
def test_kernels_need_not_be_cubes(options):
    x = cloud(3)
    assert_equals_dense(x, nn.SubMConv3d(3, 5, **options).double())
    assert_equals_dense(x, nn.SparseConv3d(3, 5, **options, stride=(1, 2, 3), padding=(1, 0, 1)).double())
    assert_equals_dense(x, nn.SparseConvTranspose3d(3, 5, **options, stride=(1, 2, 3), padding=(1, 0, 1)).double())


@pytest.mark.parametrize("options", [STRIDED[1], STRIDED[2], STRIDED[3], STRIDED[5], STRIDED[6]], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_an_inverse_convolution_is_the_dense_transposed_one_at_the_first_voxels(options, groups):
    x = cloud(4)
    down = nn.SparseConv3d(4, 6, **options, indice_key="down").double()
    coarse = down(x)
    up = nn.SparseInverseConv3d(6, 4, options["kernel_size"], indice_key="down", groups=groups).double()
    y = up(coarse)
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape

    batch, *position = coarse.indices.long().T
    dense = torch.zeros(2, *coarse.spatial_shape, 6, dtype=torch.float64)
    dense = dense.index_put((batch, *position), coarse.features).movedim(-1, 1)
    weight = up.kernel.unflatten(0, (groups, -1)).movedim(-1, 1).flatten(0, 1)
    made = functional.conv_transpose3d(dense, weight, up.bias, down.stride, 0, 0, groups, down.dilation)
    made = functional.pad(made, [0, 8] * 3)  # what no window covers
    made = made[(..., *[slice(p, p + n) for p, n in zip(down.padding, x.spatial_shape)])]
    expected = picked(made, x.indices)
    has_pair = (coarse.indice_dict["down"].kernel_map.inverse.neighbours >= 0).any(1)
    assert_matches(y.features[has_pair], expected[has_pair])
    if (~has_pair).any():
        assert_matches(y.features[~has_pair], up.bias.expand(int((~has_pair).sum()), 4))
    wanted = [coarse.features, *up.parameters()]
    weights = torch.randn_like(expected) * has_pair[:, None]
    for actual, reference in zip(gradients(y.features, weights, wanted), gradients(expected, weights, wanted)):
        assert_matches(actual, reference)


def test_four_axes_are_a_sum_over_the_taps_of_one_of_them():
    indices = voxels([3, 4, 3, 4], density=0.3)
    features = torch.randn(len(indices), 3, dtype=torch.float64)
    x = nn.SparseConvTensor(features, indices, [3, 4, 3, 4], 2)
    layer = nn.SubMConv4d(3, 5, 3).double()
    dense = x.dense()
    expected = torch.zeros(2, 5, 3, 4, 3, 4, dtype=torch.float64)
    for tap in range(3):
        kernel = layer.weight[:, tap].movedim(-1, 1)
        for time in range(3):
            if 0 <= time + tap - 1 < 3:
                expected[:, :, time] += functional.conv3d(dense[:, :, time + tap - 1], kernel, padding=1)
    expected += layer.bias.view(-1, 1, 1, 1, 1)
    assert_matches(layer(x).features, picked(expected, indices))


@pytest.mark.parametrize("make", [nn.SparseConv4d, nn.SparseConvTranspose4d])
def test_four_axes_have_strides_and_padding_and_an_inverse(make):
    """Along the first axis tap by tap, over the other three by torch's own convolution."""
    shape, kernel, stride, padding = [4, 4, 3, 4], (3, 2, 3, 2), (2, 2, 1, 2), (1, 0, 1, 1)
    indices = voxels(shape, density=0.2)
    features = torch.randn(len(indices), 3, dtype=torch.float64, requires_grad=True)
    x = nn.SparseConvTensor(features, indices, shape, 2)
    layer = make(3, 5, kernel, stride, padding, indice_key="a").double()
    y = layer(x)
    dense, is_strided = x.dense(), make is nn.SparseConv4d
    expected = layer.bias.view(-1, 1, 1, 1, 1).expand(2, 5, *y.spatial_shape).clone()
    for tap in range(kernel[0]):
        for fine, coarse in ((f, c) for f in range(8) for c in range(4) if f == stride[0] * c - padding[0] + tap):
            source, target = (fine, coarse) if is_strided else (coarse, fine)
            if source < shape[0] and target < y.spatial_shape[0]:
                weight = layer.weight[:, tap].movedim(-1, 1 if is_strided else 0)
                function = functional.conv3d if is_strided else functional.conv_transpose3d
                options = dict(stride=stride[1:], padding=padding[1:])
                expected[:, :, target] += function(dense[:, :, source], weight, **options)
    assert_matches(y.features, picked(expected, y.indices))
    wanted = [features, *layer.parameters()]
    weights = torch.randn_like(y.features)
    pairs = zip(gradients(y.features, weights, wanted), gradients(picked(expected, y.indices), weights, wanted))
    for actual, reference in pairs:
        assert_matches(actual, reference)
    back = nn.SparseInverseConv4d(5, 3, kernel, "a", bias=False).double()
    back.load_kernel(layer.weight.transpose(0, -1))
    (adjoint,) = torch.autograd.grad(layer(x).features, features, y.features.detach())
    assert_matches(back(y).features, adjoint)  # with channels swapped, the inverse is the gradient of the inputs


@pytest.mark.cpu
@pytest.mark.parametrize("layer", ["SubMConv2d", "SparseConv2d", "SparseConvTranspose2d"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_both_orders_are_right(monkeypatch, layer, groups, deterministic):
    monkeypatch.setenv("INSUM_TUNE", "off")  # bits of two calls are compared, and a form that wins later has others
    indices = voxels([3, 3], batch=1, density=0.5)
    stride = {} if layer == "SubMConv2d" else dict(stride=2, padding=1)
    module = getattr(nn, layer)(4, 4, 3, groups=groups, **stride).double()
    features = torch.randn(len(indices), 4, dtype=torch.float64, requires_grad=True)
    x = nn.SparseConvTensor(features, indices, [3, 3], 1)

    def call(features, weight, bias):
        given = {"weight": weight, "bias": bias}
        return torch.func.functional_call(module, given, (x.replace_feature(features),)).features

    leaves = (features, *(p.detach().clone().requires_grad_() for p in (module.weight, module.bias)))
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_mode_computes_the_same():
    x = cloud(4)
    torch.use_deterministic_algorithms(True)
    try:
        for layer in (nn.SubMConv3d(4, 8, 3), nn.SparseConv3d(4, 8, 3, 2, 1), nn.SubMConv3d(4, 4, 3, groups=4)):
            assert_equals_dense(x, layer.double())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_deterministic_weight_gradient_of_several_groups_to_a_tap(monkeypatch, groups):
    """Long groups are summed, then the groups of each tap."""
    monkeypatch.setattr(conv_forms, "GROUP_SIZE_OF_PARTS", 16)
    x, layer = cloud(4), nn.SubMConv3d(4, 4, 3, groups=groups).double()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert_equals_dense(x, layer)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_map_gives_the_same_at_its_first_use_and_later_ones_whatever_its_size(groups):
    layer = nn.SubMConv3d(4, 4, 3, groups=groups).double()
    for voxels in (30, 29, 30, 28):
        x = cloud(4)
        x = x.select_by_index(torch.arange(voxels, device=x.indices.device))
        for _ in range(3):  # worked out, put in place, in place
            assert_equals_dense(x, layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_precision_is_as_near_as_it_can_be(dtype):
    x = cloud(4, dtype=dtype)
    layer = nn.SubMConv3d(4, 8, 3).to(dtype)
    y = layer(x)
    assert y.features.dtype == dtype
    assert_matches(y.features, picked(dense_result(x, layer), y.indices))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_layers_take_its_type_and_gradients_that_of_their_tensors(dtype):
    x = cloud(4, dtype=torch.float32)
    model = nn.SparseSequential(
        nn.SubMConv3d(4, 8, 3), torch.nn.ReLU(), nn.SparseConv3d(8, 8, 2, 2, groups=2), nn.SubMConv3d(8, 4, 1)
    )
    with torch.autocast("cpu", dtype):
        y = model(x)
    assert y.features.dtype == dtype
    y.features.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    gradient = x.features.grad
    x.features.grad = None
    model(x).features.square().sum().backward()
    scale = x.features.grad.abs().max()
    assert (gradient - x.features.grad).abs().max() < 0.1 * scale


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_types_that_differ_are_promoted_whatever_the_kernel(kernel, groups, bias):
    x = cloud(4, dtype=torch.float32)
    for layer, features, expected in (
        (nn.SubMConv3d(4, 8, kernel, groups=groups, bias=bias), x.features.half(), torch.float32),
        (nn.SubMConv3d(4, 8, kernel, groups=groups, bias=bias).bfloat16(), x.features, torch.float32),
        (nn.SubMConv3d(4, 8, kernel, groups=groups, bias=bias).half(), x.features.double(), torch.float64),
    ):
        features = features.detach().requires_grad_()
        y = layer(x.replace_feature(features)).features
        assert y.dtype == expected
        wide = copy.deepcopy(layer).to(expected)(x.replace_feature(features.to(expected))).features
        assert_matches(y, wide.double())
        y.sum().backward()
        assert features.grad.dtype == features.dtype
        assert all(parameter.grad.dtype == parameter.dtype for parameter in layer.parameters())


@pytest.mark.cpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_under_autocast_a_layer_takes_its_type_but_for_float64(kernel, groups):
    layer = nn.SubMConv3d(4, 8, kernel, groups=groups)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(cloud(4, dtype=torch.float32)).features.dtype == torch.bfloat16
        assert layer(cloud(4, dtype=torch.bfloat16)).features.dtype == torch.bfloat16
        assert layer(cloud(4, dtype=torch.float64)).features.dtype == torch.float64


def test_permuting_the_voxels_permutes_the_outputs():
    x = cloud(4)
    order = torch.randperm(len(x.indices))
    moved = nn.SparseConvTensor(x.features[order], x.indices[order], x.spatial_shape, 2)
    layer = nn.SubMConv3d(4, 8, 3).double()
    assert_matches(layer(moved).features, layer(x).features[order])
    strided = nn.SparseConv3d(4, 8, 3, 2, 1).double()
    assert torch.equal(strided(moved).indices, strided(x).indices)
    assert_matches(strided(moved).features, strided(x).features)


def test_batch_entries_do_not_meet():
    x = cloud(4, batch=3)
    layer = nn.SparseConv3d(4, 6, 3, 2, 1).double()
    whole = layer(x)
    for entry in range(3):
        pick = x.indices[:, 0] == entry
        alone = layer(x.select_by_index(pick))
        there = whole.indices[:, 0] == entry
        assert torch.equal(alone.indices, whole.indices[there])
        assert_matches(alone.features, whole.features[there])


@pytest.mark.parametrize(
    "layer", [nn.SubMConv3d(2, 3, 3), nn.SparseConv3d(2, 3, 2, 2), nn.SparseConvTranspose3d(2, 3, 2, 2)], ids=repr
)
@pytest.mark.parametrize("count", [0, 1])
def test_no_voxel_and_one_voxel_work_and_train(layer, count):
    indices = torch.tensor([[1, 2, 1, 0]], dtype=torch.int32)[:count]
    features = torch.randn(count, 2, dtype=torch.float64, requires_grad=True)
    layer = layer.double()
    layer.zero_grad()
    y = layer(nn.SparseConvTensor(features, indices, [4, 4, 4], 3))
    assert y.features.shape[1] == 3
    assert (
        len(y.features)
        == count * {"SubMConv3d": 1, "SparseConv3d": 1, "SparseConvTranspose3d": 8}[type(layer).__name__]
    )
    y.features.sum().backward()
    assert features.grad.shape == features.shape
    assert torch.isfinite(layer.weight.grad).all()
    assert y.dense().shape[:2] == (3, 3)


def test_a_nan_in_one_voxel_reaches_its_neighbours_alone():
    indices = torch.tensor([[0, 0], [0, 1], [0, 5], [0, 9]], dtype=torch.int32)
    features = torch.ones(4, 2)
    features[0] = float("nan")
    y = nn.SubMConv1d(2, 2, 3)(nn.SparseConvTensor(features, indices, [10], 1)).features
    assert y.isnan().all(1).tolist() == [True, True, False, False]


@pytest.mark.cpu
def test_the_function_takes_any_map_and_gives_what_the_layer_gives():
    x = cloud(4)
    layer = nn.SparseConv3d(4, 6, 3, 2, 1).double()
    found = kernel_map(x.indices, x.spatial_shape, 2, 3, 2, 1, kind="strided")
    assert torch.equal(sparse_conv3d(x.features, layer.weight, found, layer.bias), layer(x).features)
    back = sparse_conv3d(layer(x).features, layer.weight.transpose(0, -1), found.inverse)
    assert back.shape == (len(x.indices), 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces an autograd.Function
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_network_traces_into_one_graph_once_its_maps_are_known(backend):
    torch._dynamo.reset()
    x = cloud(4, dtype=torch.float32)
    model = nn.SparseSequential(
        nn.SubMConv3d(4, 8, 3, indice_key="a"),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        nn.SparseConv3d(8, 8, 2, 2, indice_key="down"),
        nn.SparseInverseConv3d(8, 4, 2, indice_key="down"),
        nn.SubMConv3d(4, 4, 3, groups=4, indice_key="a2"),
    ).eval()

    def call(features):
        return model(x.replace_feature(features)).features

    expected = call(x.features)
    expected.square().sum().backward()  # makes the inverse maps as well
    gradient, x.features.grad = x.features.grad, None
    y = torch.compile(call, fullgraph=True, backend=backend)(x.features)
    y.square().sum().backward()
    assert_matches(y, expected.double())
    assert_matches(x.features.grad, gradient.double())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_maps_are_never_searched_for_their_range(monkeypatch, deterministic):
    x = cloud(4)
    layer = nn.SparseConv3d(4, 8, 3, 2, 1).double()
    monkeypatch.setattr(ranges, "_bounds", lambda *_: pytest.fail("read an index tensor whose range is known"))
    torch.use_deterministic_algorithms(deterministic)
    try:
        layer(x).features.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_weights_start_within_the_bounds_of_a_dense_layer():
    layer, dense = nn.SubMConv3d(8, 16, 3), torch.nn.Conv3d(8, 16, 3)
    assert layer.weight.abs().max() <= dense.weight.abs().max() * 1.05
    assert layer.bias.abs().max() <= (8 * 27) ** -0.5


def test_layers_print_what_they_are():
    assert repr(nn.SubMConv3d(4, 8, 3, indice_key="a")) == "SubMConv3d(4, 8, kernel_size=[3, 3, 3], indice_key='a')"
    assert repr(nn.SparseConv2d(4, 8, (3, 1), 2, 1, 2, 4, False)) == (
        "SparseConv2d(4, 8, kernel_size=[3, 1], stride=[2, 2], padding=[1, 1], dilation=[2, 2], groups=4, bias=False)"
    )


def test_arguments_of_spconv_are_accepted_in_its_order():
    nn.SubMConv3d(4, 8, 3, 1, 1, 1, 1, False, "a", None, True, False, "name")
    nn.SparseConv3d(4, 8, 3, 2, 1, 1, 1, False, "a", None, True, False, False, "name")
    nn.SparseInverseConv3d(4, 8, 3, "a", False, None, True, False, "name")


def test_sizes_may_be_any_integers():
    layer = nn.SparseConv3d(4, 8, numpy.array([3, 1, 2]), numpy.int64(2), torch.tensor(1))
    expected = nn.SparseConv3d(4, 8, [3, 1, 2], 2, 1)
    assert (repr(layer), layer.layout) == (repr(expected), expected.layout)


def _x(channels=4, ndim=3):
    return nn.SparseConvTensor(torch.ones(1, channels), torch.zeros(1, 1 + ndim, dtype=torch.int32), [2] * ndim, 1)


INTEGERS = _x().replace_feature(torch.ones(1, 4, dtype=torch.int64))
NOT_FLOATING = (
    "{} takes features of a floating-point type, but they are torch.int64; "
    "write x = x.replace_feature(x.features.float())"
)
MISTAKES = [
    (lambda: nn.SubMConv3d(4, 8, 3)(INTEGERS), OperandError, NOT_FLOATING.format("SubMConv3d")),
    (lambda: nn.SparseConv3d(4, 8, 1)(INTEGERS), OperandError, NOT_FLOATING.format("SparseConv3d")),
    (lambda: nn.SparseMaxPool3d(2)(INTEGERS), OperandError, NOT_FLOATING.format("SparseMaxPool3d")),
    (
        lambda: nn.SubMConv3d(4, 8, 3)(_x().replace_feature(torch.ones(1, 4, dtype=torch.complex64))),
        OperandError,
        "SubMConv3d takes features of a floating-point type, but they are torch.complex64; "
        "write x = x.replace_feature(torch.view_as_real(x.features).flatten(1))",
    ),
    (lambda: nn.SubMConv3d(5, 8, 3)(_x()), ShapeError, "SubMConv3d takes 5 channels but features have 4"),
    (lambda: nn.SubMConv2d(4, 8, 3)(_x()), ShapeError, "SubMConv2d takes 2 axes but spatial_shape is [2, 2, 2]"),
    (
        lambda: nn.SubMConv3d(4, 8, 3)(torch.ones(1, 4)),
        OperandError,
        "SubMConv3d takes a SparseConvTensor of insum_ops.nn, but got a Tensor; make one of features and voxels, "
        "SparseConvTensor(features, indices, spatial_shape, batch_size)",
    ),
    (
        lambda: nn.SubMConv3d(4, 6, 3, groups=4),
        ShapeError,
        "groups is 4 but the channels are 4 in and 6 out; groups must divide both",
    ),
    (lambda: nn.SubMConv3d(0, 6, 3), ShapeError, "in_channels is 0 and out_channels 6; both are at least 1"),
    (
        lambda: nn.SubMConv3d(4, 6, 2),
        ShapeError,
        "kernel_size is [2, 2, 2]; a submanifold kernel has a centre, so each size is odd",
    ),
    (
        lambda: nn.SubMConv3d(4, 6, 3, 2),
        ShapeError,
        "stride is [2, 2, 2]; a submanifold convolution keeps its voxels, so its stride is 1; use SparseConv3d to "
        "downsample",
    ),
    (
        lambda: nn.SparseConv3d(4, 6, 1, 1, 1),
        ShapeError,
        "padding is [1, 1, 1] but the kernel is 1 and so is the stride; such a layer takes none",
    ),
    (
        lambda: nn.SparseInverseConv3d(4, 6, 3, None),
        OperandError,
        "indice_key is None; name the key of the convolution that is to be undone",
    ),
    (
        lambda: nn.SubMConv3d(4, 6, 3).load_kernel(torch.ones(4, 3, 3, 3, 6)),
        ShapeError,
        "kernel is [4, 3, 3, 3, 6] but SubMConv3d takes [6, 3, 3, 3, 4], [out channels, *kernel_size, "
        "in channels / groups]",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES, ids=[message[:40] for *_, message in MISTAKES])
def test_a_mistake_is_named(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("rows", [1, 9])
def test_features_that_no_longer_fit_their_voxels_are_refused(rows):
    """Memory of another length, put there between two calls."""
    x, layer = cloud(4), nn.SubMConv3d(4, 8, 3).double()
    count = len(layer(x).indices)
    x.features.data = torch.randn(count * rows // 3, 4, dtype=torch.float64)
    with pytest.raises(ShapeError) as caught:
        layer(x)
    assert str(caught.value) == (
        f"features is [{count * rows // 3}, 4] but the kernel map has {count} input voxels; features are "
        "[voxels, channels]"
    )


FUNCTIONAL = [
    (
        dict(features=torch.ones(2, 4)),
        "features is [2, 4] but the kernel map has 1 input voxels; features are [voxels, channels]",
    ),
    (
        dict(weight=torch.ones(6, 3, 4)),
        "weight is [6, 3, 4] but the kernel map was made for kernel_size [3, 3]; weights are [out channels, "
        "*kernel_size, in channels / groups]",
    ),
    (dict(groups=4), "weight has 6 output channels and groups is 4; groups must divide the channels"),
    (
        dict(groups=2),
        "features have 4 channels but weight is [6, 3, 3, 4] with groups 2, which takes 8",
    ),
    (dict(features=_x()), "features is of type SparseConvTensor; pass a tensor"),
    (dict(weight=None), "weight is of type NoneType; pass a tensor"),
    (dict(bias=True), "bias is of type bool; pass a tensor"),
    (
        dict(kernel_map=torch.zeros(1, 3, dtype=torch.int32)),
        "kernel_map is of type Tensor; pass what insum_ops.formats.kernel_map makes",
    ),
    (dict(bias=torch.ones(5)), "bias is [5] but weight has 6 output channels; give one each"),
]


@pytest.mark.parametrize(("wrong", "message"), FUNCTIONAL, ids=[message[:40] for _, message in FUNCTIONAL])
def test_a_mistake_of_the_function_is_named(wrong, message):
    found = kernel_map(torch.zeros(1, 3, dtype=torch.int32), [2, 2], 1, 3)
    call = dict(features=torch.ones(1, 4), weight=torch.ones(6, 3, 3, 4), kernel_map=found)
    with pytest.raises((ShapeError, OperandError)) as caught:
        sparse_conv3d(**{**call, **wrong})
    assert str(caught.value) == message
