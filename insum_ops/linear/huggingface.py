"""Block-sparse layers in Hugging Face's save_pretrained and from_pretrained, through their registry of quantizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..close_names import with_article
from ..compiler import OperandError

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        "insum_ops.huggingface needs transformers of version 5.23 or newer; install it with pip install "
        "'insum_ops[huggingface]'"
    ) from error

from .layer import BlockSparseLinear
from .patterns import block_grid, is_pattern
from .pretrained import QUANT_METHOD, is_conv1d, other_quantizers, pretrained_models

__all__ = ["BlockSparseConfig", "BlockSparseQuantizer", "attach_"]


@register_quantization_config(QUANT_METHOD)
class BlockSparseConfig(QuantizationConfigMixin):
    """What config.json says of a model's block-sparse layers; `save_pretrained` makes it.

    Args:
        layers: by the name of each layer its `block_size` and how many `blocks` it stores.
        **others: what a later version may add, which this one does not read.

    Example:
        >>> from insum_ops.huggingface import BlockSparseConfig
        >>> BlockSparseConfig({"lm_head": {"block_size": [32, 32], "blocks": 10}}).quant_method
        'insum_ops'
    """

    def __init__(self, layers: dict[str, dict[str, Any]], **others: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.layers = layers


@register_quantizer(QUANT_METHOD)
class BlockSparseQuantizer(HfQuantizer):
    """Puts `BlockSparseLinear` layers into a model before `from_pretrained` loads their values.

    The layers are no approximation of others: the model can be trained, cast, compiled and saved like a dense one.
    """

    def is_serializable(self, *arguments: Any, **options: Any) -> bool:
        """Whether `save_pretrained` may save the model: it may."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: it can."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the layers themselves can be trained: they can."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether the model can be compiled: it can."""
        return True

    def get_state_dict_and_metadata(
        self, model: nn.Module, *arguments: Any, **options: Any
    ) -> tuple[None, dict[str, str]]:
        """Write the patterns' sizes, which may have changed, into the model's config; `save_pretrained` calls it."""
        model.config.quantization_config = BlockSparseConfig(_layers(model))  # type: ignore[union-attr]
        conversions: Any = getattr(model, "_weight_conversions", None)
        if conversions is None:  # as save_pretrained would work them out
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
        kept = _without_blocks(conversions, model)
        if len(kept) < len(conversions):
            model._weight_conversions = kept  # type: ignore[assignment]
        return None, {}

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Return how the tensors of a checkpoint become those of the model; `from_pretrained` calls it."""
        return _without_blocks(weight_conversions, model)

    def _process_model_before_weight_loading(self, model: nn.Module, **options: Any) -> None:
        if not self.pre_quantized:
            raise OperandError(
                "quantization_config is a BlockSparseConfig, but the checkpoint is dense; load it without, "
                "then call insum_ops.nn.sparsify(model)"
            )
        prefix = f"{model.base_model_prefix}."
        for saved_name, sizes in self.quantization_config.layers.items():
            # a base model may have been saved with its head, or the other way round
            names = (saved_name, saved_name.removeprefix(prefix), prefix + saved_name)
            name = next((name for name in names if _has(model, name)), None)
            if name is not None:  # else it belongs to the head that this class lacks
                model.set_submodule(name, _empty_layer(saved_name, model.get_submodule(name), **sizes))

    def _process_model_after_weight_loading(self, model: nn.Module, **options: Any) -> nn.Module:
        for name, layer in model.named_modules():
            is_loaded = isinstance(layer, BlockSparseLinear) and not layer.coords.is_meta
            if is_loaded and not is_pattern(layer.coords, layer.grid):
                raise OperandError(
                    f"{name}.coords is missing in the checkpoint or lists no blocks of a {list(layer.grid)} grid in "
                    "ascending order; save the model again with save_pretrained"
                )
        model.is_quantized = False  # type: ignore[assignment]  # or .half(), .float() and Trainer would refuse it
        attach_(model)
        return model


def attach_(model: nn.Module) -> None:
    """Make `save_pretrained` write down which layers of a model are block-sparse, in place.

    `sparsify` and `from_pretrained` do it themselves. It is for layers that were put into a model by hand.

    Args:
        model: a `transformers.PreTrainedModel`, or a module that holds some.

    Raises:
        OperandError: there is no `PreTrainedModel`, or it is quantized by another method.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from insum_ops.huggingface import attach_
        >>> from insum_ops.nn import BlockSparseLinear
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50))
        >>> model.transformer.h[0].mlp.c_fc = BlockSparseLinear(32, 128, block_size=16, density=0.5)
        >>> attach_(model)
    """
    parts = list(pretrained_models(model))
    if not parts:
        raise OperandError(
            f"model is {with_article(type(model).__name__)} without a transformers.PreTrainedModel; save its state_dict"
        )
    methods = other_quantizers(model)
    if methods:
        raise OperandError(
            f"model is quantized with {next(iter(methods.values()))}, and a config.json holds one method; save its "
            "state_dict"
        )
    for part in parts:
        layers = _layers(part)
        if layers and getattr(part, "hf_quantizer", None) is None:
            part.hf_quantizer = BlockSparseQuantizer(BlockSparseConfig(layers))


def _layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the sizes of a model's block-sparse layers, by name."""
    return {
        name: {"block_size": list(layer.block_size), "blocks": layer.coords.shape[1]}
        for name, layer in model.named_modules()
        if isinstance(layer, BlockSparseLinear)
    }


def _without_blocks(conversions: list[Any], model: nn.Module) -> list[Any]:
    """Return the conversions that no block-sparse layer needs.

    The others cut matrices apart or join them, as q, k and v from one tensor; blocks and their coordinates are none.
    """
    keys = [f"{name}.{part}" for name in _layers(model) for part in ("weight", "coords", "bias")]
    return [
        conversion
        for conversion in conversions
        if not isinstance(conversion, WeightConverter) or not any(_matches(conversion, key) for key in keys)
    ]


def _matches(converter: Any, key: str) -> bool:
    """Whether a converter makes the tensor of this name in a model."""
    _, pattern = converter.reverse_transform().rename_source_key(key)
    return pattern is not None


def _has(model: nn.Module, name: str) -> bool:
    """Whether a model has a submodule of this name."""
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _empty_layer(name: str, dense: nn.Module, block_size: list[int], blocks: int) -> BlockSparseLinear:
    """Return a layer with room for so many blocks, in the place of a dense one on the meta device."""
    if isinstance(dense, nn.Linear):
        in_features, out_features = dense.in_features, dense.out_features
    elif is_conv1d(dense):
        in_features, out_features = dense.nx, dense.nf  # type: ignore[assignment]
    else:
        raise OperandError(
            f"{name} is block-sparse in the checkpoint but {with_article(type(dense).__name__)} in the model; load it "
            "with the class and the version of transformers that it was saved with"
        )
    grid = block_grid((out_features, in_features), (block_size[0], block_size[1]))
    first = torch.arange(grid[0] * grid[1], device="cpu") < blocks  # only their number counts: coords is loaded
    weight = dense.get_parameter("weight")
    return BlockSparseLinear(
        *(in_features, out_features, block_size, 1.0, dense.bias is not None, weight.device, weight.dtype),
        pattern=first.view(grid),
    )
