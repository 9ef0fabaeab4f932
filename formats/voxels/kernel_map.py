"""Voxel coordinates -> which voxel meets which through which tap of a convolution's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..guard import may_keep
from ..torch_state import is_capturing, is_exporting, is_followed, is_inference_mode
from . import map_tables
from .geometry import Geometry, MapLayout, per_axis
from .grid import VoxelGrid
from .map_parts import Key, MapParts, cached_map, cached_start, described, keep, know_copy, original_of
from .map_tables import GroupedMap, Tables, TiledMap
from .sort import reached_voxels

__all__ = [
    "MOST_TAPS",
    "GroupedMap",
    "KernelMap",
    "TiledMap",
    "from_parts",
    "kernel_map",
    "map_of",
    "map_on",
    "parts_of",
    "reached_again",
    "reached_by",
    "traced_map",
]

Sizes = tuple[int, ...]  # one for each axis

MOST_TAPS = 40  # whose set is the bits of one sorting key, with the number of a stretch of rows above them
KINDS = ("subm", "strided", "transposed")


@dataclass(frozen=True, eq=False, repr=False)
class KernelMap:
    """Pairs of voxels (x out, y in) that meet through tap z of a convolution's kernel; made by `kernel_map`.

    `sparse_conv3d` and the layers of `insum_ops.nn` go over it. Rows of `neighbours` are outputs; every form is worked
    out when it is first asked for, and kept. Beside its arguments it has `volume`, the number of taps V, `num_inputs` N
    and `num_outputs` X.

    Args:
        indices: input voxels [N, 1+D], the batch index and then a coordinate for each axis.
        out_indices: output voxels [X, 1+D].
        spatial_shape: cells on each axis of the inputs' grid.
        out_spatial_shape: cells on each axis of the outputs' grid.
        batch_size: how many grids there are.
        kernel_size: taps on each axis.
        stride: cells from one output to the next, on each axis.
        padding: cells added on both sides of each axis.
        dilation: cells from one tap to the next, on each axis.
        kind: "subm", "strided", "transposed", or "inverse" of one of the latter two.
        most_per_input: pairs that one input voxel is in at most.
        most_per_output: pairs that one output voxel is in at most.

    Example:
        >>> import torch
        >>> from insum_ops.formats import kernel_map
        >>> line = kernel_map(torch.tensor([[0, 4], [0, 5], [0, 0]]), [6], batch_size=1, kernel_size=3)
        >>> line
        KernelMap(subm, inputs=3, outputs=3, kernel_size=[3], stride=[1], padding=[1], dilation=[1])
        >>> line.neighbours.tolist(), line.num_pairs, line.volume
        ([[-1, 0, 1], [0, 1, -1], [-1, 2, -1]], 5, 3)
        >>> line.pairs.tolist(), line.inverse.kind
        ([[0, 1, 1, 1, 2], [0, 0, 1, 2, 1], [1, 0, 1, 2, 0]], 'subm')
        >>> line.is_counted, line.is_captured, line.uses, len(line.known_neighbours)
        (True, False, 0, 2)
    """

    indices: Tensor  # [N, 1+D]  of the inputs
    out_indices: Tensor  # [X, 1+D]  of the outputs
    spatial_shape: tuple[int, ...]
    out_spatial_shape: tuple[int, ...]
    batch_size: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    kind: str  # "subm", "strided", "transposed", or "inverse" of one of the latter two
    most_per_input: int  # pairs that one input voxel is in at most
    most_per_output: int
    _tables: Tables
    _side: int = 0
    _inverse: list[KernelMap] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict, init=False)  # what is worth keeping as long as the map lives
    volume: int = field(init=False)  # how many taps the kernel has
    num_inputs: int = field(init=False)
    num_outputs: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out the sizes; no cached properties, whose lock on Python 3.11 a tracer can't follow."""
        rows, side = self._tables.rows, self._side
        vars(self).update(volume=prod(self.kernel_size), num_inputs=rows[1 - side], num_outputs=rows[side])

    @property
    def num_pairs(self) -> int:
        """How many pairs there are, read from the device once; during a capture, how many there may be."""
        tables = self._tables
        if tables.num_pairs is None:
            if self.is_captured:
                return self.num_inputs * self.most_per_input
            num_pairs = sum(tables.count()[1])
            if may_keep():
                tables.num_pairs = num_pairs
            return num_pairs
        return tables.num_pairs

    @property
    def is_counted(self) -> bool:
        """Whether `num_pairs` is known without a read from the device."""
        return self._tables.num_pairs is not None

    @property
    def is_captured(self) -> bool:
        """Whether a graph is being captured, during which nothing can be read from the device."""
        return self.indices.is_cuda and is_capturing()

    @property
    def uses(self) -> int:
        """How often `count_use` was called; the two directions of a submanifold count as one."""
        return self._tables.uses[self._shared_side]

    def count_use(self) -> None:
        """Count one more convolution over the map that tiles would have served better; `uses` is the count.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> line.count_use()
            >>> line.uses
            1
        """
        self._tables.uses[self._shared_side] += 1

    @property
    def _shared_side(self) -> int:
        """The side whose tiles serve this side."""
        return 0 if self._tables.is_symmetric else self._side

    @property
    def neighbours(self) -> Tensor:
        """NBR[x,z], int32 [X, V]: the input that output x reads through tap z, -1 where there is none."""
        return self._tables.of(self._side)

    @property
    def known_neighbours(self) -> list[Tensor | None]:
        """The tables of both directions, None for one that was not asked for yet."""
        return self._tables.neighbours

    @property
    def inverse(self) -> KernelMap:
        """The same pairs with inputs and outputs swapped."""
        if not self._inverse:
            swapped = replace(
                self,
                indices=self.out_indices,
                out_indices=self.indices,
                spatial_shape=self.out_spatial_shape,
                out_spatial_shape=self.spatial_shape,
                kind=self.kind if self.kind == "subm" else "inverse",
                most_per_input=self.most_per_output,
                most_per_output=self.most_per_input,
                _side=1 - self._side,
                _inverse=[],  # not this map: memory is to be freed without waiting for the cycle collector
            )
            self._inverse.append(swapped)
        return self._inverse[0]

    @property
    def pairs(self) -> Tensor:
        """(z, y, x) of every pair, int64 [3, pairs]; ascending by tap, then by output."""
        NBR = self.neighbours.T
        z, x = (NBR >= 0).nonzero().T
        return torch.stack([z, NBR[z, x].long(), x])

    def grouped(self, group_size: int = 128, multiple_of: int = 1) -> GroupedMap:
        """Return the pairs in groups with one tap each; the last group of a tap is padded with -1.

        Args:
            group_size: pairs of a group.
            multiple_of: what divides the number of groups P if that is at most 64: the last ones hold no pair. A
                kernel, with its launch plan, is for one such number, and so serves maps of several.

        Returns:
            A `GroupedMap` with tensors [P, group_size] and [P], kept for the next call.

        Raises:
            FormatError: `group_size` or `multiple_of` is below 1.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> line.grouped(group_size=2).MAPY.tolist()
            [[0, -1], [0, 1], [1, -1]]
            >>> line.grouped(group_size=2, multiple_of=4).MAPY.tolist()
            [[0, -1], [0, 1], [1, -1], [-1, -1]]
        """
        if group_size < 1:
            raise FormatError(f"group_size is {group_size}; a group holds at least one pair")
        if multiple_of < 1:
            raise FormatError(f"multiple_of is {multiple_of}; it divides the number of groups")
        groups = self._tables.grouped
        own_key, first_key = [(side, group_size, multiple_of) for side in (self._side, 0)]
        grouped = groups.get(own_key)
        if grouped is None:
            first = groups.get(first_key)
            if first is None:
                first = self._tables.group(group_size, multiple_of)
            grouped = first if self._side == 0 else GroupedMap(first.MAPY, first.MAPX, first.MAPZ)
            if may_keep(first.MAPX, first.MAPY, first.MAPZ):
                groups[first_key], groups[own_key] = first, grouped
        return grouped

    def tiled(self, tile_size: int = 128) -> TiledMap:
        """Return the outputs in tiles of voxels that need the same taps, as far as there are as many.

        Args:
            tile_size: outputs of a tile, a power of two.

        Returns:
            A `TiledMap` with the tensors of `Out[ROW[TILE[p],q],m] += In[NBR[p,q],c] * Weight[TAP[p],c,m]`: ROW [T,
            tile_size], TILE [P], NBR [P, tile_size] and TAP [P], int32, -1 at padding; kept for the next call.

        Raises:
            FormatError: `tile_size` is no power of two, or the kernel has more than 40 taps.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> line.tiled(tile_size=2).ROW.tolist()
            [[1, 0]]
        """
        if not 1 <= self.volume <= MOST_TAPS:
            raise FormatError(f"the kernel has {self.volume} taps; tiles are made for at most {MOST_TAPS}")
        if tile_size < 1 or tile_size & (tile_size - 1):
            raise FormatError(f"tile_size is {tile_size}; a tile holds a power of two of voxels")
        tables, key = self._tables, (self._side, tile_size)
        tiled = tables.tiled.get(key)
        if tiled is None and tables.is_symmetric and self._side == 1:  # the same rows, through the opposite taps
            first = self.inverse.tiled(tile_size)
            tiled = replace(first, TAP=self.volume - 1 - first.TAP)
            self._keep_tiles(key, tiled)
        elif tiled is None:
            rarity = _geometry(self.kernel_size, self.stride, self.padding, self.dilation).rarity
            tiled = tables.tile(self._side, rarity, tile_size)
            self._keep_tiles(key, tiled)
        return tiled

    def _keep_tiles(self, key: tuple[int, int], tiled: TiledMap) -> None:
        if may_keep(tiled.ROW, tiled.TILE, tiled.NBR, tiled.TAP, tiled.pointers, tiled.order):
            self._tables.tiled[key] = tiled

    def has_tiles(self, tile_size: int = 128) -> bool:
        """Return whether `tiled` need not sort; for a capture, whether it need not make anything.

        Args:
            tile_size: outputs of a tile.

        Returns:
            True if tiles of that size are known.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> line.has_tiles(2), line.tiled(2).TAP.shape, line.has_tiles(2)
            (False, torch.Size([3]), True)
        """
        tiles = self._tables.tiled
        if (self._side, tile_size) in tiles:
            return True
        if self.is_captured:
            return False
        return (self._shared_side, tile_size) in tiles

    def has_parts(self, kind: str, size: int) -> bool:
        """Return whether some direction has its groups or tiles of a size.

        Args:
            kind: "groups" or "tiles".
            size: pairs of a group, or outputs of a tile.

        Returns:
            True if they were made and not dropped.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> groups = line.grouped(group_size=2)
            >>> line.has_parts("groups", 2), line.has_parts("tiles", 2)
            (True, False)
        """
        parts = self._tables.parts(kind)
        return any([key[1] == size for key in list(parts)])

    def drop_parts(self, kind: str, size: int) -> None:
        """Free the groups or tiles of a size, of both directions; they are made again when they are asked for.

        Args:
            kind: "groups" or "tiles".
            size: pairs of a group, or outputs of a tile.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> groups = line.grouped(group_size=2)
            >>> line.drop_parts("groups", 2)
            >>> line.has_parts("groups", 2)
            False
        """
        parts = self._tables.parts(kind)
        for key in [key for key in list(parts) if key[1] == size]:
            parts.pop(key, None)

    def to(self, device: torch.device | str) -> KernelMap:
        """Return the same map in another device's memory.

        Args:
            device: where to.

        Returns:
            A new map; groups and tiles are made again there.

        Example:
            >>> import torch
            >>> from insum_ops.formats import kernel_map
            >>> line = kernel_map(torch.tensor([[0, 4], [0, 5]]), [6], batch_size=1, kernel_size=3)
            >>> line.to("cpu").neighbours.tolist()
            [[-1, 0, 1], [0, 1, -1]]
        """
        voxels = {name: getattr(self, name).to(device) for name in ("indices", "out_indices")}
        neighbours = [None if table is None else table.to(device) for table in self._tables.neighbours]
        tables = replace(self._tables, neighbours=neighbours, counts=None, grouped={}, tiled={}, uses=[0, 0])
        return replace(self, **voxels, _tables=tables, _inverse=[])

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and deepcopy, without what others keep with the map."""
        return {**vars(self), "memory": {}}

    def __repr__(self) -> str:
        return (
            f"KernelMap({self.kind}, inputs={len(self.indices)}, outputs={len(self.out_indices)}, "
            f"kernel_size={list(self.kernel_size)}, stride={list(self.stride)}, padding={list(self.padding)}, "
            f"dilation={list(self.dilation)})"
        )


def kernel_map(
    indices: Tensor,
    spatial_shape: Sequence[int],
    batch_size: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    kind: str = "subm",
    output_padding: int | Sequence[int] = 0,
) -> KernelMap:
    """fine = coarse * stride - padding + dilation * tap: the pairs of voxels for which that holds.

    This is the rulebook of a sparse convolution. Taps count with the last axis fastest. What the outputs are depends on
    `kind`:

    - "subm": the inputs, in their order; the kernel is centred, so padding is not used.
    - "strided": every cell of `nn.Conv3d`'s output that some input reaches, ascending by (batch, coordinates).
    - "transposed": the same for `nn.ConvTranspose3d`.

    Args:
        indices: input voxels [N, 1+D], int32 or int64, each given once: the batch index and then a coordinate for each
            of one to four axes.
        spatial_shape: cells on each axis.
        batch_size: how many grids there are.
        kernel_size: taps on each axis, one number or one for each axis; odd for "subm".
        stride: cells from one output to the next ("transposed": from one input to the next), one number or one for each
            axis; 1 for "subm".
        padding: cells added on both sides of each axis ("transposed": taken away from the output), one number or one
            for each axis; not used for "subm".
        dilation: cells from one tap to the next, one number or one for each axis.
        kind: "subm", "strided" or "transposed".
        output_padding: cells added to the end of each axis of the output, for "transposed" alone.

    Returns:
        A `KernelMap` on the device of the indices.

    Raises:
        FormatError: a voxel is given twice or lies outside the grid, indices are not integers [N, 1+D], a size or
            `kind` is none that there is, or no cell is left of the grid.

    Example:
        >>> import torch
        >>> from insum_ops.formats import kernel_map
        >>> line = torch.tensor([[0, 4], [0, 5], [0, 0]])
        >>> kernel_map(line, [6], 1, kernel_size=3).neighbours.tolist()
        [[-1, 0, 1], [0, 1, -1], [-1, 2, -1]]
        >>> kernel_map(line, [6], 1, kernel_size=2, stride=2, kind="strided").out_indices.tolist()
        [[0, 0], [0, 2]]
    """
    if kind not in KINDS:
        raise FormatError(f"kind is {kind!r}; choose from {', '.join(KINDS)}")
    grid = VoxelGrid(tuple(spatial_shape), batch_size)
    grid.check_kind(indices)
    ndim = len(grid.spatial_shape)
    kernel = per_axis("kernel_size", kernel_size, ndim, 1)
    strides, dilations = per_axis("stride", stride, ndim, 1), per_axis("dilation", dilation, ndim, 1)
    is_centred = kind == "subm"
    paddings = per_axis("padding", 0 if is_centred else padding, ndim, 0)
    extra = per_axis("output_padding", 0 if is_centred else output_padding, ndim, 0)
    layout = MapLayout(kind, kernel, strides, paddings, dilations, extra)
    if is_followed(indices):
        return traced_map(indices, grid, layout)  # type: ignore[return-value]  # which stands for one
    return map_on(indices, grid, layout)


def map_on(indices: Tensor, grid: VoxelGrid, layout: MapLayout) -> KernelMap:
    """Return what `kernel_map` does, for arguments that were checked: one size for each axis, and an existing kind."""
    kind, geometry = layout.kind, _known_geometry(layout)
    if kind == "subm":
        shape = grid.spatial_shape
        new_map = _submanifold(indices, grid, geometry)
    else:
        shape = _shape_of_outputs(indices, grid, kind, geometry, layout.output_padding)
        new_map = _generated(indices, grid, VoxelGrid(shape, grid.batch_size), geometry, kind)
    if may_keep(indices, new_map.out_indices):
        # for operators of compiled calls
        keep(_key(kind, geometry, grid, shape), new_map, indices, new_map.out_indices)
    return new_map


def traced_map(indices: Tensor, grid: VoxelGrid, layout: MapLayout) -> MapParts:
    """Return what `map_on` does for a tracer: the map is made when the compiled call runs."""
    kind, geometry, shape = layout.kind, _geometry_of(layout), grid.spatial_shape
    if kind != "subm":
        shape = _shape_of_outputs(indices, grid, kind, geometry, layout.output_padding)
    text, sizes = _key(kind, geometry, grid, shape)
    target = indices
    if kind != "subm" and is_exporting():
        target = reached_voxels(indices, VoxelGrid(shape, grid.batch_size), geometry, kind == "strided")
    elif kind != "subm":
        target = torch.ops.insum_ops.reached_voxels.default(indices, text, list(sizes))
    return MapParts(indices, target, text, sizes, geometry.kernel_size)


def parts_of(kernel_map: KernelMap | MapParts) -> MapParts:
    """Return the parts of a map, for a tracer."""
    if isinstance(kernel_map, MapParts):
        return kernel_map
    side, kernel = kernel_map._side, kernel_map.kernel_size
    source, target = kernel_map.indices, kernel_map.out_indices
    shape, out_shape = kernel_map.spatial_shape, kernel_map.out_spatial_shape
    if side:
        source, target, shape, out_shape = target, source, out_shape, shape
    geometry = Geometry(kernel, kernel_map.stride, kernel_map.padding, kernel_map.dilation)
    text, sizes = _key(kernel_map._tables.kind, geometry, VoxelGrid(shape, kernel_map.batch_size), out_shape)
    return MapParts(source, target, text, sizes, kernel, side)


def from_parts(parts: MapParts) -> KernelMap:
    """Return the map of its parts, outside of a tracer."""
    kernel_map = map_of(parts.source, parts.target, parts.geometry, parts.sizes)
    return kernel_map.inverse if parts.side else kernel_map


def map_of(source: Tensor, target: Tensor, text: str, sizes: Sizes) -> KernelMap:
    """Return the map between voxels, made once; an operator gets them, text and sizes of `MapParts`.

    Raises:
        FormatError: a voxel of the source is given twice or lies outside the grid, or the target is not what the source
            leads to.
    """
    kernel_map = cached_map(source, target, (text, sizes))
    if kernel_map is not None:
        return kernel_map
    originals = original_of(source), original_of(target)
    if originals[0] is not source or originals[1] is not target:  # copies, new in every call, of what a map holds
        return map_of(*originals, text, sizes)
    kernel_map = _start_of(source, text, sizes)
    if target is not source and not torch.equal(target, kernel_map.out_indices):
        raise FormatError(
            "the indices of voxels were changed in place since a convolution made or read them; change a clone of them "
            "and make a new SparseConvTensor of it"
        )
    keep((text, sizes), kernel_map, source, target)
    return kernel_map


def reached_by(source: Tensor, text: str, sizes: Sizes) -> Tensor:
    """Return the voxels that a convolution leads to, as a tensor that nobody else holds; its map is made once.

    Raises:
        FormatError: a voxel of the source is given twice or lies outside the grid.
    """
    voxels = reached_again(source, text, sizes)
    if voxels is None:
        original, key = original_of(source), (text, sizes)
        kernel_map = _start_of(original, text, sizes)
        voxels = _own_copy(kernel_map.out_indices)
        keep(key, kernel_map, original, voxels)
        know_copy(key, source, voxels, kernel_map.out_indices)
    return voxels


def reached_again(source: Tensor, text: str, sizes: Sizes) -> Tensor | None:
    """Return what `reached_by` does, if the map was made before and its voxels are unchanged; else None."""
    key = text, sizes
    kernel_map = cached_start(original_of(source), key)
    if kernel_map is None:
        return None
    voxels = _own_copy(kernel_map.out_indices)
    know_copy(key, source, voxels, kernel_map.out_indices)
    return voxels


def _own_copy(voxels: Tensor) -> Tensor:
    with torch.inference_mode(False) if is_inference_mode() else nullcontext():
        return voxels.clone()


def _start_of(source: Tensor, text: str, sizes: Sizes) -> KernelMap:
    """Return the map of a convolution that starts from voxels, which holds neither them nor what it is known by."""
    kernel_map = cached_start(source, (text, sizes))
    if kernel_map is not None:
        return kernel_map
    kind, geometry, grid, out_grid = _described(text, sizes)
    if kind == "subm":
        kernel_map = _submanifold(source, grid, geometry)
        alias = source.detach()
        return replace(kernel_map, indices=alias, out_indices=alias)
    return replace(_generated(source, grid, out_grid, geometry, kind), indices=source.detach())


_described = lru_cache(256)(described)


def _key(kind: str, geometry: Geometry, grid: VoxelGrid, out_shape: Sizes) -> Key:
    """Return the text and the sizes by which parts of a map tell what it is."""
    axes = geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation
    text = ";".join([kind, *[",".join([str(number) for number in numbers]) for numbers in axes]])
    return text, (grid.batch_size, *grid.spatial_shape, *out_shape)


def _shape_of_outputs(indices: Tensor, grid: VoxelGrid, kind: str, geometry: Geometry, extra: Sizes) -> Sizes:
    """Return the shape of the grid that a convolution leads to; raise FormatError if there is none."""
    if kind == "strided":
        if any(extra):
            raise FormatError(f"output_padding is {list(extra)} but kind is 'strided'; only 'transposed' takes it")
        shape = geometry.coarse_shape(grid.spatial_shape)
    else:
        shape = geometry.fine_shape(grid.spatial_shape, extra)
    stride, padding = list(geometry.stride), list(geometry.padding)
    if min(shape) < 1:
        raise FormatError(
            f"a {kind} convolution with kernel_size {list(geometry.kernel_size)}, stride {stride}, padding "
            f"{padding} and dilation {list(geometry.dilation)} leaves nothing of spatial_shape "
            f"{list(grid.spatial_shape)}: its output would be {list(shape)}"
        )
    if max(shape) > 2**31 and indices.dtype == torch.int32:
        raise FormatError(
            f"indices is torch.int32, but a {kind} convolution with stride {stride} and padding "
            f"{padding} makes a grid of {list(shape)}, whose coordinates pass it; use indices.long()"
        )
    return shape


@torch.inference_mode(False)  # what is kept must be good for training too
def _submanifold(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> KernelMap:
    """Return the map of a submanifold convolution, whose outputs are its inputs."""
    neighbours, counts = map_tables.maker(indices).find(indices, grid, geometry)
    voxels, volume = indices.shape[0], geometry.volume
    shapes = indices, indices, grid.spatial_shape, grid.spatial_shape, grid.batch_size
    sizes = geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation
    tables = Tables((voxels, voxels), True, [neighbours, None], None if counts is None else sum(counts[1]), counts)
    return KernelMap(*shapes, *sizes, "subm", volume, volume, tables)


def _geometry_of(layout: MapLayout) -> Geometry:
    """Return the geometry of a convolution; raise FormatError for a submanifold's even kernel or stride."""
    kind, kernel, stride, padding, dilation, _ = layout
    if kind != "subm":
        return Geometry(kernel, stride, padding, dilation)
    if any([size % 2 == 0 for size in kernel]):
        raise FormatError(
            f"kernel_size is {list(kernel)}; a submanifold kernel has a centre, so each size is odd; "
            "use a strided convolution for even kernels"
        )
    if max(stride) > 1:
        raise FormatError(
            f"stride is {list(stride)}; a submanifold convolution keeps its voxels, so its stride is 1; "
            "use a strided convolution to downsample"
        )
    return Geometry(kernel, stride, tuple([d * (k // 2) for d, k in zip(dilation, kernel)]), dilation)


_known_geometry = cache(_geometry_of)  # keeps what was worked out about each
_geometry = cache(Geometry)


@torch.inference_mode(False)
def _generated(indices: Tensor, grid: VoxelGrid, out_grid: VoxelGrid, geometry: Geometry, kind: str) -> KernelMap:
    out_indices, inverse, swapped, counts = map_tables.maker(indices).generate(
        indices, grid, out_grid, geometry, kind == "strided"
    )
    out_grid.mark_checked(out_indices)
    return KernelMap(
        indices,
        out_indices,
        grid.spatial_shape,
        out_grid.spatial_shape,
        grid.batch_size,
        geometry.kernel_size,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        kind,
        geometry.reached if kind == "strided" else geometry.volume,
        geometry.volume if kind == "strided" else geometry.reached,
        Tables(
            (len(out_indices), len(indices)), False, [swapped, inverse], counts and sum(counts[1]), counts, kind=kind
        ),
    )
