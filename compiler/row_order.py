"""Rows of blocks that programs take in an order of their own: narrow ones in pairs, which load what both multiply once.

By default a rule of the matrix and the device says whether that pays; a full search times it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..formats.torch_state import is_captured, is_deterministic, is_free, is_watched, wants_gradient
from .autograd import is_sum, run_plain
from .binding import SparseFormat, bucket, recipe_for
from .planning import Schedule, device_of, may_be_listed, rows_of_a_set
from .routes import has_kernels, ways_of
from .runtime import on_device, paused
from .tuning import Key, choice_key, fastest, host_milliseconds, may_be_timed, tuning_mode

__all__ = ["with_row_order"]


def with_row_order(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat:
    """Return the format grouped along a dimension.

    If a kernel will read its values they stay where they are, and its rows may be listed in another order; anything
    else gets a copy of them in the new order.
    """
    is_read = not is_watched() and not wants_gradient([form.values]) and is_sum(expr) and has_kernels(form.device)
    if not is_read:
        return form if form.group_dim == group_dim else form.regroup(group_dim)
    if _may_be_timed(form):
        return _fastest(expr, size, name, form, group_dim, dense)
    return _listed_by_rule(expr, size, name, form, group_dim, dense) or _as_they_are(form, group_dim)


def _as_they_are(form: SparseFormat, group_dim: int) -> SparseFormat:
    """Return the format grouped along a dimension, its rows in ascending order and its values in place."""
    return form if form.group_dim == group_dim else form.regrouped_view(group_dim)


def _listed_by_rule(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat | None:
    """Return the format with its rows in the order of programs, if that pays and a kernel takes them so."""
    blocks = form.block_size
    if blocks is None or not _has_rows_of_blocks(form):
        return None
    width = rows_of_a_set(blocks[group_dim], form.values.dtype, device_of(form.device))
    if width == 0:
        return None
    sets = -(-form.shape[group_dim] // (width * blocks[group_dim]))
    results, device = prod(recipe_for(expr, size, name, form, dense).final), device_of(form.device)
    if not may_be_listed(width, sets, form.values.shape[0], results, device):  # no set has more columns than blocks
        return None
    if is_captured(form.device) and not form.has_row_order(group_dim, width):  # which reads lengths back
        return None
    listed = form.row_ordered_view(group_dim, width)
    if not may_be_listed(width, sets, listed.sets.numel(), results, device, listed.row_order.shared):
        return None
    schedules = _schedules(expr, size, name, listed, dense)
    return listed if any(map(_takes_listed, schedules)) and schedules[0].bound.dtype.itemsize == 2 else None


def _schedules(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, dense: Mapping[str, Any]
) -> list[Schedule]:
    """Return the schedules of all candidate kernels of a statement in which the format stands as `name`."""
    how = recipe_for(expr, size, name, form, dense)
    return [way.schedule for way in ways_of(how.text, how.tensors(form, dense), how.size, how.fact(form))]


def _takes_listed(schedule: Schedule) -> bool:
    """Return whether a kernel takes rows in the order in which they are listed."""
    return schedule.holds_set or schedule.has_rows_in_turn


def _has_rows_of_blocks(form: SparseFormat) -> bool:
    return form.block_size is not None and len(form.shape) == 2 and form.value_axes == ("p",)


def _may_be_timed(form: SparseFormat) -> bool:
    """Return whether a full search is on, the rows can be listed, and something may be timed now."""
    if tuning_mode() != "full" or form.device.type != "cuda" or not may_be_timed(form.device):
        return False
    return _has_rows_of_blocks(form) and form.values.shape[0] > 0 and is_free()


@torch.no_grad()
def _fastest(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat:
    """Return the format with its rows as they are, listed, or listed in pairs, whichever runs the statement fastest."""
    forms = {"as they are": _as_they_are(form, group_dim)}
    for way, width in (("listed", 1), ("in pairs", 2)):
        listed = form.row_ordered_view(group_dim, width)
        if any(map(_takes_listed, _schedules(expr, size, name, listed, dense))):
            forms[way] = listed

    def start(way: str) -> tuple[Callable[[], object], float]:
        how = recipe_for(expr, size, name, forms[way], dense)
        tensors, fact = how.tensors(forms[way], dense), how.fact(forms[way])
        names, operands = ",".join(tensors), [tensor.detach() for tensor in tensors.values()]
        return lambda: run_plain(how.text, names, how.size, operands, fact), host_milliseconds(form.device, "")

    key = _key(expr, name, form, group_dim, dense)
    with on_device(form.device), paused():  # none of it is a part of the call
        return forms[fastest(key, forms, list(forms), start)]


def _key(expr: str, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]) -> Key:
    """Return the tuning key of the fastest order of rows; lengths that vary count by their power of two."""
    tensors = {name: form.values, **dense}
    lengths = [(f"{key}[{dim}]", n) for key, tensor in dense.items() for dim, n in enumerate(tensor.shape)]
    sizes = [("blocks", bucket(form.values.shape[0])), *((str(at), n) for at, n in enumerate(form.values.shape[1:]))]
    settings = f"rows of {list(form.shape)}"
    return choice_key(
        f"rows of {expr}", tensors, [*lengths, *sizes, (" group", group_dim)], settings, is_deterministic()
    )
