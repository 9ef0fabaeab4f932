"""What torch is told about `SparseConvTensor`: how it is taken apart, joined into a batch, read from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from ..compiler import OperandError
from ..formats.voxels.grid import VoxelGrid
from .tensor import SparseConvTensor
from .voxels import MapCache, Voxels

__all__ = ["joined"]


@dataclass(frozen=True)
class _Context:
    """All of a `SparseConvTensor` but its tensors, for torch's pytrees; kernel maps do not count in a comparison."""

    voxel_grid: VoxelGrid
    benchmark: bool
    names: tuple[str, ...]  # of the tensors, in their order
    map_cache: MapCache | None = field(default=None, compare=False, repr=False)  # None: read from a file


def _flatten(x: SparseConvTensor) -> tuple[list[Any], _Context]:
    optional = [name for name in ("grid", "voxel_num") if getattr(x, name) is not None]
    names = ("features", "indices", *optional)
    return [getattr(x, name) for name in names], _Context(x.voxels.grid, x.benchmark, names, x.map_cache)


def _flatten_with_keys(x: SparseConvTensor) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    leaves, context = _flatten(x)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context.names, leaves)], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> SparseConvTensor:
    """Return a tensor of leaves, which are not checked: a leaf may be whatever a function made of a tensor."""
    tensors: dict[str, Any] = {"grid": None, "voxel_num": None, **dict(zip(context.names, leaves))}
    indices, cache = tensors["indices"], context.map_cache
    result = object.__new__(SparseConvTensor)
    result.voxels, result.indice_dict = (
        (Voxels.of(indices, context.voxel_grid), {}) if cache is None else cache.on(indices, context.voxel_grid)
    )
    result._features, result.benchmark = tensors["features"], context.benchmark
    result.grid, result.voxel_num = tensors["grid"], tensors["voxel_num"]
    return result


def _to_file(context: _Context) -> list[Any]:
    """Return what JSON can hold of a context; kernel maps are left out, since they can be computed again."""
    grid = context.voxel_grid
    return [list(grid.spatial_shape), grid.batch_size, context.benchmark, list(context.names)]


def _from_file(saved: list[Any]) -> _Context:
    spatial_shape, batch_size, benchmark, names = saved
    return _Context(VoxelGrid(tuple(spatial_shape), batch_size), benchmark, tuple(names))


pytree.register_pytree_node(
    SparseConvTensor,
    _flatten,
    _unflatten,
    serialized_type_name="insum_ops.nn.SparseConvTensor",
    to_dumpable_context=_to_file,
    from_dumpable_context=_from_file,
    flatten_with_keys_fn=_flatten_with_keys,
)


def joined(batch: Sequence[SparseConvTensor]) -> SparseConvTensor:
    """Return several tensors as one: the grids of the second follow those of the first, and so on.

    >>> one = SparseConvTensor(torch.ones(2, 1), torch.tensor([[0, 0], [0, 2]]), spatial_shape=[3], batch_size=1)
    >>> two = joined([one, one])
    >>> two.batch_size, two.indices.tolist()
    (2, [[0, 0], [0, 2], [1, 0], [1, 2]])
    """
    shapes = list(dict.fromkeys(tuple(x.spatial_shape) for x in batch))
    if len(shapes) > 1:
        first, other = shapes[:2]
        raise OperandError(
            f"a batch holds grids of one spatial_shape, but here are {list(first)} and {list(other)}; give all samples "
            "the shape of the largest"
        )
    channels = list(dict.fromkeys(x.features.shape[1] for x in batch))
    if len(channels) > 1:
        raise OperandError(
            f"a batch holds features of one number of channels, but here are {channels[0]} and {channels[1]}; give all "
            "samples the same"
        )
    past, indices = 0, []
    for x in batch:
        own = x.indices.clone()
        own[:, 0] += past
        indices.append(own)
        past += x.batch_size
    return SparseConvTensor(torch.cat([x.features for x in batch]), torch.cat(indices), shapes[0], past)


def _collate(batch: Sequence[SparseConvTensor], **_: object) -> SparseConvTensor:
    return joined(batch)


default_collate_fn_map[SparseConvTensor] = _collate
torch.serialization.add_safe_globals([SparseConvTensor])
