"""Patterns of layers under FSDP2: `prune_` and `set_pattern_` change the shards that `fully_shard` has made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..compiler import OperandError
from ..linear.remap import moved_states
from ..linear.sharded import keepers
from .agreement import on_all_ranks
from .placed import full

__all__: list[str] = []


class FSDPShards:
    """One parameter of a group that FSDP gathers and frees together.

    FSDP knows a parameter's size from the start, so another size is another parameter of FSDP's, in the place of the
    old one. Optimizers get it in that one's place, with the state of the blocks that stay.
    """

    def __init__(self, group: Any, at: int) -> None:
        if group._training_state.name != "IDLE":
            raise OperandError(
                f"the layer is in a pass of FSDP on rank {dist.get_rank()}; change its pattern between training steps"
            )
        group.reshard()  # after an inference it may still be whole
        self.group, self.at = group, at

    @property
    def weight(self) -> nn.Parameter:
        """The DTensor that the layer holds between passes."""
        parameter: nn.Parameter = self.group.fsdp_params[self.at].sharded_param
        return parameter

    @contextmanager
    def agreed(self, values: dict[str, Any]) -> Iterator[None]:
        """Check something on all ranks that share the weight."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        with on_all_ranks(weight.device_mesh) as ranks:
            yield
            for name, value in values.items():
                shown = value if isinstance(value, Tensor) else repr(value)
                ranks.equal(name, shown, "change the pattern alike on every rank")

    def whole(self) -> Tensor:
        """Return all blocks, gathered."""
        whole: Tensor = full(self.weight.detach())
        return whole

    def change(self, blocks: Tensor, source: Tensor, optimizers: Sequence[Optimizer]) -> None:
        """Shard other blocks in the place of these."""
        old, weight, group = self.group.fsdp_params[self.at], self.weight, self.group
        moved = moved_states(optimizers, weight, source)
        plain = nn.Parameter(blocks.contiguous(), weight.requires_grad)
        place = old.fsdp_placement
        new = type(old)(
            plain,
            old._module_info,
            old.mesh_info,
            old.post_forward_mesh_info,
            old.device,
            None if place.dim == 0 else lambda _: place,
            old.mp_policy,
            group.offload_policy,
        )
        old._post_load_hook_handle.remove()
        new._param_fqn = old._param_fqn
        new.init_dtype_attrs(group.mp_policy)
        group.fsdp_params[self.at] = new
        for optimizer, state in moved:
            for option in optimizer.param_groups:
                option["params"] = [new.sharded_param if own is weight else own for own in option["params"]]
            had_state = optimizer.state.pop(weight, None) is not None
            if had_state:
                optimizer.state[new.sharded_param] = {key: _sharded(part, new) for key, part in state.items()}


def _sharded(part: Any, parameter: Any) -> Any:
    """Return a state of all blocks, which all ranks have, in the shards of the parameter."""
    weight = parameter.sharded_param
    if not isinstance(part, Tensor) or part.shape != weight.shape:
        return part
    return distribute_tensor(part, weight.device_mesh, weight.placements, src_data_rank=None)


keepers.append(FSDPShards)
