"""load_patterns_: the patterns of a checkpoint, before its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..compiler.errors import OperandError
from .block_sparse_linear import BlockSparseLinear
from .remap import holders
from .state import pattern_misfit

__all__ = ["load_patterns_"]


def load_patterns_(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Give every BlockSparseLinear of `model` the pattern it has in `state_dict`, which can then be loaded strictly.

    For a checkpoint whose patterns have other sizes than the model's, for example because it was pruned later.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]
    masks = []
    for name, layer in layers:
        prefix = f"{name}." if name else ""
        key = f"{prefix}coords"
        if key not in state_dict:
            raise OperandError(f"{key} is not in the state_dict; it must be that of a model with the same layers")
        problem = pattern_misfit(state_dict, prefix, layer)
        if problem:
            raise OperandError(problem)
        if layer.coords.is_meta:
            raise OperandError(
                f"{key} is on the meta device here; give it memory first, with model.to_empty(device=...)"
            )
        mask = torch.zeros(layer.grid, dtype=torch.bool, device=layer.coords.device)
        mask[tuple(state_dict[key].to(mask.device).long())] = True
        layer._check_change(mask)
        masks.append(mask)
    optimizers = holders([layer.weight for _, layer in layers])
    for (_, layer), mask in zip(layers, masks):
        layer._change_pattern(mask, optimizers)
