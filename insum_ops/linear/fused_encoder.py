"""Keeps torch's transformer encoders, which for inference read a Linear's weight themselves, calling the layer."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .layer import BlockSparseLinear

__all__ = ["keep_from_fused_kernels"]


def keep_from_fused_kernels(model: nn.Module) -> None:
    """Switch fused kernels off in the encoders of a model that hold a BlockSparseLinear anywhere."""
    for module in model.modules():
        if any(isinstance(part, BlockSparseLinear) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                _call_layers(module)
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _call_layers(encoder_layer: nn.TransformerEncoderLayer) -> None:
    """Make an encoder layer call its linear layers."""
    encoder_layer.activation_relu_or_gelu = 0  # 0: another activation, which no fused kernel has


def _notice(module: nn.Module, name: str, part: nn.Module | None) -> None:
    """Switch fused kernels off in an encoder layer that a BlockSparseLinear is assigned to."""
    if isinstance(part, BlockSparseLinear) and isinstance(module, nn.TransformerEncoderLayer):
        _call_layers(module)


register_module_module_registration_hook(_notice)
