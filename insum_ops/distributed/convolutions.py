"""Convolutions over DTensors: each rank convolves some of the channels, over voxels that all ranks have.

The rules are read off the statement that a convolution is, as for `insum`. What comes from the kernel map is whole on
each rank, so that no index over voxels, taps or pairs is split; features that are split by voxels are gathered. They
are registered for the two operators, below autograd: gradients are convolutions over DTensors in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import Shard

from ..compiler import parse
from ..conv.forms import STATIONARY, WEIGHT_GRADIENT
from ..conv.weight_views import DENSE, channel_kind
from .agreement import after_agreement, on_all_ranks
from .placed import as_placed, check_placed, compare, mesh_of, own_share, splits_for
from .rules import Split, splits_of

__all__: list[str] = []

Dims = tuple[tuple[int, int], ...]  # which dimension of an argument each dimension of a statement's tensor is
Roles = tuple[tuple[str, str, Dims], ...]  # a statement's tensor, the argument that it is, and their dimensions

FEATURES: Dims = ((1, 1),)  # [voxels, channels]; in groups too, since these come first
BIAS: Dims = ((1, 0),)
# of a weight [out channels, *kernel_size, in channels / groups]
GROUPS: Dims = ((1, 0),)
CHANNELS: Dims = ((1, -1), (2, 0))
SWAPPED: Dims = ((1, 0), (2, -1))
# of its gradient, which lies as the weight does
GROUPS_OF_GRADIENT: Dims = ((0, 0),)
CHANNELS_OF_GRADIENT: Dims = ((0, 0), (2, -1))


def _convolve(cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> DTensor:
    """Evaluate `insum_ops::convolved_voxels` over DTensors; plain tensors are whole on each rank."""
    features, weight, bias, source, target, geometry, sizes, groups, side, is_swapped = args
    operands = {"features": features, "weight": weight, **({} if bias is None else {"bias": bias})}
    mesh = _agreed(operands, source, target, f"{geometry} on {list(sizes)} in {groups} groups")
    kind = channel_kind(weight, groups)
    of_weight = (SWAPPED if is_swapped else CHANNELS) if kind == DENSE else GROUPS
    roles = ("In", "features", FEATURES), ("Weight", "weight", of_weight), ("Out", "bias", BIAS)
    with torch.no_grad(), after_agreement():
        splits = _chosen(STATIONARY[kind], roles, FEATURES, operands, mesh, weight, groups)
        local = {name: own_share(name, operand, splits, mesh) for name, operand in operands.items()}
        own_groups = _own_groups(groups, kind, local["features"], features)
        over = source, target, geometry, sizes, own_groups, side
        value = func(local["features"], local["weight"], local.get("bias"), *over, is_swapped)
    channels = groups * weight.shape[-1] if is_swapped else weight.shape[0]
    rows = (source if side else target).shape[0]
    return as_placed(value, mesh, [split.output for split in splits], (rows, channels))


def _gradients(
    cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """Evaluate `insum_ops::voxel_convolution_gradients` over DTensors: each gradient is placed by its own statement."""
    dOut, features, weight, source, target, geometry, sizes, groups, side, is_swapped, wanted = args
    grads, over = list[Tensor](), (source, target, geometry, sizes, groups)
    if wanted[0]:
        inverse = dOut, weight, None, *over, 1 - side, not is_swapped
        grads.append(_convolve(cls, torch.ops.insum_ops.convolved_voxels.default, types, inverse).to(features.dtype))
    if wanted[1] and is_swapped:  # the features have the weight's output channels
        grads.append(_weight_gradient(func, dOut, features, weight, *over, 1 - side))
    elif wanted[1]:
        grads.append(_weight_gradient(func, features, dOut, weight, *over, side))
    if wanted[2:] == [True]:  # of the bias
        grads.append(dOut.sum(0))
    return grads


def _weight_gradient(
    func: Any,
    In: Tensor,
    dOut: Tensor,
    weight: Tensor,
    source: Tensor,
    target: Tensor,
    geometry: str,
    sizes: Sequence[int],
    groups: int,
    side: int,
) -> DTensor:
    """Return the gradient of the weight, of which the shape alone counts."""
    operands = {"In": In, "dOut": dOut}
    mesh = _agreed(operands, source, target, f"{geometry} on {list(sizes)} in {groups} groups")
    kind = channel_kind(weight, groups)
    of_weight = CHANNELS_OF_GRADIENT if kind == DENSE else GROUPS_OF_GRADIENT
    roles = ("In", "In", FEATURES), ("dOut", "dOut", FEATURES)
    with torch.no_grad(), after_agreement():
        splits = _chosen(WEIGHT_GRADIENT[kind], roles, of_weight, operands, mesh, weight, groups)
        local = {name: own_share(name, operand, splits, mesh) for name, operand in operands.items()}
        own_groups = _own_groups(groups, kind, local["In"], In)
        shape = local["dOut"].shape[1], *weight.shape[1:-1], local["In"].shape[1] // own_groups
        own_weight = torch.empty((), dtype=weight.dtype, device=local["In"].device).expand(shape)
        over = source, target, geometry, sizes, own_groups, side
        (value,) = func(local["dOut"], local["In"], own_weight, *over, False, [False, True])
    return as_placed(value, mesh, [split.output for split in splits], weight.shape)


def _agreed(operands: Mapping[str, Tensor], source: Tensor, target: Tensor, geometry: str) -> DeviceMesh:
    """Return the mesh of a call that all ranks make alike; raise on all of them if they do not."""
    first, mesh = mesh_of(operands)
    with on_all_ranks(mesh, is_call=True) as ranks:
        check_placed(first, mesh, operands)
        ranks.equal("the convolution", geometry, "call the same layer on every rank")
        compare(ranks, operands)
        for voxels in (source,) if target is source else (source, target):
            ranks.equal("indices", voxels, "give all ranks the same voxels in the same order")
    return mesh


def _chosen(
    expr: str,
    roles: Roles,
    of_output: Dims,
    operands: Mapping[str, Tensor],
    mesh: DeviceMesh,
    weight: Tensor,
    groups: int,
) -> list[Split]:
    """Return the split along each mesh dimension that moves the fewest bytes."""
    splits = _splits(expr, roles, of_output, weight.ndim)
    if groups > 1 and groups % mesh.size():  # no group is torn apart, and no rank is left without one
        splits = [split for split in splits if split.index is None]
    return splits_for(splits, operands, mesh)


@lru_cache(maxsize=64)
def _splits(expr: str, roles: Roles, of_output: Dims, ndim: int) -> list[Split]:
    """Return the splits of a statement that leave its map whole, over the arguments of a convolution."""
    arguments = {tensor: (argument, dims) for tensor, argument, dims in roles}
    output, found = parse(expr).output.name, []
    for split in splits_of(expr):
        others = [split.inputs[tensor] for tensor in split.inputs if tensor not in arguments and tensor != output]
        placed = {name: _of_argument(split.inputs[tensor], dims, ndim) for tensor, (name, dims) in arguments.items()}
        result = _of_argument(split.output, of_output, ndim)
        inputs = {name: placement for name, placement in placed.items() if placement is not None}
        if all(other.is_replicate() for other in others) and result is not None and len(inputs) == len(placed):
            found.append(Split(split.index, inputs, result))
    return found


def _of_argument(placement: Placement, dims: Dims, ndim: int) -> Placement | None:
    """Return the placement of an argument; None if it has no such dimension. A weight has `ndim` of them."""
    if not isinstance(placement, Shard):
        return placement
    dim = dict(dims).get(placement.dim)
    return None if dim is None else Shard(dim % ndim)


def _own_groups(groups: int, kind: int, local: Tensor, whole: Tensor) -> int:
    return groups if kind == DENSE else groups * local.shape[1] // whole.shape[1]


torch.library.register_torch_dispatch("insum_ops::convolved_voxels", DTensor, _convolve)
torch.library.register_torch_dispatch("insum_ops::voxel_convolution_gradients", DTensor, _gradients)
