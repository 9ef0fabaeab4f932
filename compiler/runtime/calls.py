"""What a call of a statement depends on, read off its arguments: the cache of its launch plans, and the key in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...formats.torch_state import PLAIN, default_dtype, wants_gradient
from ...lru_cache import LRUCache
from ..binding import SparseFormat

__all__ = ["PLAIN_CALLS", "arguments"]

Operand = Any  # a Tensor or a SparseFormat
CALLS = 4096  # over plain tensors that are kept, with what tells that a call came once; of about 4 kB each
PLAIN_CALLS: LRUCache[Any] = LRUCache(CALLS)


def arguments(expr: str, operands: Mapping[str, Operand], size: Sequence[int] | None) -> tuple[Any, ...] | None:
    """Return (cache of plans, key of the call, whether a tensor wants a gradient), then what `planned` takes.

    That is (tensors, size, whether lengths may vary, pattern). The tensors are the operands in the caller's order, a
    format's values in its place. The pattern is the coordinates of the format, and a call over plain tensors has none:
    its lengths may vary. The result is None if an operand is no tensor or format, if `size` holds no integers, or if a
    tracer's symbols or tensors stand for them, which no plan can hold.
    """
    form: SparseFormat | None = None
    place = -1
    tensors: list[Tensor] = []
    try:
        for operand in operands.values():
            if type(operand) not in PLAIN and form is None and not isinstance(operand, Tensor):
                # the values are asked each time: a Parameter stays the same object when its dtype or device changes
                form, place, operand = operand, len(tensors), operand.values
            tensors.append(operand)
        numbers = None if size is None else _integers(size)
        learns = wants_gradient(tensors)
        if form is not None:
            if type(form.values) not in PLAIN and isinstance(form.values, FakeTensor):
                return None
            call_key = (expr, numbers is None, place, *operands)
            return form.memory, call_key, learns, tensors, numbers or (), False, form.coords
    except (AttributeError, TypeError):
        return None
    return PLAIN_CALLS, _plain_key(expr, tuple(operands), numbers), learns, tensors, numbers or (), True, ()


def _plain_key(expr: str, names: tuple[str, ...], size: tuple[int, ...] | None) -> tuple[Any, ...]:
    """Return the key of a call over plain tensors; it has the default dtype, which a statement of numbers takes."""
    return expr, size is None, default_dtype(), *names


def _integers(size: object) -> tuple[int, ...]:
    """Return a size as integers; raise TypeError for anything else: what equals one, such as 3.0, or a symbol."""
    if type(size) is tuple:
        for extent in size:
            if type(extent) is not int:
                break
        else:
            return size
    if not isinstance(size, (tuple, list)) or any([isinstance(extent, SymInt) for extent in size]):
        raise TypeError
    return tuple(map(index, size))
