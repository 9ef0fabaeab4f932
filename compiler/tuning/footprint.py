"""The shared memory and registers that a config would take of a multiprocessor, estimated from its schedule.

The estimate follows Triton's pipeliner (3.6 and 3.7): of `stages` it keeps (stages - 1) // (1 + levels) tiles of every
operand in flight, where a position that is itself loaded in the loop is a level, and one more where the tensor core
reads its operands from shared memory while the next ones arrive. The tests in `tests/cross` compare it with what the
compiler takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from ..codegen import Config
from ..language import Access
from ..planning import Device, Leaf, Node, Schedule, dots, leaves

__all__ = ["accumulators", "computed_operands", "fitted", "shared_bytes", "unrolled_registers"]

READS_SHARED = ("wgmma", "tcgen05")  # instructions whose operands lie in shared memory
SPARE = 2048  # bytes: barriers, and what reductions exchange


def fitted(
    schedule: Schedule, configs: tuple[Config, ...], device: Device, precision: str = "tf32"
) -> tuple[Config, ...]:
    """Return the configs in their order, each with as many stages as the device's shared memory has room for.

    A config that had to change, or that fits with no number of stages, is also kept unchanged at the end, unless its
    operands in flight alone exceed the shared memory: the compiler may need less than the estimate.
    """
    room, late = list[Config](), list[Config]()
    for config in configs:
        for stages in range(config.num_stages, 0, -1):
            shallower = replace(config, num_stages=stages)
            if shared_bytes(schedule, shallower, device, precision) <= device.shared_per_block:
                room.append(shallower)
                break
        if not room or room[-1] != config:
            least, _ = _shared_range(schedule, config, device, precision)
            late += [config] if least <= device.shared_per_block else []
    return tuple(dict.fromkeys((*room, *late))) or configs


def accumulators(config: Config, schedule: Schedule, device: Device) -> float:
    """Return how many registers of a thread the sums of a tile take, in float32 or wider."""
    blocks, words = dict(config.blocks), schedule.bound.compute_dtype.itemsize / 4
    elements = prod(blocks[name] for name in schedule.names("tile"))
    return words * elements / (config.num_warps * device.warp_width)


def unrolled_registers(schedule: Schedule, each: int, ahead: int) -> int:
    """Return about how many registers a thread needs with `each` elements of a tile over constant tables.

    It has such a tile for each row that the tables name and for each of those that are loaded ahead; a number for each
    place of the tables is an estimate. Compiled for sm_90, 353 entries of 16 rows spill with 4 elements (456 bytes), 36
    entries of 12 rows with 16 (72); 83 entries of 9 rows do not with 8.
    """
    unrolled = schedule.names("unrolled")
    rows = prod(schedule.extents[name] for name in unrolled if name in schedule.free)
    return (rows + ahead) * each + prod(schedule.extents[name] for name in unrolled)


def computed_operands(schedule: Schedule) -> list[Node]:
    """Return the operands of dots that are products themselves: they are made in registers."""
    return [node for dot in dots(schedule.tree) for node in (dot.left, dot.right) if not isinstance(node, Leaf)]


def shared_bytes(schedule: Schedule, config: Config, device: Device, precision: str = "tf32") -> int:
    """Return an upper bound of the shared memory of a program, in bytes; `precision` is that of a float32 dot.

    It is what operands in flight and operands that are products take, or the result while it is converted to the layout
    of its store, whichever is more. Without a dot a tile only changes its layout for a sum.
    """
    return _shared_range(schedule, config, device, precision)[1]


def _shared_range(schedule: Schedule, config: Config, device: Device, precision: str) -> tuple[int, int]:
    """Return the least and the most bytes of shared memory that a program may take."""
    blocks, bound = dict(config.blocks), schedule.bound
    width = bound.compute_dtype.itemsize
    if not schedule.uses_dot:
        return 0, prod(blocks.values()) * width + SPARE
    loop, tiles, positions, levels = _pipelined(schedule, blocks), 0, 0, 0
    for leaf in leaves(schedule.tree):
        factor = schedule.factors[leaf.at]
        if not isinstance(factor, Access):  # a one-hot matrix, made of positions
            continue
        tiles += prod(blocks[axis] for axis in leaf.axes) * bound.dtypes[factor.name].itemsize
        for access in factor.indirections:
            count = prod(blocks[axis] for axis in leaf.axes if axis in {*access.names})
            positions += count * bound.dtypes[access.name].itemsize
            # elements gathered one by one along memory are not loaded ahead, nor are their positions
            is_ahead = bool(loop & {*access.names}) and access is not factor.indices[-1]
            levels = max(levels, int(is_ahead))
    if schedule.strategy == "on-chip":  # its positions are not pipelined
        levels = 0
    ahead = max(config.num_stages - 1, 0) // (1 + levels) if loop else 0
    is_exact = bound.dtype == torch.float32 and precision == "ieee"  # by multiply-adds
    buffers = max(ahead + (not is_exact and device.tensor_core(bound.dtype) in READS_SHARED), 1)
    products = sum(prod(blocks[axis] for axis in node.axes) * width for node in computed_operands(schedule))
    result = prod(blocks[name] for name in schedule.names("tile")) * schedule.sum_dtype(None).itemsize
    operands = buffers * tiles + products + ahead * positions
    # a program of several rows stores one while the operands of the next are in flight
    most = operands + result if config.rows > 1 else max(operands, result)
    return max(ahead, 1) * tiles, most + SPARE


def _pipelined(schedule: Schedule, blocks: Mapping[str, int]) -> set[str]:
    """Return the index names that change in the innermost loop, into which nested loops of fixed lengths are fused."""
    loops = schedule.loops(blocks)
    return {*loops} if schedule.are_fused(loops) else {*loops[-1:]}
