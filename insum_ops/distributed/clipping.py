"""Gradients over ranks, clipped by the norm that they have without ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from ..formats.torch_state import default_dtype
from .placed import full
from .split_models import mesh_of_layer, split_layers_of, split_parameters, together

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a model over ranks, so that their norm is at most `max_norm`; all ranks call it together.

    `torch.nn.utils.clip_grad_norm_` knows only a rank's own blocks of a split layer: each rank finds another norm, and
    parameters that all ranks have drift apart. Here the norm is that of the model without ranks. Trained values of a
    `SplitSpMM` count, too.

    Args:
        model: a model in which some layers are split over ranks, or sharded by `fully_shard`.
        max_norm: the largest norm that is left as it is.
        norm_type: which norm, 2.0 or `float("inf")` for example.

    Returns:
        The norm before clipping, of no dimensions; on every rank the same.

    Raises:
        OperandError: on every rank, if the model has other split layers on one of them.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel, clip_grad_norm_
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel())
        >>> layer(torch.ones(5, 64)).sum().backward()
        >>> norm = clip_grad_norm_(layer, max_norm=1.0)
        >>> clip_grad_norm_(layer, max_norm=1.0)
        tensor(1.0000)
        >>> distributed.destroy_process_group()
    """
    layers = list(split_layers_of(model))
    with together(layers) as ranks:
        ranks.equal("max_norm", f"{max_norm} of norm_type {norm_type}", "clip alike on every rank")
    split = {own: mesh_of_layer(layer) for _, layer in layers for own in split_parameters(layer).values()}
    # by the ranks that have other parts of a parameter, of a split layer and of what torch has sharded
    groups: dict[tuple[DeviceMesh | None, DeviceMesh | None], list[Tensor]] = {}
    for own in dict.fromkeys([*model.parameters(), *split]):
        grads = groups.setdefault((split.get(own), own.device_mesh if isinstance(own, DTensor) else None), [])
        if own.grad is not None:
            grads.append(own.grad)
    norms = []
    for (mesh, _), grads in groups.items():
        norm = full(get_total_norm(grads, norm_type)).double().view(1)
        if mesh is not None:
            norm = full(DTensor.from_local(norm.to(mesh.device_type), mesh, [Shard(0)], run_check=False))
        norms.append(norm)
    device = norms[-1].device if norms else None
    total: Tensor = torch.cat([norm.to(device) for norm in norms] or [torch.zeros(1)]).norm(norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            grad.mul_(scale)
    return total.to(default_dtype())
