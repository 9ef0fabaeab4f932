"""Styles for torch's `parallelize_module`, which split a `BlockSparseLinear` or a sparse convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..compiler import OperandError, ShapeError
from ..conv.convolution import SparseConvolution
from ..linear.layer import BlockSparseLinear
from .agreement import on_all_ranks, ranks_of
from .placed import check_whole_numbers
from .split_convolutions import split_convolution
from .split_layers import ByColumns, ByRows, SplitLayer

__all__ = ["ColumnParallel", "RowParallel", "balanced_order"]

WORDS = (("block rows", "out_features"), ("block columns", "in_features"))


def balanced_order(ranks: int, up: BlockSparseLinear | None = None, down: BlockSparseLinear | None = None) -> Tensor:
    """Return an order of blocks of features in which each rank's share holds about as many stored blocks.

    The features are those between `up` and `down`: the block rows of the one, the block columns of the other.

    Args:
        ranks: how many ranks share them; it must divide their number.
        up: the layer that makes the features, to be split by `ColumnParallel(order)`.
        down: the layer that takes them, to be split by `RowParallel(order)`.

    Returns:
        Every block number once [blocks]: first those of the first rank, as many for each rank.

    Raises:
        OperandError: neither layer is given.
        ShapeError: the layers have other numbers of blocks between them, or the ranks do not divide it.

    Example:
        >>> import torch
        >>> from insum_ops.distributed import balanced_order
        >>> from insum_ops.nn import BlockSparseLinear
        >>> pattern = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
        >>> balanced_order(2, BlockSparseLinear(64, 64, block_size=16, pattern=pattern)).tolist()
        [0, 3, 1, 2]
    """
    if up is None and down is None:
        raise OperandError("neither up nor down is given; pass the layer whose blocks are to be shared, or both")
    pairs = [(layer, dim) for dim, layer in enumerate((up, down)) if layer is not None]
    counts = [layer.coords[dim].long().bincount(minlength=layer.grid[dim]) for layer, dim in pairs]
    if len(counts) > 1 and len(counts[0]) != len(counts[1]):
        raise ShapeError(
            f"up has {len(counts[0])} block rows but down {len(counts[1])} block columns; pass layers that follow one "
            "another, with blocks of one length between them"
        )
    total = torch.stack(counts).sum(0).cpu()
    if ranks < 1 or len(total) % ranks:
        raise ShapeError(f"{ranks} ranks do not divide {len(total)} blocks; choose another number, or smaller blocks")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for block in total.argsort(descending=True, stable=True).tolist():
        open_ranks = [rank for rank in range(ranks) if len(shares[rank]) < len(total) // ranks]
        rank = min(open_ranks, key=lambda rank: sums[rank])
        shares[rank].append(block)
        sums[rank] += int(total[block])
    return torch.tensor([block for share in shares for block in sorted(share)])


class ColumnParallel(ParallelStyle):
    """Split a `BlockSparseLinear` by its outputs: each rank has some block rows, and computes their features.

    The input is the same on all ranks; its gradient is summed over them. Weights and bias are those of the first rank.
    A sparse convolution is split by its output channels, in equal stretches: its parameters are DTensors then, which
    torch saves and loads by itself. All ranks have all voxels.

    Args:
        order: which block rows each rank has [block rows], as `balanced_order` returns it; None for equal stretches.
        gather_output: whether every rank gets the whole output; otherwise each has its own features, in this order.

    Raises:
        OperandError: on every rank, if the module is neither a `BlockSparseLinear` nor a sparse convolution, has been
            split before, or differs between ranks; of convolutions those with a kernel of 1 are refused.
        ShapeError: on every rank, if the mesh does not divide the block rows or channels, or blocks do not divide the
            features.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import ColumnParallel, RowParallel
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layers = [BlockSparseLinear(64, 64, block_size=16, density=0.5) for _ in range(2)]
        >>> model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
        >>> plan = {"0": ColumnParallel(), "2": RowParallel()}
        >>> _ = parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        >>> model(torch.randn(5, 64)).shape
        torch.Size([5, 64])
        >>> distributed.destroy_process_group()
    """

    def __init__(self, order: Tensor | None = None, *, gather_output: bool = False) -> None:
        super().__init__()
        self.order, self.gather_output = order, gather_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, SparseConvolution):
            split_convolution(module, device_mesh, self.order, 0, self.gather_output)
            return module
        _split(module, device_mesh, self.order, ByColumns, self.gather_output)
        return module


class RowParallel(ParallelStyle):
    """Split a `BlockSparseLinear` by its inputs: each rank has some block columns, and the outputs are summed.

    Every rank gets the whole output. Weights and bias are those of the first rank; the bias is whole on each. A sparse
    convolution is split by its input channels, in equal stretches: its parameters are DTensors then, which torch saves
    and loads by itself. All ranks have all voxels.

    Args:
        order: which block columns each rank has [block columns], as `balanced_order` returns it; None for equal
            stretches.
        split_input: whether each rank passes its own features, as `ColumnParallel` leaves them; otherwise the input is
            whole on all ranks.

    Raises:
        OperandError: on every rank, if the module is neither a `BlockSparseLinear` nor a sparse convolution, has been
            split before, or differs between ranks; of convolutions those with a kernel of 1 or with groups are refused.
        ShapeError: on every rank, if the mesh does not divide the block columns or channels, or blocks do not divide
            the features.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel(split_input=False))
        >>> layer(torch.randn(5, 64)).shape
        torch.Size([5, 48])
        >>> distributed.destroy_process_group()
    """

    def __init__(self, order: Tensor | None = None, *, split_input: bool = True) -> None:
        super().__init__()
        self.order, self.split_input = order, split_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, SparseConvolution):
            split_convolution(module, device_mesh, self.order, 1, not self.split_input)
            return module
        _split(module, device_mesh, self.order, ByRows, not self.split_input)
        return module


def _split(module: nn.Module, mesh: DeviceMesh, order: Tensor | None, split: type[SplitLayer], is_whole: bool) -> None:
    """Make a layer one that has this rank's blocks alone; `is_whole` as in `SplitLayer.style`."""
    dim = split.dim
    with on_all_ranks(mesh) as ranks:
        layer, order = _checked(module, mesh, order, dim)
        kind = f"{layer.block_size} blocks of [{layer.out_features}, {layer.in_features}]"
        kind += f" {layer.weight.dtype}, {'no bias' if layer.bias is None else 'with bias'}"
        ranks.equal("the layer", kind, "make it of the same sizes on every rank")
        ranks.equal("coords", layer.coords, "seed all ranks alike before the layer is made")
        ranks.equal("order", order, "compute it from the same pattern on all ranks")
    with torch.no_grad():
        for parameter in layer.parameters():
            dist.broadcast(parameter, ranks_of(mesh)[0], group=mesh.get_group())
    parts = {"coords": layer.coords, **{name: parameter.detach() for name, parameter in layer.named_parameters()}}
    layer.__class__ = split
    layer.style = {"mesh": mesh, "order": order, "is_whole": is_whole}
    grid = list(layer.grid)
    grid[dim] = len(layer.own)
    layer.grid = (grid[0], grid[1])
    setattr(layer, WORDS[dim][1], grid[dim] * layer.block_size[dim])
    share = layer.own_parts(parts)
    layer.coords = share["coords"]
    layer.weight = nn.Parameter(share["weight"], layer.weight.requires_grad)
    if layer.bias is not None and dim == 0:
        layer.bias = nn.Parameter(share["bias"], layer.bias.requires_grad)


def _checked(module: nn.Module, mesh: DeviceMesh, order: Tensor | None, dim: int) -> tuple[Any, Tensor]:
    """Refuse what can't be split; return the layer and the order in which its blocks are dealt out."""
    rank, ranks, (words, features) = dist.get_rank(), mesh.size(), WORDS[dim]
    if type(module) is not BlockSparseLinear:
        raise OperandError(
            f"the module is a {type(module).__name__} on rank {rank}; this style is for a BlockSparseLinear or a "
            "sparse convolution that has not been split"
        )
    if mesh.ndim != 1:
        raise OperandError(f"mesh has {mesh.ndim} dimensions, says rank {rank}; pass one of them, as in mesh['model']")
    size, block, count = (module.out_features, module.in_features)[dim], module.block_size[dim], module.grid[dim]
    if count % ranks or size % block:
        raise ShapeError(
            f"{ranks} ranks do not divide {features}={size} in blocks of {block}, says rank {rank}: {count} {words}; "
            f"choose {features} that are a multiple of {ranks * block}"
        )
    order = torch.arange(count) if order is None else order
    check_whole_numbers("order", order)
    if sorted(order.tolist()) != list(range(count)):
        raise ShapeError(
            f"order does not list each of the {count} {words} once, says rank {rank}; take it from balanced_order"
        )
    return module, order.to(module.coords.device)
