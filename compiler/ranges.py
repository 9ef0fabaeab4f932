"""Index values against the dimensions they point into, read once per tensor and remembered."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .bind import Bound
from .errors import IndexRangeError

__all__ = ["check_ranges", "value_range"]

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


def check_ranges(bound: Bound, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Raise `IndexRangeError` on a position past its dimension; return the index tensors that hold a -1."""
    padded = set()
    for pointed in bound.pointed:
        low, high = value_range(tensors[pointed.index])
        if high >= pointed.extent:
            raise _out_of_range(bound, pointed.index, pointed.into, pointed.dim, pointed.extent, pointed.at, tensors[pointed.index])
        if low < 0:
            padded.add(pointed.index)
    return frozenset(padded)


def _out_of_range(bound: Bound, name: str, into: str, dim: int, extent: int, at: int, index: Tensor) -> IndexRangeError:
    position = (index >= extent).nonzero()[0].tolist()
    value = int(index[tuple(position)])
    where = f"{name}[{','.join(map(str, position))}]" if position else f"{name}[()]"
    return IndexRangeError(
        f"{where} is {value}, outside {into} dimension {dim}, which has size {extent}", bound.statement.text or None, at
    )
