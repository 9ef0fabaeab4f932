"""A layer's product goes straight to its kernel when it is like one before, and is a new one when anything differs."""

from __future__ import annotations

import pytest
import torch
from linear_twin import MaskedLinear, dense_weight
from statements import DEVICE
from tolerances import TOLERANCE, assert_matches
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from insum_ops.nn import BlockSparseLinear


def made(in_features: int = 8, out_features: int = 12, **options: object) -> BlockSparseLinear:
    options = {"density": 0.5, "dtype": torch.float64, "device": DEVICE, **options}
    return BlockSparseLinear(in_features, out_features, 4, **options)  # type: ignore[arg-type]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def assert_step(layer: BlockSparseLinear, x: Tensor) -> None:
    """Values without and with gradients, and all gradients, as the dense twin has them."""
    twin, wide = MaskedLinear(layer), x.detach().cpu().double().requires_grad_()
    expected = twin(wide)
    with torch.no_grad():
        assert_matches(layer(x), expected)
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    assert_matches(y, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    y.backward(upstream.to(y.device, y.dtype))
    expected.backward(upstream)
    assert_matches(x.grad, wide.grad)
    found = dense_weight(layer, layer.weight.grad)
    torch.testing.assert_close(found, twin.weight.grad * twin.mask, **TOLERANCE[x.dtype])
    if layer.bias is not None:
        assert_matches(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [(8, 12), (7, 10)])
def test_inputs_of_many_shapes_may_take_turns(features, bias):
    layer = made(*features, bias=bias)
    width = features[0]
    for _ in range(2):
        for shape in ((3,), (2, 3), (3,), (), (1,), (0,), (1, 3, 1)):
            assert_step(layer, drawn(*shape, width))
        assert_step(layer, drawn(width, 3).T)
        assert_step(layer, drawn(2, width, 3).transpose(1, 2))
        assert_step(layer, drawn(1, width).expand(3, width))
        assert_step(layer, drawn(3, 1, width).expand(3, 2, width))


@pytest.mark.every_route
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_steps_after_the_first_are_right_too(shape):
    """The first is worked out, the second recorded, the others replayed."""
    layer = made()
    for _ in range(4):
        assert_step(layer, drawn(*shape))


def other_data(layer: BlockSparseLinear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)
    layer.bias.data = torch.randn_like(layer.bias)


def other_layout(layer: BlockSparseLinear) -> None:
    layer.weight.data = torch.randn_like(layer.weight).transpose(1, 2).contiguous().transpose(1, 2)
    layer.bias.data = drawn(len(layer.bias), 2)[:, 0]


def other_parameters(layer: BlockSparseLinear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    layer.bias = nn.Parameter(torch.randn_like(layer.bias))


def other_pattern(layer: BlockSparseLinear) -> None:
    layer.set_pattern_(~layer.mask, init="random")


def optimizer_step(layer: BlockSparseLinear) -> None:
    torch.optim.SGD(layer.parameters(), 0.5).step()


CHANGES = {
    "in place": lambda layer: layer.weight.data.mul_(3),
    "by an optimizer": optimizer_step,
    "other data": other_data,
    "other layout": other_layout,
    "other parameters": other_parameters,
    "other pattern": other_pattern,
    "another type": lambda layer: layer.float(),
    "without a bias": lambda layer: layer.register_parameter("bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_layer_is_noticed(change):
    layer = made()
    x = drawn(3, 8)
    assert_step(layer, x)
    change(layer)
    assert_step(layer, x.to(layer.weight.dtype))


def test_settings_are_noticed():
    layer, x = made(dtype=torch.float32), drawn(3, 8).float()
    assert_step(layer, x)
    torch.use_deterministic_algorithms(True)
    try:
        assert_step(layer, x)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert_matches(layer(x), MaskedLinear(layer)(x.cpu().double()))
    assert_step(layer, x)


def test_a_negated_input_is_read_with_its_sign():
    layer = made()
    x = torch.complex(drawn(3, 8), drawn(3, 8)).conj().imag
    assert x.is_neg()
    for _ in range(2):
        assert_step(layer, x)


def test_saved_tensors_may_come_back_in_another_layout():
    layer, x = made(), drawn(3, 8)
    assert_step(layer, x)

    def pack(tensor: Tensor) -> Tensor:
        return tensor.detach().transpose(0, 1).contiguous()

    with saved_tensors_hooks(pack, lambda packed: packed.transpose(0, 1)):
        assert_step(layer, x)


def test_a_weight_changed_before_backward_is_refused():
    layer, x = made(), drawn(3, 8)
    assert_step(layer, x)
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_see_every_gradient():
    layer, x = made(), drawn(2, 3, 8).requires_grad_()
    seen = []
    for tensor in (layer.weight, layer.bias, x):
        tensor.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    for _ in range(2):
        layer(x).sum().backward()
    assert sorted(seen) == sorted(2 * [tuple(layer.weight.shape), (12,), (2, 3, 8)])


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_transforms_give_what_autograd_gives(shape):
    layer, x = made(), drawn(*shape)
    layer(x)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, parameters, (x,)).square().sum()

    grads = torch.func.grad(loss)(parameters)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_matches(grads[name], parameter.grad.cpu())
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    _, moved = torch.func.jvp(loss, (parameters,), (tangents,))
    expected = sum((grads[name] * tangents[name]).sum() for name in grads)
    assert_matches(moved, expected.cpu())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [(8, 12), (8, 11), (7, 12)], ids=str)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_what_comes_out_may_be_changed_in_place(
    leading: tuple[int, ...], features: tuple[int, int], bias: bool
) -> None:
    """As nn.ReLU(inplace=True) and `h += x` do after nn.Linear."""
    layer = made(*features, bias=bias)
    x, twin = drawn(*leading, features[0]), MaskedLinear(layer)
    for _ in range(2):
        given = x.clone().requires_grad_()
        y = layer(given)
        y += 1
        y.relu_().square().sum().backward()
        wide = x.cpu().clone().requires_grad_()
        expected = (twin(wide) + 1).relu()
        expected.square().sum().backward()
        assert_matches(y, expected)
        assert_matches(given.grad, wide.grad)


def test_what_comes_of_a_transposed_input_may_be_changed_in_place() -> None:
    layer, x = made(), drawn(8, 5).T.requires_grad_()
    for _ in range(2):
        layer(x).relu_().sum().backward()
