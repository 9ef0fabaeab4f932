"""Which modules are Hugging Face's, asked without importing transformers, which takes seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

from torch import nn

from .layer import BlockSparseLinear

__all__ = ["QUANT_METHOD", "attach", "is_conv1d", "other_quantizers", "pretrained_models"]

QUANT_METHOD = "insum_ops"  # what config.json calls block-sparse layers, by the name of the package that reads them


def is_conv1d(module: nn.Module, or_subclass: bool = True) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer with its weight [in, out]."""
    kind = _kind("transformers.pytorch_utils", "Conv1D")
    return kind is not None and (isinstance(module, kind) if or_subclass else type(module) is kind)


def pretrained_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model, itself included, that `save_pretrained` saves."""
    kind = _kind("transformers.modeling_utils", "PreTrainedModel")
    return (part for part in model.modules() if kind is not None and isinstance(part, kind))


def other_quantizers(model: nn.Module) -> dict[int, str]:
    """Return, by the id of each module in a model that another library has quantized, the name of the method."""
    methods = {}
    for part in pretrained_models(model):
        quantizer = getattr(part, "hf_quantizer", None)
        method = quantizer.quantization_config.quant_method if quantizer is not None else QUANT_METHOD
        if method != QUANT_METHOD:
            methods.update(dict.fromkeys(map(id, part.modules()), str(getattr(method, "value", method))))
    return methods


def attach(model: nn.Module) -> None:
    """Make `save_pretrained` write down which layers of a model are block-sparse."""
    if any(_holds_blocks(part) for part in pretrained_models(model)):
        importlib.import_module(f"{__package__}.huggingface").attach_(model)


def _holds_blocks(model: nn.Module) -> bool:
    return any(isinstance(part, BlockSparseLinear) for part in model.modules())


def _kind(source: str, name: str) -> type | None:
    """Return a class of transformers, or None where it was not imported, so that there can be no instance of it."""
    kind = getattr(sys.modules.get(source), name, None)
    return kind if isinstance(kind, type) else None
