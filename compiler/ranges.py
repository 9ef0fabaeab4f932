"""Index values against the dimensions they point into, read once per tensor and remembered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..formats.guard import may_keep
from .bind import Bound, Pointed
from .errors import IndexRangeError
from .runtime.recording import paused
from .runtime.torch_state import is_capturing, is_wrapped

__all__ = [
    "check_ranges",
    "known_version",
    "remember_range",
    "remembered_range",
    "segment_lengths",
    "value_range",
]

_REMEMBERED, _SEGMENTS = "_insum_value_range", "_insum_segments"


class _Read(NamedTuple):
    """What was read of one tensor; a copy has the tensor's attributes too, but its own versions."""

    owner: ref[Tensor]
    version: int
    pointer: int  # `.data = ...` puts other memory there and counts no version
    values: tuple[int, int]

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # nothing: a pickle need not have it, and torch.load's weights_only knows this word


def value_range(index: Tensor) -> tuple[int, int]:
    """Smallest and largest value, `(0, -1)` when there is none; one pass per tensor and version."""
    known = _known(index)
    if known is not None:
        return known
    if index.numel() == 0:
        found = (0, -1)
    else:
        with paused():
            low, high = torch.aminmax(index)
            found = tuple(torch.stack((low, high)).tolist())  # one read from the device, not two
    _keep(index, found)
    return found


def remember_range(index: Tensor, low: int, high: int) -> None:
    """Every value is known to lie from `low` to `high`: whoever made the tensor says so, and nothing is read."""
    if _known(index) is None:
        _keep(index, (low, high))


def _known(index: Tensor) -> tuple[int, int] | None:
    known: _Read | None = getattr(index, _REMEMBERED, None)
    if not known:  # nor what a pickle has of it
        return None
    owner, version, pointer, values = known
    if owner() is not index or version != index._version:
        return None
    return values if pointer == (0 if is_wrapped(index) else index.data_ptr()) else None  # `_address`, without a call


def _address(index: Tensor) -> int:
    """Where a tensor lies; 0 for one that a transform of torch.func has wrapped, which lies nowhere."""
    return 0 if is_wrapped(index) else index.data_ptr()


def known_version(index: Tensor) -> int | None:
    """The version of a tensor that was read as it is now; None: it was not, or does not tell when it changes."""
    return None if _known(index) is None else index._version


def _keep(index: Tensor, values: tuple[int, int]) -> None:
    if may_keep() and not index.is_inference():  # which does not tell when it changes
        setattr(index, _REMEMBERED, _Read(ref(index), index._version, _address(index), values))


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
