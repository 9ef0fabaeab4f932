"""Layers whose weight FSDP holds as shards, of sizes that it keeps: found here, changed by `insum_ops.distributed`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..compiler import OperandError

__all__ = ["Shards", "agreed", "held_weight", "keepers", "shards_of"]

STATES = "torch.distributed._composable_state"


class Shards(Protocol):
    """A weight of which each rank has a shard."""

    @property
    def weight(self) -> nn.Parameter:
        """What optimizers hold."""

    def agreed(self, values: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context for checks that end alike on every rank; the values are the same on all of them."""

    def whole(self) -> Tensor:
        """Return the weight of all ranks."""

    def change(self, blocks: Tensor, source: Tensor, optimizers: Sequence[Optimizer]) -> None:
        """Make these blocks the weight; `source` says which old block each of them was, -1 for none."""


keepers: list[Callable[[Any, int], Shards]] = []  # makes shards of one parameter in a group of FSDP's


def shards_of(layer: nn.Module) -> Shards | None:
    """Return the shards of a layer's weight, or None if the layer holds the weight itself."""
    states = getattr(sys.modules.get(STATES), "_module_state_mapping", {})  # of all modules that fully_shard took
    groups = [group for state in list(states.values()) for group in _groups(state())]
    for group in groups:
        for at, parameter in enumerate(group.fsdp_params):
            info = parameter._module_info
            if info.module is layer and info.param_name == "weight":
                if not keepers:
                    raise OperandError(
                        "weight is sharded by fully_shard; write `import insum_ops.distributed`, which can change it"
                    )
                return keepers[0](group, at)
    return None


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters of one module; torch 2.12 and before have one, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in [getattr(state, "_fsdp_param_group", None)] if group] if groups is None else groups


def agreed(shards: Shards | None, **values: Any) -> AbstractContextManager[None]:
    """Return a context for checks, which end alike on every rank if the weight is sharded."""
    return nullcontext() if shards is None else shards.agreed(values)


def held_weight(layer: Any, shards: Shards | None) -> nn.Parameter:
    """Return the parameter that optimizers hold."""
    weight: nn.Parameter = layer.weight if shards is None else shards.weight
    return weight
