"""The layers that `ColumnParallel` and `RowParallel` make of a `BlockSparseLinear`: each rank has some of its blocks.

A block belongs to the rank that has its block row, or its block column, so no block moves when the pattern changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh

from ..compiler import OperandError, ShapeError
from ..formats.torch_state import wants_gradient
from ..linear.layer import BlockSparseLinear
from ..linear.patterns import block_norms, check_density, check_mask, inside, largest, num_blocks, row_bounds, uniform
from ..linear.remap import check_optimizer, holders
from ..linear.sharded import held_weight, shards_of
from .agreement import gathered_numbers, gathered_objects, on_all_ranks
from .own_part import as_own_part
from .placed import full, local_part, refuse_transforms

__all__ = ["ByColumns", "ByRows", "SplitLayer"]

Pair = tuple[int, int]


@dataclass
class WholeSizes:
    """The sizes of a layer that a pattern must fit."""

    in_features: int
    out_features: int
    block_size: Pair
    grid: Pair


class SplitLayer(BlockSparseLinear):
    """A layer that has this rank's blocks.

    `style` says of which mesh, in which order they were dealt out, and whether the features of the side that is split
    are whole on every rank all the same.
    """

    style: dict[str, Any]
    dim = 0  # of the weight that is split

    @property
    def own(self) -> Tensor:
        """This rank's block rows or columns, by their numbers in the whole layer."""
        mesh = self.style["mesh"]
        share: Tensor = self.style["order"].chunk(mesh.size())[mesh.get_local_rank()]
        return share

    @property
    def whole_grid(self) -> Pair:
        """How many block rows and columns the whole layer has."""
        count = len(self.style["order"])
        return (count, self.grid[1]) if self.dim == 0 else (self.grid[0], count)

    @property
    def _pattern_sizes(self) -> WholeSizes:
        """The sizes that the layer had before it was split."""
        features = [self.out_features, self.in_features]
        features[self.dim] = len(self.style["order"]) * self.block_size[self.dim]
        return WholeSizes(features[1], features[0], self.block_size, self.whole_grid)

    @property
    def split_parameters(self) -> dict[str, Any]:
        """The parameters of which other ranks have other parts, by name; the bias of `ByRows` is whole on each."""
        names = ["weight"] if self.bias is None or self.dim == 1 else ["weight", "bias"]
        return {name: self._parameter(name) for name in names}

    def _own_share(self, mask: Tensor) -> Tensor:
        return mask.index_select(self.dim, self.own)

    def prune_(self, density: float, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Keep the largest blocks of all ranks, `density` of the whole layer's; all ranks call it together."""
        mesh = self.style["mesh"]
        with on_all_ranks(mesh) as ranks:
            count = num_blocks(check_density(density), self.whole_grid)
            self._format(self.weight, is_compiled=False)  # refuses what is no pattern
            ranks.equal("density", repr(density), "prune to the same density on every rank")
        stored = sum(own for (own,) in gathered_numbers([self.coords.shape[1]], mesh))
        if count > stored:
            raise OperandError(
                f"density is {density}, which is {count} blocks, but {stored} are stored; set_pattern_ adds blocks"
            )
        norms = torch.full(self.whole_grid, -1.0, dtype=torch.float64, device="cpu")
        own_norms = block_norms(_whole_weight(self) * self._inside(self.coords)).double()
        for coords, found in gathered_objects((self.whole_coords.cpu(), own_norms.cpu()), mesh):
            norms[tuple(coords.long())] = found
        self.set_pattern_(largest(norms, count).to(self.coords.device), optimizer=optimizer)

    def set_pattern_(
        self,
        mask: Tensor,
        *,
        init: Literal["zeros", "random"] = "zeros",
        optimizer: torch.optim.Optimizer | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Store the blocks of a mask of the whole layer, the same on all ranks, which call it together."""
        with on_all_ranks(self.style["mesh"]) as ranks:
            check_mask("mask", mask, self.whole_grid, self.coords.device)
            local = self._own_share(mask)
            self._check_change(local, init, generator)
            self._settle()
            weight = held_weight(self, shards_of(self))
            if optimizer is not None:
                check_optimizer(optimizer, weight)
            ranks.equal("mask", mask, "give the same pattern on every rank")
            ranks.equal("init", repr(init), "start new blocks alike on every rank")
        self._change_pattern(local, holders([weight]) if optimizer is None else [optimizer], init, generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Refuse to draw weights anew: a rank has a part of each output's inputs."""
        raise OperandError("the layer is split over ranks; call reset_parameters() before it is split, on every rank")

    @property
    def whole_coords(self) -> Tensor:
        """This rank's blocks [2, blocks], by their places in the whole layer."""
        return self._in_whole(self.coords)

    def _in_whole(self, coords: Tensor) -> Tensor:
        """Return the places in the whole layer of blocks of this rank's share [2, blocks]."""
        placed = coords.clone()
        placed[self.dim] = self.own[coords[self.dim].long()].to(coords.dtype)
        return placed

    def _drawn_blocks(self, coords: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return random blocks at `coords`, as the whole layer would draw them with this generator."""
        placed, grid = self._in_whole(coords), self.whole_grid
        all_coords = torch.cat(gathered_objects(placed.cpu(), self.style["mesh"]), 1).to(coords.device)
        all_coords = all_coords[:, _flat(all_coords, grid).argsort()]
        sizes = self._pattern_sizes
        bound = row_bounds(all_coords, grid, self.block_size[1], sizes.in_features)[all_coords[0].long()]
        limits = bound.to(self.weight.dtype).view(-1, 1, 1).expand(-1, *self.block_size)
        is_inside = inside(all_coords, self.block_size, (sizes.out_features, sizes.in_features))
        drawn = uniform(limits, generator) * is_inside
        return drawn[torch.searchsorted(_flat(all_coords, grid), _flat(placed, grid))]

    def whole_parts(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return pattern, blocks and bias of all ranks as before the layer was split; or other values of each block."""
        order, mesh = self.style["order"].cpu(), self.style["mesh"]
        if values is None:
            values = {"weight": _whole_weight(self)}
            if self.bias is not None:
                values["bias"] = full(self.bias.detach())
        by_block = {name: value.cpu() for name, value in values.items() if name != "bias"}
        bias = values["bias"].cpu() if "bias" in values else None
        shares = gathered_objects((self.whole_coords.cpu(), by_block, bias), mesh)
        coords = torch.cat([coords for coords, _, _ in shares], 1)
        ascending = _flat(coords, self.whole_grid).argsort()
        parts = {"coords": coords[:, ascending].contiguous()}
        for name in by_block:
            parts[name] = torch.cat([blocks[name] for _, blocks, _ in shares])[ascending]
        if bias is not None and self.dim == 0:
            rows = torch.cat([own_bias for _, _, own_bias in shares if own_bias is not None]).view(len(order), -1)
            parts["bias"] = rows[order.argsort()].flatten()
        elif bias is not None:
            parts["bias"] = bias
        return {name: part.to(self.coords.device) for name, part in parts.items()}

    def own_parts(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's share of what `whole_parts` returns; all ranks have the same `parts`."""
        coords, own = parts["coords"], self.own
        place = torch.full((len(self.style["order"]),), -1, device=own.device)
        place[own] = torch.arange(len(own), device=own.device)
        coords = coords.clone()
        coords[self.dim] = place[coords[self.dim].long()].to(coords.dtype)
        kept = (coords[self.dim] >= 0).nonzero().flatten()
        kept = kept[_flat(coords[:, kept], self.grid).argsort()]
        share = {name: part[kept] for name, part in parts.items() if name not in ("coords", "bias")}
        share["coords"] = coords[:, kept].contiguous()
        if "bias" in parts:
            bias = parts["bias"]
            share["bias"] = bias.view(len(place), -1)[own].flatten() if self.dim == 0 else bias
        return share

    def _multiply(self, x: Tensor, bias: Tensor | None, take: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Multiply what `take` makes of x by this rank's blocks; refuse on all ranks what one can't multiply."""
        refuse_transforms("a layer that is split over ranks")
        with on_all_ranks(self.style["mesh"], is_call=True) as ranks:
            if not isinstance(x, Tensor):
                raise OperandError(f"x is of type {type(x).__name__}; pass a tensor [..., in_features]")
            kind = f"{list(x.shape)} {x.dtype}{' with a gradient' if wants_gradient([x]) else ''}"
            ranks.equal("x", kind, "pass an input of one shape and dtype on every rank")
            width = self.in_features if take is None else self._pattern_sizes.in_features
            if x.ndim == 0 or x.shape[-1] != width:
                raise ShapeError(f"x is {list(x.shape)} on rank {dist.get_rank()}; its last dimension must be {width}")
            if x.device != self.coords.device:
                raise OperandError(f"x is on {x.device} but the layer is on {self.coords.device}; move one with .to()")
            x = x if take is None else take(x)
            return self._multiplied(x, self._parameter("weight"), bias)

    def _shared(self, x: Tensor) -> Tensor:
        """Return an input that all ranks have, whose gradient is the sum of what each finds."""
        return _Shared.apply(x, self.style["mesh"])  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the tensors, those that other ranks have no copy of as this rank's own."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("coords", *self.split_parameters):
            if not keep_vars and f"{prefix}{name}" in destination and self.style["mesh"].size() > 1:
                destination[f"{prefix}{name}"] = as_own_part(destination[f"{prefix}{name}"])

    def extra_repr(self) -> str:
        mesh = self.style["mesh"]
        return f"{super().extra_repr()}, rank {mesh.get_local_rank()} of {mesh.size()}"


class ByColumns(SplitLayer):
    """Each rank has some block rows of the weight, and makes their features."""

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(x, self._parameter("bias"), self._shared)
        if not self.style["is_whole"]:
            return y
        whole: Tensor = _Joined.apply(y, self.style["mesh"])
        blocks: Tensor = whole.unflatten(-1, (-1, self.block_size[0]))
        return blocks.index_select(-2, self.style["order"].argsort()).flatten(-2)


class ByRows(SplitLayer):
    """Each rank has some block columns of the weight, and takes their features; the outputs are summed."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(x, None, self._taken if self.style["is_whole"] else None)
        total: Tensor = _Sum.apply(y, self.style["mesh"])
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def _taken(self, x: Tensor) -> Tensor:
        """Return this rank's features of an input that all ranks have."""
        blocks: Tensor = self._shared(x).unflatten(-1, (-1, self.block_size[1]))
        return blocks.index_select(-2, self.own).flatten(-2)


class _Sum(torch.autograd.Function):
    """The sum of what each rank has, which all of them get, and whose gradient they share.

    DTensors have no gradients of gradients here: they take what a rank makes of a shared gradient for that of all, and
    in torch 2.11 leave out what is moved.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local_part(all_reduce(own.contiguous(), "sum", (mesh, 0)))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _Shared.apply(grad_output, ctx.mesh), None


class _Shared(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of what each makes of it."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _Sum.apply(grad_output, ctx.mesh), None


class _Joined(torch.autograd.Function):
    """The features of all ranks side by side, which all of them get, and whose gradient they share."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return local_part(all_gather_tensor(own.movedim(-1, 0).contiguous(), 0, (mesh, 0))).movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _OwnFeatures.apply(grad_output, ctx.mesh), None


class _OwnFeatures(torch.autograd.Function):
    """This rank's features of a tensor that all ranks have; its gradient is what they all make of theirs."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.chunk(mesh.size(), -1)[mesh.get_local_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _Joined.apply(grad_output, ctx.mesh), None


def _whole_weight(layer: SplitLayer) -> Tensor:
    """Return all blocks of this rank, of which FSDP may have sharded the weight over others."""
    shards = shards_of(layer)
    return layer.weight.detach() if shards is None else shards.whole()


def _flat(coords: Tensor, grid: Pair) -> Tensor:
    """Return the place of each block, counted row by row."""
    return coords[0].long() * grid[1] + coords[1].long()
