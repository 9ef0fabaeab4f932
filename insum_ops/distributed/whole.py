"""The state of a model over ranks as it is without ranks, which any number of ranks can load."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..compiler import OperandError, ShapeError
from ..linear.remap import holders
from ..linear.state import pattern_mismatch
from .agreement import gathered_objects
from .placed import as_placed, full
from .rows import SplitSpMM
from .split_layers import SplitLayer
from .split_models import mesh_of_layer, split_layers_of, together, trained_parameters

__all__ = ["load_whole_state_dict", "saved_patterns", "whole_state_dict"]


def whole_state_dict(model: nn.Module, *, sharded: bool = False) -> dict[str, Any]:
    """Return the state of a model as it is without ranks, in which split layers have all of their blocks again.

    All ranks call it together, and each gets all of it. Saved, it loads on any number of ranks: into a model that is
    not split, by `insum_ops.nn.load_patterns_`, if patterns have changed, and `load_state_dict`; or into one that is,
    by `load_whole_state_dict`. Of a `SplitSpMM` whose values are trained it has `values` [entries] and `entries`
    [2, entries], row by row. For `torch.distributed.checkpoint` pass `sharded=True`; `model.state_dict()` has only a
    rank's own blocks there, under names that are the same on all ranks, and is refused.

    Args:
        model: a model in which some `BlockSparseLinear` layers were split by `ColumnParallel` or `RowParallel`, or with
            `SplitSpMM` layers; it may also be sharded by `fully_shard`.
        sharded: whether what was split comes as DTensors, each rank with an equal share of the blocks, so that ranks
            save their shares in parallel.

    Returns:
        What `model.state_dict()` would be if nothing had been split; on every rank the same.

    Raises:
        OperandError: on every rank, if the model has other split layers on one of them.

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
    layers = list(split_layers_of(model))
    with together(layers):
        state = model.state_dict()
    split = {}
    for prefix, layer in layers:
        parts = layer.whole_parts() if isinstance(layer, SplitLayer) else whole_values(layer)
        for key, part in parts.items():
            split[f"{prefix}{key}"] = equal_share(key, part, mesh_of_layer(layer)) if sharded else part
    # what torch itself has split, as a convolution's channels, comes whole too
    rest = {name: part if sharded or name in split else full(part) for name, part in state.items()}
    return {**rest, **split}


def load_whole_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load what `whole_state_dict` returned, on any number of ranks, into a model whose layers are split over these.

    All ranks call it together. Split layers take the patterns of the state, too; optimizers keep the state of blocks
    that stay. What is not split is loaded by `load_state_dict`.

    Args:
        model: a model of the same layers, split over any number of ranks.
        state_dict: the whole state; its tensors may be DTensors.

    Raises:
        OperandError: on every rank, if the state has no or another layer of some name, or names of no layer; nothing is
            changed then.
        ShapeError: on every rank, if the state of a `SplitSpMM` has other entries.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from insum_ops.distributed import RowParallel, load_whole_state_dict, whole_state_dict
        >>> from insum_ops.nn import BlockSparseLinear
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> saved = BlockSparseLinear(64, 48, block_size=16, density=0.25).state_dict()
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> _ = parallelize_module(layer, init_device_mesh("cpu", (1,)), RowParallel())
        >>> load_whole_state_dict(layer, saved)
        >>> layer.density
        0.25
        >>> distributed.destroy_process_group()
    """
    layers = list(split_layers_of(model))
    rest, shares = dict(state_dict), []
    with together(layers) as ranks:
        listed = {f"{prefix}{name}" for prefix, layer in layers for name in _names(layer)}
        missing, extra = {*model.state_dict(), *listed} - {*rest}, {*rest} - {*model.state_dict(), *listed}
        if missing or extra:
            problem = f"{min(missing)} is not in the state_dict" if missing else f"{min(extra)} is of no layer"
            raise OperandError(
                f"{problem}, says rank {dist.get_rank()}; pass what whole_state_dict returned for a model of the same "
                "layers"
            )
        kinds = {name: type(rest[name]).__name__ for name in sorted(listed)}
        ranks.equal("the state_dict", str(kinds), "load the same state on every rank")
    for prefix, layer in layers:
        parts = {name: full(rest.pop(f"{prefix}{name}")) for name in _names(layer)}
        with together([(prefix, layer)]) as ranks:
            for name, part in parts.items():
                ranks.equal(f"{prefix}{name}", part, "load the same state on every rank")
            if isinstance(layer, SplitLayer):
                shares.append(_own_blocks(prefix, layer, parts))
            else:
                shares.append(own_values(layer, parts))
    optimizers = holders([layer.weight for _, layer in layers if isinstance(layer, SplitLayer)])
    for (prefix, layer), share in zip(layers, shares):
        if isinstance(layer, SplitLayer):
            mask = torch.zeros(layer.grid, dtype=torch.bool, device=layer.coords.device)
            mask[tuple(share["coords"].long())] = True
            layer._change_pattern(mask, optimizers)
            rest.update({f"{prefix}{name}": part for name, part in share.items()})
        elif layer.values is not None:
            with torch.no_grad():
                layer.values.copy_(share["values"])
    held = model.state_dict()
    model.load_state_dict({name: placed_like(part, held.get(name)) for name, part in rest.items()})


def saved_patterns(checkpoint: str | Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the patterns in a distributed checkpoint, for `insum_ops.nn.load_patterns_`.

    `torch.distributed.checkpoint` loads into tensors of the sizes that were saved, so a model whose patterns have other
    sizes takes the patterns first. Each rank reads them by itself.

    Args:
        checkpoint: the folder that `torch.distributed.checkpoint.save` has written.
        prefix: what stands before the names of the model's state there, as "model." for `save({"model": state})`.

    Returns:
        `coords` [2, blocks] of each `BlockSparseLinear` by its name in the model, on the CPU.

    Raises:
        OperandError: there is no pattern of such a name.

    Example:
        >>> import tempfile
        >>> from torch import distributed
        >>> from torch.distributed import checkpoint
        >>> from insum_ops.distributed import saved_patterns
        >>> from insum_ops.nn import BlockSparseLinear, load_patterns_
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = BlockSparseLinear(64, 48, block_size=16, density=0.25).state_dict()
        ...     _ = checkpoint.save(state, checkpoint_id=folder)
        ...     patterns = saved_patterns(folder)
        >>> distributed.destroy_process_group()
        >>> layer = BlockSparseLinear(64, 48, block_size=16, density=0.5)
        >>> load_patterns_(layer, patterns)
        >>> layer.density
        0.25
    """
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    patterns = {
        name: torch.empty(part.size, dtype=part.properties.dtype)
        for name, part in saved.items()
        if name.startswith(prefix) and name.endswith("coords") and isinstance(part, TensorStorageMetadata)
    }
    if not patterns:
        raise OperandError(
            f"no pattern whose name starts with {prefix!r} is in {checkpoint}; pass what stands before the names of "
            f"the model's state there, such as {min(saved, default='')!r}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads by itself, on purpose
        load(patterns, checkpoint_id=checkpoint, no_dist=True)
    return {name.removeprefix(prefix): coords for name, coords in patterns.items()}


def _names(layer: SplitLayer | SplitSpMM) -> list[str]:
    """Return the names of what `whole_state_dict` has of a layer: the places of its numbers, then its parameters."""
    return ["entries" if isinstance(layer, SplitSpMM) else "coords", *trained_parameters(layer)]


def equal_share(name: str, part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return an equal share of a tensor that all ranks have: of its blocks, or of its columns if it lists places."""
    dim = 1 if name in ("coords", "entries") else 0
    whole = part.contiguous()
    chunks = list(whole.chunk(mesh.size(), dim))
    rank = mesh.get_local_rank()
    own = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
    return as_placed(own.contiguous(), mesh, [Shard(dim)], whole.shape)


def placed_like(part: Any, held: Any) -> Any:
    """Return a tensor that all ranks have in the place of one that torch has split, if it is split at all."""
    if not isinstance(held, DTensor) or not isinstance(part, Tensor) or isinstance(part, DTensor):
        return part
    return distribute_tensor(part.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


def _own_blocks(prefix: str, layer: SplitLayer, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's share of a layer's state, if that fits the whole layer."""
    problem = pattern_mismatch({f"{prefix}{name}": part for name, part in parts.items()}, prefix, layer._pattern_sizes)
    if problem:
        raise OperandError(f"{problem}, says rank {dist.get_rank()}")
    share = layer.own_parts({name: part.to(layer.coords.device) for name, part in parts.items()})
    layer._check_filled(torch.ones_like(share["coords"]))
    return share


def whole_values(layer: SplitSpMM, values: Tensor | None = None) -> dict[str, Tensor]:
    """Return the places and values of all ranks' entries, row by row; or other values of each entry."""
    assert layer.values is not None
    values = layer.values.detach() if values is None else values
    shares = gathered_objects((layer.graph_entries.cpu(), values.cpu()), layer.mesh)
    entries, values = torch.cat([own for own, _ in shares], 1), torch.cat([own for _, own in shares])
    ascending = _place(entries, sum(layer.counts)).argsort()
    device = layer.values.device
    return {"entries": entries[:, ascending].contiguous().to(device), "values": values[ascending].to(device)}


def own_values(layer: SplitSpMM, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of this rank's entries."""
    width = sum(layer.counts)
    saved, held = (_place(entries.to(layer.send.device), width) for entries in (parts["entries"], layer.graph_entries))
    at = torch.searchsorted(saved, held).clamp(max=max(len(saved) - 1, 0))
    if len(saved) != sum(layer.entry_counts) or (len(held) and not torch.equal(saved[at], held)):
        raise ShapeError(
            f"entries in the state_dict lists {len(saved)} places, not those of the {sum(layer.entry_counts)} entries "
            f"of A, says rank {dist.get_rank()}; make the layer of the same matrix"
        )
    return {"values": parts["values"].to(held.device)[at]}


def _place(entries: Tensor, width: int) -> Tensor:
    return entries[0].long() * width + entries[1].long()
