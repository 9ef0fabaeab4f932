"""A weight's blocks and their coordinates as a format that is kept, with all that is worked out of its pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..compiler import OperandError, UnsupportedError, outside_transforms
from ..formats import BlockCOO
from ..formats.guard import ChangeGuards
from ..formats.torch_state import is_wrapped
from .patterns import is_pattern

__all__ = ["KnownWeight", "known_weight"]


@dataclass(frozen=True, eq=False)
class KnownWeight:
    """The weight as a format, and the buffer that its pattern was read from."""

    form: BlockCOO
    pattern: Tensor  # the format's own copy of the buffer, which nobody writes to
    coords: Tensor
    guard: ChangeGuards  # of coords

    def is_of(self, coords: Tensor | None) -> bool:
        """The buffer is the same and has not changed."""
        return self.coords is coords and self.guard.hold()

    def has_pattern(self, coords: Tensor) -> bool:
        mine, other = self.pattern, coords
        is_alike = (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device)
        return is_alike and torch.equal(mine, other)


def known_weight(coords: Tensor, weight: Tensor, grid: tuple[int, int], known: KnownWeight | None) -> KnownWeight:
    """`weight` [P, bo, bi] at `coords` [2, P]; what is known already stays if it has this pattern."""
    if is_wrapped(coords):
        raise UnsupportedError(
            "coords is batched or differentiated by torch.func, but a pattern is one for all calls; "
            "pass parameters alone, as in torch.func.functional_call(layer, parameters, (x,))"
        )
    guard = ChangeGuards([coords])  # before it is read: another thread may write to it
    if known is not None and known.has_pattern(coords):  # written to, but with what was there
        return replace(known, coords=coords, guard=guard)
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
                "fills nothing in; call reset_parameters(), set_pattern_(mask) or load a state_dict"
            )
        pattern = coords.clone()
        rows, columns = pattern
        if not isinstance(weight, nn.Parameter):  # of one call, as by torch.func: it may not outlive it
            weight = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        form = BlockCOO((rows, columns), weight, (grid[0] * height, grid[1] * width), block_size=(height, width))
        _ = form.facts, form.regroup(1).facts  # worked out now, since a later call may be traced, with its gradients
    return KnownWeight(form, pattern, coords, guard)
