"""What `torch.utils.flop_counter.FlopCounterMode` counts of a statement."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..binding import bind
from ..language import parse
from .operators import call, call_with_winners

__all__ = ["flops"]


def flops(expr: str, names: str, size: Sequence[int] | None, tensors: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Return the multiplications and additions of a statement, padding included; 0 where nothing is multiplied.

    A matrix product has 2 for each of its products, as torch counts it, and every further factor adds one.

    >>> import torch
    >>> flops("C[i,k] += A[i,j] * B[j,k]", "A,B", None, [torch.empty(3, 4), torch.empty(4, 5)])
    120
    """
    bound = bind(parse(expr), dict(zip(names.split(","), tensors)), size)
    factors = len(bound.statement.accesses)
    return factors * prod(bound.extents.values()) if factors > 1 else 0


register_flop_formula([call.overloadpacket, call_with_winners.overloadpacket], get_raw=True)(flops)
