"""Sparse convolutions whose channels are split over ranks, with DTensors as parameters, which torch saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    _redistribute,
    distribute_module,
    distribute_tensor,
)

from ..compiler import OperandError, ShapeError
from ..conv.convolution import SparseConvolution
from ..conv.tensor import SparseConvTensor
from ..formats.torch_state import is_grad_enabled
from .agreement import on_all_ranks

__all__ = ["split_convolution"]

STYLES = "ColumnParallel", "RowParallel"
CHANNELS = "out_channels", "in_channels"
# whether torch differentiates how a gradient is redistributed: 2.11 loses the graph there, without a word
IS_TWICE_DIFFERENTIABLE = hasattr(_redistribute, "NestedRedistribute")


def split_convolution(
    layer: SparseConvolution, mesh: DeviceMesh, order: Tensor | None, dim: int, is_whole: bool
) -> None:
    """Split a layer by its output channels (`dim` 0) or its input channels (1).

    `is_whole`: the side that is split is whole on every rank all the same, as the other side always is.
    """
    with on_all_ranks(mesh) as ranks:
        _check(layer, mesh, order, dim)
        kind = f"{type(layer).__name__}({layer.extra_repr()}) {layer.weight.dtype}"
        ranks.equal("the layer", kind, "make it of the same sizes on every rank")
    of_weight = Shard(0 if dim == 0 else layer.weight.ndim - 1)
    placements: dict[str, Placement] = {"weight": of_weight, "bias": Shard(0) if dim == 0 else Replicate()}
    entering = Shard(1) if dim == 1 and not is_whole else Replicate()

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [placements[key]])
            module.register_parameter(key, nn.Parameter(placed, parameter.requires_grad))

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x = inputs[0] if inputs else None
        if not isinstance(x, SparseConvTensor) or isinstance(x.features, DTensor):
            return inputs
        own = x.features if is_grad_enabled() else x.features.detach()
        features = DTensor.from_local(own, mesh, [entering], run_check=False)
        # `from_local` would bring a gradient to this placement below autograd, and lose gradients of gradients
        return x.replace_feature(features.redistribute(placements=[entering])), *inputs[1:]

    def leave(module: nn.Module, y: Any, mesh: DeviceMesh) -> Any:
        features: DTensor = y.features
        own = features.full_tensor() if dim == 1 or is_whole else _own_channels(features)
        if own.requires_grad and not IS_TWICE_DIFFERENTIABLE:
            own.register_hook(_refuse_second_gradients)
        return y.replace_feature(own)

    distribute_module(layer, mesh, place, enter, leave)


def _refuse_second_gradients(gradient: Tensor) -> None:
    """Refuse gradients that are to be differentiated in turn, where torch would leave parts of theirs out."""
    if is_grad_enabled():
        raise OperandError(
            f"gradients of gradients of a split convolution need torch 2.13 or newer, and this is {torch.__version__}: "
            "keep the layer whole, or leave create_graph=True out"
        )


def _own_channels(features: DTensor) -> Tensor:
    own: Tensor = features.redistribute(placements=[Shard(1)]).to_local()
    return own


def _check(layer: SparseConvolution, mesh: DeviceMesh, order: Tensor | None, dim: int) -> None:
    """Refuse what can't be split."""
    rank, ranks, style, name = dist.get_rank(), mesh.size(), STYLES[dim], type(layer).__name__
    weight = layer._parameters.get("weight")
    if weight is None or isinstance(weight, DTensor):
        raise OperandError(
            f"the {name} has been split or parametrized before, says rank {rank}; give a new layer to {style}"
        )
    if order is not None:
        raise OperandError(
            f"order deals out blocks, but the layer is a {name}, says rank {rank}; leave order out: all channels cost "
            "the same"
        )
    if layer.is_pointwise:
        raise OperandError(
            f"the kernel of the {name} is 1, so that its memory holds a matrix [in_channels, out_channels], which "
            f"{style} can't split, says rank {rank}; leave it whole, or use nn.Linear on the features"
        )
    if layer.groups > 1 and dim == 1:
        raise OperandError(
            f"the {name} has {layer.groups} groups, which RowParallel would tear apart, says rank {rank}; split it by "
            "ColumnParallel(gather_output=True)"
        )
    size = (layer.out_channels, layer.in_channels)[dim]
    if size % ranks or (layer.groups % ranks and layer.groups > 1):
        words = f"{CHANNELS[dim]}={size}" if size % ranks else f"groups={layer.groups}"
        raise ShapeError(
            f"{ranks} ranks do not divide {words} of the {name}, says rank {rank}; choose a multiple of {ranks}"
        )
