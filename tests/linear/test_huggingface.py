"""Models of Hugging Face's transformers: sparsified, saved, loaded and trained; `make test-huggingface` installs it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from linear_twin import dense_weight, element_mask
from tolerances import assert_matches
from torch import Tensor, nn

from insum_ops.compiler.language.errors import OperandError
from insum_ops.nn import BlockSparseLinear, Sparsified, sparsify

transformers = pytest.importorskip("transformers", minversion="5.23")

import insum_ops.huggingface  # noqa: E402  # it needs transformers

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("default")]  # what others warn of is not ours
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def llama(**options) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    config = transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2, **options})
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(n_embd=64, n_head=4, n_layer=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert [type(part) for part in model.modules()] == [type(part) for part in expected.modules()]
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert torch.equal(logits(model), logits(expected))


def reasons(result: Sparsified) -> dict[str, str]:
    return {layer.name: layer.skipped for layer in result.layers if layer.skipped}


@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_a_saved_model_comes_back(make, tmp_path):
    model = make()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert sum(isinstance(part, BlockSparseLinear) for part in loaded.modules()) > 2
    assert_same(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(type(model).from_pretrained(tmp_path / "again"), model)


def test_a_new_process_needs_the_import_and_nothing_else(tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list(tmp_path.glob("model/*.safetensors"))) > 3
    torch.save(TOKENS, tmp_path / "tokens.pt")
    script = (
        "import sys, torch, insum_ops.huggingface\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + '/model')\n"
        "torch.save(model(torch.load(sys.argv[1] + '/tokens.pt')).logits.detach(), sys.argv[1] + '/logits.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(model))


def test_shards_the_meta_device_and_the_disk(tmp_path):
    pytest.importorskip("accelerate")
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    split = dict.fromkeys(["model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb", "model.layers.0"], "cpu")
    for options in (
        {"low_cpu_mem_usage": True},
        {"device_map": "cpu"},
        {"device_map": {**split, "model.layers.1": "disk"}, "offload_folder": tmp_path / "offloaded"},
    ):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **options)
        assert torch.equal(logits(loaded), logits(model)), options
    assert loaded.model.layers[1].mlp.up_proj.weight.is_meta


def test_a_dtype_is_given_to_the_blocks_and_not_to_the_pattern(tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path)
    layer = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).model.layers[0].mlp.up_proj
    assert (layer.weight.dtype, layer.coords.dtype) == (torch.float64, torch.int32)
    assert torch.equal(dense_weight(layer), dense_weight(model.model.layers[0].mlp.up_proj))


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_stay_tied(tie, tmp_path):
    model = llama(tie_word_embeddings=tie)
    result = sparsify(model, 16, 0.5)
    assert reasons(result) == ({"lm_head": "shared with another layer"} if tie else {})
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
    assert isinstance(loaded.lm_head, BlockSparseLinear) != tie
    assert_same(loaded, model)


def test_patterns_are_saved_as_they_are_then(tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.model.layers[0].mlp.up_proj.prune_(0.1)
    copied = copy.deepcopy(model)
    layer = copied.model.layers[1].mlp.up_proj
    layer.set_pattern_(torch.zeros_like(layer.mask))
    for name, saved in {"model": model, "copied": copied}.items():
        saved.save_pretrained(tmp_path / name)
        assert_same(transformers.LlamaForCausalLM.from_pretrained(tmp_path / name), saved)


def test_matrices_that_a_checkpoint_joins_are_saved_apart(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**sizes)).eval()
    joined = [name for name, _ in model.named_modules() if name.endswith("q_proj")]
    assert len(joined) == 2
    sparsify(model, 16, 0.5, filter=lambda name, layer: "layers.0" in name)  # the others stay dense
    model.get_submodule(joined[0]).prune_(0.25)
    model.save_pretrained(tmp_path)
    loaded, info = transformers.NomicBertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    ours, theirs = loaded.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_a_base_model_loads_from_one_with_a_head_and_the_other_way_round(tmp_path):
    model = llama(tie_word_embeddings=True)
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path / "with_head")
    model.model.save_pretrained(tmp_path / "base")
    base = transformers.AutoModel.from_pretrained(tmp_path / "with_head")
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)
    assert_same(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"), model)


def test_a_loaded_model_is_cast_trained_and_pickled_like_a_dense_one(tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.half().float().double().dtype == torch.float64
    torch.save(loaded, tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=False), loaded)
    loaded(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_conv1d_is_swapped_by_its_transposed_weight():
    model, dense = gpt2(), gpt2()
    layer = dense.transformer.h[0].mlp.c_fc
    layer.weight.requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    result = sparsify(model, 16, 0.25)
    swapped = model.transformer.h[0].mlp.c_fc
    assert reasons(result) == {"lm_head": "shared with another layer"}
    assert isinstance(swapped, BlockSparseLinear)
    assert torch.equal(dense_weight(swapped), layer.weight.T.double() * element_mask(swapped))
    assert (swapped.weight.requires_grad, swapped.bias.requires_grad, swapped.training) == (False, True, False)
    report = next(entry for entry in result.layers if entry.name == "transformer.h.0.mlp.c_fc")
    assert (report.shape, report.blocks, report.all_blocks) == ((256, 64), 16, 64)
    x = torch.randn(3, 64)
    expected = x.double() @ dense_weight(swapped).T + layer.bias.detach().double()
    assert_matches(swapped(x).detach(), expected)


def test_conv1d_of_all_blocks_changes_no_output():
    model = gpt2().double()
    expected = logits(model)
    sparsify(model, 16, 1.0)
    assert_matches(logits(model), expected)


def test_a_conv1d_that_would_lose_something_is_left():
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.note = "mine"

    class Odd(type(model.transformer.h[0].mlp.c_fc)):
        pass

    model.transformer.h[0].mlp.c_proj.__class__ = Odd
    assert reasons(sparsify(model, 16, 0.5)) == {
        "transformer.h.0.mlp.c_fc": "has note of its own, which would be lost; convert first, then set it again",
        "transformer.h.0.mlp.c_proj": "a subclass, Odd",
        "lm_head": "shared with another layer",
    }


def test_experts_in_one_tensor_are_left_and_counted():
    model = mixtral()
    result = sparsify(model, 16, 0.5)
    experts = "model.layers.0.mlp.experts"
    why = "the weights of 4 experts, which MixtralExperts multiplies itself"
    assert reasons(result) == {f"{experts}.gate_up_proj": why, f"{experts}.down_proj": why}
    (report,) = (entry for entry in result.layers if entry.name == f"{experts}.down_proj")
    assert (report.shape, report.parameters, report.parameters_before) == ((4, 32, 48), 6144, 6144)
    line = f"{experts}.down_proj     4 x 32 x 48  skipped: {why}"
    assert line in str(result).splitlines()


def test_a_model_quantized_by_another_method_is_left():
    model = llama()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="torchao"))
    result = sparsify(model, 16, 0.5)
    assert set(reasons(result).values()) == {
        "its model is quantized with torchao, and can be saved with one method only"
    }
    with pytest.raises(OperandError) as caught:
        insum_ops.huggingface.attach_(model)
    assert str(caught.value) == (
        "model is quantized with torchao, and a config.json holds one method; save its state_dict"
    )


def test_layers_put_in_by_hand_are_attached(tmp_path):
    model = llama()
    model.model.layers[0].mlp.up_proj = BlockSparseLinear(64, 100, 16, 0.5, bias=False)
    insum_ops.huggingface.attach_(model)
    model.save_pretrained(tmp_path)
    assert_same(transformers.LlamaForCausalLM.from_pretrained(tmp_path), model)
    with pytest.raises(OperandError) as caught:
        insum_ops.huggingface.attach_(nn.ReLU())
    assert str(caught.value) == "model is a ReLU without a transformers.PreTrainedModel; save its state_dict"


def test_a_config_for_a_dense_checkpoint_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    config = insum_ops.huggingface.BlockSparseConfig({})
    with pytest.raises(OperandError) as caught:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert str(caught.value) == (
        "quantization_config is a BlockSparseConfig, but the checkpoint is dense; load it without, then call "
        "insum_ops.nn.sparsify(model)"
    )


def _damage(folder: Path, name: str, value: Tensor | None) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = safetensors.load_file(folder / "model.safetensors")
    if value is None:
        del state[name]
    else:
        state[name] = value
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("value", [None, torch.full((2, 8), 99, dtype=torch.int32)], ids=["missing", "out of range"])
def test_a_checkpoint_without_a_pattern_is_refused(value, tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    _damage(tmp_path, f"{name}.coords", value)
    with pytest.raises(OperandError) as caught:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert str(caught.value) == (
        f"{name}.coords is missing in the checkpoint or lists no blocks of a [4, 4] grid in ascending order; save the "
        "model again with save_pretrained"
    )


def test_another_architecture_is_refused(tmp_path):
    model = llama()
    sparsify(model, 16, 0.5)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["layers"] = {"model.norm": {"block_size": [16, 16], "blocks": 1}}
    path.write_text(json.dumps(config))
    with pytest.raises(OperandError) as caught:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert str(caught.value) == (
        "model.norm is block-sparse in the checkpoint but a LlamaRMSNorm in the model; load it with the class and the "
        "version of transformers that it was saved with"
    )


def test_trainer_resumes(tmp_path):
    pytest.importorskip("accelerate")
    tokens = torch.randint(0, 50, (12, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )

    def trained(model: nn.Module, checkpoint: Path | None = None) -> nn.Module:
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        return model.eval()

    model = gpt2()
    sparsify(model, 16, 0.5)
    expected, fresh = trained(model), gpt2()
    sparsify(fresh, 16, 0.5)
    checkpoint = tmp_path / "checkpoint-2"
    for other in (fresh, transformers.AutoModelForCausalLM.from_pretrained(checkpoint)):
        assert_same(trained(other, checkpoint), expected)
