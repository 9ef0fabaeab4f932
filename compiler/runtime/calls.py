"""What a call of a statement depends on, read off its arguments: the cache of its launch plans, and the key in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from ...lru_cache import LRUCache
from ..binding import SparseFormat

__all__ = ["PLAIN_CALLS", "integers", "plan_arguments", "unchecked"]

Operand = Any  # a Tensor or a SparseFormat
CALLS = 4096  # over plain tensors that are kept, with what tells that a call came once; of about 4 kB each
PLAIN_CALLS: LRUCache[Any] = LRUCache(CALLS)
NOTHING: tuple[Any, ...] = ({}, None, (), (), False, ())


def unchecked(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> Sequence[int] | None:
    """Return the size: the check of a call whose operands were checked before."""
    return size


def plan_arguments(expr: object, operands: Mapping[str, Operand], size: Sequence[int] | None) -> tuple[Any, ...]:
    """Return (cache of plans, key of the call, tensors, size), which `replayed` takes, then what `planned` takes more.

    That is (whether lengths may vary, pattern). The tensors are the operands in the caller's order, a format's values
    in its place. The pattern is the format, and a call over plain tensors has none: its lengths may vary. The key is
    None, and the cache empty, if the expression is no text, if an operand is no tensor or format, if `size` holds no
    integers, or if a tracer's symbols or tensors stand for them, which no plan can hold.
    """
    numbers = () if size is None else integers(size)
    if numbers is None or not isinstance(expr, str):
        return NOTHING
    tensors: list[Any] = [*operands.values()]
    is_unsized, place = size is None, -1
    for at, operand in enumerate(tensors):
        if type(operand) is not Tensor and type(operand) is not Parameter and not isinstance(operand, Tensor):
            if place >= 0:
                return NOTHING
            place = at
    if place < 0:
        return PLAIN_CALLS, (expr, is_unsized, *operands), tensors, numbers, True, ()
    form: SparseFormat = tensors[place]
    try:
        # the values are asked each time: a Parameter stays the same object when its dtype or device changes
        tensors[place] = values = form.values
        if type(values) is not Tensor and isinstance(values, FakeTensor):
            return NOTHING
        return form.memory, (expr, is_unsized, place, *operands), tensors, numbers, False, form
    except (AttributeError, TypeError):  # it is no format
        return NOTHING


def integers(size: object) -> tuple[int, ...] | None:
    """Return a size as integers; None for anything else: what equals one, such as 3.0, or a symbol."""
    if type(size) is tuple:
        for extent in size:
            if type(extent) is not int:
                break
        else:
            return size
    if not isinstance(size, (tuple, list)) or any([isinstance(extent, SymInt) for extent in size]):
        return None
    try:
        return tuple(map(index, size))
    except TypeError:
        return None
