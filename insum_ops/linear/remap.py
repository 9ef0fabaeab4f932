"""A change of pattern: which old block each new one was, and the optimizers' state that moves with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, Adagrad, Optimizer, Rprop

from ..compiler import OperandError

__all__ = ["check_optimizer", "holders", "moved_states", "put_states", "resize_", "sources", "take"]

Moved = list[tuple[Optimizer, dict[str, Any]]]
STARTS = ((Rprop, "step_size", "lr"), (Adagrad, "sum", "initial_accumulator_value"))  # states that do not start at zero


def sources(old: Tensor, new: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return for each block of `new` [2, P] its place in `old`, -1 where it was not stored.

    >>> sources(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]]), (2, 2)).tolist()
    [-1, 0, 1]
    """
    place = torch.full(grid, -1, device=old.device)
    place[tuple(old.long())] = torch.arange(old.shape[1], device=old.device)
    return place[tuple(new.long())]


def take(blocks: Tensor, source: Tensor, start: float = 0.0) -> Tensor:
    """Return out[p] = blocks[source[p]], or `start` where source[p] is -1."""
    taken = blocks.new_full((len(source), *blocks.shape[1:]), start)
    is_kept = source >= 0
    taken[is_kept] = blocks[source[is_kept]]
    return taken


def check_optimizer(optimizer: Optimizer, weight: nn.Parameter) -> None:
    """Refuse an optimizer that does not hold the weight, or whose state can't move with the blocks."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        kind = type(optimizer).__name__
        raise OperandError(f"optimizer is of type {kind}; give the torch.optim.Optimizer that trains the weight")
    if _group(optimizer, weight) is None:
        raise OperandError("optimizer does not hold this layer's weight; pass the one that trains it")
    if isinstance(optimizer, LBFGS):
        raise OperandError("optimizer is LBFGS, whose state spans all parameters; leave it out and make a new one")


def holders(weights: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Return all torch optimizers that hold one of these weights.

    They are searched among all objects: torch lists optimizers nowhere, and a hook on their next step could not
    distinguish the state of old blocks from one that was loaded for the new blocks.
    """
    kinds = {id(kind) for kind in _kinds(Optimizer)}  # by id: a metaclass may make a type unhashable
    optimizers = [thing for thing in gc.get_objects() if id(type(thing)) in kinds]
    return [optimizer for optimizer in optimizers if any(_group(optimizer, weight) is not None for weight in weights)]


def moved_states(optimizers: Sequence[Optimizer], weight: nn.Parameter, source: Tensor) -> Moved:
    """Return the optimizers' state of the weight for its new blocks.

    The state of each block moves with it, and new blocks start like a new parameter. If some state is not by block, it
    belongs to all old blocks, and all state is dropped.
    """
    holding = [optimizer for optimizer in optimizers if _group(optimizer, weight) is not None]
    return [(optimizer, _moved_state(optimizer, weight, source)) for optimizer in holding]


def put_states(moved: Moved, weight: nn.Parameter) -> None:
    """Give the optimizers the state that `moved_states` returned."""
    for optimizer, state in moved:
        if isinstance(optimizer, LBFGS):  # its state spans all parameters, so it starts again
            optimizer.state.clear()
            optimizer._numel_cache = None
        elif weight in optimizer.state:
            optimizer.state[weight] = state


def _moved_state(optimizer: Optimizer, weight: nn.Parameter, source: Tensor) -> dict[str, Any]:
    group, moved = _group(optimizer, weight), {}
    for name, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and (value.ndim > 1 or value.numel() != 1):
            if value.ndim != weight.ndim or len(value) != len(weight):
                return {}
            if hasattr(value, "full_tensor"):  # sharded like the weight, whose blocks may change ranks
                value = value.full_tensor()
            options = [option for kind, state, option in STARTS if isinstance(optimizer, kind) and state == name]
            value = take(value, source, float(group[options[0]]) if group and options else 0.0)
        moved[name] = value
    return moved


def _group(optimizer: Any, weight: nn.Parameter) -> dict[str, Any] | None:
    """Return the optimizer's parameter group that the weight is in, or None."""
    groups = getattr(optimizer, "param_groups", ())  # an optimizer under construction has none yet
    return next((group for group in groups if any(weight is parameter for parameter in group["params"])), None)


def _kinds(kind: Any) -> Iterator[type]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


def resize_(parameter: nn.Parameter, values: Tensor) -> None:
    """Make `values`, of any size, the data of a Parameter, whose gradient is dropped."""
    parameter.grad = None
    # As long as an earlier loss is alive torch remembers the shape that it expects of a gradient. A change of dtype
    # makes it forget that; a change of shape alone does not, and the next backward would fail.
    other = torch.float32 if values.dtype == torch.float64 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values
    if not parameter.is_inference():
        increment_version(parameter)  # setting data does not: an earlier loss must not read the new values
