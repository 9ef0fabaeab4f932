"""Patterns of BlockSparseLinear: drawn, taken from dense weights, changed; and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy
import pytest
import torch
from linear_twin import dense_weight, element_mask, eye, seeded
from messages import assert_says
from tolerances import DTYPES, assert_matches
from torch import nn
from torch.nn.utils import parametrize

from insum_ops.compiler.language.errors import InsumError, OperandError, ShapeError
from insum_ops.nn import BlockSparseLinear, load_patterns_

# random patterns and values


@pytest.mark.parametrize("density", [0.01, 0.1, 0.37, 0.5, 1.0])
@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (5, 13), (16, 3)])
def test_a_random_pattern_has_the_density_and_no_empty_row(grid, density):
    layer = BlockSparseLinear(grid[1] * 4, grid[0] * 2, (2, 4), density)
    wanted = max(1, round(density * grid[0] * grid[1]))
    assert layer.mask.sum() == max(wanted, grid[0])
    assert layer.mask.any(1).all()
    assert layer.weight.shape == (max(wanted, grid[0]), 2, 4)
    loose = BlockSparseLinear(grid[1] * 4, grid[0] * 2, (2, 4), density, allow_empty_rows=True)
    assert loose.mask.sum() == wanted


def test_a_random_pattern_uses_every_block_alike():
    counts = sum(BlockSparseLinear(8, 8, 2, 0.5, generator=seeded(seed)).mask.long() for seed in range(200))
    assert counts.min() > 70
    assert counts.max() < 130


def test_a_layer_is_reproducible_from_a_generator_or_the_global_seed():
    first, second = (BlockSparseLinear(64, 64, 8, 0.3, generator=seeded(3)) for _ in range(2))
    third = BlockSparseLinear(64, 64, 8, 0.3, generator=seeded(4))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    assert not torch.equal(first.mask, third.mask)

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    BlockSparseLinear(64, 64, 8, 0.3, generator=seeded(3))
    assert torch.equal(torch.random.get_rng_state(), before)
    fourth = BlockSparseLinear(64, 64, 8, 0.3)
    torch.manual_seed(5)
    fifth = BlockSparseLinear(64, 64, 8, 0.3)
    assert torch.equal(fourth.mask, fifth.mask)
    assert torch.equal(fourth.weight, fifth.weight)


def test_values_start_within_the_bound_of_the_inputs_that_a_row_has():
    pattern = torch.tensor([[True, False, False], [True, True, True], [False, False, False], [False, False, True]])
    layer = BlockSparseLinear(300, 500, 128, pattern=pattern)
    dense = dense_weight(layer)
    for rows, inputs in ((slice(0, 128), 128), (slice(128, 256), 300), (slice(384, 500), 44)):
        bound = 1 / math.sqrt(inputs)
        assert 0.97 * bound < dense[rows].abs().max() <= bound * (1 + 1e-6)
        assert 0.9 * bound < layer.bias[rows].abs().max() <= bound * (1 + 1e-6)
        assert abs(float(dense[rows][dense[rows] != 0].std()) / bound - 1 / math.sqrt(3)) < 0.02
    assert not layer.bias[256:384].any()
    blocks = layer.weight.detach()
    assert not blocks[layer.coords[1] == 2][:, :, 44:].any()
    assert not blocks[layer.coords[0] == 3][:, 116:].any()


def test_reset_parameters_draws_new_values_for_the_same_pattern():
    layer = BlockSparseLinear(64, 64, 16, 0.5)
    weight, mask = layer.weight.detach().clone(), layer.mask
    layer.reset_parameters()
    assert not torch.equal(layer.weight, weight)
    assert torch.equal(layer.mask, mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_and_bias_are_as_asked(dtype):
    layer = BlockSparseLinear(32, 32, 16, dtype=dtype, bias=False)
    assert layer.weight.dtype == dtype
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight", "coords"]


# from and to dense weights


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (50, 37)])
def test_from_dense_keeps_the_largest_blocks(shape, dtype):
    linear = nn.Linear(shape[1], shape[0], dtype=dtype)
    layer = BlockSparseLinear.from_dense(linear, (16, 8), density=0.3)
    norms = torch.zeros(layer.grid, dtype=torch.float64)
    for row in range(layer.grid[0]):
        for column in range(layer.grid[1]):
            norms[row, column] = linear.weight[row * 16 : row * 16 + 16, column * 8 : column * 8 + 8].double().norm()
    count = round(0.3 * norms.numel())
    assert layer.mask.sum() == count
    assert norms[layer.mask].min() >= norms[~layer.mask].max() * (1 - 1e-6)
    assert torch.equal(dense_weight(layer), linear.weight.detach().double() * element_mask(layer))
    assert torch.equal(layer.bias, linear.bias)
    assert layer.bias is not linear.bias
    assert layer.weight.dtype == dtype


def test_from_dense_by_threshold_keeps_blocks_above_it():
    weight = torch.zeros(8, 8)
    weight[0, 0], weight[2, 4], weight[6, 7], weight[4, 1] = 3.0, 1.0, -2.0, math.nan
    assert BlockSparseLinear.from_dense(weight, 2, threshold=0).mask.nonzero().tolist() == [
        [0, 0],
        [1, 2],
        [2, 0],
        [3, 3],
    ]
    layer = BlockSparseLinear.from_dense(weight, 2, threshold=2.0, bias=torch.arange(8.0))
    assert layer.mask.nonzero().tolist() == [[0, 0], [2, 0]]  # not one that is equal; a NaN stays to be seen
    assert torch.equal(layer.bias, torch.arange(8.0))
    nothing = BlockSparseLinear.from_dense(torch.zeros(8, 8), 2, threshold=0)
    assert nothing.density == 0
    assert nothing.bias is None


def test_from_dense_of_large_half_precision_does_not_overflow():
    weight = torch.full((4, 4), 2.0**12, dtype=torch.float16)
    weight[:2, :2] *= 2
    assert BlockSparseLinear.from_dense(weight, 2, density=0.25).mask.nonzero().tolist() == [[0, 0]]


def test_from_dense_draws_nothing_and_takes_no_part_in_autograd():
    linear = nn.Linear(32, 32)
    before = torch.random.get_rng_state()
    layer = BlockSparseLinear.from_dense(linear, 16, density=0.5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert layer.weight.is_leaf
    assert layer.weight.requires_grad


def test_from_dense_keeps_what_is_trained_and_the_mode():
    linear = nn.Linear(32, 32).eval()
    linear.weight.requires_grad_(False)
    layer = BlockSparseLinear.from_dense(linear, 16, 0.5)
    assert (layer.weight.requires_grad, layer.bias.requires_grad, layer.training) == (False, True, False)
    layer = BlockSparseLinear.from_dense(linear.weight, 16, None, 0.0)
    assert (layer.weight.requires_grad, layer.training) == (True, True)


def test_a_share_may_be_a_number_of_numpy():
    assert BlockSparseLinear(64, 64, 16, numpy.float32(0.5)).density == 0.5
    assert BlockSparseLinear.from_dense(torch.ones(4, 4), 2, threshold=numpy.float64(9.0)).density == 0


@pytest.mark.cpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 48), (50, 37)])
def test_to_dense_and_to_linear(shape, bias):
    layer = BlockSparseLinear(*shape, (16, 32), 0.5, bias, dtype=torch.float64).eval()
    assert torch.equal(layer.to_dense(), dense_weight(layer))
    layer.to_dense().sum().backward()
    assert torch.equal(dense_weight(layer, layer.weight.grad), element_mask(layer))
    linear = layer.to_linear()
    x = torch.randn(3, shape[0], dtype=torch.float64)
    assert_matches(layer(x), linear(x))
    assert type(linear) is nn.Linear
    assert not linear.training
    with torch.no_grad():
        linear.weight += 1
    assert torch.equal(layer.to_dense(), dense_weight(layer))


def test_the_repr_shows_sizes_density_and_the_statement():
    layer = BlockSparseLinear(100, 64, (32, 16), 0.5, bias=False)
    assert repr(layer) == (
        "BlockSparseLinear(in_features=100, out_features=64, block_size=(32, 16), blocks=7/14, density=0.5, "
        "bias=False, Y[t,o] += X[t,i] * W[o,i])"
    )
    assert layer.density == 0.5


# changing the pattern


@pytest.mark.cpu
def test_set_pattern_keeps_kept_blocks_and_starts_new_ones_at_zero():
    old = torch.tensor([[True, True, False], [False, True, True]])
    new = torch.tensor([[False, True, True], [True, True, False]])
    layer = BlockSparseLinear(6, 4, 2, pattern=old)
    before = dense_weight(layer)
    layer.set_pattern_(new)
    expected = before * torch.tensor([[0.0, 1, 0], [0, 1, 0]]).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert torch.equal(dense_weight(layer), expected)
    assert torch.equal(layer.mask, new)
    assert layer.coords.dtype == torch.int32
    assert layer.weight.shape == (4, 2, 2)
    assert layer.weight.requires_grad


def test_new_blocks_may_start_at_random():
    old, new = torch.eye(3).bool(), torch.ones(3, 3).bool()
    layer = BlockSparseLinear(40, 40, 16, pattern=old)
    before = dense_weight(layer)
    layer.set_pattern_(new, init="random", generator=seeded(0))
    added = dense_weight(layer) * (before == 0)
    assert torch.equal(dense_weight(layer) * (before != 0), before)
    assert 0.9 / math.sqrt(40) < added.abs().max() <= 1 / math.sqrt(40) * (1 + 1e-6)
    assert not layer.weight.detach()[layer.coords[1] == 2][:, :, 8:].any()


def test_prune_keeps_the_largest_blocks_counting_only_what_is_in_the_matrix():
    layer = BlockSparseLinear(5, 4, 2, 1.0)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 7.0).view(6, 1, 1).expand(6, 2, 2))
        layer.weight[2, :, 1] = 100.0  # beyond the last input
    layer.prune_(0.5)
    assert layer.mask.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
    same = layer.weight.detach().clone()
    layer.prune_(0.5)
    assert torch.equal(layer.weight, same)


@pytest.mark.cpu
def test_a_layer_can_lose_and_regain_all_its_blocks():
    layer = BlockSparseLinear(8, 8, 2, 0.5, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    layer.set_pattern_(torch.zeros(4, 4, dtype=torch.bool))
    assert_matches(layer(x), layer.bias.expand(3, 8))
    layer.set_pattern_(torch.ones(4, 4, dtype=torch.bool), init="random")
    assert_matches(layer(x), x @ dense_weight(layer).T + layer.bias)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_goes_on_after_a_change_of_pattern(make):
    layer = BlockSparseLinear(8, 8, 2, 0.5)
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make(layer.parameters(), lr=0.1, **options)

    def step() -> None:
        optimizer.zero_grad()
        layer(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()

    step()
    layer.prune_(0.25, optimizer=optimizer)
    for value in optimizer.state[layer.weight].values():
        assert not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) == 4
    step()
    layer.set_pattern_(~layer.mask)
    optimizer.state.pop(layer.weight, None)
    step()
    assert layer.weight.shape == (12, 2, 2)


def trained(layer: BlockSparseLinear, make: Any, steps: int = 2, **options: Any) -> torch.optim.Optimizer:
    optimizer = make([layer.weight], **options)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.randn(3, layer.in_features)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("is_given", [True, False])
def test_an_optimizers_state_moves_with_its_blocks(is_given):
    """Given or not: momentum of other blocks would be used without a word."""
    layer = BlockSparseLinear(8, 8, 2, pattern=eye(4, 4))
    optimizer = trained(layer, torch.optim.SGD, lr=0.1, momentum=0.9)
    before = optimizer.state[layer.weight]["momentum_buffer"].clone()
    mask = eye(4, 4).roll(1, 1)
    mask[2] = torch.tensor([True, False, True, False])
    layer.set_pattern_(mask, optimizer=optimizer if is_given else None)
    after = optimizer.state[layer.weight]["momentum_buffer"]
    assert layer.coords.T.tolist() == [[0, 1], [1, 2], [2, 0], [2, 2], [3, 0]]
    assert torch.equal(after, torch.stack([0 * before[0], *[0 * before[0]] * 2, before[2], 0 * before[0]]))
    weight = layer.weight.detach().clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    moved = (layer.weight.detach() != weight).flatten(1).any(1)
    assert moved.tolist() == [False, False, False, True, False]


OPTIMIZERS = {
    torch.optim.SGD: dict(lr=0.1, momentum=0.9),
    torch.optim.Adam: dict(amsgrad=True),
    torch.optim.Adagrad: dict(initial_accumulator_value=0.5),
    torch.optim.Adadelta: {},
    torch.optim.Adamax: {},
    torch.optim.ASGD: {},
    torch.optim.NAdam: {},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: dict(momentum=0.9, centered=True),
    torch.optim.Rprop: dict(lr=0.25),
    torch.optim.Adafactor: {},
}


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_every_optimizer_that_holds_the_weight_is_found(make):
    layer = BlockSparseLinear(8, 8, 2, pattern=eye(4, 4))
    first, second = (trained(layer, make, **OPTIMIZERS[make]) for _ in range(2))
    other = trained(BlockSparseLinear(8, 8, 2, 0.25), make, **OPTIMIZERS[make])
    untouched = copy.deepcopy(other.state_dict())
    layer.set_pattern_(torch.ones(4, 4, dtype=torch.bool))
    start = {"step_size": 0.25, "sum": 0.5}
    for optimizer in (first, second):
        for name, value in optimizer.state[layer.weight].items():
            if isinstance(value, torch.Tensor) and value.ndim == 3:
                new = value[~eye(4, 4).flatten()]
                assert torch.equal(new, torch.full_like(new, start.get(name, 0.0)))
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    torch.testing.assert_close(other.state_dict(), untouched, rtol=0, atol=0)


def test_a_state_that_is_not_kept_by_block_is_left_behind():
    layer = BlockSparseLinear(8, 8, 2, pattern=eye(4, 4))
    optimizer = trained(layer, torch.optim.Adam)
    optimizer.state[layer.weight]["scales"] = torch.ones(3)
    layer.prune_(0.125)
    assert optimizer.state[layer.weight] == {}
    flat = trained(layer, lambda weights: torch.optim.LBFGS([layer.bias, *weights]), steps=0)

    def loss() -> torch.Tensor:
        flat.zero_grad()
        value = layer(torch.ones(3, 8)).square().sum()
        value.backward()
        return value

    flat.step(loss)
    layer.set_pattern_(~layer.mask)
    assert not flat.state
    flat.step(loss)


def test_a_state_that_is_loaded_after_a_change_of_pattern_stays():
    """A run is resumed: patterns, values, then the optimizer, made before or after."""
    source = BlockSparseLinear(8, 8, 2, pattern=eye(4, 4))
    saved = trained(source, torch.optim.Adam).state_dict()
    layer = BlockSparseLinear(8, 8, 2, 1.0)
    optimizer = torch.optim.Adam([layer.weight])
    load_patterns_(layer, source.state_dict())
    layer.load_state_dict(source.state_dict())
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], saved["state"][0]["exp_avg"])
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"], 0.9 * saved["state"][0]["exp_avg"])


def test_load_patterns_moves_the_state_of_optimizers():
    layer = BlockSparseLinear(8, 8, 2, pattern=eye(4, 4))
    optimizer = trained(layer, torch.optim.Adam)
    before = optimizer.state[layer.weight]["exp_avg"].clone()
    load_patterns_(nn.Sequential(layer), {"0.coords": torch.tensor([[1, 3], [1, 0]])})
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], torch.stack([before[1], 0 * before[1]]))


def test_a_loss_from_before_a_change_of_pattern_is_refused():
    """Its gradients would be those of blocks that have moved."""
    layer, x = BlockSparseLinear(8, 8, 2, 0.5), torch.randn(3, 8, requires_grad=True)
    for change in (lambda: layer.set_pattern_(~layer.mask, init="random"), lambda: layer.prune_(0.25)):
        loss = layer(x).square().sum()
        change()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert x.grad is None


@pytest.mark.cpu
def test_a_pattern_changed_in_inference_mode_trains():
    layer, x = BlockSparseLinear(8, 8, 2, 0.5), torch.randn(3, 8)
    with torch.inference_mode():
        layer.prune_(0.25)
        expected = layer(x)
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (4, 2, 2)
    with torch.inference_mode():
        layer = BlockSparseLinear(8, 8, 2, 0.5)
    for density in (0.25, 0.125):
        layer.prune_(density)
        with torch.no_grad():
            assert_matches(layer(x), x.double() @ dense_weight(layer).double().T + layer.bias.double())


# what is refused

CONSTRUCTOR = [
    (dict(in_features=0), ShapeError, "in_features is 0; give a whole number of at least 1"),
    (dict(out_features=2.5), ShapeError, "out_features is 2.5; give a whole number of at least 1"),
    *(
        (
            dict(block_size=size),
            ShapeError,
            f"block_size is {size!r}; give a whole number of at least 1, or two of them (out, in)",
        )
        for size in (0, -1, (16, 0), (16,), (16, 16, 16), 1.5, "16", True, None)
    ),
    (
        dict(block_size=64),
        ShapeError,
        "block_size is (64, 64) but the weight is [48, 100]; a block can't be larger than the matrix",
    ),
    (
        dict(block_size=(16, 101)),
        ShapeError,
        "block_size is (16, 101) but the weight is [48, 100]; a block can't be larger than the matrix",
    ),
    *(
        (
            dict(density=density),
            OperandError,
            f"density is {density!r}; give a number above 0 and up to 1, the share of blocks to keep",
        )
        for density in (0, 0.0, -0.1, 1.01, math.nan, "0.5", True, None, numpy.float32(2.0))
    ),
    *(
        (
            dict(dtype=dtype),
            OperandError,
            f"dtype is {dtype}; a weight is torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        )
        for dtype in (torch.int32, torch.complex64, torch.bool)
    ),
    (dict(pattern=[[True]]), OperandError, "pattern is of type list; give a bool tensor [3, 7], one per block"),
    (
        dict(pattern=torch.ones(3, 7)),
        OperandError,
        "pattern is torch.float32; give torch.bool, as in pattern=pattern != 0",
    ),
    (
        dict(pattern=torch.ones(7, 3, dtype=torch.bool)),
        ShapeError,
        "pattern is [7, 3] but the blocks are [3, 7]; give one bool per block",
    ),
    (
        dict(generator=42),
        OperandError,
        "generator is of type int; give a torch.Generator, as torch.Generator().manual_seed(0)",
    ),
    (
        dict(pattern=torch.ones(3, 7, dtype=torch.bool, device="meta")),
        OperandError,
        "pattern is on meta but the layer is on cpu; move one with .to()",
    ),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("options", "error", "words"), CONSTRUCTOR)
def test_a_layer_that_can_not_be_is_refused(options, error, words):
    given = {"in_features": 100, "out_features": 48, "block_size": 16, **options}
    assert_says(error, words, lambda: BlockSparseLinear(**given))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(4, 31), ShapeError, "x is [4, 31] but in_features is 32; its last dimension must be in_features"),
        (torch.ones(()), ShapeError, "x is [] but in_features is 32; its last dimension must be in_features"),
        (
            torch.ones(4, 32, dtype=torch.float16),
            OperandError,
            "x is torch.float16 but the weight is torch.float32; convert one with .to(), or use autocast",
        ),
        (
            torch.ones(4, 32, dtype=torch.int64),
            OperandError,
            "x is torch.int64 but the weight is torch.float32; convert one with .to(), or use autocast",
        ),
        (
            torch.ones(4, 32, device="meta"),
            OperandError,
            "x is on meta but the layer is on cpu; move one with .to()",
        ),
        *(
            (x, OperandError, f"x is of type {kind}; pass a tensor [..., in_features]")
            for x, kind in ((None, "NoneType"), ([1.0], "list"), (numpy.ones((4, 32)), "ndarray"))
        ),
        (
            torch.ones(4, 32).to_sparse(),
            OperandError,
            "x is a torch.sparse_coo tensor; pass a dense one, as x.to_dense()",
        ),
    ],
)
def test_an_input_that_does_not_fit_is_refused(x, error, words):
    layer = BlockSparseLinear(32, 48, 16)
    assert_says(error, words, lambda: layer(x))
    with torch.no_grad():
        layer(torch.ones(4, 32))
        assert_says(error, words, lambda: layer(x))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_a_nested_input_is_refused():
    """After a call too, when its strides would be compared: asking for them ends the process."""
    layer, x = BlockSparseLinear(32, 48, 16), torch.nested.nested_tensor([torch.ones(4, 32), torch.ones(3, 32)])
    words = (
        "x is a nested tensor; pass a padded one, as x.to_padded_tensor(0.0), and give an nn.TransformerEncoder that "
        "makes them enable_nested_tensor=False"
    )
    assert_says(OperandError, words, lambda: layer(x))
    with torch.no_grad():
        layer(torch.ones(4, 32))
        assert_says(OperandError, words, lambda: layer(x))


WEIGHT = torch.ones(48, 32)
FROM_DENSE = [
    (dict(), OperandError, "one of density and threshold says which blocks to keep, but neither is given"),
    (
        dict(density=0.5, threshold=1.0),
        OperandError,
        "one of density and threshold says which blocks to keep, but both are given",
    ),
    (
        dict(density=2),
        OperandError,
        "density is 2; give a number above 0 and up to 1, the share of blocks to keep",
    ),
    *(
        (
            dict(threshold=threshold),
            OperandError,
            f"threshold is {threshold!r}; give a number of at least 0, which a kept norm exceeds",
        )
        for threshold in (-1.0, math.nan, "1")
    ),
    (
        dict(dense=[1.0]),
        OperandError,
        "dense is of type list; give a torch.nn.Linear or its weight [out, in]",
    ),
    (dict(dense=torch.ones(3)), ShapeError, "dense is [3]; give a weight [out, in]"),
    (
        dict(dense=nn.Linear(32, 48, device="meta"), density=0.5),
        OperandError,
        "dense is on the meta device, where it has no values; give it memory and values first",
    ),
    (
        dict(dense=nn.LazyLinear(48), density=0.5),
        OperandError,
        "dense is a LazyLinear without values before its first call; call it once",
    ),
    (
        dict(dense=torch.ones(48, 32).to_sparse(), density=0.5),
        OperandError,
        "dense is a torch.sparse_coo tensor; give a dense one, as in dense.to_dense()",
    ),
    (
        dict(density=0.5, bias=True),
        OperandError,
        "bias is of type bool; give a tensor [out], or leave it out",
    ),
    (
        dict(dense=torch.ones(48, 32, dtype=torch.complex64)),
        OperandError,
        "dense is torch.complex64; a weight is torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    (
        dict(density=0.5, block_size=33),
        ShapeError,
        "block_size is (33, 33) but the weight is [48, 32]; a block can't be larger than the matrix",
    ),
    (
        dict(dense=nn.Linear(32, 48), density=0.5, bias=torch.ones(48)),
        OperandError,
        "bias goes with a weight, but dense is a Linear, which brings its own; leave bias out",
    ),
    (
        dict(density=0.5, bias=torch.ones(32)),
        ShapeError,
        "bias is [32] but dense is [48, 32]; give one number per output",
    ),
    (
        dict(density=0.5, bias=torch.ones(48, dtype=torch.float64)),
        OperandError,
        "bias is torch.float64 on cpu but dense is torch.float32 on cpu; move one with .to()",
    ),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("options", "error", "words"), FROM_DENSE)
def test_a_dense_weight_that_can_not_be_taken_is_refused(options, error, words):
    assert_says(error, words, lambda: BlockSparseLinear.from_dense(**{"dense": WEIGHT, "block_size": 16, **options}))


@pytest.mark.cpu
def test_a_change_that_can_not_be_made_changes_nothing():
    layer = BlockSparseLinear(32, 48, 16, 0.5)
    other = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    flat = torch.optim.LBFGS(layer.parameters())
    adam = trained(layer, torch.optim.Adam)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = copy.deepcopy(adam.state[layer.weight])
    mask = torch.ones(3, 2, dtype=torch.bool)
    for words, call in (
        (
            "optimizer does not hold this layer's weight; pass the one that trains it",
            lambda: layer.prune_(0.2, optimizer=other),
        ),
        (
            "optimizer is LBFGS, whose state spans all parameters; leave it out and make a new one",
            lambda: layer.prune_(0.2, optimizer=flat),
        ),
        (
            "density is 1.0, which is 6 blocks, but 3 are stored; set_pattern_ adds blocks",
            lambda: layer.prune_(1.0),
        ),
        (
            "density is 0; give a number above 0 and up to 1, the share of blocks to keep",
            lambda: layer.prune_(0),
        ),
        (
            "optimizer is of type str; give the torch.optim.Optimizer that trains the weight",
            lambda: layer.prune_(0.2, optimizer="adam"),
        ),
        (
            "generator is of type int; give a torch.Generator, as torch.Generator().manual_seed(0)",
            lambda: layer.set_pattern_(mask, init="random", optimizer=adam, generator=42),
        ),
        (
            "generator is of type int; give a torch.Generator, as torch.Generator().manual_seed(0)",
            lambda: layer.reset_parameters(42),
        ),
        ("init is 'ones'; choose from 'zeros' and 'random'", lambda: layer.set_pattern_(mask, init="ones")),
        ("mask is [2, 3] but the blocks are [3, 2]; give one bool per block", lambda: layer.set_pattern_(mask.T)),
        ("mask is torch.int64; give torch.bool, as in mask=mask != 0", lambda: layer.set_pattern_(mask.long())),
        (
            "mask is on meta but the layer is on cpu; move one with .to()",
            lambda: layer.set_pattern_(mask.to("meta")),
        ),
    ):
        assert_says(InsumError, words, call)
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
    torch.testing.assert_close(dict(adam.state[layer.weight]), state, rtol=0, atol=0)


def test_a_parametrized_weight_has_no_pattern_to_change():
    layer, x = BlockSparseLinear(32, 48, 16, 0.5), torch.randn(3, 32)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    mask, expected = layer.mask, layer(x)
    words = "weight is parametrized, so its blocks are not stored here; remove the parametrization first"
    assert_says(OperandError, words, lambda: layer.prune_(0.2))
    assert_says(OperandError, words, lambda: layer.set_pattern_(~mask))
    assert torch.equal(layer(x), expected)
    parametrize.remove_parametrizations(layer, "weight")
    layer.set_pattern_(~mask)
    assert torch.equal(layer.mask, ~mask)


@pytest.mark.cpu
def test_a_layer_on_the_meta_device_has_room_for_a_pattern():
    mask = torch.rand(4, 3) < 0.5
    layer = BlockSparseLinear(48, 64, 16, pattern=mask, device="meta")
    assert (layer.coords.shape, layer.weight.shape) == ((2, int(mask.sum())), (int(mask.sum()), 16, 16))
    assert layer.weight.is_meta
    with pytest.raises(OperandError) as caught:
        BlockSparseLinear(48, 64, 16, pattern=mask.to("meta"), device="meta")
    assert str(caught.value) == "pattern is on the meta device, where it has no values; give one on another device"


# weights of another number of blocks

BLOCKS = (
    "there is one block for each column of coords. If layers share a weight, prune_ and set_pattern_ of one change it "
    "for all: give the others the same coords"
)


@pytest.mark.parametrize("use", ["forward", "no_grad", "to_dense", "as_format"])
def test_a_weight_that_another_layer_has_pruned_is_refused_until_its_pattern_follows(use):
    first = BlockSparseLinear(16, 16, 4, pattern=torch.ones(4, 4, dtype=torch.bool), bias=False)
    second, x = BlockSparseLinear(16, 16, 4, pattern=first.mask, bias=False), torch.randn(3, 16)
    second.weight = first.weight
    for _ in range(3):
        second(x)  # by a launch plan at last
    first.prune_(0.5)
    calls = {"forward": lambda: second(x), "to_dense": second.to_dense, "as_format": second.as_format}
    with torch.set_grad_enabled(use != "no_grad"):
        call = calls.get(use, calls["forward"])
        assert_says(ShapeError, f"weight is [8, 4, 4] but coords is [2, 16] and block_size (4, 4); {BLOCKS}", call)
    second.coords = first.coords
    assert_matches(second(x), x.cpu().double() @ dense_weight(first).T)


@pytest.mark.parametrize("coords", [torch.arange(16), torch.zeros(3, 16, dtype=torch.int32), torch.zeros(2, 16)])
def test_coords_of_another_shape_or_type_are_no_pattern(coords):
    layer = BlockSparseLinear(16, 16, 4, density=1.0)
    layer.coords = coords
    with pytest.raises(OperandError, match=r"coords does not list blocks of a \[4, 4\] grid in ascending order"):
        layer(torch.randn(3, 16))
