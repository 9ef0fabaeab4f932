"""The sum, or max, of the copies of an output to which programs of one kernel wrote: a kernel, `Y[a] += T[r,a]`."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ...lru_cache import LRUCache
from ..binding import SHORT_LENGTH, Bound, Meta, bind, kernel_strides, power_of_two, row_major
from ..codegen import Config, Flags, emit
from ..language import parse
from ..planning import device_of, schedules
from .launch import INTERPRETED, Launcher, launcher

__all__ = ["sum_of_copies"]

STATEMENTS = {
    "sum": parse("Y[a] += T[r,a]"),
    "max": parse("Y[a] = max(T[r,a])"),
    "min": parse("Y[a] = min(T[r,a])"),
}
COLUMNS, ELEMENTS = 32, 4096  # of a tile: a line of float32 along memory, and no more registers than a program has
EACH, MOST_WARPS = 8, 8  # elements of a tile to a thread
KERNELS = 512

_sums: LRUCache[Launcher] = LRUCache(KERNELS)  # by all that a source depends on


def sum_of_copies(bound: Bound, copies: int, sum_dtype: torch.dtype) -> Launcher:
    """Return the launcher that adds up copies of a statement's output, whose tensors are those and the seed.

    Launchers for outputs of other lengths share one kernel, which assumes nothing of a length above 64.
    """
    elements = prod(bound.size)
    seed = bound.dtypes[bound.statement.output.name] if bound.is_seeded else None
    usual = elements if elements <= SHORT_LENGTH else 2 * SHORT_LENGTH + 1
    key = usual, copies, sum_dtype, bound.dtype, seed, bound.device, bound.statement.reduction
    cached = _sums.get(key)
    if cached is None:
        cached = _sums[key] = _launcher(_sum(usual, bound, copies, sum_dtype, seed))
    statement = _sum(elements, bound, copies, sum_dtype, seed)
    schedule = replace(cached.schedule, extents={"r": copies, "a": elements})
    total = launcher(statement, schedule, cached.kernel, _strides(statement), tuple(statement.shapes), bound.dtype)
    return replace(total, runners=cached.runners, refused=cached.refused)


def _sum(elements: int, bound: Bound, copies: int, sum_dtype: torch.dtype, seed: torch.dtype | None) -> Bound:
    """Return the bound statement; its result has the type of the output, whatever that of the copies."""
    tensors = {"T": Meta((copies, elements), sum_dtype, bound.device)}
    if seed is not None:
        tensors["Y"] = Meta((elements,), seed, bound.device)
    return replace(bind(STATEMENTS[bound.statement.reduction], tensors), dtype=bound.dtype)


def _strides(bound: Bound) -> dict[str, tuple[int, ...]]:
    return kernel_strides(bound, {name: row_major(shape) for name, shape in bound.shapes.items()})


def _launcher(bound: Bound) -> Launcher:
    """Return the launcher of a tile as deep as a program has registers for."""
    strides = _strides(bound)
    # a sum that programs share has copies again, and leaves a seed to those who add them up
    ways = [way for way in schedules(bound, strides, "store", deterministic=True, use_dot=False) if not way.is_shared]
    schedule = next((way for way in ways if way.names("step")), ways[0])  # several copies at once, unless they are few
    copies, elements = bound.shapes["T"]
    columns = min(power_of_two(elements), COLUMNS)
    sizes = {"r": min(power_of_two(copies), ELEMENTS // columns), "a": columns}
    warp_width = device_of(bound.device).warp_width
    warps = max(1, min(prod(sizes.values()) // (warp_width * EACH), MOST_WARPS))
    config = Config(tuple((axis, sizes[axis]) for axis in schedule.axes), warps)
    kernel = emit(schedule, strides, config, Flags(interpreted=INTERPRETED, strides_vary=True, warp_width=warp_width))
    return launcher(bound, schedule, kernel, strides, tuple(bound.shapes), bound.dtype)
