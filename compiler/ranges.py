"""Index values against the dimensions they point into, read once per tensor and remembered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .bind import Bound, Pointed
from .errors import IndexRangeError

__all__ = ["check_ranges", "remember_range", "remembered_range", "segment_lengths", "value_range"]

_REMEMBERED = "_insum_value_range"


def value_range(index: Tensor) -> tuple[int, int]:
    """Smallest and largest value, `(0, -1)` when there is none; one pass per tensor and version."""
    known = getattr(index, _REMEMBERED, None)
    version = None if index.is_inference() else index._version
    if known is not None and version is not None and known[0] == version:
        return known[1]  # type: ignore[no-any-return]
    if index.numel() == 0:
        found = (0, -1)
    else:
        low, high = torch.aminmax(index)
        found = tuple(torch.stack((low, high)).tolist())  # one read from the device, not two
    setattr(index, _REMEMBERED, (version, found))
    return found


def remember_range(index: Tensor, low: int, high: int) -> None:
    """Every value is known to lie from `low` to `high`: whoever made the tensor says so, and nothing is read."""
    if getattr(index, _REMEMBERED, None) is None and not index.is_inference():
        setattr(index, _REMEMBERED, (index._version, (low, high)))


def remembered_range(index: Tensor) -> tuple[int, int]:
    """`value_range`, except that nothing is read while a CUDA graph is captured: then any entry may be -1."""
    known = getattr(index, _REMEMBERED, None)
    if known is not None and known[0] is not None and known[0] == index._version:
        return known[1]  # type: ignore[no-any-return]
    if index.is_cuda and torch.cuda.is_current_stream_capturing():
        return -1, -1
    return value_range(index)


def segment_lengths(pointers: Tensor) -> tuple[int, int]:
    """How many segments there are and the longest one's length, read once; 0 during a capture."""
    known = getattr(pointers, _REMEMBERED, None)
    if known is None:
        if pointers.is_cuda and torch.cuda.is_current_stream_capturing():
            return len(pointers) - 1, 0
        longest = int(pointers.diff().max()) if len(pointers) > 1 else 0
        known = (len(pointers) - 1, longest)
        setattr(pointers, _REMEMBERED, known)
    return known


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
