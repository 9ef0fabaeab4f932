"""A layer reads its parameters through views that it keeps: they follow every change, and keep nothing alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from tolerances import assert_matches

from insum_ops import kernel_views, nn, sparse_conv3d
from insum_ops.compiler.errors import ShapeError


def cloud(channels=4, dtype=torch.float64):
    indices = (torch.rand(2, 4, 5) < 0.5).nonzero().int()
    return nn.SparseConvTensor(torch.randn(len(indices), channels, dtype=dtype), indices, [4, 5], 2)


def fresh(layer, x):
    """What the layer computes, by a call that keeps nothing."""
    found, _ = layer.map(x)
    return sparse_conv3d(x.features, layer.weight.detach(), found, layer.bias.detach(), layer.groups)


def moved_by_optimizer(layer):
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def replace_data(layer):
    layer.weight.data = torch.randn_like(layer.weight)
    layer.bias.data = torch.randn_like(layer.bias)


def replace_parameters(layer):
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    layer.bias = torch.nn.Parameter(torch.randn_like(layer.bias))


def change_layout(layer):
    """The same memory, read in another order."""
    layer.weight.data = layer.weight.data.transpose(0, -1)


CHANGES = {
    "in place": lambda layer: layer.weight.data.mul_(3),
    "by an optimizer": moved_by_optimizer,
    "other data": replace_data,
    "other parameters": replace_parameters,
    "other layout": change_layout,
    "loaded": lambda layer: layer.load_state_dict(
        {"weight": torch.randn_like(layer.weight), "bias": torch.randn_like(layer.bias)}
    ),
    "assigned": lambda layer: layer.load_state_dict(
        {"weight": torch.randn_like(layer.weight), "bias": torch.randn_like(layer.bias)}, assign=True
    ),
    "cast and back": lambda layer: layer.float().double(),
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_parameter_is_noticed(change, groups):
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3, groups=groups).double()
    if groups > 1 and change is change_layout:
        pytest.skip("the two ends of such a weight differ")
    with torch.no_grad():
        layer(x)
        change(layer)
        assert_matches(layer(x).features, fresh(layer, x))
    leaf = x.replace_feature(x.features.clone().requires_grad_())
    layer(leaf).features.square().sum().backward()
    own, weight = leaf.features.detach().clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    found, _ = layer.map(x)
    sparse_conv3d(own, weight, found, layer.bias.detach(), groups).square().sum().backward()
    assert_matches(leaf.features.grad, own.grad)
    assert_matches(layer.weight.grad, weight.grad)


@pytest.mark.cpu
def test_settings_changed_between_calls_are_noticed():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    first = layer(x).features
    torch.use_deterministic_algorithms(True)
    try:
        assert_matches(layer(x).features, first)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(cloud(dtype=torch.float32)).features.dtype == torch.bfloat16


def test_one_layer_serves_many_clouds_and_one_cloud_many_layers():
    clouds = [cloud() for _ in range(3)]
    layers = [nn.SubMConv2d(4, 6, 3).double() for _ in range(2)]
    for _ in range(2):
        for x in clouds:
            for layer in layers:
                assert_matches(layer(x).features, fresh(layer, x))


def test_parametrized_weights_are_asked_for():
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    once = layer(x).features - layer.bias
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    assert_matches(layer(x).features - layer.bias, 2 * once)


def test_what_was_made_in_inference_mode_trains():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    with torch.inference_mode():
        layer(x)
    layer(x).features.sum().backward()
    assert layer.weight.grad is not None


def test_views_are_not_copied_or_saved():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    expected = layer(x).features
    twin = copy.deepcopy(layer)
    assert twin._views is None
    with torch.no_grad():
        twin.weight.zero_()
    assert_matches(layer(x).features, expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert_matches(torch.load(file, weights_only=False)(x).features, expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == {"weight", "bias"}


@pytest.mark.cpu
def test_a_map_that_remembers_calls_can_be_copied_and_pickled():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    expected = layer(x).features
    found, _ = layer.map(x)
    assert found.memory
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found.to("cpu"), found.inverse.inverse):
        assert not twin.memory
        assert_matches(sparse_conv3d(x.features, layer.weight, twin, layer.bias), expected)


def test_a_map_keeps_one_call_for_each_layer():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    found, _ = layer.map(x)
    with torch.no_grad():
        layer(x)
        known = len(found.memory)
        for _ in range(5):
            replace_data(layer)
            layer(x)
    assert len(found.memory) == known


def test_a_layer_keeps_neither_the_memory_it_has_left_nor_the_clouds_it_has_seen():
    x, layer = cloud(dtype=torch.float32), nn.SubMConv2d(4, 4, 3)
    layer(x)
    assert layer._views is not None
    layer.double()
    assert layer._views is None
    layer(cloud())
    voxels = weakref.ref(layer(cloud()).voxels)
    gc.collect()
    assert voxels() is None


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("change", [moved_by_optimizer, lambda layer: layer.weight.data.mul_(3)], ids=["step", "data"])
def test_a_weight_whose_taps_are_no_view_is_read_anew(change, groups):
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3, groups=groups).double().to(memory_format=torch.channels_last)
    batch, row, column = x.indices.long().T
    for is_training in (False, True, True, False):
        with torch.set_grad_enabled(is_training):
            found = layer(x).features
        kernel, bias = layer.weight.detach().movedim(-1, 1), layer.bias.detach()
        dense = torch.nn.functional.conv2d(x.dense(), kernel, bias, padding=1, groups=groups)
        assert_matches(found.detach(), dense[batch, :, row, column])
        change(layer)


@pytest.mark.parametrize("length", [1, 2])
def test_a_bias_that_has_become_shorter_is_refused(length):
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    with torch.no_grad():
        layer(x)
        layer.bias.data = layer.bias.data[:length]
        with pytest.raises(ShapeError, match=rf"^bias is \[{length}\] but weight has 4 output channels;"):
            layer(x)


def test_another_thread_sees_views_that_are_all_there_or_none(monkeypatch):
    layer, x = nn.SubMConv2d(4, 6, 3).double(), cloud()
    views, real = layer.views(), kernel_views.statement_weight

    def watched(weight, *given, **options):
        assert not views.has(layer.weight, layer.bias)  # as another thread would ask in the middle
        return real(weight, *given, **options)

    monkeypatch.setattr(kernel_views, "statement_weight", watched)
    for change in (lambda: None, lambda: replace_parameters(layer)):
        change()
        layer(x)
        assert views.has(layer.weight, layer.bias)
