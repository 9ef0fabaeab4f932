"""Patterns in a state_dict, and why one does not fit a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["coords_problem", "misfit"]

Pair = tuple[int, int]


def misfit(state_dict: Mapping[str, Any], prefix: str, grid: Pair, num_blocks: int) -> str:
    """Why the entries under `prefix` can't be copied into a layer of `num_blocks` blocks; "" if they can."""
    coords, weight = state_dict.get(f"{prefix}coords"), state_dict.get(f"{prefix}weight")
    if coords is None:
        if isinstance(weight, Tensor) and weight.ndim == 2:
            return (
                f"{prefix}weight is dense, {list(weight.shape)}, in the state_dict; load it into a torch.nn.Linear and "
                f"pass that to BlockSparseLinear.from_dense or insum_ops.nn.sparsify"
            )
        return ""  # strict loading says what is missing
    problem = coords_problem(f"{prefix}coords", coords, grid)
    if not problem and coords.shape[1] != num_blocks:
        problem = (
            f"loading a state_dict of another pattern size: {prefix}weight has {coords.shape[1]} blocks there but "
            f"{num_blocks} here; call insum_ops.nn.load_patterns_(model, state_dict) first"
        )
    return problem


def coords_problem(name: str, coords: Any, grid: Pair) -> str:
    """Why `coords` is no list of blocks of this grid, in ascending order; "" if it is."""
    is_index = isinstance(coords, Tensor) and coords.dtype in (torch.int32, torch.int64)
    if not is_index or coords.ndim != 2 or len(coords) != 2:
        return f"{name} in the state_dict is no int32 tensor [2, blocks]; it was not saved by a BlockSparseLinear"
    if coords.is_meta:
        return ""
    rows, columns = coords.long()
    is_inside = (rows >= 0) & (rows < grid[0]) & (columns >= 0) & (columns < grid[1])
    is_ascending = (rows * grid[1] + columns).diff() > 0
    if bool(is_inside.all()) and bool(is_ascending.all()):
        return ""
    return f"{name} in the state_dict does not list blocks of a {list(grid)} grid in ascending order"
