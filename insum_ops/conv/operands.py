"""A kernel map as the statements of a convolution read it; what was worked out is kept with the map."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..compiler import outside_transforms, remember_range, remember_segments
from ..formats.facts import OwnedRows
from ..formats.guard import may_keep
from ..formats.torch_state import is_compiling
from ..formats.voxels.kernel_map import KernelMap
from .forms import STATIONARY, TILED, Form

__all__ = ["drop", "groups_by_tap", "has", "maps", "neighbours", "operands_of"]


def operands_of(kernel_map: KernelMap, form: Form, size: int) -> tuple[dict[str, Tensor], OwnedRows | None]:
    """What a form reads of the map, in groups or tiles of `size`, and the fact that tiles own their rows."""
    if form == TILED:  # not `is`: what a tracer finds by two paths are two tuples to it
        return tiles(kernel_map, size)
    return neighbours(kernel_map) if form == STATIONARY else maps(kernel_map, size), None


def has(kernel_map: KernelMap, form: Form, size: int) -> bool:
    """Whether some direction of the map has its groups or tiles already; the table is always there."""
    return form == STATIONARY or kernel_map.has_parts("tiles" if form == TILED else "groups", size)


def drop(kernel_map: KernelMap, form: Form, size: int) -> None:
    """Nobody is going to read it."""
    kernel_map.drop_parts("tiles" if form == TILED else "groups", size)
    kernel_map.memory.pop(("tiles", size) if form == TILED else size, None)


def tiles(kernel_map: KernelMap, tile_size: int) -> tuple[dict[str, Tensor], OwnedRows]:
    """The map in tiles, for a statement, and its fact: where each tile's taps begin, which tiles have the most."""
    key = "tiles", tile_size
    known: tuple[dict[str, Tensor], OwnedRows] | None = kernel_map.memory.get(key)
    if known is None:
        with outside_transforms():
            tiled = kernel_map.tiled(tile_size)
        _remember(tiled.ROW, -1 if kernel_map.num_outputs % tile_size else 0, kernel_map.num_outputs)
        _remember(tiled.TILE, 0, len(tiled.ROW))
        _remember(tiled.NBR, -1, kernel_map.num_inputs)
        _remember(tiled.TAP, 0, kernel_map.volume)
        remember_segments(tiled.pointers, kernel_map.volume)
        operands = {"ROW": tiled.ROW, "TILE": tiled.TILE, "NBR": tiled.NBR, "TAP": tiled.TAP}
        known = operands, OwnedRows("ROW", "TILE", tiled.pointers, tiled.order)
        _keep(kernel_map, key, known, *operands.values(), tiled.pointers, tiled.order)
    return known


def neighbours(kernel_map: KernelMap) -> dict[str, Tensor]:
    """The map's table, for a statement."""
    known: dict[str, Tensor] | None = kernel_map.memory.get("NBR")
    if known is None:
        with outside_transforms():
            known = {"NBR": kernel_map.neighbours}
        _remember(known["NBR"], -1, kernel_map.num_inputs)
        _keep(kernel_map, "NBR", known, known["NBR"])
    return known


def maps(kernel_map: KernelMap, group_size: int) -> dict[str, Tensor]:
    """The pairs in groups, for a statement; no more in a group than a tap can have."""
    known: dict[str, Tensor] | None = kernel_map.memory.get(group_size)
    if known is None:
        voxels = min(kernel_map.num_inputs, kernel_map.num_outputs)
        fitting = group_size if voxels >= group_size else max(16, 1 << (voxels - 1).bit_length())
        with outside_transforms():
            grouped = kernel_map.grouped(fitting)
        _remember(grouped.MAPX, -1, kernel_map.num_outputs)
        _remember(grouped.MAPY, -1, kernel_map.num_inputs)
        _remember(grouped.MAPZ, 0, kernel_map.volume)
        known = {"MAPX": grouped.MAPX, "MAPY": grouped.MAPY, "MAPZ": grouped.MAPZ}
        _keep(kernel_map, group_size, known, *known.values())
    return known


def groups_by_tap(kernel_map: KernelMap, group_size: int) -> Tensor:
    """MAPP[z,s]: the groups of each tap."""
    known: Tensor | None = kernel_map.memory.get("MAPP")
    if known is None:
        grouped = kernel_map.grouped(group_size)
        with outside_transforms():
            known = grouped.by_tap(kernel_map.volume)
        _remember(known, -1, len(grouped.MAPZ))
        _keep(kernel_map, "MAPP", known, known)
    return known


def _keep(kernel_map: KernelMap, key: Hashable, known: object, *made: Tensor) -> None:
    """A tracer keeps nothing: where it differentiates, it refuses what outlives the call."""
    if may_keep(*made):
        kernel_map.memory[key] = known


def _remember(index: Tensor, low: int, extent: int) -> None:
    if not is_compiling():
        remember_range(index, low, extent - 1)
