"""Long sums over memory as it lies: which names one axis may hold together, and which statements read stretches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..language import Access, Var
from .device import Device
from .scatter import Start

__all__ = ["is_crowded", "reads_stretches", "stretch"]

# additions for each element of the output from which on so many meet at one place that copies of the output are tried
CROWD = 64


def reads_stretches(start: Start) -> bool:
    """Whether all factors are read where an index name says, not where an index tensor points."""
    return all(isinstance(factor, Access) and not factor.indirections for factor in start.factors)


def stretch(start: Start, strides: Mapping[str, tuple[int, ...]], name: str) -> tuple[str, ...]:
    """Return a name with the names before it along which memory goes on without a gap: summed ones, or of the output.

    Every access over one of them has all of them, side by side, so that one axis may run over them all.
    """
    is_summed = name in start.summed
    factors = start.accesses
    accesses = factors if is_summed else [start.output, *factors]
    if len(factors) < len(start.factors) or not (is_summed or name in start.free):
        return (name,)
    group: tuple[str, ...] = (name,)
    others = start.summed if is_summed else start.free
    hidden = {inner for each in accesses for access in each.indirections for inner in access.names}
    if start.owner is not None:
        hidden |= {start.owner.row, start.owner.segment}
    while group[0] not in hidden:
        before = {_before(access, group[0]) for access in accesses if group[0] in access.names}
        (other,) = before if len(before) == 1 else ("",)
        if other not in others or other in group or other in hidden:
            return group
        wider = (other, *group)
        keys = ["" if each is start.output else each.name for each in accesses]
        if not all(_is_stretch(each, strides[key], wider, start) for each, key in zip(accesses, keys)):
            return group
        group = wider
    return group


def _before(factor: Access, name: str) -> str:
    """Return the index name in the dimension before that of `name`, "" if there is none."""
    indices = [str(index) if isinstance(index, Var) else "" for index in factor.indices]
    at = indices.index(name) if name in indices else 0
    return indices[at - 1] if at else ""


def _is_stretch(factor: Access, strides: tuple[int, ...], names: tuple[str, ...], start: Start) -> bool:
    """Whether a factor has none of the names, or each once, one after another and without a gap in memory."""
    indices = [str(index) for index in factor.indices]
    count = sum(indices.count(name) for name in names)
    if not count:
        return True
    first = indices.index(names[0]) if names[0] in indices else 0
    is_in_order = count == len(names) and tuple(indices[first : first + len(names)]) == names
    lengths = [start.extents[name] for name in names]
    steps = strides[first : first + len(names)]
    return is_in_order and min(lengths) > 1 and all(a == b * n for a, b, n in zip(steps, steps[1:], lengths[1:]))


def is_crowded(start: Start, device: Device) -> bool:
    """Whether a scatter adds so often to so few places that copies of the output are worth a second kernel."""
    if start.strategy != "atomic" or not start.output.indirections:
        return False
    elements = math.prod(start.bound.size)
    additions = math.prod(start.extents[name] for name in start.free)
    copy = elements * start.bound.compute_dtype.itemsize
    return additions >= CROWD * elements and 2 * copy <= device.room_for_copies
