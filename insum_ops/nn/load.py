"""load_patterns_: the patterns of a checkpoint, before its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..compiler.errors import OperandError
from .block_sparse_linear import BlockSparseLinear
from .state import coords_problem

__all__ = ["load_patterns_"]


def load_patterns_(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Give every BlockSparseLinear of `model` the pattern it has in `state_dict`, which can then be loaded strictly.

    For a checkpoint whose patterns have other sizes than the model's, for example because it was pruned later.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]
    masks = []
    for name, layer in layers:
        key = f"{name}.coords" if name else "coords"
        if key not in state_dict:
            raise OperandError(f"{key} is not in the state_dict; it must be that of a model with the same layers")
        problem = coords_problem(key, state_dict[key], layer.grid)
        if problem:
            raise OperandError(problem)
        if layer.coords.is_meta:
            raise OperandError(
                f"{key} is on the meta device here; give it memory first, with model.to_empty(device=...)"
            )
        mask = torch.zeros(layer.grid, dtype=torch.bool, device=layer.coords.device)
        mask[tuple(state_dict[key].to(mask.device).long())] = True
        masks.append(mask)
    for (_, layer), mask in zip(layers, masks):
        if coords_problem("coords", layer.coords, layer.grid):  # whatever to_empty found in memory is no pattern
            layer.coords = layer.coords[:, :0]
        layer.set_pattern_(mask)
