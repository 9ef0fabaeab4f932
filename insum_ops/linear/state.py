"""Checks of the patterns in a state_dict against a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ..formats.check import COORD_DTYPES
from .patterns import Pair, inside_grid, is_pattern

__all__ = ["Blocked", "mismatch", "pattern_mismatch"]

REMEDY = "it was not saved by a BlockSparseLinear"


class Blocked(Protocol):
    """The sizes of a layer that its pattern and its blocks must have."""

    in_features: int
    out_features: int
    block_size: Pair
    grid: Pair


def mismatch(state_dict: Mapping[str, Any], prefix: str, layer: Blocked, tensors: Mapping[str, Tensor]) -> str:
    """Return why the entries under `prefix` can't be copied into a layer's tensors, or "" if they can."""
    coords, weight, bias = (state_dict.get(f"{prefix}{name}") for name in ("coords", "weight", "bias"))
    if coords is None and isinstance(weight, Tensor) and weight.ndim == 2:
        return (
            f"{prefix}weight is dense, {list(weight.shape)}, in the state_dict; load it into a torch.nn.Linear and "
            f"pass that to BlockSparseLinear.from_dense or insum_ops.nn.sparsify"
        )
    if "weight" in tensors and (coords is None) != (weight is None):
        lost, there = ("coords", "weight") if coords is None else ("weight", "coords")
        return (
            f"{prefix}{lost} is not in the state_dict but {prefix}{there} is; blocks are loaded with their pattern, "
            "or neither is"
        )
    if coords is None:
        return ""  # strict loading says what is missing
    problem = pattern_mismatch(state_dict, prefix, layer)
    num_blocks = tensors["coords"].shape[1]
    if not problem and coords.shape[1] != num_blocks:
        problem = (
            f"loading a state_dict of another pattern size: {prefix}weight has {coords.shape[1]} blocks there but "
            f"{num_blocks} here; call insum_ops.nn.load_patterns_(model, state_dict) first"
        )
    if not problem and "bias" in tensors and isinstance(bias, Tensor) and bias.shape != tensors["bias"].shape:
        problem = (
            f"{prefix}bias is {list(bias.shape)} in the state_dict but {list(tensors['bias'].shape)} here; "
            "it was saved by a layer of other out_features"
        )
    return problem


def pattern_mismatch(state_dict: Mapping[str, Any], prefix: str, layer: Blocked) -> str:
    """Return why the pattern and blocks under `prefix` do not fit a layer, or "" if they do; the pattern is there."""
    coords, weight = state_dict[f"{prefix}coords"], state_dict.get(f"{prefix}weight")
    is_index = isinstance(coords, Tensor) and coords.dtype in COORD_DTYPES
    if not is_index or coords.ndim != 2 or len(coords) != 2:
        return f"{prefix}coords in the state_dict is no int32 tensor [2, blocks]; {REMEDY}"
    if weight is not None:
        if not isinstance(weight, Tensor) or weight.ndim != 3:
            return f"{prefix}weight in the state_dict is no tensor [blocks, *block_size]; {REMEDY}"
        theirs = tuple(weight.shape[1:])
        if theirs != layer.block_size:
            return (
                f"{prefix}weight is {list(weight.shape)} in the state_dict but blocks are {list(layer.block_size)} "
                f"here; make the layer with block_size={theirs}"
            )
        if len(weight) != coords.shape[1]:
            return f"{prefix}weight has {len(weight)} blocks in the state_dict but {prefix}coords {coords.shape[1]}"
    if coords.is_meta:
        return ""
    is_inside = inside_grid(coords, layer.grid)
    if not bool(is_inside.all()):
        place = coords[:, int((~is_inside).nonzero()[0])].tolist()
        return (
            f"{prefix}coords in the state_dict lists a block at {place}, but in_features={layer.in_features}, "
            f"out_features={layer.out_features} and block_size={layer.block_size} make {list(layer.grid)} blocks; "
            "it was saved by a layer of other features"
        )
    if not is_pattern(coords, layer.grid):
        return f"{prefix}coords in the state_dict does not list blocks of a {list(layer.grid)} grid in ascending order"
    return ""
