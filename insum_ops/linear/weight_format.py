"""The format of a weight's blocks and coordinates, which a layer keeps while its pattern does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..compiler import OperandError, ShapeError, UnsupportedError, outside_transforms
from ..formats import BlockCOO
from ..formats.guard import ChangeGuards
from ..formats.torch_state import is_batched
from .patterns import is_pattern

__all__ = ["WeightFormat", "check_blocks", "make_weight_format"]


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """The weight as a format, and the buffer that its pattern was read from."""

    form: BlockCOO
    pattern: Tensor  # the format's own copy of the buffer, which is never written to
    coords: Tensor
    guard: ChangeGuards  # of coords

    def has_pattern(self, coords: Tensor) -> bool:
        """Whether a buffer holds this pattern."""
        kept, other = self.pattern, coords
        is_alike = (kept.shape, kept.dtype, kept.device) == (other.shape, other.dtype, other.device)
        return is_alike and torch.equal(kept, other)


def check_blocks(weight: Tensor, coords: Tensor, block_size: Sequence[int]) -> None:
    """Refuse a weight that does not have a block for each of `coords`."""
    if weight.shape != (*coords.shape[-1:], *block_size):
        raise ShapeError(
            f"weight is {list(weight.shape)} but coords is {list(coords.shape)} and block_size {tuple(block_size)}; "
            "there is one block for each column of coords. If layers share a weight, prune_ and set_pattern_ of one "
            "change it for all: give the others the same coords"
        )


def make_weight_format(
    coords: Tensor, weight: Tensor, grid: tuple[int, int], cached: WeightFormat | None
) -> WeightFormat:
    """Return the format of `weight` [P, bo, bi] at `coords` [2, P], with the cached format if it has this pattern.

    Raises OperandError for coordinates that list no pattern, UnsupportedError for those that vmap batches.
    """
    if is_batched(coords):
        raise UnsupportedError(
            "coords is batched by torch.func.vmap, but a pattern is one for all calls; "
            "pass parameters alone, as in torch.func.functional_call(layer, parameters, (x,))"
        )
    guard = ChangeGuards([coords])  # before it is read: another thread may write to it
    if cached is not None and cached.has_pattern(coords):  # the buffer was overwritten with the same pattern
        return replace(cached, coords=coords, guard=guard)
    if coords.is_meta:
        raise OperandError(
            "the layer is on the meta device, where it has no pattern; give it memory with .to_empty(device=...), "
            "then call reset_parameters() or load a state_dict"
        )
    height, width = weight.shape[1:]
    with outside_transforms(), torch.no_grad():  # the pattern outlives this call
        if not is_pattern(coords, grid):
            raise OperandError(
                f"coords does not list blocks of a {list(grid)} grid in ascending order, as after to_empty(), which "
                "fills nothing in, or an average over buffers; call reset_parameters(), set_pattern_(mask) or load a "
                "state_dict, and average without coords"
            )
        pattern = coords.clone()
        rows, columns = pattern
        if not isinstance(weight, nn.Parameter):  # torch.func passes it for one call, which it must not outlive
            weight = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        form = BlockCOO((rows, columns), weight, (grid[0] * height, grid[1] * width), block_size=(height, width))
        form = form.as_private()
        _ = form.facts, form.regroup(1).facts  # computed now: a later call, with its gradients, may be traced
    return WeightFormat(form, pattern, coords, guard)
