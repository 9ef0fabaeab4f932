"""The operands of a convolution's statements that come from its kernel map, which keeps them."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ..compiler import outside_transforms, remember_range, remember_segments
from ..formats.facts import OwnedRows
from ..formats.guard import may_keep
from ..formats.torch_state import is_exporting, is_followed
from ..formats.voxels.kernel_map import KernelMap
from ..formats.voxels.map_building import parts_of
from ..formats.voxels.map_parts import MapParts
from .forms import STATIONARY, TILED, Form

__all__ = ["drop", "groups_by_tap", "has", "maps", "neighbours", "operands_of"]

# What divides the number of a map's groups if it is short. Clouds that are new at every step have ever other numbers of
# groups, and a kernel, with its launch plan, is for one such number: 64 of them are four so. Longer ones are arguments,
# and padding would cost its share: 321 groups took 7.0 us on one H200, 336 took 7.3.
MULTIPLE = 16


def operands_of(kernel_map: KernelMap, form: Form, size: int) -> tuple[dict[str, Tensor], OwnedRows | None]:
    """Return what a form reads of the map, in groups or tiles of `size`, and the fact that tiles own their rows."""
    if form == TILED:  # not `is`: what a tracer finds by two paths are two tuples to it
        return tiles(kernel_map, size)
    return neighbours(kernel_map) if form == STATIONARY else maps(kernel_map, size), None


def has(kernel_map: KernelMap, form: Form, size: int) -> bool:
    """Whether some direction of the map has its groups or tiles already; the table is always there."""
    return form == STATIONARY or kernel_map.has_parts("tiles" if form == TILED else "groups", size)


def drop(kernel_map: KernelMap, form: Form, size: int) -> None:
    """Free the groups or tiles of a form that lost, which no call is going to read."""
    kernel_map.drop_parts("tiles" if form == TILED else "groups", size)
    kernel_map.memory.pop(("tiles", size) if form == TILED else size, None)


def tiles(kernel_map: KernelMap, tile_size: int) -> tuple[dict[str, Tensor], OwnedRows]:
    """Return the map in tiles, and the fact of where each tile's taps begin and which tiles have the most."""
    key = "tiles", tile_size
    cached: tuple[dict[str, Tensor], OwnedRows] | None = kernel_map.memory.get(key)
    if cached is None:
        with outside_transforms():
            tiled = kernel_map.tiled(tile_size)
        _remember(tiled.ROW, -1 if kernel_map.num_outputs % tile_size else 0, kernel_map.num_outputs)
        _remember(tiled.TILE, 0, len(tiled.ROW))
        _remember(tiled.NBR, -1, kernel_map.num_inputs)
        _remember(tiled.TAP, 0, kernel_map.volume)
        remember_segments(tiled.pointers, kernel_map.volume)
        operands = {"ROW": tiled.ROW, "TILE": tiled.TILE, "NBR": tiled.NBR, "TAP": tiled.TAP}
        cached = operands, OwnedRows("ROW", "TILE", tiled.pointers, tiled.order)
        _keep(kernel_map, key, cached, *operands.values(), tiled.pointers, tiled.order)
    return cached


def neighbours(kernel_map: KernelMap | MapParts) -> dict[str, Tensor]:
    """Return the map's table of neighbours."""
    if isinstance(kernel_map, MapParts) or is_followed(kernel_map.indices):
        # an exported program holds the table of a map that is there
        return {"NBR": (kernel_map if is_exporting() else parts_of(kernel_map)).neighbours}
    operands: dict[str, Tensor] | None = kernel_map.memory.get("NBR")
    if operands is None:
        with outside_transforms():
            operands = {"NBR": kernel_map.neighbours}
        _remember(operands["NBR"], -1, kernel_map.num_inputs)
        _keep(kernel_map, "NBR", operands, operands["NBR"])
    return operands


def maps(kernel_map: KernelMap, group_size: int) -> dict[str, Tensor]:
    """Return the map's pairs in groups, of no more pairs than a tap can have."""
    operands: dict[str, Tensor] | None = kernel_map.memory.get(group_size)
    if operands is None:
        voxels = min(kernel_map.num_inputs, kernel_map.num_outputs)
        fitting = group_size if voxels >= group_size else max(16, 1 << (voxels - 1).bit_length())
        with outside_transforms():
            grouped = kernel_map.grouped(fitting, MULTIPLE)
        _remember(grouped.MAPX, -1, kernel_map.num_outputs)
        _remember(grouped.MAPY, -1, kernel_map.num_inputs)
        _remember(grouped.MAPZ, 0, kernel_map.volume)
        operands = {"MAPX": grouped.MAPX, "MAPY": grouped.MAPY, "MAPZ": grouped.MAPZ}
        _keep(kernel_map, group_size, operands, *operands.values())
    return operands


def groups_by_tap(kernel_map: KernelMap, group_size: int) -> Tensor:
    """Return MAPP[z,s], the groups of each tap."""
    MAPP: Tensor | None = kernel_map.memory.get("MAPP")
    if MAPP is None:
        grouped = kernel_map.grouped(group_size, MULTIPLE)
        with outside_transforms():
            MAPP = grouped.by_tap(kernel_map.volume)
        _remember(MAPP, -1, len(grouped.MAPZ))
        _keep(kernel_map, "MAPP", MAPP, MAPP)
    return MAPP


def _keep(kernel_map: KernelMap, key: Hashable, value: object, *tensors: Tensor) -> None:
    """Keep operands with the map, where something may be kept."""
    if may_keep(*tensors):
        kernel_map.memory[key] = value


def _remember(index: Tensor, low: int, extent: int) -> None:
    """Tell the compiler the range of an index tensor, so that it need not be read from the device."""
    remember_range(index, low, extent - 1)
