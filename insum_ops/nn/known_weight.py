"""A weight's blocks and their coordinates as a format that is kept, with all that is worked out of its pattern."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler.errors import OperandError, UnsupportedError
from ..compiler.runtime.torch_state import is_wrapped, outside_transforms
from ..formats import BlockCOO
from .patterns import is_pattern

__all__ = ["KnownWeight", "known_weight"]


@dataclass(frozen=True, eq=False)
class KnownWeight:
    """The weight as a format, and the buffer that its pattern was read from."""

    form: BlockCOO
    pattern: Tensor  # the format's own copy of the buffer, which nobody writes to
    coords: Tensor
    version: int | None  # None: coords does not tell when it changes
    memory: Any  # of coords, held so that no other can have its address
    pointer: int

    def is_of(self, coords: Tensor | None) -> bool:
        """The buffer is the same and has not changed."""
        if coords is None or self.coords is not coords or coords.data_ptr() != self.pointer:
            return False
        if self.version is None:
            return _is_capturing(coords) or self.has_pattern(coords)
        return self.version == coords._version

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
    if known is not None and known.has_pattern(coords):  # written to, but with what was there
        return replace(known, coords=coords, **_state(coords))
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
    return KnownWeight(form, pattern, coords, **_state(coords))


def _state(coords: Tensor) -> dict[str, Any]:
    version = None if coords.is_inference() else coords._version
    return {"version": version, "memory": coords.untyped_storage(), "pointer": coords.data_ptr()}


def _is_capturing(tensor: Tensor) -> bool:
    """A CUDA graph is captured, during which nothing can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
