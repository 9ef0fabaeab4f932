"""Rows of blocks that are walked in an order of their own: narrow ones in pairs, which load once what both multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..formats.torch_state import is_capturing, is_watched, wants_gradient
from .autograd import is_sum
from .binding import SparseFormat, recipe_for
from .planning import device_of, may_be_listed, rows_of_a_set
from .prepared import has_kernels, ways_of

__all__ = ["grouped"]


def grouped(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat:
    """Grouped along a dimension: a kernel reads the values where they are, anything else gets a copy of them."""
    is_read = not is_watched() and not wants_gradient([form.values]) and is_sum(expr) and has_kernels(form.device)
    shared = _walked(expr, size, name, form, group_dim, dense) if is_read else None
    if shared is not None:
        return shared
    if form.group_dim == group_dim:
        return form
    return form.along(group_dim) if is_read else form.regroup(group_dim)


def _walked(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat | None:
    """The format with its rows as programs walk them, if that pays and a kernel takes them so."""
    width = _width(form, group_dim)
    if width == 0:
        return None
    assert form.block_size is not None
    sets = -(-form.shape[group_dim] // (width * form.block_size[group_dim]))
    results, device = prod(recipe_for(expr, size, name, form, dense).final), device_of(form.device)
    if not may_be_listed(width, sets, form.values.shape[0], results, device):  # no set has more columns than blocks
        return None
    if _is_captured(form) and not form.is_walked(group_dim, width):  # which reads lengths back
        return None
    found = form.walked(group_dim, width)
    if not may_be_listed(width, sets, found.sets.numel(), results, device, found.walk.shared):
        return None
    how = recipe_for(expr, size, name, found, dense)
    ways = [way.schedule for way in ways_of(how.text, how.tensors(found, dense), how.size, how.fact(found))]
    is_held = any(way.holds_set or way.has_rows_in_turn for way in ways)
    return found if is_held and ways[0].bound.dtype.itemsize == 2 else None


def _width(form: SparseFormat, group_dim: int) -> int:
    """Rows to a set, 0 where none are made."""
    blocks = form.block_size
    if blocks is None or len(form.shape) != 2 or form.value_axes != ("p",):
        return 0
    return rows_of_a_set(blocks[group_dim], form.values.dtype, device_of(form.device))


def _is_captured(form: SparseFormat) -> bool:
    return form.device.type == "cuda" and is_capturing()
