"""`BlockSparseLinear` over ranks: styles for torch's `parallelize_module`, each rank with some blocks of the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..compiler import InsumError, OperandError, ShapeError, shortened
from ..linear.layer import BlockSparseLinear
from ..linear.product import product
from .agreement import check_equal, ranks_of

__all__ = ["ColumnParallel", "RowParallel", "balanced_order", "whole_state_dict"]

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

    Args:
        order: which block rows each rank has [block rows], as `balanced_order` returns it; None for equal stretches.
        gather_output: whether every rank gets the whole output; otherwise each has its own features, in this order.

    Raises:
        OperandError: on every rank, if the module is no `BlockSparseLinear`, or its pattern differs between ranks.
        ShapeError: on every rank, if the mesh does not divide the block rows, or blocks do not divide the features.

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
        layer, order = _split(module, device_mesh, self.order, 0)
        layer.__class__ = _ByColumns
        layer.style = {"mesh": device_mesh, "order": order, "is_whole": self.gather_output}
        return module


class RowParallel(ParallelStyle):
    """Split a `BlockSparseLinear` by its inputs: each rank has some block columns, and the outputs are summed.

    Every rank gets the whole output. Weights and bias are those of the first rank; the bias is whole on each.

    Args:
        order: which block columns each rank has [block columns], as `balanced_order` returns it; None for equal
            stretches.
        split_input: whether each rank passes its own features, as `ColumnParallel` leaves them; otherwise the input is
            whole on all ranks.

    Raises:
        OperandError: on every rank, if the module is no `BlockSparseLinear`, or its pattern differs between ranks.
        ShapeError: on every rank, if the mesh does not divide the block columns, or blocks do not divide the features.

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
        layer, order = _split(module, device_mesh, self.order, 1)
        layer.__class__ = _ByRows
        layer.style = {"mesh": device_mesh, "order": order, "is_whole": not self.split_input}
        return module


def _split(module: nn.Module, mesh: DeviceMesh, order: Tensor | None, dim: int) -> tuple[Any, Tensor]:
    """Leave in a layer the blocks of this rank along one dimension; return it with the order that was taken."""
    rank, ranks, (words, features) = dist.get_rank(), mesh.size(), WORDS[dim]
    if type(module) is not BlockSparseLinear:
        raise OperandError(
            f"the module is a {type(module).__name__} on rank {rank}; this style is for a BlockSparseLinear that has "
            "not been split"
        )
    if mesh.ndim != 1:
        raise OperandError(f"mesh has {mesh.ndim} dimensions, says rank {rank}; pass one of them, as in mesh['model']")
    size, block, count = (module.out_features, module.in_features)[dim], module.block_size[dim], module.grid[dim]
    if count % ranks or size % block:
        raise ShapeError(
            f"{ranks} ranks do not divide {features}={size} in blocks of {block}, says rank {rank}: {count} {words}; "
            f"choose {features} that are a multiple of {ranks * block}"
        )
    check_equal({"coords": module.coords}, mesh, "seed all ranks alike before the layer is made")
    order = torch.arange(count) if order is None else order
    if sorted(order.tolist()) != list(range(count)):
        raise ShapeError(
            f"order does not list each of the {count} {words} once, says rank {rank}; take it from balanced_order"
        )
    order = order.to(module.coords.device)
    check_equal({"order": order}, mesh, "compute it from the same pattern on all ranks")
    with torch.no_grad():
        for parameter in module.parameters():
            dist.broadcast(parameter, ranks_of(mesh)[0], group=mesh.get_group())
        own = order.chunk(ranks)[mesh.get_local_rank()]
        place = torch.full((count,), -1, device=own.device)
        place[own] = torch.arange(len(own), device=own.device)
        coords = module.coords.clone()
        coords[dim] = place[coords[dim].long()].to(coords.dtype)
        kept = (coords[dim] >= 0).nonzero().flatten()
        coords = coords[:, kept]
        rank_in_grid = coords[0].long() * module.grid[1] + coords[1].long()
        ascending = rank_in_grid.argsort()
        weight = module.weight.detach()[kept[ascending]].clone()
        bias = module.bias
        if bias is not None and dim == 0:
            bias = nn.Parameter(bias.detach().view(count, block)[own].flatten(), bias.requires_grad)
    grid = list(module.grid)
    grid[dim] = len(own)
    module.grid = (grid[0], grid[1])
    setattr(module, features, len(own) * block)
    module.coords = coords[:, ascending].contiguous()
    module.weight = nn.Parameter(weight, module.weight.requires_grad)
    module.bias = bias
    return module, order


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model as it is without ranks, in which split layers have all of their blocks again.

    All ranks call it together, and each gets all of it. Saved, it loads into a model that is then split over any number
    of ranks: first `insum_ops.nn.load_patterns_`, if patterns have changed, and `load_state_dict`, then
    `parallelize_module`.

    Args:
        model: a model in which some `BlockSparseLinear` layers were split by `ColumnParallel` or `RowParallel`.

    Returns:
        What `model.state_dict()` would be if nothing had been split; on every rank the same.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel, whole_state_dict
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel())
        >>> list(whole_state_dict(layer)["weight"].shape)
        [6, 16, 16]
        >>> distributed.destroy_process_group()
    """
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, _Split):
            prefix = f"{name}." if name else ""
            state.update({f"{prefix}{key}": value for key, value in module._whole().items()})
    return state


class _Split(BlockSparseLinear):
    """A layer that has this rank's blocks."""

    style: dict[str, Any]
    dim = 0  # of the weight that is split

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        W = self.as_format()
        try:
            return product(x, W, bias, lambda: self._product(x, W, bias))
        except InsumError as error:
            raise shortened(error) from error.__cause__

    def _shared(self, x: Tensor) -> Tensor:
        """Return an input that all ranks have, whose gradient is the sum of what each finds."""
        whole = DTensor.from_local(x, self.style["mesh"], [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def _whole(self) -> dict[str, Tensor]:
        """Return the pattern and blocks of all ranks, and the bias if it is split, as before the layer was split."""
        mesh, order = self.style["mesh"], self.style["order"]
        own = order.chunk(mesh.size())[mesh.get_local_rank()]
        coords = self.coords.clone()
        coords[self.dim] = own[coords[self.dim].long()].to(coords.dtype)
        parts: list[Any] = [None] * mesh.size()
        mine = coords, self.weight.detach(), None if self.bias is None else self.bias.detach()
        dist.all_gather_object(parts, tuple([None if part is None else part.cpu() for part in mine]), mesh.get_group())
        patterns, blocks, biases = zip(*parts)
        coords, weight = torch.cat(patterns, 1), torch.cat(blocks)
        ascending = (coords[0].long() * 2**31 + coords[1].long()).argsort()
        state = {"coords": coords[:, ascending].contiguous(), "weight": weight[ascending]}
        if self.bias is not None and self.dim == 0:
            bias = torch.cat(biases).view(len(order), -1)
            state["bias"] = bias[order.cpu().argsort()].flatten()
        return {name: tensor.to(self.weight.device) for name, tensor in state.items()}

    def extra_repr(self) -> str:
        mesh = self.style["mesh"]
        return f"{super().extra_repr()}, rank {mesh.get_local_rank()} of {mesh.size()}"


class _ByColumns(_Split):
    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(self._shared(x), self._parameter("bias"))
        if not self.style["is_whole"]:
            return y
        split = DTensor.from_local(y, self.style["mesh"], [Shard(y.ndim - 1)], run_check=False)
        whole: Tensor = split.full_tensor()
        blocks: Tensor = whole.unflatten(-1, (-1, self.block_size[0]))
        return blocks.index_select(-2, self.style["order"].argsort()).flatten(-2)


class _ByRows(_Split):
    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.style["is_whole"]:
            mesh = self.style["mesh"]
            own = self.style["order"].chunk(mesh.size())[mesh.get_local_rank()]
            blocks = self._shared(x).unflatten(-1, (-1, self.block_size[1]))
            x = blocks.index_select(-2, own).flatten(-2)
        partial = DTensor.from_local(self._multiply(x, None), self.style["mesh"], [Partial()], run_check=False)
        y: Tensor = partial.full_tensor()
        return y if self.bias is None else y + self.bias
