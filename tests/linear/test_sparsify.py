"""sparsify: which layers are swapped, what the new ones hold, and what the table says."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys

import pytest
import torch
from linear_twin import dense_weight, element_mask
from tolerances import assert_matches
from torch import nn
from torch.nn.utils import parametrizations

from insum_ops.compiler.language.errors import OperandError, ShapeError
from insum_ops.nn import BlockSparseLinear, Sparsified, sparsify


def reasons(result: Sparsified) -> dict[str, str]:
    return {layer.name: layer.skipped for layer in result.layers}


@pytest.mark.cpu
def test_linear_layers_become_block_sparse_in_place_with_their_largest_blocks():
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Sequential(nn.Linear(48, 64, bias=False)))
    dense = [model[0].weight.detach().clone(), model[2][0].weight.detach().clone()]
    result = sparsify(model, block_size=16, density=0.25)
    assert result.model is model
    assert reasons(result) == {"0": "", "2.0": ""}
    for layer, weight in zip((model[0], model[2][0]), dense, strict=True):
        assert type(layer) is BlockSparseLinear
        assert layer.density == 0.25
        assert torch.equal(dense_weight(layer), weight.double() * element_mask(layer))
        norms = weight.unfold(0, 16, 16).unfold(1, 16, 16).double().norm(dim=(-2, -1))
        assert norms[layer.mask].min() >= norms[~layer.mask].max()
    assert model[2][0].bias is None


def test_the_share_of_the_norm_is_what_the_blocks_hold():
    linear = nn.Linear(50, 37, dtype=torch.float64)
    (layer,) = sparsify(linear, 16, 0.5).layers
    model = sparsify(linear, 16, 0.5).model
    kept = dense_weight(model).square().sum() / linear.weight.detach().square().sum()
    assert_matches(torch.tensor(layer.norm_share, dtype=torch.float64), kept)
    assert (layer.blocks, layer.all_blocks, layer.density) == (6, 12, 0.5)
    assert (layer.parameters, layer.parameters_before) == (6 * 256 + 37, 50 * 37 + 37)


def test_density_one_changes_no_output():
    model = nn.Sequential(nn.Linear(50, 37), nn.Tanh(), nn.Linear(37, 20)).double()
    x = torch.randn(3, 50, dtype=torch.float64)
    expected = model(x)
    sparsify(model, 16, 1.0)
    assert_matches(model(x), expected)


def test_a_model_that_is_a_linear_layer_is_returned():
    linear = nn.Linear(32, 32)
    result = sparsify(linear, 16, 0.5)
    assert isinstance(result.model, BlockSparseLinear)
    assert result.layers[0].name == ""


def test_filter_says_which():
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    result = sparsify(model, 16, 0.5, filter=lambda name, layer: name != "head" and layer.in_features == 32)
    assert reasons(result) == {"body": "", "head": "left out by filter"}
    assert type(model["head"]) is nn.Linear


class Odd(nn.Linear):
    pass


HOOKS_LOST = "has hooks, which would be lost; remove them, convert, and register them again"


def test_what_can_not_be_swapped_stays_and_says_why():
    shared = nn.Linear(32, 32)
    tied, embedding = nn.Linear(32, 64), nn.Embedding(64, 32)
    tied.weight = embedding.weight
    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *args: None)
    model = nn.ModuleDict(
        {
            "small": nn.Linear(15, 32),
            "flat": nn.Linear(32, 15),
            "one": shared,
            "two": shared,
            "embedding": embedding,
            "tied": tied,
            "sparse": BlockSparseLinear(32, 32, 16, 0.5),
            "odd": Odd(32, 32),
            "hooked": hooked,
            "normed": parametrizations.weight_norm(nn.Linear(32, 32)),
            "meta": nn.Linear(32, 32, device="meta"),
            "complex": nn.Linear(32, 32, dtype=torch.complex64),
            "attention": nn.MultiheadAttention(32, 2),
        }
    )
    before = dict(model.named_modules())
    result = sparsify(model, 16, 0.5)
    assert reasons(result) == {
        "small": "smaller than a block",
        "flat": "smaller than a block",
        "one": "shared with another layer",
        "tied": "shared with another layer",
        "sparse": "block-sparse already",
        "odd": "a subclass, Odd",
        "hooked": HOOKS_LOST,
        "normed": "has a parametrization of weight, which would be lost; remove it with "
        "torch.nn.utils.parametrize.remove_parametrizations, or convert first",
        "meta": "has no values yet, on the meta device",
        "complex": "its weight is torch.complex64",
        "attention.out_proj": "a subclass, NonDynamicallyQuantizableLinear",
    }
    assert dict(model.named_modules()) == before
    assert all(layer.parameters == layer.parameters_before for layer in result.layers)


HOOKED = {
    "forward": lambda layer: layer.register_forward_pre_hook(lambda *args: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *args: None),
    "state": lambda layer: layer.register_state_dict_post_hook(lambda *args: None),
    "before state": lambda layer: layer.register_state_dict_pre_hook(lambda *args: None),
    "load": lambda layer: layer.register_load_state_dict_post_hook(lambda *args: None),
    "before load": lambda layer: layer.register_load_state_dict_pre_hook(lambda *args: None),
    "gradient": lambda layer: layer.weight.register_hook(lambda grad: 0 * grad),
    "collected": lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda parameter: None),
}


@pytest.mark.parametrize("kind", HOOKED)
def test_no_hook_is_lost(kind):
    model = nn.Sequential(nn.Linear(32, 32))
    HOOKED[kind](model[0])
    on = {"gradient": " on weight", "collected": " on bias"}.get(kind, "")
    assert reasons(sparsify(model, 16, 0.5)) == {"0": HOOKS_LOST.replace(",", f"{on},", 1)}
    assert type(model[0]) is nn.Linear


def test_nothing_that_was_added_to_a_layer_is_lost():
    names = ("attribute", "buffer", "own", "repr", "part", "tagged", "plain", "marked", "compiled")
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in names})
    model["attribute"].scale = 5
    model["attribute"].offset = 3
    model["buffer"].register_buffer("running", torch.ones(1))
    model["own"].forward = lambda x: x
    model["repr"].extra_repr = lambda: "mine"
    model["part"].lora = nn.Linear(32, 2)
    model["tagged"].weight.lr_scale = model["tagged"].weight.decays = 0.5
    weight = model["plain"].weight.detach()
    del model["plain"].weight
    model["plain"].weight = weight
    model["marked"]._is_hf_initialized = model["marked"].weight._is_hf_initialized = True  # by Hugging Face, everywhere
    model["compiled"].compile()
    model["wrapped"] = torch.compile(nn.Linear(32, 32))
    assert reasons(sparsify(model, 16, 0.5)) == {
        "attribute": "has offset, scale of its own, which would be lost; convert first, then set them again",
        "buffer": "has running of its own, which would be lost; convert first, then set it again",
        "own": "has forward of its own, which would be lost; convert first, then set it again",
        "repr": "has extra_repr of its own, which would be lost; convert first, then set it again",
        "part": "has lora of its own, which would be lost; convert first, then set it again",
        "part.lora": "smaller than a block",
        "tagged": "has weight.decays, weight.lr_scale, which would be lost; convert first, then set them again",
        "plain": "its weight is no parameter",
        "marked": "",
        "compiled": "is compiled, which would be lost; convert first, then compile",
        "wrapped._orig_mod": "is compiled, which would be lost; convert first, then compile",
    }
    assert model["attribute"].scale == 5


@pytest.mark.cpu
@torch.no_grad()
def test_the_layers_of_a_compiled_model_are_swapped_for_its_next_call():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).double()
    compiled, x = torch.compile(model, backend="eager"), torch.randn(3, 32, dtype=torch.float64)
    compiled(x)
    assert reasons(sparsify(compiled, 16, 0.5)) == {"_orig_mod.0": ""}
    model(x)  # an ordinary call, as every BlockSparseLinear wants it before it is compiled
    assert_matches(compiled(x), (x @ dense_weight(model[0]).T + model[0].bias).relu())


def test_a_lazy_layer_waits_for_its_first_call():
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
    result = sparsify(model, 16, 0.5)
    assert reasons(result) == {"0": "has no values yet, before its first call", "1": ""}
    assert str(result).splitlines()[1] == "0       32 x 0  skipped: has no values yet, before its first call"
    model(torch.randn(2, 48))
    assert reasons(sparsify(model, 16, 0.5)) == {"0": "", "1": "block-sparse already"}


def test_dtype_mode_and_what_is_trained_stay():
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32)).eval()
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    sparsify(model, 16, 0.5)
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16
    assert not model[0].training
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(trained) == ["0.bias", "1.weight"]


def test_twice_is_once():
    model = nn.Sequential(nn.Linear(32, 32))
    sparsify(model, 16, 0.5)
    layer = model[0]
    assert reasons(sparsify(model, 16, 0.5)) == {"0": "block-sparse already"}
    assert model[0] is layer


@pytest.mark.parametrize("padding", [False, True])
def test_a_transformer_encoder_calls_its_new_layers_in_inference_too(padding):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padding else None
    expected = model(x, src_key_padding_mask=mask)
    result = sparsify(model, 16, 1.0)
    assert sum(not reason for reason in reasons(result).values()) == 4
    with torch.no_grad():
        actual = model(x, src_key_padding_mask=mask)
    if padding:
        expected, actual = (y.masked_fill(mask[:, :, None], 0) for y in (expected, actual))
    assert_matches(actual, expected)


def test_an_encoder_layer_calls_a_layer_that_is_put_into_it_by_hand():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    expected = layer(x)
    layer.linear1 = BlockSparseLinear.from_dense(layer.linear1, 16, 1.0)
    layer.add_module("linear2", BlockSparseLinear.from_dense(layer.linear2, 16, 1.0))
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            assert_matches(twin(x), expected)


def test_the_result_prints_as_a_table():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    result = sparsify(model, block_size=32, density=0.25)
    assert str(result) == repr(result)
    assert str(result) == (
        "layer    weight  blocks  density  norm² kept  parameters  before\n"
        "0      128 x 64     2/8    25.0%       25.0%       2,176   8,320\n"
        "2      10 x 128  skipped: smaller than a block\n"
        "linear layers: 3,466 of 9,610 parameters, 36.1%"
    )
    assert str(sparsify(nn.Linear(2, 2), 4, 0.5)) == (
        "layer    weight  blocks  density  norm² kept  parameters  before\n"
        "(model)   2 x 2  skipped: smaller than a block\n"
        "linear layers: 6 of 6 parameters, 100.0%"
    )
    assert str(sparsify(nn.ReLU())).endswith("linear layers: 0 of 0 parameters")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(model=[]), OperandError, "model is of type list; give a torch.nn.Module"),
        (dict(filter="head"), OperandError, "filter is of type str; give a function (name, layer) -> bool"),
        (
            dict(density=0.0),
            OperandError,
            "density is 0.0; give a number above 0 and up to 1, the share of blocks to keep",
        ),
        (
            dict(block_size=(16, 0)),
            ShapeError,
            "block_size is (16, 0); give a whole number of at least 1, or two of them (out, in)",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(options, error, words):
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        sparsify(**{"model": model, "block_size": 16, **options})
    assert type(model[0]) is nn.Linear


@pytest.mark.cpu
def test_without_transformers_its_import_says_what_to_install(monkeypatch):
    for name in ("transformers", "transformers.conversion_mapping"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("insum_ops.huggingface", "insum_ops.linear.huggingface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("insum_ops.huggingface")
    assert str(caught.value) == (
        "insum_ops.huggingface needs transformers of version 5.23 or newer; install it with pip install "
        "'insum_ops[huggingface]'"
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 16))
        self.position = nn.Parameter(torch.randn(1, 32, 16))  # one matrix is no several experts


@pytest.mark.cpu
def test_weights_of_several_experts_are_reported():
    result = sparsify(nn.Sequential(Experts(), nn.Conv1d(4, 4, 3), nn.Linear(32, 32)), 16, 0.5)
    assert reasons(result) == {"0.up": "the weights of 4 experts, which Experts multiplies itself", "2": ""}
    assert result.layers[0].shape == (4, 32, 16)
