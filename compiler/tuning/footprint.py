"""What a config would occupy of a multiprocessor, reckoned from its schedule: shared memory and registers.

The reckoning follows Triton's pipeliner (3.6 and 3.7): of `stages` it keeps (stages - 1) // (1 + levels) tiles of every
operand on their way, where a position that is itself loaded in the loop is a level, and one more where the tensor core
reads its operands from shared memory while the next ones arrive. `tests/cross/test_footprint.py` compares it with what
the compiler takes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ..codegen import Config
from ..language import Access
from ..planning import Device, Leaf, Schedule, dots, is_varying, leaves

__all__ = ["accumulators", "fitted", "shared_bytes"]

READS_SHARED = ("wgmma", "tcgen05")  # instructions whose operands lie in shared memory
SPARE = 2048  # bytes: barriers, and what reductions exchange


def fitted(
    schedule: Schedule, configs: tuple[Config, ...], device: Device, precision: str = "tf32"
) -> tuple[Config, ...]:
    """Return the configs in their order, each with as many stages as the device's shared memory has room for.

    A config that had to change, or that fits with no stages at all, is kept as it was at the end, unless the operands
    on their way alone are more than there is room for: the compiler may need less than is reckoned.
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
    """Registers of a thread that the sums of a tile take, in float32 or wider."""
    blocks, words = dict(config.blocks), schedule.bound.compute_dtype.itemsize / 4
    elements = prod(blocks[name] for name in schedule.names("tile"))
    return words * elements / (config.num_warps * device.warp_width)


def shared_bytes(schedule: Schedule, config: Config, device: Device, precision: str = "tf32") -> int:
    """Bytes of shared memory that a program would take, no fewer than it will; `precision` is of a float32 dot.

    Operands on their way, operands that are products themselves, and the result on its way to the layout of its store,
    whichever is more. Without a dot a tile may change its layout for a sum, and no more.
    """
    return _shared_range(schedule, config, device, precision)[1]


def _shared_range(schedule: Schedule, config: Config, device: Device, precision: str) -> tuple[int, int]:
    """The least and the most that a program may take."""
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
    if schedule.strategy == "on-chip":  # whose positions are no level
        levels = 0
    ahead = max(config.num_stages - 1, 0) // (1 + levels) if loop else 0
    is_exact = bound.dtype == torch.float32 and precision == "ieee"  # by multiply-adds
    buffers = max(ahead + (not is_exact and device.tensor_core(bound.dtype) in READS_SHARED), 1)
    computed = [node for dot in dots(schedule.tree) for node in (dot.left, dot.right) if not isinstance(node, Leaf)]
    products = sum(prod(blocks[axis] for axis in node.axes) * width for node in computed)
    result = prod(blocks[name] for name in schedule.names("tile")) * schedule.sum_dtype(None).itemsize
    operands = buffers * tiles + products + ahead * positions
    # where a program has several rows, one is stored while the next one's operands are on their way
    most = operands + result if config.rows > 1 else max(operands, result)
    return max(ahead, 1) * tiles, most + SPARE


def _pipelined(schedule: Schedule, blocks: dict[str, int]) -> set[str]:
    """The names that move in the innermost loop, which nested ones are fused into where their lengths are known."""
    steps = [name for name in schedule.names("step") if blocks[name] < schedule.extents[name]]
    loops = [*schedule.names("segment", "loop"), *steps]
    owner = schedule.owner
    is_side_by_side = owner is not None and schedule.roles[owner.row] == "tile"
    is_fused = not is_side_by_side and not any(is_varying(schedule.bound, name) for name in loops[1:])
    return {*loops} if is_fused else {*loops[-1:]}
