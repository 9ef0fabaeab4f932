"""SparseConvTensor, indice_key, pooling and containers."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections import OrderedDict

import numpy
import pytest
import torch
from tolerances import assert_matches
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from insum_ops import explain, nn
from insum_ops.compiler.language.errors import OperandError, ShapeError
from insum_ops.formats import FormatError

SHAPE = [4, 5, 6]


NOT_A_TENSOR = (
    "takes a SparseConvTensor of insum_ops.nn, but got a Tensor; make one of features and voxels, "
    "SparseConvTensor(features, indices, spatial_shape, batch_size)"
)


def cloud(channels=4, density=0.4, dtype=torch.float64):
    indices = (torch.rand(2, *SHAPE) < density).nonzero().int()
    indices = indices[torch.randperm(len(indices))]
    return nn.SparseConvTensor(torch.randn(len(indices), channels, dtype=dtype, requires_grad=True), indices, SHAPE, 2)


def test_dense_and_back_is_the_same_cloud():
    x = cloud()
    dense = x.dense()
    assert dense.shape == (2, 4, *SHAPE)
    batch, *position = x.indices.long().T
    assert torch.equal(dense.movedim(1, -1)[(batch, *position)], x.features)
    assert int((dense != 0).any(1).sum()) == len(x.indices)
    assert torch.equal(x.dense(channels_first=False), dense.movedim(1, -1))
    back = nn.SparseConvTensor.from_dense(x.dense(channels_first=False))
    assert torch.equal(back.dense(), dense)
    assert back.indices.dtype == torch.int32
    (gradient,) = torch.autograd.grad(dense.sum(), x.features)
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_attributes_are_those_of_spconv():
    x = cloud()
    assert (x.spatial_shape, x.batch_size, x.spatial_size, x.indice_dict) == (SHAPE, 2, 120, {})
    y = x.replace_feature(x.features * 2)
    assert y.indices is x.indices
    assert y.indice_dict is x.indice_dict
    assert torch.equal((x + y).features, 3 * x.features)
    assert torch.equal((x + y.features).features, 3 * x.features)
    assert x.shadow_copy().features is x.features
    few = x.select_by_index(x.indices[:, 0] == 1)
    assert (few.indices[:, 0] == 1).all()
    assert x.find_indice_pair("a") is None
    assert x.find_indice_pair(None) is None
    nn.SubMConv3d(4, 4, 3, indice_key="a").double()(x)
    assert x.find_indice_pair("a").kernel_map.kind == "subm"
    assert repr(few) == (
        f"SparseConvTensor(voxels={len(few.indices)}, channels=4, spatial_shape=[4, 5, 6], batch_size=2, "
        "dtype=torch.float64)"
    )


def test_layers_of_one_layout_share_a_map():
    x = cloud()
    first = nn.SubMConv3d(4, 4, 3, indice_key="a").double()
    second = nn.SubMConv3d(4, 4, 3).double()  # without a key, and with a padding that means nothing
    third = nn.SubMConv3d(4, 4, 3, padding=1, indice_key="b").double()
    down = nn.SparseConv3d(4, 4, 2, 2, indice_key="down").double()
    up = nn.SparseInverseConv3d(4, 4, 2, "down").double()
    y = third(second(first(x)))
    low = down(y)
    z = first(up(second(second(low))))  # back on the first voxels, with their maps
    assert z.indices is x.indices
    own, *others = (layer.map(given)[0] for layer in (first, second, third) for given in (x, y, z))
    assert all(found is own for found in others)
    assert down.map(x)[0] is down.map(y)[0] is low.find_indice_pair("down").kernel_map
    assert second.map(low)[0] is second.map(second(low))[0]


def test_memory_is_freed_without_the_cycle_collector():
    x = cloud()
    down = nn.SparseConv3d(4, 4, 2, 2, indice_key="down").double()
    y = nn.SubMConv3d(4, 4, 3, indice_key="a").double()(nn.SparseInverseConv3d(4, 4, 2, "down").double()(down(x)))
    y.features.sum().backward()
    indices = weakref.ref(x.voxels)
    gc.disable()
    try:
        del x, y
        assert indices() is None
    finally:
        gc.enable()


@pytest.mark.cpu
@pytest.mark.parametrize("make", [lambda: nn.SubMConv3d(4, 4, 3), lambda: nn.SparseConv3d(4, 4, 2, 2)])
def test_indices_changed_in_place_get_another_map(make):
    x, layer = cloud(), make().double()
    layer(x)
    x.indices[:, 1:].copy_(x.indices[:, 1:].flip(0).clone())
    x.indices[:, 0].copy_(x.indices[:, 0].flip(0).clone())
    dense = layer(nn.SparseConvTensor(x.features, x.indices.clone(), SHAPE, 2)).dense()
    assert torch.equal(layer(x).dense(), dense)


@pytest.mark.cpu
@pytest.mark.parametrize("make", [lambda: nn.SparseConv3d(4, 4, 2, 2), lambda: nn.SparseMaxPool3d(2)])
def test_outputs_changed_in_place_are_made_again(make):
    x, layer = cloud(), make().double()
    y = layer(x)
    expected = y.indices.clone()
    y.indices[:, 1:] *= 2  # as who wants the coordinates of the first grid
    again = layer(x)
    assert torch.equal(again.indices, expected)
    assert torch.equal(again.features, y.features)
    assert layer(x).indices is again.indices


@pytest.mark.cpu
def test_a_key_that_leads_to_outputs_changed_in_place_is_refused_and_its_inverse_is_not():
    x = cloud()
    down = nn.SparseConv3d(4, 4, 2, 2, indice_key="a").double()
    up = nn.SparseInverseConv3d(4, 4, 2, "a").double()
    same = nn.SubMConv3d(4, 4, 3, indice_key="b").double()
    y = down(x)
    expected = up(y).features
    y.indices[:, 1:] = y.indices[:, 1:].flip(0).clone()
    with pytest.raises(OperandError) as caught:
        down(x)
    assert str(caught.value) == (
        "indice_key 'a' leads to voxels whose indices were changed in place since it was saved; change a clone of them"
    )
    assert torch.equal(up(y).features, expected), "by rows, which are what they were"
    fresh = nn.SparseConvTensor(y.features, y.indices.clone(), y.spatial_shape, 2)
    for _ in range(2):
        assert torch.equal(same(y).features, same(fresh).features), "changed before they were used"


@pytest.mark.cpu
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_takes_its_maps_along(copied):
    x = cloud()
    x.indices.add_(0)  # so that its version is not that of a new tensor
    down, up = nn.SparseConv3d(4, 4, 2, 2, indice_key="a").double(), nn.SparseInverseConv3d(4, 4, 2, "a").double()
    expected = up(down(x)).features
    other = copied(x.replace_feature(x.features.detach()))
    assert torch.equal(up(down(other)).features, expected)


@pytest.mark.parametrize("use", ["again", "inverse"])
def test_a_key_saved_before_indices_were_changed_in_place_is_refused(use):
    x = cloud()
    down = nn.SparseConv3d(4, 4, 2, 2, indice_key="a").double()
    y = down(x)
    x.indices.copy_(x.indices.flip(0).clone())
    with pytest.raises(OperandError) as caught:
        down(x) if use == "again" else nn.SparseInverseConv3d(4, 4, 2, "a").double()(y)
    assert str(caught.value) == (
        "indice_key 'a' was saved before the indices of its voxels were changed in place; make a new "
        "SparseConvTensor of the changed ones"
    )


def saved(key="a", **options):
    x = cloud()
    layer = nn.SparseConv3d(4, 4, 2, 2, indice_key=key, **options).double()
    return x, layer(x)


def test_an_unknown_key_is_named():
    _, y = saved()
    with pytest.raises(OperandError) as caught:
        nn.SparseInverseConv3d(4, 4, 2, "b")(y)
    assert str(caught.value) == (
        "no map was saved under indice_key 'b'; saved are 'a'; give the key to the strided convolution that this one "
        "is to undo"
    )


def test_an_inverse_of_a_kernel_of_one_is_told_that_there_is_no_map_to_go_back_over():
    """Whose convolution has the very key, but moves no voxel."""
    layer = nn.SparseConv3d(4, 4, 1, indice_key="a").double()
    with pytest.raises(OperandError) as caught:
        nn.SparseInverseConv3d(4, 4, 1, "a")(layer(cloud()))
    assert str(caught.value) == (
        "no map was saved under indice_key 'a'; saved are none; give the key to the strided convolution that this one "
        "is to undo; one of kernel_size 1 and stride 1 keeps its voxels and saves no map: a second such one undoes it"
    )


def test_an_inverse_must_fit_what_was_saved():
    x, y = saved()
    with pytest.raises(OperandError) as caught:
        nn.SparseInverseConv3d(4, 4, 3, "a")(y)
    assert str(caught.value) == (
        "indice_key 'a' was saved with kernel_size [2, 2, 2], but this inverse has [3, 3, 3]; they must agree"
    )
    with pytest.raises(OperandError) as caught:
        nn.SparseInverseConv3d(4, 4, 2, "a")(x)
    assert str(caught.value) == (
        f"indice_key 'a' leads back from {len(y.indices)} voxels of spatial_shape [2, 2, 3], but this inverse got "
        f"{len(x.indices)} voxels of spatial_shape [4, 5, 6]; bring the features to the voxels that the strided "
        "convolution made"
    )
    nn.SubMConv3d(4, 4, 3, indice_key="same").double()(x)
    with pytest.raises(OperandError) as caught:
        nn.SparseInverseConv3d(4, 4, 3, "same")(x)
    assert str(caught.value) == (
        "indice_key 'same' was saved by a submanifold convolution, which keeps its voxels; an inverse convolution "
        "undoes a strided or transposed one"
    )


def test_a_key_stands_for_one_layout_and_one_set_of_voxels():
    x, y = saved()
    with pytest.raises(OperandError) as caught:
        nn.SparseConv3d(4, 4, 3, 2, 1, indice_key="a")(x)
    assert str(caught.value) == (
        "indice_key 'a' was saved by a layer with kind 'strided', kernel_size [2, 2, 2], stride [2, 2, 2], padding "
        "[0, 0, 0], dilation [1, 1, 1], but this one has kind 'strided', kernel_size [3, 3, 3], stride [2, 2, 2], "
        "padding [1, 1, 1], dilation [1, 1, 1]; give it another key"
    )
    with pytest.raises(OperandError) as caught:
        nn.SparseConv3d(4, 4, 2, 2, indice_key="a")(y)
    assert str(caught.value) == (
        f"indice_key 'a' was saved for {len(x.indices)} voxels of spatial_shape [4, 5, 6], but this layer got "
        f"{len(y.indices)} voxels of spatial_shape [2, 2, 3]; give it another key"
    )


@pytest.mark.cpu
def test_equal_voxels_in_another_tensor_reuse_a_key():
    x = cloud()
    layer = nn.SubMConv3d(4, 4, 3, indice_key="a").double()
    y = layer(x)
    again = nn.SparseConvTensor(x.features, x.indices.clone(), SHAPE, 2, indice_dict=x.indice_dict)
    assert torch.equal(layer(again).features, y.features)


def test_tensors_on_different_voxels_do_not_add():
    x, y = saved()
    with pytest.raises(OperandError) as caught:
        x + y
    assert str(caught.value) == "the two tensors lie on different voxels; bring them to the same ones to add them"


def test_features_of_other_voxels_need_another_tensor():
    x, _ = saved()
    rows = len(x.indices)
    with pytest.raises(ShapeError) as caught:
        x.replace_feature(torch.ones(rows + 1, 4))
    assert str(caught.value) == (
        f"features is [{rows + 1}, 4] but there are {rows} voxels; features are [voxels, channels]; with other voxels "
        "write x = SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)"
    )
    with pytest.raises(ShapeError) as caught:
        x.replace_feature(torch.ones(rows))
    assert str(caught.value) == f"features is [{rows}] but there are {rows} voxels; features are [voxels, channels]"


INDICES = torch.tensor([[0, 1, 2, 3], [1, 0, 0, 0]], dtype=torch.int32)
MISTAKES = [
    (
        (torch.ones(3, 4), INDICES, SHAPE, 2),
        ShapeError,
        "features is [3, 4] but there are 2 voxels; features are [voxels, channels]",
    ),
    (
        (torch.ones(2), INDICES, SHAPE, 2),
        ShapeError,
        "features is [2] but there are 2 voxels; features are [voxels, channels]",
    ),
    (
        (torch.ones(2, 4), INDICES.float(), SHAPE, 2),
        FormatError,
        "indices is torch.float32; coordinates are torch.int32 or torch.int64, as indices.int() is",
    ),
    (
        (torch.ones(2, 4), INDICES, SHAPE[:2], 2),
        FormatError,
        "indices is [2, 4] but spatial_shape is [4, 5]; it must be [N, 3], the batch and then a coordinate for "
        "each axis",
    ),
    (
        (torch.ones(2, 4, device="meta"), INDICES, SHAPE, 2),
        OperandError,
        "features are on meta but indices on cpu; move one",
    ),
    (
        (numpy.ones((2, 4)), INDICES, SHAPE, 2),
        OperandError,
        "features is of type ndarray; pass a tensor [voxels, channels]",
    ),
    (
        (torch.ones(2, 4), INDICES, [4, 5, 6.5], 2),
        FormatError,
        "spatial_shape is [4, 5, 6.5]; it holds a whole number for each dimension",
    ),
    (
        (torch.ones(2, 4), INDICES, 4, 2),
        FormatError,
        "spatial_shape is 4; it holds a whole number for each dimension",
    ),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("call", "kind", "message"), MISTAKES, ids=[message[:40] for *_, message in MISTAKES])
def test_a_mistake_is_named(call, kind, message):
    with pytest.raises(kind) as caught:
        nn.SparseConvTensor(*call)
    assert str(caught.value) == message


@pytest.mark.cpu
@pytest.mark.parametrize("layer", [nn.SubMConv3d(4, 2, 3), nn.SparseConv3d(4, 2, 2), nn.SparseMaxPool3d(2)])
def test_voxels_without_numbers_are_refused(layer):
    x = nn.SparseConvTensor(torch.ones(2, 4, device="meta"), INDICES.to("meta"), SHAPE, 2)
    with pytest.raises(FormatError) as caught:
        layer.to("meta")(x)
    assert str(caught.value) == (
        "indices is on the meta device, where it lists no entries; give it memory and numbers first"
    )


@pytest.mark.parametrize("shape", [torch.tensor(SHAPE), numpy.array(SHAPE), (4.0, 5.0, 6.0)])
def test_a_spatial_shape_may_be_any_whole_numbers(shape):
    assert nn.SparseConvTensor(torch.ones(2, 4), INDICES, shape, 2).spatial_shape == SHAPE


@pytest.mark.parametrize("wrong", ["two", None, [2], 2.5, float("inf")], ids=str)
def test_a_batch_size_is_a_whole_number(wrong):
    with pytest.raises(FormatError) as caught:
        nn.SparseConvTensor(torch.ones(2, 4), INDICES, SHAPE, wrong)
    assert str(caught.value) == f"batch_size is {wrong}; it is a whole number"


def test_features_are_replaced_and_not_set():
    x = cloud()
    with pytest.raises(OperandError) as caught:
        x.indices = torch.cat([x.indices, x.indices])
    assert str(caught.value) == (
        "indices of a SparseConvTensor are not set; write x = SparseConvTensor(features, indices, x.spatial_shape, "
        "x.batch_size)"
    )
    with pytest.raises(OperandError) as caught:
        x.features = x.features * 2
    assert str(caught.value) == "features of a SparseConvTensor are not set; write x = x.replace_feature(features)"


def test_casting_a_dataclass_field_by_field_casts_the_features():
    """Lightning's precision plugins copy a dataclass and set each of its fields, floating-point tensors cast."""
    x = cloud().float()
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    y = copy.deepcopy(x, memo={id(value): value for value in fields.values()})
    for name, value in fields.items():
        is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
        setattr(y, name, value.double() if is_cast else value)
    assert (y.features.dtype, x.features.dtype) == (torch.float64, torch.float32)
    assert y.indices is x.indices
    torch.testing.assert_close(y.dense(), x.dense().double(), rtol=0, atol=0)
    for other in (x.features * 2, x.features[:-1].double(), None):
        with pytest.raises(OperandError, match=r"^features of a SparseConvTensor are not set; "):
            x.features = other


@pytest.mark.parametrize("features", [None, numpy.ones((2, 4)), (torch.ones(2, 4), None)], ids=type)
def test_features_are_replaced_by_a_tensor(features):
    with pytest.raises(OperandError) as caught:
        nn.SparseConvTensor(torch.ones(2, 4), INDICES, SHAPE, 2).replace_feature(features)
    assert str(caught.value) == (f"features is of type {type(features).__name__}; pass a tensor [voxels, channels]")


def test_a_grid_has_its_size_in_an_empty_batch_too():
    x = nn.SparseConvTensor(torch.ones(0, 4), INDICES[:0], SHAPE, 0)
    assert x.spatial_size == 120


def test_from_dense_needs_an_axis():
    with pytest.raises(ShapeError) as caught:
        nn.SparseConvTensor.from_dense(torch.ones(2, 3))
    assert str(caught.value) == "x is [2, 3]; it must be [batch, *spatial_shape, channels]"


@pytest.mark.parametrize(
    "use", [lambda x: x.dense(), lambda x: nn.SubMConv3d(1, 1, 3)(x), lambda x: nn.SparseConv3d(1, 1, 2, 2)(x)]
)
def test_wrong_voxels_are_refused_wherever_they_are_first_used(use):
    outside = nn.SparseConvTensor(torch.ones(2, 1), INDICES, [4, 5, 3], 2)
    with pytest.raises(FormatError, match=r"^indices\[0\] is \[0, 1, 2, 3\], whose coordinate 3 on axis 2 is outside"):
        use(outside)
    twice = nn.SparseConvTensor(torch.ones(2, 1), INDICES[[1, 1]], SHAPE, 2)
    with pytest.raises(
        FormatError, match=r"^indices\[0\] and indices\[1\] are both \[1, 0, 0, 0\]; give each voxel once"
    ):
        use(twice)


POOLS = [dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1), dict(kernel_size=2, stride=1, dilation=2)]


@pytest.mark.parametrize("options", POOLS, ids=str)
def test_max_pooling_is_the_dense_one_without_the_empty_cells(options):
    x = cloud()
    y = nn.SparseMaxPool3d(**options)(x)
    batch, *position = x.indices.long().T
    dense = torch.full((2, *SHAPE, 4), -torch.inf, dtype=torch.float64)
    dense = dense.index_put((batch, *position), x.features).movedim(-1, 1)
    expected = functional.max_pool3d(dense, **options)
    batch, *position = y.indices.long().T
    assert y.spatial_shape == list(expected.shape[2:])
    expected = expected.movedim(1, -1)[(batch, *position)]
    assert torch.equal(y.features, expected)
    weights = torch.randn_like(expected)
    for result in (y.features, expected):
        result.backward(weights)
        gradient, x.features.grad = x.features.grad, None
        if result is y.features:
            first = gradient
    assert_matches(first, gradient)


@pytest.mark.parametrize("options", POOLS[:2], ids=str)
def test_average_pooling_divides_by_the_voxels_there_are(options):
    x = cloud()
    y = nn.SparseAvgPool3d(**options)(x)
    occupied = x.replace_feature(torch.ones(len(x.indices), 1, dtype=torch.float64)).dense()
    kernel = options["kernel_size"]
    sums = [functional.avg_pool3d(dense, **options) * kernel**3 for dense in (x.dense(), occupied)]
    batch, *position = y.indices.long().T
    expected = (sums[0] / sums[1]).movedim(1, -1)[(batch, *position)]
    assert_matches(y.features, expected)
    weights = torch.randn_like(expected)
    (actual,) = torch.autograd.grad((y.features * weights).sum(), x.features)
    (reference,) = torch.autograd.grad((expected * weights).sum(), x.features)
    assert_matches(actual, reference)


def test_of_equal_features_the_first_tap_gets_the_gradient():
    features = torch.ones(3, 2, requires_grad=True)
    x = nn.SparseConvTensor(features, torch.tensor([[0, 1], [0, 0], [0, 2]]), [4], 1)
    nn.SparseMaxPool1d(2)(x).features.sum().backward()
    assert features.grad.tolist() == [[0, 0], [1, 1], [1, 1]]


def test_max_pooling_is_one_statement():
    y = explain(nn.SparseMaxPool3d.EXPR, In=torch.ones(2, 3), NBR=torch.tensor([[0, 1], [-1, 1]]))
    assert "scatter: store" in str(y)


@pytest.mark.parametrize("pool", [nn.SparseMaxPool3d(2), nn.SparseAvgPool3d(2)], ids=repr)
def test_pooling_keeps_its_type_under_autocast(pool):
    x = cloud()
    x = x.replace_feature(x.features.detach().float().requires_grad_())
    expected = pool(x).features
    with torch.autocast("cpu", torch.bfloat16):
        actual = pool(x).features
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_max_pooling_are_right(deterministic):
    x = cloud(density=0.2)
    torch.use_deterministic_algorithms(deterministic)
    try:
        pool = nn.SparseMaxPool3d(3, 2, 1)
        call = lambda features: pool(x.replace_feature(features)).features
        assert torch.autograd.gradcheck(call, x.features, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, x.features, fast_mode=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_pooling_over_a_submanifold_keeps_the_voxels():
    x = cloud()
    y = nn.SparseMaxPool3d(3, subm=True)(x)
    assert y.indices is x.indices
    assert (y.features >= x.features).all()
    assert repr(nn.SparseMaxPool3d(3, 2, 1, 2, "a")) == (
        "SparseMaxPool3d(kernel_size=[3, 3, 3], stride=[2, 2, 2], padding=[1, 1, 1], dilation=[2, 2, 2], "
        "indice_key='a')"
    )


@pytest.mark.parametrize("pool", [nn.SparseMaxPool3d, nn.SparseAvgPool3d])
def test_pools_take_the_arguments_of_spconv_in_its_order(pool):
    """kernel_size, stride, padding, dilation, indice_key, algo, record_voxel_count, name: an algorithm is no subm."""
    made = pool(3, 2, 1, 1, "a", 1, True, "name")
    assert (made.subm, made.name, made.layout.kind) == (False, "name", "strided")


@pytest.mark.parametrize("pool", [nn.SparseMaxPool3d(2), nn.SparseAvgPool3d(2)], ids=repr)
def test_pooling_no_voxel_gives_none(pool):
    empty = nn.SparseConvTensor(torch.ones(0, 3), torch.ones(0, 4, dtype=torch.int32), SHAPE, 1)
    assert pool(empty).features.shape == (0, 3)
    with pytest.raises(OperandError) as caught:
        pool(torch.ones(1))
    name = type(pool).__name__
    assert str(caught.value) == f"{name} {NOT_A_TENSOR}"
    with pytest.raises(ShapeError) as caught:
        pool(nn.SparseConvTensor(torch.ones(0, 3), torch.ones(0, 2, dtype=torch.int32), [3], 1))
    assert str(caught.value) == f"{name} takes 3 axes but spatial_shape is [3]"


def test_what_pooling_saved_an_inverse_convolution_undoes():
    x = cloud()
    y = nn.SparseMaxPool3d(2, indice_key="pool")(x)
    assert nn.SparseInverseConv3d(4, 3, 2, "pool").double()(y).indices is x.indices


def test_a_sequence_gives_plain_modules_the_features():
    x = cloud()
    conv, norm = nn.SubMConv3d(4, 8, 3), torch.nn.BatchNorm1d(8)
    model = nn.SparseSequential(
        conv, norm, torch.nn.ReLU(), nn.SparseIdentity(), nn.ToDense(), torch.nn.Flatten()
    ).double()
    assert len(model) == 6
    assert model[1] is norm
    expected = torch.relu(functional.batch_norm(conv(x).features, None, None, training=True))
    assert_matches(model(x), x.replace_feature(expected).dense().flatten(1))
    assert list(dict(nn.SparseSequential(OrderedDict(a=conv, b=norm)).named_children())) == ["a", "b"]
    assert list(dict(nn.SparseSequential(conv, last=norm).named_children())) == ["0", "last"]


def test_a_sequence_may_hold_a_module_twice():
    act, layer = torch.nn.ReLU(), nn.SubMConv3d(4, 4, 3).double()
    row = nn.SparseSequential(layer, act, layer, act)
    assert list(row) == [layer, act, layer, act]
    assert row[3] is row[-1] is act


NEEDS_FEATURES = (
    "use its features, as in x.replace_feature(f(x.features)), and insum_ops.nn.SparseSequential in the place of "
    "nn.Sequential"
)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.nn.Sequential(nn.SubMConv3d(4, 4, 3), torch.nn.ReLU())(x), "relu"),
        (torch.relu, "relu"),
        (lambda x: torch.nn.Linear(4, 8)(x), "linear"),
        (lambda x: torch.cat([x, x]), "cat"),
    ],
)
def test_functions_of_torch_take_features(call, name):
    with pytest.raises(TypeError) as caught:
        call(cloud())
    assert (
        str(caught.value) == f"a SparseConvTensor is not a tensor, so torch's {name} does not take it; {NEEDS_FEATURES}"
    )


def test_what_a_tensor_has_and_a_sparse_one_has_not():
    for call, name in ((torch.nn.BatchNorm1d(4), "dim"), (lambda x: x.relu(), "relu"), (lambda x: x.shape, "shape")):
        with pytest.raises(AttributeError) as caught:
            call(cloud())
        assert str(caught.value) == f"a SparseConvTensor is not a tensor, so it has no {name}; {NEEDS_FEATURES}"
    with pytest.raises(AttributeError) as caught:
        _ = cloud().feature
    assert str(caught.value) == "a SparseConvTensor has no feature; use x.features"
    with pytest.raises(AttributeError) as caught:
        _ = cloud()._shape
    assert str(caught.value) == "a SparseConvTensor has no _shape"


@pytest.mark.parametrize("make", [nn.SubMConv3d, nn.SparseConv3d])
def test_a_kernel_of_one_checks_its_voxels_too(make):
    layer, features = make(4, 8, 1), torch.ones(2, 4)
    outside = nn.SparseConvTensor(features, torch.tensor([[0, 0, 0, 0], [0, 0, 0, 2]]), [2, 2, 2], 1)
    with pytest.raises(FormatError) as caught:
        layer(outside)
    assert str(caught.value) == (
        "indices[1] is [0, 0, 0, 2], whose coordinate 2 on axis 2 is outside spatial_shape [2, 2, 2]; drop such voxels "
        "or enlarge spatial_shape"
    )
    twice = nn.SparseConvTensor(features, torch.zeros(2, 4, dtype=torch.int64), [2, 2, 2], 1)
    with pytest.raises(FormatError) as caught:
        layer(twice)
    assert str(caught.value) == (
        "indices[0] and indices[1] are both [0, 0, 0, 0]; give each voxel once and merge the features of its points "
        "first"
    )


@pytest.mark.parametrize(
    ("make", "given", "missing"),
    [
        (nn.SubMConv3d, (4, 8), "1 required positional argument: 'kernel_size'"),
        (nn.SubMConv1d, (), "3 required positional arguments: 'in_channels', 'out_channels', and 'kernel_size'"),
        (nn.SparseConv2d, (4,), "1 required positional argument: 'out_channels'"),
        (nn.SparseConvTranspose4d, (), "2 required positional arguments: 'in_channels' and 'out_channels'"),
        (nn.SparseInverseConv3d, (4, 8, 2), "1 required positional argument: 'indice_key'"),
        (nn.SparseMaxPool3d, (), "1 required positional argument: 'kernel_size'"),
        (nn.SparseAvgPool1d, (), "1 required positional argument: 'kernel_size'"),
    ],
)
def test_a_missing_argument_names_the_layer(make, given, missing):
    with pytest.raises(TypeError) as caught:
        make(*given)
    assert str(caught.value) == f"{make.__name__}.__init__() missing {missing}"


def test_what_is_dense_already_is_named():
    with pytest.raises(OperandError) as caught:
        nn.SparseSequential(nn.ToDense(), nn.ToDense())(cloud())
    assert str(caught.value) == f"ToDense {NOT_A_TENSOR}"


def test_names_of_a_sequence_are_given_once():
    row = nn.SparseSequential(torch.nn.ReLU())
    row.add(torch.nn.ReLU(), "2")
    with pytest.raises(OperandError) as caught:
        row.add(torch.nn.Tanh())
    assert str(caught.value) == "a module is named '2' already; give this one another name"


def test_a_sequence_without_voxels_trains():
    empty = nn.SparseConvTensor(torch.ones(0, 4), torch.ones(0, 4, dtype=torch.int32), SHAPE, 2)
    norm = torch.nn.BatchNorm1d(4)
    model = nn.SparseSequential(
        nn.SubMConv3d(4, 4, 3), norm, torch.nn.Linear(4, 6), nn.SparseConv3d(6, 8, 2, 2), nn.ToDense()
    )
    y = model(empty)
    assert y.shape == (2, 8, 2, 2, 3)
    y.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    assert torch.equal(norm.running_mean, torch.zeros(4))
    assert torch.equal(norm.running_var, torch.ones(4))


def saved_cloud():
    """On the voxels that a strided convolution made, which saved its map."""
    x = cloud()
    return nn.SparseConv3d(4, 4, 2, 2, indice_key="down").double()(x), nn.SparseInverseConv3d(4, 4, 2, "down").double()


def assert_same_cloud(found, expected, is_shared=True):
    assert found.features is expected.features
    assert found.indices is expected.indices
    assert (found.spatial_shape, found.batch_size) == (expected.spatial_shape, expected.batch_size)
    assert (found.grid, found.voxel_num, found.benchmark) == (expected.grid, expected.voxel_num, expected.benchmark)
    if is_shared:
        assert found.indice_dict is expected.indice_dict
        layout = nn.SubMConv3d(4, 4, 3).layout
        assert found.map(layout, None)[0] is expected.map(layout, None)[0]


def test_a_pytree_of_it_has_its_tensors_and_shares_its_maps():
    x, up = saved_cloud()
    leaves, spec = pytree.tree_flatten(x)
    assert [leaf is own for leaf, own in zip(leaves, (x.features, x.indices))] == [True, True]
    found = pytree.tree_unflatten(leaves, spec)
    assert_same_cloud(found, x)
    assert torch.equal(up(found).features, up(x).features)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": x})[0]]
    assert keys == ["['x'].features", "['x'].indices"]


def test_a_pytree_of_it_has_the_tensors_that_only_spconv_uses():
    x = cloud()
    grid, voxel_num = torch.zeros(3), torch.ones(1)
    given = nn.SparseConvTensor(x.features, x.indices, SHAPE, 2, grid, voxel_num, benchmark=True)
    leaves, spec = pytree.tree_flatten(given)
    assert [id(leaf) for leaf in leaves] == [id(own) for own in (x.features, x.indices, grid, voxel_num)]
    assert_same_cloud(pytree.tree_unflatten(leaves, spec), given)
    one = nn.SparseConvTensor(x.features, x.indices, SHAPE, 2, voxel_num=voxel_num)
    assert_same_cloud(pytree.tree_map(lambda leaf: leaf, one), one)


def test_functions_are_mapped_over_its_tensors():
    x, up = saved_cloud()
    shapes = pytree.tree_map(lambda leaf: leaf.shape, x)
    assert repr(shapes) == f"SparseConvTensor(spatial_shape={x.spatial_shape}, batch_size={x.batch_size})"
    twice = pytree.tree_map(lambda leaf: 2 * leaf if leaf.is_floating_point() else leaf, x)
    assert torch.equal(twice.features, 2 * x.features)
    assert twice.indice_dict is x.indice_dict
    both = pytree.tree_map(lambda a, b: a + b if a.is_floating_point() else a, x, twice)
    assert torch.equal(both.features, 3 * x.features)
    copied = pytree.tree_map(torch.clone, x)
    assert torch.equal(up(copied).features, up(x).features), "saved maps hold for a copy"
    nn.SubMConv3d(4, 4, 3, indice_key="new").double()(copied)
    assert list(x.indice_dict) == ["down"], "what a copy saves is its own"
    moved = pytree.tree_map(lambda leaf: leaf.to("meta"), x)
    assert (moved.features.device.type, moved.indices.device.type, moved.indice_dict) == ("meta", "meta", {})
    shapes = pytree.tree_map(lambda leaf: leaf.shape, x)
    assert (shapes.features, shapes.indices) == (x.features.shape, x.indices.shape)
    other = nn.SparseConvTensor(x.features, x.indices, [8, 8, 8], 2)
    with pytest.raises(ValueError, match="context"):
        pytree.tree_map(torch.add, x, other)


def test_the_structure_of_it_goes_to_a_file_and_back():
    x = cloud()
    leaves, spec = pytree.tree_flatten([x])
    (found,) = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert_same_cloud(found, x, is_shared=False)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_it_is_a_dataclass_whose_copies_share_its_maps():
    x, up = saved_cloud()
    names = [field.name for field in dataclasses.fields(x)]
    assert names[:4] == ["features", "indices", "spatial_shape", "batch_size"]
    assert_same_cloud(dataclasses.replace(x), x)
    features = x.features * 2
    found = dataclasses.replace(x, features=features)
    assert_same_cloud(found, x.replace_feature(features))
    assert torch.equal(up(found).features, up(x.replace_feature(features)).features)
    elsewhere = dataclasses.replace(x, indices=x.indices.clone())
    assert torch.equal(up(elsewhere).features, up(x).features)
    assert elsewhere.map(nn.SubMConv3d(4, 4, 3).layout, None)[0] is not x.map(nn.SubMConv3d(4, 4, 3).layout, None)[0]
    with pytest.raises(ShapeError, match=r"^features is "):
        dataclasses.replace(x, features=features[:1])
    assert x == x
    assert x != x.shadow_copy()
    assert len({x, x.shadow_copy()}) == 2


def test_fields_are_set_to_what_they_are_and_to_nothing_else():
    """As by who copies a dataclass field by field."""
    x, _ = saved_cloud()
    for field in dataclasses.fields(x):
        setattr(x, field.name, getattr(x, field.name))
    assert list(x.indice_dict) == ["down"]
    written = {
        "features": "features of a SparseConvTensor are not set; write x = x.replace_feature(features)",
        "indices": "indices of a SparseConvTensor are not set; write "
        "x = SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)",
        "spatial_shape": "spatial_shape of a SparseConvTensor is not set; write "
        "x = SparseConvTensor(x.features, x.indices, spatial_shape, x.batch_size)",
        "batch_size": "batch_size of a SparseConvTensor is not set; write "
        "x = SparseConvTensor(x.features, x.indices, x.spatial_shape, batch_size)",
    }
    others = {
        "features": x.features.clone(),
        "indices": x.indices.clone(),
        "spatial_shape": [9, 9, 9],
        "batch_size": 3,
    }
    for name, message in written.items():
        with pytest.raises(OperandError) as caught:
            setattr(x, name, others[name])
        assert str(caught.value) == message


def test_checkpointed_layers_have_the_same_gradients():
    x = cloud()
    layer = nn.SparseSequential(
        nn.SubMConv3d(4, 4, 3, indice_key="a"), torch.nn.ReLU(), nn.SubMConv3d(4, 4, 3, indice_key="a")
    ).double()
    expected = torch.autograd.grad(layer(x).features.square().sum(), [x.features, *layer.parameters()])
    y = checkpoint(layer, x, use_reentrant=False)
    found = torch.autograd.grad(y.features.square().sum(), [x.features, *layer.parameters()])
    for own, reference in zip(found, expected):
        assert_matches(own, reference)
