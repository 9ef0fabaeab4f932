"""The split layers of a model and what they train: all ranks have the same layers, and each has its part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .agreement import Agreement, on_all_ranks
from .rows import SplitSpMM
from .split_layers import SplitLayer

__all__ = ["mesh_of_layer", "split_layers_of", "split_parameters", "together", "trained_parameters"]


def split_layers_of(model: nn.Module) -> Iterator[tuple[str, SplitLayer | SplitSpMM]]:
    """Yield the layers that train a part on each rank, each with what stands before its names in the model's state."""
    for name, module in model.named_modules():
        if isinstance(module, SplitLayer) or (isinstance(module, SplitSpMM) and module.values is not None):
            yield f"{name}." if name else "", module


@contextmanager
def together(layers: Sequence[tuple[str, SplitLayer | SplitSpMM]]) -> Iterator[Agreement]:
    """Check something on all ranks of the first layer, which have the same layers: each is gathered in its turn."""
    if not layers:
        yield Agreement()
        return
    with on_all_ranks(mesh_of_layer(layers[0][1])) as ranks:
        listed = ", ".join(f"{prefix or 'model.'}{type(layer).__name__}" for prefix, layer in layers)
        ranks.equal("the list of split layers", listed, "split the same layers on every rank")
        yield ranks


def mesh_of_layer(layer: SplitLayer | SplitSpMM) -> DeviceMesh:
    """Return the ranks over which a layer is split."""
    mesh: DeviceMesh = layer.style["mesh"] if isinstance(layer, SplitLayer) else layer.mesh
    return mesh


def trained_parameters(layer: SplitLayer | SplitSpMM) -> dict[str, Any]:
    """Return the parameters of a layer by name; those of a `SplitSpMM` are among no module's parameters."""
    return {"values": layer.values} if isinstance(layer, SplitSpMM) else dict(layer.named_parameters(recurse=False))


def split_parameters(layer: SplitLayer | SplitSpMM) -> dict[str, Any]:
    """Return the parameters of a layer of which other ranks have other parts, by name."""
    return trained_parameters(layer) if isinstance(layer, SplitSpMM) else layer.split_parameters
