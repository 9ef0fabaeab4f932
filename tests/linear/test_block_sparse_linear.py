"""BlockSparseLinear against its masked dense twin: values, gradients, training; on every route."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from linear_twin import MaskedLinear, dense_weight, element_mask
from profiled import sorts
from statements import DEVICE, IS_INTERPRETED, IS_THOROUGH
from tolerances import DTYPES, TOLERANCE, assert_matches
from torch import Tensor, nn
from torch.func import functional_call, grad

from insum_ops import explain
from insum_ops.linear import product as linear_product
from insum_ops.nn import BlockSparseLinear

# in_features, out_features, block_size
SHAPES = (
    (64, 48, (16, 16)),
    (96, 64, (32, 32)),
    (128, 32, (16, 64)),
    (50, 37, (16, 32)),
    (37, 50, 16),
    (60, 48, (24, 20)),
    *(() if IS_INTERPRETED else ((256, 384, (128, 128)), (300, 200, (128, 128)), (33, 129, (64, 16)))),
)
LEADING = ((5,), (2, 3), (2, 1, 2, 2), (), (0,), (2, 0), (1,))


def made(
    in_features: int, out_features: int, block_size: int | tuple[int, int], **options: object
) -> BlockSparseLinear:
    options = {"density": 0.4, "dtype": torch.float64, "device": DEVICE, **options}
    return BlockSparseLinear(in_features, out_features, block_size, **options)  # type: ignore[arg-type]


def assert_equals_twin(layer: BlockSparseLinear, x: Tensor) -> None:
    """Values and the gradients of input, blocks and bias."""
    twin = MaskedLinear(layer)
    x = x.detach().requires_grad_()
    wide = x.detach().cpu().double().requires_grad_()
    y, expected = layer(x), twin(wide)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    assert_matches(y, expected)

    upstream = torch.randn(expected.shape, dtype=torch.float64).to(x.dtype)
    layer.zero_grad()
    y.backward(upstream.to(y.device))
    expected.backward(upstream.double())
    assert_matches(x.grad, wide.grad)
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == layer.weight.shape
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(dense_weight(layer, layer.weight.grad), twin.weight.grad * twin.mask, **tolerance)
    if layer.bias is not None:
        assert_matches(layer.bias.grad, twin.bias.grad)


def random_input(layer: BlockSparseLinear, *leading: int) -> Tensor:
    x = torch.randn(*leading, layer.in_features, dtype=torch.float64)
    return x.to(layer.weight.dtype).to(DEVICE)


@pytest.mark.sampled("in_features", "out_features", "block_size")
@pytest.mark.every_route
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_features", "out_features", "block_size"), SHAPES)
def test_it_equals_its_masked_dense_twin(in_features, out_features, block_size, bias):
    layer = made(in_features, out_features, block_size, bias=bias)
    assert_equals_twin(layer, random_input(layer, 7))


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [64, 50])
def test_every_dtype(in_features, dtype):
    layer = made(in_features, 37, (16, 32), dtype=dtype)
    assert_equals_twin(layer, random_input(layer, 6))


@pytest.mark.every_route
@pytest.mark.parametrize("block_size", [16, (32, 16), (16, 32)], ids=str)
def test_rows_of_many_narrow_blocks(block_size):
    """A kernel takes the gradient of several blocks of a row together."""
    layer = made(150, 48, block_size, density=0.7)
    for _ in range(3):
        assert_equals_twin(layer, random_input(layer, 19))


def test_rows_of_many_narrow_blocks_under_a_transform():
    layer = made(96, 32, 16, density=0.8)
    x = random_input(layer, 5)
    layer(x).square().sum().backward()
    weight = layer.weight.detach()
    found = grad(lambda weight: functional_call(layer, {"weight": weight}, (x,)).square().sum())(weight)
    assert_matches(found, layer.weight.grad.cpu())


@pytest.mark.sampled
@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("in_features", [32, 37])
def test_any_leading_dimensions(in_features, leading):
    layer = made(in_features, 20, 16)
    assert_equals_twin(layer, random_input(layer, *leading))


@pytest.mark.every_route
def test_an_input_need_not_be_contiguous():
    layer = made(32, 48, 16)
    assert_equals_twin(layer, torch.randn(32, 5, dtype=torch.float64, device=DEVICE).T)
    assert_equals_twin(layer, torch.randn(5, 64, dtype=torch.float64, device=DEVICE)[:, ::2])
    assert_equals_twin(layer, torch.randn(3, 32, 4, dtype=torch.float64, device=DEVICE).transpose(1, 2))
    assert_equals_twin(layer, torch.randn(1, 32, dtype=torch.float64, device=DEVICE).expand(4, 32))


@pytest.mark.every_route
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_without_blocks_is_its_bias(bias):
    pattern = torch.tensor([[True, False], [False, False], [True, True]], device=DEVICE)
    layer = made(32, 48, 16, pattern=pattern, bias=bias)
    assert_equals_twin(layer, random_input(layer, 3))
    y = layer(random_input(layer, 3))[:, 16:32]
    assert_matches(y, torch.zeros(3, 16).double() if layer.bias is None else layer.bias[16:32].cpu().expand(3, 16))


@pytest.mark.every_route
def test_a_layer_without_any_block_is_its_bias():
    layer = made(32, 48, 16, pattern=torch.zeros(3, 2, dtype=torch.bool, device=DEVICE))
    assert layer.weight.shape == (0, 16, 16)
    assert_equals_twin(layer, random_input(layer, 3))


@pytest.mark.every_route
def test_what_a_last_block_holds_outside_the_matrix_is_never_seen():
    layer = made(20, 20, 16, density=1.0)
    with torch.no_grad():
        layer.weight += 1  # as an initialiser that knows nothing of blocks
    assert_equals_twin(layer, random_input(layer, 4))


def test_it_is_linear():
    layer = made(50, 37, (16, 32), bias=False)
    x, y = random_input(layer, 4), random_input(layer, 4)
    assert_matches(layer(2 * x - 3 * y), (2 * layer(x) - 3 * layer(y)).cpu())


@pytest.mark.parametrize("in_features", [4, 3])
def test_gradients_of_both_orders(in_features):
    layer = made(in_features, 5, 2)
    x = random_input(layer, 2).requires_grad_()

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    leaves = (x, layer.weight, layer.bias)
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(name):
    layer = made(32, 32, 16)
    getattr(layer, name).requires_grad_(False)
    layer(random_input(layer, 3)).sum().backward()
    assert {key for key, parameter in layer.named_parameters() if parameter.grad is not None} == {
        "weight",
        "bias",
    } - {name}


@pytest.mark.parametrize("in_features", [32, 40])
def test_autocast_computes_in_its_dtype(in_features):
    layer = made(in_features, 40, 16, dtype=torch.float32)
    x = random_input(layer, 5).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    rounded = dense_weight(layer, layer.weight.bfloat16())
    wide = x.detach().bfloat16().cpu().double()
    assert_matches(y, wide @ rounded.T + layer.bias.detach().bfloat16().cpu().double())
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad.cpu().double(), rounded.sum(0).expand(5, -1), **TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("features", [(32, 48), (40, 50)])
def test_the_bias_is_read_in_place_and_never_copied_for_every_token(monkeypatch, features, autocast):
    seen = []

    def watched(expr: str, **tensors: Tensor) -> Tensor:
        seen.append((tensors["Y"].stride(), tensors["Y"].dtype))
        return insum(expr, **tensors)

    insum = linear_product.insum
    monkeypatch.setattr(linear_product, "insum", watched)
    layer = made(*features, 16, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        layer(random_input(layer, 5))
    assert seen == [((0, 1), torch.bfloat16 if autocast else torch.float32)]


def test_training_reads_a_pattern_once():
    layer = made(32, 48, 16)
    optimizer = torch.optim.Adam(layer.parameters())

    def step() -> None:
        optimizer.zero_grad()
        layer(random_input(layer, 3).requires_grad_()).square().sum().backward()
        optimizer.step()

    step()
    assert sorts(lambda: [step() for _ in range(3)]) == 0
    assert sorts(lambda: [layer.prune_(0.2), step()]) > 0
    assert sorts(step) == 0
    assert_equals_twin(layer, random_input(layer, 3))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class MLP(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def train_together(model: MLP, twin: MLP, pair: tuple[torch.optim.Optimizer, ...], steps: int) -> None:
    """Both take the same steps; losses and weights agree after each."""
    for _ in range(steps):
        x = torch.randn(8, model.first.in_features, dtype=torch.float64)
        target = x[:, :1].sin().expand(8, model.second.out_features)
        losses = []
        for net, optimizer, device in ((model, pair[0], DEVICE), (twin, pair[1], "cpu")):
            optimizer.zero_grad()
            loss = (net(x.to(device)) - target.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert_matches(losses[0], losses[1])
        for layer, dense in ((model.first, twin.first), (model.second, twin.second)):
            assert_matches(dense_weight(layer), dense.weight * dense.mask)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_mlp_trains_like_its_masked_dense_twin(name):
    model = MLP(made(40, 48, 16), made(48, 20, (16, 32)))
    twin = MLP(MaskedLinear(model.first), MaskedLinear(model.second))
    optimizers = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    train_together(model, twin, optimizers, steps=3 if IS_INTERPRETED else 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_pattern_changes_in_the_middle_of_training(name):
    """Pruned, then regrown: kept blocks keep their values and the optimizer's state, and training goes on alike."""
    steps = 2 if IS_INTERPRETED else 4
    model = MLP(made(40, 48, 16, density=0.8), made(48, 20, (16, 32), density=0.5))
    twin = MLP(MaskedLinear(model.first), MaskedLinear(model.second))
    optimizers = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
    train_together(model, twin, optimizers, steps)

    weight = model.first.weight
    model.first.prune_(0.4, optimizer=optimizers[0])
    assert model.first.weight is weight
    assert weight.grad is None
    twin.first.follow(model.first, optimizers[1])
    train_together(model, twin, optimizers, steps)

    grown = model.first.mask
    grown[:, 0] = True
    grown[-1, -1] = not grown[-1, -1]
    model.first.set_pattern_(grown, optimizer=optimizers[0])
    twin.first.follow(model.first, optimizers[1])
    train_together(model, twin, optimizers, steps)


def test_a_pattern_may_change_while_an_earlier_loss_is_alive():
    layer = made(32, 32, 16, density=1.0)
    alive = layer(random_input(layer, 3)).sum()
    alive.backward()
    layer.prune_(0.5)
    assert_equals_twin(layer, random_input(layer, 3))
    assert alive.grad_fn is not None


def test_a_copy_is_a_layer_of_its_own():
    layer = made(32, 48, 16)
    layer(random_input(layer, 2))
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight += 1
    assert_equals_twin(other, random_input(other, 3))
    assert_equals_twin(layer, random_input(layer, 3))
    assert torch.equal(element_mask(layer), element_mask(other))


def test_a_copy_of_a_compiled_layer_computes_with_its_own_weight():
    layer = made(32, 48, 16)
    layer.compile(backend="eager")
    layer(random_input(layer, 2))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight += 1
        assert_equals_twin(other, random_input(other, 3))


@pytest.mark.every_route
def test_inference_mode():
    with torch.inference_mode():
        layer = made(32, 48, 16)
        x = random_input(layer, 3)
        expected = x.cpu() @ dense_weight(layer).T + layer.bias.cpu()
        assert_matches(layer(x), expected)
        assert_matches(layer(x), expected)
    ordinary = made(32, 48, 16)
    with torch.inference_mode():
        ordinary(random_input(ordinary, 3))
    assert_equals_twin(ordinary, random_input(ordinary, 3))


@pytest.mark.every_route
def test_each_direction_is_one_kernel_without_atomics():
    layer = made(64, 48, 16, dtype=torch.float16)
    X, W = random_input(layer, 32), layer.as_format()
    start = layer.bias.expand(32, 48)
    forward = explain(layer.EXPR, X=X, W=W, Y=start)
    assert str(forward.rewritten) == "Y[t,WO[p],bo] += X[t,WI[p],bi] * WV[p,bo,bi]"
    backward = explain("dX[t,i] += dY[t,o] * W[o,i]", dY=start, W=W)
    for explanation in (forward, backward):
        assert "scatter: owner, product: tl.dot" in str(explanation)
        assert "atomic" not in explanation.source
    assert "ptr_of_seed" in forward.source


def test_a_caller_may_write_to_the_pattern_of_a_format():
    """It is a copy: a layer does not ask at each call whether its own was written to."""
    layer = made(64, 48, 16)
    x = random_input(layer, 5).requires_grad_()
    for at in range(6):
        assert_equals_twin(layer, x)
        form = layer.as_format()
        form.coords[at % 2].fill_(at // 2)
        form.regroup(1).coords[1 - at % 2].fill_(0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
@pytest.mark.skipif(IS_INTERPRETED, reason="tracing never reaches a kernel")
def test_it_compiles_under_autocast():
    torch._dynamo.reset()
    layer = made(40, 50, 16, dtype=torch.float32)
    x = random_input(layer, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = layer(x)
        actual = compiled(x)
    assert actual.dtype == torch.bfloat16
    assert_matches(actual, expected.double())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
@pytest.mark.skipif(IS_INTERPRETED, reason="tracing never reaches a kernel")
@pytest.mark.parametrize("features", [(32, 48), (40, 50), (144, 48)] if IS_THOROUGH else [(40, 50)])
def test_it_compiles_into_one_graph_after_one_ordinary_call(features):
    torch._dynamo.reset()
    layer = made(*features, 16)
    with torch.no_grad():
        layer(random_input(layer, 3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for change in (lambda: None, lambda: layer.prune_(0.2)):
        change()
        x = random_input(layer, 3).requires_grad_()
        y = compiled(x)
        y.square().sum().backward()
        twin, wide = MaskedLinear(layer), x.detach().cpu().requires_grad_()
        expected = twin(wide)
        expected.square().sum().backward()
        assert_matches(y, expected)
        assert_matches(x.grad, wide.grad)
        assert_matches(layer.bias.grad, twin.bias.grad)
        torch.testing.assert_close(dense_weight(layer, layer.weight.grad), twin.weight.grad, **TOLERANCE[torch.float64])
        layer.zero_grad()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does it
@pytest.mark.skipif(IS_INTERPRETED, reason="tracing never reaches a kernel")
def test_compiled_it_runs_without_gradients_at_every_length_and_after_a_checkpoint_is_loaded():
    torch._dynamo.reset()
    layer = made(32, 48, 16)
    layer(random_input(layer, 3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (3, 5, 7):
        x = random_input(layer, length)
        with torch.no_grad():
            assert_matches(compiled(x), MaskedLinear(layer)(x.cpu()))
    other = {name: value * 2 if value.is_floating_point() else value for name, value in layer.state_dict().items()}
    layer.load_state_dict(other)
    with torch.no_grad():
        assert_matches(compiled(x), MaskedLinear(layer)(x.cpu()))


def test_values_of_one_call_do_not_outlive_it():
    layer = made(32, 48, 16)
    x, weight = random_input(layer, 3), layer.weight.detach().clone().requires_grad_()
    doubled = weight * 2  # holds a graph
    torch.func.functional_call(layer, {"weight": doubled}, (x,)).sum().backward()
    known = ref(doubled)
    del doubled
    assert known() is None
    assert_matches(layer(x), MaskedLinear(layer)(x.cpu()))
