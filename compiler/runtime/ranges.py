"""Index values against the dimensions they point into, read once per tensor and remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...formats.guard import ChangeGuard, guard_expression, may_keep
from ...formats.torch_state import is_capturing
from ..binding import Bound, Pointed
from ..language import IndexRangeError
from .recording import paused

__all__ = [
    "check_ranges",
    "range_expression",
    "remember_range",
    "remembered_range",
    "segment_lengths",
    "value_range",
]

_REMEMBERED, _SEGMENTS = "_insum_value_range", "_insum_segments"


class _Range(ChangeGuard):
    """The smallest and the largest value of one tensor; a copy has the tensor's attributes too, but is another one."""

    __slots__ = ("owner", "values")

    def __init__(self, index: Tensor) -> None:
        super().__init__(index)
        self.owner = ref(index)
        self.values = 0, -1

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # nothing: a pickle need not have it, and torch.load's weights_only knows this word


def value_range(index: Tensor) -> tuple[int, int]:
    """Smallest and largest value, `(0, -1)` when there is none; one pass per tensor and version."""
    known = _known(index)
    if known is not None:
        return known
    fresh = _fresh(index)  # before it is read: another thread may write to it
    if index.numel() == 0:
        values = (0, -1)
    else:
        with paused():
            low, high = torch.aminmax(index)
            values = tuple(torch.stack((low, high)).tolist())  # one read from the device, not two
    _keep(index, fresh, values)
    return values


def remember_range(index: Tensor, low: int, high: int) -> None:
    """Every value is known to lie from `low` to `high`: whoever made the tensor says so, and nothing is read."""
    if _known(index) is None:
        _keep(index, _fresh(index), (low, high))


def _known(index: Tensor) -> tuple[int, int] | None:
    known: _Range | None = getattr(index, _REMEMBERED, None)
    if not known:  # nor what a pickle has of it
        return None
    return known.values if known.owner() is index and known.holds_for(index) else None


def _fresh(index: Tensor) -> _Range | None:
    """Return what is to hold the range of an index tensor, one wrapped by a transform too; None if nothing may."""
    return _Range(index) if may_keep() and not index.is_inference() else None


def _keep(index: Tensor, fresh: _Range | None, values: tuple[int, int]) -> None:
    if fresh is not None:
        fresh.values = values
        setattr(index, _REMEMBERED, fresh)


def range_expression(name: str, slow: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return the text by which a launch plan asks for the range of an input of this dtype, shape and strides.

    It is what `remembered_range`, which the plan calls `slow`, does where a range is known.
    """
    known = f"(known := getattr({name}, {_REMEMBERED!r}, None)) and known.owner() is {name}"
    return f"known.values if {known} and {guard_expression('known', name, dtype, shape, strides)} else {slow}({name})"


def remembered_range(index: Tensor) -> tuple[int, int]:
    """`value_range`, except that nothing is read while a CUDA graph is captured, nor where there is nothing to read,
    on the meta device: then any entry may be -1.
    """
    known = _known(index)
    if known is not None:
        return known
    if (index.is_cuda and is_capturing()) or index.is_meta:
        return -1, -1
    return value_range(index)


def segment_lengths(pointers: Tensor) -> tuple[int, int]:
    """How many segments there are and the longest one's length, read once; 0 during a capture."""
    known = getattr(pointers, _SEGMENTS, None)
    if known is None:
        if pointers.is_cuda and is_capturing():
            return len(pointers) - 1, 0
        with paused():
            longest = int(pointers.diff().max()) if len(pointers) > 1 else 0
        known = (len(pointers) - 1, longest)
        if may_keep():
            setattr(pointers, _SEGMENTS, known)
    return known


def remember_segments(pointers: Tensor, longest: int) -> None:
    """No segment is longer than that: nothing needs to be read."""
    if may_keep():
        setattr(pointers, _SEGMENTS, (len(pointers) - 1, longest))


def check_ranges(bound: Bound, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Raise `IndexRangeError` on a position past its dimension; return the index tensors that hold a -1."""
    padded = set()
    for pointed in bound.pointed:
        low, high = remembered_range(tensors[pointed.index])
        if high >= pointed.extent:
            raise _out_of_range(bound, pointed, tensors[pointed.index])
        if low < 0:
            padded.add(pointed.index)
    return frozenset(padded)


def _out_of_range(bound: Bound, pointed: Pointed, index: Tensor) -> IndexRangeError:
    position = (index >= pointed.extent).nonzero()[0].tolist()
    where = f"{pointed.index}[{','.join(map(str, position)) or '()'}]"
    return IndexRangeError(
        f"{where} is {int(index[tuple(position)])}, outside {pointed.into} dimension {pointed.dim}, "
        f"which has size {pointed.extent}; a negative position means no entry",
        bound.statement.text or None,
        pointed.at,
    )
