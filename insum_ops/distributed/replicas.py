"""Models that must be the same on every rank, before a wrapper makes them so by overwriting."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..formats.torch_state import PLAIN
from .agreement import on_all_ranks

__all__ = ["check_replicas"]


def check_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise on every rank if a model has other parameters, or other buffers, on one of them.

    DistributedDataParallel sends the first rank's parameters and buffers to all when it wraps a model. A pattern is a
    buffer: one of another size ends the process inside gloo or NCCL, and one of the same size is overwritten. Call this
    before wrapping, on all ranks. Values of parameters may differ, since DDP makes them the same.

    Args:
        model: what is to be wrapped.
        mesh: the ranks that share it.

    Raises:
        OperandError: on every rank; it names what differs and where.

    Example:
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from insum_ops.distributed import check_replicas
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> check_replicas(BlockSparseLinear(64, 48, block_size=16, density=0.5), init_device_mesh("cpu", (1,)))
        >>> distributed.destroy_process_group()
    """
    with on_all_ranks(mesh) as ranks:
        for name, buffer in model.named_buffers():
            has_numbers = type(buffer) in PLAIN and buffer.layout == torch.strided and not buffer.is_meta
            claim = buffer if has_numbers else f"{type(buffer).__name__} {list(buffer.shape)} {buffer.dtype}"
            ranks.equal(name, claim, "seed all ranks alike before the model is made, or load one state on all of them")
        for name, parameter in model.named_parameters():
            kind = f"{list(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ', not trained'}"
            ranks.equal(name, kind, "make the model of the same sizes on every rank")
