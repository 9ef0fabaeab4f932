"""A rank's own part of a split layer, in its state_dict: a tensor that torch's distributed checkpoints refuse to save.

They take a plain tensor for one that all ranks have, and would store the first rank's blocks as if these were all.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from ..compiler import OperandError

__all__ = ["as_own_part"]

REMEDY = (
    "save whole_state_dict(model, sharded=True) of insum_ops.distributed, with whole_optimizer_state_dict for the "
    "optimizer, and load them with load_whole_state_dict and load_whole_optimizer_state_dict"
)


class OwnPart(Tensor):
    """A tensor of a state_dict that holds one rank's blocks; torch.save stores it as a plain one."""

    def __create_write_items__(self, name: str, _: Any) -> NoReturn:
        _refuse_to_save(name, self)

    def __create_chunk_list__(self) -> NoReturn:
        _refuse_to_load()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def as_own_part(tensor: Tensor) -> Tensor:
    """Return a tensor of a state_dict as a rank's own part."""
    if not isinstance(tensor, DTensor):
        return tensor.as_subclass(OwnPart)
    # shards of a rank's blocks, by fully_shard: torch asks the tensor itself, of which a state_dict has its own
    vars(tensor).update(__create_write_items__=_refuse_to_save, __create_chunk_list__=_refuse_to_load)
    return tensor


def _refuse_to_save(name: str, _: Any) -> NoReturn:
    raise OperandError(
        f"{name} holds only the blocks of rank {dist.get_rank()} of a layer that is split over ranks, and a checkpoint "
        f"would hold no others; {REMEDY}"
    )


def _refuse_to_load() -> NoReturn:
    raise OperandError(
        f"the state_dict holds only the blocks of rank {dist.get_rank()} of a layer that is split over ranks; {REMEDY}"
    )
