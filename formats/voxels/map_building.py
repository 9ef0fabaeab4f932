"""Voxel coordinates to kernel maps, or to the parts of one where a tracer follows the call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..errors import FormatError
from ..guard import may_keep
from ..torch_state import is_exporting, is_followed
from . import map_tables
from .geometry import Geometry, MapLayout, per_axis
from .grid import VoxelGrid
from .kernel_map import KernelMap
from .map_parts import Key, MapParts, keep
from .map_tables import Tables
from .sort import reached_voxels

__all__ = ["generated_map", "kernel_map", "map_on", "parts_of", "submanifold_map", "traced_map"]

Sizes = tuple[int, ...]  # one for each axis

KINDS = ("subm", "strided", "transposed")


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
        new_map = submanifold_map(indices, grid, geometry)
    else:
        shape = _shape_of_outputs(indices, grid, kind, geometry, layout.output_padding)
        new_map = generated_map(indices, grid, VoxelGrid(shape, grid.batch_size), geometry, kind)
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
    return MapParts(indices, target, text, sizes, geometry.kernel_size, 0)


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
def submanifold_map(indices: Tensor, grid: VoxelGrid, geometry: Geometry) -> KernelMap:
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


@torch.inference_mode(False)
def generated_map(indices: Tensor, grid: VoxelGrid, out_grid: VoxelGrid, geometry: Geometry, kind: str) -> KernelMap:
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
