"""A change of pattern: which old block each new one was, and what moves along with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..compiler.errors import OperandError

__all__ = ["remap_optimizer", "resize_", "sources", "take"]


def sources(old: Tensor, new: Tensor, grid: tuple[int, int]) -> Tensor:
    """For each block of `new` [2, P] its place in `old`, -1 where it was not stored.

    >>> sources(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]]), (2, 2)).tolist()
    [-1, 0, 1]
    """
    place = torch.full(grid, -1, device=old.device)
    place[tuple(old.long())] = torch.arange(old.shape[1], device=old.device)
    return place[tuple(new.long())]


def take(blocks: Tensor, source: Tensor) -> Tensor:
    """out[p] = blocks[source[p]], or 0 where there is none."""
    taken = blocks.new_zeros(len(source), *blocks.shape[1:])
    is_kept = source >= 0
    taken[is_kept] = blocks[source[is_kept]]
    return taken


def remap_optimizer(optimizer: torch.optim.Optimizer | None, weight: nn.Parameter, source: Tensor) -> None:
    """State that an optimizer keeps for each block moves with the block; a new block's starts at zero."""
    if optimizer is None:
        return
    if not any(weight is parameter for group in optimizer.param_groups for parameter in group["params"]):
        raise OperandError("optimizer does not hold this layer's weight; pass the one that trains it")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OperandError("optimizer is LBFGS, whose state spans all parameters; leave it out and make a new one")
    state = optimizer.state.get(weight, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim == weight.ndim and len(value) == len(weight):
            state[name] = take(value, source)


def resize_(parameter: nn.Parameter, values: Tensor) -> None:
    """`values`, of any size, become the data of the same Parameter; its gradient is dropped."""
    parameter.grad = None
    # As long as an earlier loss is alive torch remembers the shape that it expects of a gradient. A change of dtype
    # makes it forget that; a change of shape alone does not, and the next backward would fail.
    other = torch.float32 if values.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values
    if not parameter.is_inference():
        increment_version(parameter)  # which new data alone do not: an earlier loss must not read them for its own
