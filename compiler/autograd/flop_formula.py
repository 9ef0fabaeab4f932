"""What `torch.utils.flop_counter.FlopCounterMode` counts of a statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...formats.torch_state import is_readable
from ..binding import Bound, bind
from ..language import Const, Var, parse
from .operators import call, call_with_winners

__all__ = ["flops"]

MOST_NAMES = 52  # that torch.einsum takes


def flops(expr: str, names: str, size: Sequence[int] | None, tensors: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Return the multiplications and additions of a statement, without padding; 0 where nothing is multiplied.

    A matrix product has 2 for each of its products, as torch counts it, and every further factor adds one. What a
    negative position leaves out is not counted, unless index tensors have no numbers, as where a model is estimated.

    >>> import torch
    >>> flops("C[i,k] += A[i,j] * B[j,k]", "A,B", None, [torch.empty(3, 4), torch.empty(4, 5)])
    120
    >>> flops("C[i] += A[I[i]] * A[I[i]]", "A,I", None, [torch.empty(3), torch.tensor([2, 0, -1])])
    4
    """
    operands = dict(zip(names.split(","), tensors))
    bound = bind(parse(expr), operands, size)
    factors = len(bound.statement.accesses)
    return factors * _products(bound, operands) if factors > 1 else 0


def _products(bound: Bound, tensors: Mapping[str, Tensor]) -> int:
    """Return how many products a statement adds up: of those whose positions can be told, the ones that are there."""
    letters, present, spanned = {name: at for at, name in enumerate(bound.extents)}, list[Any](), set[str]()
    for access in bound.statement.index_accesses:
        index = tensors[access.name]
        # what is read of a position that is read itself is not followed
        if access.is_indirect or len(letters) > MOST_NAMES or not is_readable(index):
            continue
        positions = index[tuple([at.value if isinstance(at, Const) else slice(None) for at in access.indices])]
        names = [at.name for at in access.indices if isinstance(at, Var)]
        is_there = positions >= 0
        if not bool(is_there.all()):
            present += [is_there.double(), [letters[name] for name in names]]
            spanned.update(names)
    others = prod([extent for name, extent in bound.extents.items() if name not in spanned])
    return others * int(torch.einsum(*present, [])) if present else others


register_flop_formula([call.overloadpacket, call_with_winners.overloadpacket], get_raw=True)(flops)
