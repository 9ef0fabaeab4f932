"""Patterns of BlockSparseLinear that are saved, loaded, copied and moved, and memory that holds none."""

from __future__ import annotations

import copy
import io
import pickle
import re

import pytest
import torch
from linear_twin import dense_weight, eye, seeded
from messages import assert_says
from tolerances import assert_matches
from torch import nn
from torch.nn.utils import parametrize

from insum_ops.compiler.language.errors import OperandError
from insum_ops.nn import BlockSparseLinear, load_patterns_

# saving, loading, copying, moving


def test_a_state_dict_holds_values_and_pattern():
    layer = BlockSparseLinear(32, 48, 16, 0.5)
    state = layer.state_dict()
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        "weight": ((3, 16, 16), torch.float32),
        "bias": ((48,), torch.float32),
        "coords": ((2, 3), torch.int32),
    }


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_dict_loads_strictly_into_another_pattern_of_the_same_size(dtype, assign):
    source = BlockSparseLinear(32, 48, 16, 0.5, generator=seeded(0))
    target = BlockSparseLinear(32, 48, 16, 0.5, dtype=dtype, generator=seeded(1))
    assert not torch.equal(source.mask, target.mask)
    x = torch.randn(3, 32)
    target(x.to(dtype)).sum().backward()
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    target.load_state_dict(torch.load(buffer), assign=assign)
    assert torch.equal(target.mask, source.mask)
    torch.testing.assert_close(target(x.to(target.weight.dtype)).float(), source(x))


def test_a_state_dict_of_another_pattern_size_is_refused():
    source, target = BlockSparseLinear(32, 48, 16, 1.0), BlockSparseLinear(32, 48, 16, 0.5)
    model = nn.Sequential(target)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = nn.Sequential(source).state_dict()
    assert_says(
        RuntimeError,
        "Error(s) in loading state_dict for Sequential:\n\tloading a state_dict of another pattern size: 0.weight has "
        "6 blocks there but 3 here; call insum_ops.nn.load_patterns_(model, state_dict) first",
        lambda: model.load_state_dict(state),
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    load_patterns_(model, state)
    model.load_state_dict(state)
    assert torch.equal(target.to_dense(), source.to_dense())


@pytest.mark.cpu
def test_a_model_made_without_memory_takes_the_patterns_of_a_state_dict():
    source = BlockSparseLinear(32, 48, 16, 1.0)
    target = BlockSparseLinear(32, 48, 16, 0.5, device="meta")
    words = "coords is on the meta device here; give it memory first, with model.to_empty(device=...)"
    assert_says(OperandError, words, lambda: load_patterns_(target, source.state_dict()))
    target.to_empty(device="cpu")
    target.coords.fill_(10**9)  # what happened to be there
    load_patterns_(target, source.state_dict())
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.to_dense(), source.to_dense())


def test_patterns_of_a_state_dict_are_checked():
    layer = BlockSparseLinear(32, 48, 16, 0.5)
    head = "Error(s) in loading state_dict for BlockSparseLinear:\n\t"
    order = "coords in the state_dict does not list blocks of a [3, 2] grid in ascending order"
    outside = (
        "coords in the state_dict lists a block at {}, but in_features=32, out_features=48 and block_size=(16, 16) "
        "make [3, 2] blocks; it was saved by a layer of other features"
    )
    kind = "coords in the state_dict is no int32 tensor [2, blocks]; it was not saved by a BlockSparseLinear"
    for coords, words in (
        (torch.tensor([[0, 1, 3], [0, 0, 0]]), outside.format([3, 0])),
        (torch.tensor([[0, 1, 2], [0, -1, 0]]), outside.format([1, -1])),
        (torch.tensor([[0, 2, 1], [0, 0, 0]]), order),
        (torch.tensor([[0, 1, 1], [0, 1, 1]]), order),
        (torch.zeros(3, 3, dtype=torch.int32), kind),
        (torch.zeros(2, 3), kind),
        ("coords", kind),
    ):
        state = {**layer.state_dict(), "coords": coords}
        assert_says(RuntimeError, head + words, lambda state=state: layer.load_state_dict(state))
        assert_says(OperandError, words, lambda state=state: load_patterns_(layer, state))
    assert_says(
        OperandError,
        "0.coords is not in the state_dict; it must be that of a model with the same layers",
        lambda: load_patterns_(nn.Sequential(layer), layer.state_dict()),
    )
    assert_says(
        RuntimeError,
        head + "weight is dense, [48, 32], in the state_dict; load it into a torch.nn.Linear and pass that to "
        "BlockSparseLinear.from_dense or insum_ops.nn.sparsify",
        lambda: layer.load_state_dict(nn.Linear(32, 48).state_dict()),
    )
    assert_says(
        RuntimeError,
        head + "coords is not in the state_dict but weight is; blocks are loaded with their pattern, or neither is",
        lambda: layer.load_state_dict({"weight": layer.weight, "bias": layer.bias}),
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: state.update(BlockSparseLinear(64, 32, (16, 8), pattern=eye(2, 8)).state_dict()),
            "weight is [2, 16, 8] in the state_dict but blocks are [8, 16] here; "
            "make the layer with block_size=(16, 8)",
        ),
        (
            lambda state: state.pop("coords"),
            "coords is not in the state_dict but weight is; blocks are loaded with their pattern, or neither is",
        ),
        (
            lambda state: state.pop("weight"),
            "weight is not in the state_dict but coords is; blocks are loaded with their pattern, or neither is",
        ),
        (
            lambda state: state.update(weight=torch.ones(3, 8, 16)),
            "weight has 3 blocks in the state_dict but coords 2",
        ),
        (
            lambda state: state.update(weight=[1.0]),
            "weight in the state_dict is no tensor [blocks, *block_size]; it was not saved by a BlockSparseLinear",
        ),
        (
            lambda state: state.update(bias=torch.ones(31)),
            "bias is [31] in the state_dict but [32] here; it was saved by a layer of other out_features",
        ),
        (
            lambda state: state.update(coords=torch.tensor([[0, 1], [0, 5]])),
            "coords in the state_dict lists a block at [1, 5], but in_features=64, out_features=32 and "
            "block_size=(8, 16) make [4, 4] blocks; it was saved by a layer of other features",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(change, words, strict):
    layer = BlockSparseLinear(64, 32, (8, 16), pattern=eye(4, 4) & (torch.arange(4) > 1))
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = {key: torch.zeros_like(value) for key, value in before.items()}
    state["coords"] = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)
    change(state)
    with pytest.raises(RuntimeError, match=re.escape(words)):
        layer.load_state_dict(state, strict=strict)
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


def test_a_parametrized_layer_loads_its_own_state():
    layer, other = (BlockSparseLinear(32, 48, 16, 0.5, generator=seeded(seed)) for seed in (0, 1))
    for each in (layer, other):
        parametrize.register_parametrization(each, "weight", nn.Softplus())
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.to_dense(), other.to_dense())


# memory without a pattern


@pytest.mark.cpu
def test_reset_parameters_draws_a_pattern_where_there_is_none():
    """A layer made on the meta device becomes what the same seed makes elsewhere."""
    for options in ({"density": 0.3}, {"density": 0.1, "allow_empty_rows": True}, {"density": 0.01}):
        wanted = BlockSparseLinear(64, 80, 16, generator=seeded(7), **options)
        for found in (None, 0, 10**6, -1):
            layer = BlockSparseLinear(64, 80, 16, device="meta", **options).to_empty(device="cpu")
            if found is not None:
                layer.coords.fill_(found)
            layer.reset_parameters(seeded(7))
            assert all(torch.equal(layer.state_dict()[key], value) for key, value in wanted.state_dict().items())
    torch.manual_seed(3)
    layer.to("meta").to_empty(device="cpu").reset_parameters()
    again = layer.coords.clone()
    torch.manual_seed(3)
    layer.to("meta").to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.coords, again)
    layer.set_pattern_(torch.zeros(5, 4, dtype=torch.bool))
    layer.to("meta").to_empty(device="cpu").reset_parameters()
    assert layer.coords.shape == (2, 0)


@pytest.mark.cpu
def test_a_pattern_that_was_set_after_to_empty_stays():
    source = BlockSparseLinear(64, 64, 16, 0.25)
    for fill in (
        lambda layer: layer.load_state_dict(source.state_dict()),
        lambda layer: layer.set_pattern_(source.mask),
        lambda layer: load_patterns_(layer, source.state_dict()),
    ):
        layer = BlockSparseLinear(64, 64, 16, 0.25, device="meta").to_empty(device="cpu")
        layer.coords.fill_(-7)
        fill(layer)
        layer.reset_parameters()
        assert torch.equal(layer.mask, source.mask)


@pytest.mark.parametrize("found", [0, 10**6, -1])
def test_memory_without_a_pattern_is_not_multiplied(found):
    layer = BlockSparseLinear(64, 64, 16, 0.25, device="meta").to_empty(device="cpu")
    layer.coords.fill_(found)
    words = (
        "coords does not list blocks of a [4, 4] grid in ascending order, as after to_empty(), which fills nothing in, "
        "or an average over buffers; call reset_parameters(), set_pattern_(mask) or load a state_dict, and average "
        "without coords"
    )
    for call in (lambda: layer(torch.ones(2, 64)), layer.to_dense, lambda: layer.prune_(0.1)):
        assert_says(OperandError, words, call)


def test_a_layer_on_the_meta_device_is_not_multiplied():
    layer = BlockSparseLinear(64, 64, 16, 0.25, device="meta")
    words = (
        "the layer is on the meta device, where it has no pattern; give it memory with .to_empty(device=...), then "
        "call reset_parameters() or load a state_dict"
    )
    for x in (torch.ones(2, 64), torch.ones(2, 64, device="meta")):
        assert_says(OperandError, words, lambda x=x: layer(x))
    words = "the layer is on the meta device; give it memory first, with .to_empty(device=...)"
    assert_says(OperandError, words, lambda: layer.set_pattern_(torch.ones(4, 4, dtype=torch.bool, device="meta")))


def test_copies_and_pickles_work_and_share_nothing():
    layer = BlockSparseLinear(32, 48, 16, 0.5)
    x = torch.randn(3, 32)
    expected = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.weight.zero_()
        other.set_pattern_(~other.mask)
    assert torch.equal(layer(x), expected)


@pytest.mark.cpu
def test_it_follows_to_and_half_and_double():
    layer = BlockSparseLinear(32, 48, 16, 0.5)
    x = torch.randn(3, 32)
    expected = x.double() @ dense_weight(layer).T + layer.bias.double()
    assert_matches(layer(x), expected)
    layer.double()
    assert layer.coords.dtype == torch.int32
    assert_matches(layer(x.double()), expected)
    layer.to(torch.float16)
    assert_matches(layer(x.half()), x.half().double() @ dense_weight(layer).T + layer.bias.double())


@pytest.mark.cpu
def test_a_layer_on_the_meta_device_is_filled_by_a_state_dict():
    source = BlockSparseLinear(32, 48, 16, 0.5)
    layer = BlockSparseLinear(32, 48, 16, 0.5, device="meta")
    assert layer.weight.is_meta
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), source(x))


@pytest.mark.cpu
def test_another_parameter_may_take_the_weights_place():
    layer = BlockSparseLinear(32, 48, 16, 0.5, dtype=torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64)
    layer(x)
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    assert_matches(layer(x), x @ dense_weight(layer).T + layer.bias)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.cpu
def test_a_pattern_written_over_itself_is_kept_and_another_one_refused():
    """As DistributedDataParallel writes it: at every step, mostly what was there."""
    layer = BlockSparseLinear(8, 8, 2, pattern=torch.eye(4, dtype=torch.bool), dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    layer(x)
    known = layer._weight_format.form
    layer.coords.copy_(layer.coords.clone())
    layer(x)
    assert layer._weight_format.form is known
    assert_matches(layer(x), x @ dense_weight(layer).T + layer.bias)
    for other in (layer.coords[1].flip(0), torch.zeros(4)):  # another pattern, and none, as rounded averages may be
        layer.coords[1] = other
        with pytest.raises(OperandError, match=r"^coords was overwritten with another pattern"):
            layer(x)
