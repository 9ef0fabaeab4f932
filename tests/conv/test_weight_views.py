"""A layer of convolutions follows every change of its parameters, refuses those without memory, keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import weakref

import pytest
import torch
from tolerances import assert_matches

from insum_ops import nn, sparse_conv3d
from insum_ops.compiler.language.errors import OperandError, ShapeError


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
        for _ in range(3):
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


def test_a_layer_that_was_called_is_copied_and_saved_as_any_other():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    expected = layer(x).features
    twin = copy.deepcopy(layer)
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
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found.to("cpu"), found.inverse.inverse):
        assert_matches(sparse_conv3d(x.features, layer.weight, twin, layer.bias), expected)


def test_a_layer_keeps_neither_the_memory_it_has_left_nor_the_clouds_it_has_seen():
    x, layer = cloud(dtype=torch.float32), nn.SubMConv2d(4, 4, 3)
    for _ in range(3):
        layer(x)
    weight = weakref.ref(layer.weight)
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    layer.double()
    for _ in range(3):
        seen = cloud()
        layer(seen)
    voxels = weakref.ref(layer(seen).voxels)
    del seen
    gc.collect()
    assert voxels() is None
    assert weight() is None


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


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_memory_that_was_freed_and_filled_again_is_read_where_it_is(groups):
    """As by fully_shard: the parameter stays, and its storage goes and comes."""
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3, groups=groups).double()
    leaf = x.replace_feature(x.features.clone().requires_grad_())
    held = []  # what takes the place of freed memory
    for step in range(6):
        values = [torch.randn_like(own) for own in layer.parameters()]
        for own in layer.parameters():
            own.data.untyped_storage().resize_(0)
            held.append(torch.full_like(own, float("nan")))
        for own, value in zip(layer.parameters(), values):
            own.data.untyped_storage().resize_(own.numel() * own.element_size())
            with torch.autograd._unsafe_preserve_version_counter(own):
                own.data.copy_(value)
        expected = fresh(layer, x)
        if step % 2:
            leaf.features.grad = None
            y = layer(leaf).features
            y.sum().backward()
            assert_matches(y, expected)
            own = leaf.features.detach().clone().requires_grad_()
            sparse_conv3d(own, values[0], layer.map(x)[0], values[1], groups).sum().backward()
            assert_matches(leaf.features.grad, own.grad)
        else:
            with torch.no_grad():
                assert_matches(layer(x).features, expected)


@pytest.mark.parametrize("channels", [4, 16, 48])
def test_other_data_at_the_address_of_freed_data_is_read(channels):
    x, layer = cloud(channels), nn.SubMConv2d(channels, channels, 3).double()
    with torch.no_grad():
        layer.weight.data = torch.randn_like(layer.weight)
        layer(x)
        at = layer.weight.data_ptr()
        layer.weight.data.untyped_storage().resize_(0)
        others = [torch.randn_like(layer.weight) for _ in range(200)]
        again = [other for other in others if other.data_ptr() == at]  # which an allocator may give, and mostly does
        layer.weight.data = (again or others)[0]
        assert_matches(layer(x).features, fresh(layer, x))


FREED = (
    "{0} has no memory: it was freed by who shards the model's parameters, such as fully_shard, which gathers them "
    "for the forward and backward passes of the modules it was called on; call those modules, and let them return "
    "tensors where torch finds them"
)


@pytest.mark.parametrize(("name", "shape"), [("weight", [4, 3, 3, 4]), ("bias", [4])])
def test_a_parameter_without_memory_is_refused(name, shape):
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    layer(x)
    getattr(layer, name).data.untyped_storage().resize_(0)
    with pytest.raises(OperandError) as caught:
        layer(x)
    assert str(caught.value) == FREED.format(f"{name} {shape}")


def test_a_weight_freed_before_its_backward_is_refused():
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3).double()
    y = layer(x.replace_feature(x.features.clone().requires_grad_())).features
    layer.weight.data.untyped_storage().resize_(0)
    with pytest.raises(OperandError) as caught:
        y.sum().backward()
    assert str(caught.value) == FREED.format("weight [4, 3, 3, 4]")


def test_threads_see_one_weight_or_another():
    """One thread replaces the parameters while others compute: each result is of parameters that the layer had."""
    x, layer = cloud(), nn.SubMConv2d(4, 4, 3, bias=False).double()
    weights = [torch.nn.Parameter(torch.full_like(layer.weight, float(value))) for value in (1, 2)]
    once = sparse_conv3d(x.features, weights[0].detach(), layer.map(x)[0])
    is_done, wrong = threading.Event(), []

    def compute():
        with torch.no_grad():
            for _ in range(60):
                found = layer(x).features
                if not any(torch.allclose(found, value * once) for value in (1, 2)):
                    wrong.append(found)

    def replace():
        while not is_done.is_set():
            for weight in weights:
                layer.weight = weight

    layer.weight = weights[0]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=compute) for _ in range(3)]
    replacing = threading.Thread(target=replace)
    try:
        for thread in (*threads, replacing):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        is_done.set()
        replacing.join()
        sys.setswitchinterval(before)
    assert not wrong
