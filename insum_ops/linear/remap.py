"""A change of pattern: which old block each new one was, and what moves along with it."""

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
    """For each block of `new` [2, P] its place in `old`, -1 where it was not stored.

    >>> sources(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 0, 1], [0, 1, 0]]), (2, 2)).tolist()
    [-1, 0, 1]
    """
    place = torch.full(grid, -1, device=old.device)
    place[tuple(old.long())] = torch.arange(old.shape[1], device=old.device)
    return place[tuple(new.long())]


def take(blocks: Tensor, source: Tensor, start: float = 0.0) -> Tensor:
    """out[p] = blocks[source[p]], or `start` where there is none."""
    taken = blocks.new_full((len(source), *blocks.shape[1:]), start)
    is_kept = source >= 0
    taken[is_kept] = blocks[source[is_kept]]
    return taken


def check_optimizer(optimizer: Optimizer, weight: nn.Parameter) -> None:
    """It holds the weight, and its state can move with the blocks."""
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        kind = type(optimizer).__name__
        raise OperandError(f"optimizer is of type {kind}; give the torch.optim.Optimizer that trains the weight")
    if _group(optimizer, weight) is None:
        raise OperandError("optimizer does not hold this layer's weight; pass the one that trains it")
    if isinstance(optimizer, LBFGS):
        raise OperandError("optimizer is LBFGS, whose state spans all parameters; leave it out and make a new one")


def holders(weights: Sequence[nn.Parameter]) -> list[Optimizer]:
    """All torch optimizers that hold one of these weights.

    They are looked for among all objects: torch lists optimizers nowhere, and a hook that waits for their next step
    could not tell a state of the old blocks from one that was loaded for the new ones.
    """
    kinds = {id(kind) for kind in _kinds(Optimizer)}  # not the types: that they can be hashed is not known of all
    found = [thing for thing in gc.get_objects() if id(type(thing)) in kinds]
    return [optimizer for optimizer in found if any(_group(optimizer, weight) is not None for weight in weights)]


def moved_states(optimizers: Sequence[Optimizer], weight: nn.Parameter, source: Tensor) -> Moved:
    """What the optimizers know of the weight, for its new blocks: state of each block moves with it, new ones start
    like a new parameter's. State of another kind belongs to all old blocks, so that all state is left behind.
    """
    own = [optimizer for optimizer in optimizers if _group(optimizer, weight) is not None]
    return [(optimizer, _moved_state(optimizer, weight, source)) for optimizer in own]


def put_states(moved: Moved, weight: nn.Parameter) -> None:
    for optimizer, state in moved:
        if isinstance(optimizer, LBFGS):  # it starts anew, and counts elements anew
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
            options = [option for kind, own, option in STARTS if isinstance(optimizer, kind) and own == name]
            value = take(value, source, float(group[options[0]]) if group and options else 0.0)
        moved[name] = value
    return moved


def _group(optimizer: Any, weight: nn.Parameter) -> dict[str, Any] | None:
    """The group of the optimizer's parameters that the weight is in."""
    groups = getattr(optimizer, "param_groups", ())  # one that is being made has none yet
    return next((group for group in groups if any(weight is own for own in group["params"])), None)


def _kinds(kind: Any) -> Iterator[type]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


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
