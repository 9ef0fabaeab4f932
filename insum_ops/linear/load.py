"""load_patterns_: the patterns of a checkpoint, before its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..compiler import OperandError
from .layer import BlockSparseLinear
from .remap import holders
from .sharded import held_weight, shards_of
from .state import pattern_mismatch

__all__ = ["load_patterns_"]


def load_patterns_(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Give every `BlockSparseLinear` of a model the pattern it has in a state_dict, which can then be loaded strictly.

    It is for a checkpoint whose patterns have other sizes than the model's, for example because it was pruned later.
    Blocks that both patterns have keep their values, and their state in torch's optimizers, as by `set_pattern_`.
    Nothing changes unless all patterns fit.

    Args:
        model: a module with `BlockSparseLinear` layers, or one itself.
        state_dict: that of a model with the same layers, with `coords` [2, blocks] for each of them.

    Raises:
        OperandError: a layer's pattern is missing, does not fit the layer, or the layer is on the meta device or has a
            parametrized weight.

    Example:
        >>> import torch
        >>> from insum_ops.nn import BlockSparseLinear, load_patterns_
        >>> saved = BlockSparseLinear(64, 64, block_size=16, density=0.25).state_dict()
        >>> layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
        >>> load_patterns_(layer, saved)
        >>> layer.load_state_dict(saved)
        <All keys matched successfully>
        >>> layer.density
        0.25
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]
    masks = []
    for name, layer in layers:
        prefix = f"{name}." if name else ""
        key = f"{prefix}coords"
        if key not in state_dict:
            raise OperandError(f"{key} is not in the state_dict; it must be that of a model with the same layers")
        sizes = layer._pattern_sizes
        problem = pattern_mismatch(state_dict, prefix, sizes)
        if problem:
            raise OperandError(problem)
        if layer.coords.is_meta:
            raise OperandError(
                f"{key} is on the meta device here; give it memory first, with model.to_empty(device=...)"
            )
        mask = torch.zeros(sizes.grid, dtype=torch.bool, device=layer.coords.device)
        mask[tuple(state_dict[key].to(mask.device).long())] = True
        mask = layer._own_share(mask)
        layer._check_change(mask)
        masks.append(mask)
    optimizers = holders([held_weight(layer, shards_of(layer)) for _, layer in layers])
    for (_, layer), mask in zip(layers, masks):
        layer._change_pattern(mask, optimizers)
