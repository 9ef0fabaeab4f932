"""sparsify: the linear layers of a model become block-sparse ones, by magnitude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..compiler import OperandError
from ..models.swap_losses import has_tensor_hooks, lost_in_swap
from .fused_encoder import keep_from_fused_kernels
from .layer import BlockSparseLinear
from .patterns import DTYPES, check_block_size, check_density

__all__ = ["LayerReport", "Sparsified", "sparsify"]

Filter = Callable[[str, nn.Module], bool]
HEAD = ("layer", "weight", "blocks", "density", "norm² kept", "parameters", "before")
# the last is an attribute that Hugging Face sets on all layers
LINEAR_ATTRIBUTES = {"in_features", "out_features", "weight", "bias", "_is_hf_initialized"}


@dataclass(frozen=True)
class LayerReport:
    """What `sparsify` did to one linear layer.

    Args:
        name: where the layer is in the model, "" for the model itself.
        shape: the dense weight's (out_features, in_features).
        blocks: how many blocks are stored, 0 for a layer that was skipped.
        all_blocks: how many blocks the weight has, 0 for a layer that was skipped.
        norm_share: share of the weight's squared norm that the stored blocks hold.
        parameters: numbers that the layer trains now.
        parameters_before: numbers that it trained before.
        skipped: why it was left as it was, "" if it was not.

    Example:
        >>> import torch
        >>> from insum_ops.nn import sparsify
        >>> report = sparsify(torch.nn.Sequential(torch.nn.Linear(64, 64)), block_size=32, density=0.5).layers[0]
        >>> report.name, report.shape, report.blocks, report.all_blocks, report.density, report.skipped
        ('0', (64, 64), 2, 4, 0.5, '')
    """

    name: str  # "" for the model itself
    shape: tuple[int, int]  # of the dense weight
    blocks: int  # stored
    all_blocks: int
    norm_share: float  # of the weight's squared norm, that the stored blocks hold
    parameters: int  # of the layer now
    parameters_before: int
    skipped: str  # why it was left as it was, "" if it was not

    @property
    def density(self) -> float:
        """The share of blocks that are stored, 1.0 for a layer that was skipped."""
        return self.blocks / self.all_blocks if self.all_blocks else 1.0


@dataclass(frozen=True)
class Sparsified:
    """What `sparsify` returns: the model, and what became of each linear layer; prints as a table.

    Args:
        model: the model with its layers swapped; of a Linear itself, the new layer.
        layers: a `LayerReport` for each linear layer, in the order of the model's modules.

    Example:
        >>> import torch
        >>> from insum_ops.nn import sparsify
        >>> result = sparsify(torch.nn.Linear(64, 64), block_size=32, density=0.25)
        >>> list(result.model.weight.shape), len(result.layers)
        ([1, 32, 32], 1)
    """

    model: nn.Module
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        rows = [HEAD, *map(_cells, self.layers)]
        full = [row for row in rows if len(row) == len(HEAD)]
        widths = [max(len(row[at]) for row in (rows if at < 2 else full)) for at in range(len(HEAD))]
        now = sum(layer.parameters for layer in self.layers)
        before = sum(layer.parameters_before for layer in self.layers)
        share = f", {now / before:.1%}" if before else ""
        total = f"linear layers: {now:,} of {before:,} parameters{share}"
        return "\n".join([*(_line(row, widths) for row in rows), total])

    __repr__ = __str__


def sparsify(
    model: nn.Module,
    block_size: int | Sequence[int] = (32, 32),
    density: float = 0.1,
    filter: Filter | None = None,
) -> Sparsified:
    """Swap the `nn.Linear` layers of a model, in place, for `BlockSparseLinear` with their largest blocks.

    What can't be swapped is left as it is, and the table says why: a layer smaller than a block, with a shared weight,
    with hooks on itself or its parameters, with buffers, attributes, parametrizations or a forward that an nn.Linear
    has not, compiled, of a subclass of nn.Linear. Make the optimizer afterwards.

    Args:
        model: the model, or a Linear itself.
        block_size: rows and columns of a block, (out, in), or one number for both.
        density: share of blocks to keep in each layer, above 0 and up to 1; those of the largest Frobenius norm stay.
        filter: `filter(name, layer)` says whether to swap a layer; None swaps all of them.

    Returns:
        A `Sparsified`, which prints as a table. Its `model` is the model, or the new layer if the model was a Linear
        itself; its `layers` hold a `LayerReport` each.

    Raises:
        OperandError: `model` is no module, `filter` no function, or `density` no share.
        ShapeError: `block_size` is not one or two whole numbers of at least 1.

    Example:
        >>> import torch
        >>> from insum_ops.nn import sparsify
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        >>> result = sparsify(model, block_size=32, density=0.25)
        >>> type(model[0]).__name__, result.layers[1].skipped
        ('BlockSparseLinear', 'smaller than a block')
    """
    if not isinstance(model, nn.Module):
        raise OperandError(f"model is of type {type(model).__name__}; give a torch.nn.Module")
    if filter is not None and not callable(filter):
        raise OperandError(f"filter is of type {type(filter).__name__}; give a function (name, layer) -> bool")
    density = check_density(density)
    pair = check_block_size(block_size, (2**63, 2**63))
    swaps: dict[str, BlockSparseLinear] = {}
    layers = []
    shared = _shared(model)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, BlockSparseLinear)):
            continue
        reason = _obstacle(name, module, pair, filter, shared)
        if isinstance(module, nn.Linear) and not reason:
            swaps[name] = BlockSparseLinear.from_dense(module, pair, density)
        layers.append(_report(name, module, swaps.get(name), reason))
    for name, layer in swaps.items():
        if name == "":
            model = layer
        else:
            model.set_submodule(name, layer)
    keep_from_fused_kernels(model)
    return Sparsified(model, tuple(layers))


def _obstacle(
    name: str, module: nn.Module, block_size: tuple[int, int], filter: Filter | None, shared: set[int]
) -> str:
    """Return the reason why a linear layer stays as it is, or "" if it can be swapped."""
    if isinstance(module, BlockSparseLinear):
        return "block-sparse already"
    if any(map(is_lazy, module.parameters())):
        return "has no values yet, before its first call"
    if is_parametrized(module):  # which makes it a class of its own, too
        return lost_in_swap(module, LINEAR_ATTRIBUTES, name)
    if type(module) is not nn.Linear:
        return f"a subclass, {type(module).__name__}"
    if filter is not None and not filter(name, module):
        return "left out by filter"
    if id(module) in shared or any(id(parameter) in shared for parameter in module.parameters()):
        return "shared with another layer"
    lost = lost_in_swap(module, LINEAR_ATTRIBUTES, name) or _lost_of_parameters(module)
    if lost:
        return lost
    if "weight" not in module._parameters:
        return "its weight is no parameter"
    if module.weight.is_meta:
        return "has no values yet, on the meta device"
    if module.weight.dtype not in DTYPES:
        return f"its weight is {module.weight.dtype}"
    if module.out_features < block_size[0] or module.in_features < block_size[1]:
        return "smaller than a block"
    return ""


def _lost_of_parameters(module: nn.Linear) -> str:
    """Return what a swap would lose of the layer's parameters, hooks or attributes, or "" if nothing."""
    for name, parameter in module.named_parameters():
        if has_tensor_hooks([parameter]):
            return f"has hooks on {name}, which would be lost; remove them, convert, and register them again"
        extras = sorted(
            extra for extra in vars(parameter) if not extra.startswith("_")
        )  # those are torch's and others'
        if extras:
            names = ", ".join(f"{name}.{extra}" for extra in extras)
            them = "them" if len(extras) > 1 else "it"
            return f"has {names}, which would be lost; convert first, then set {them} again"
    return ""


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of modules and parameters that occur in several places of a model."""
    seen: set[int] = set()
    twice: set[int] = set()
    for parent in model.modules():
        places = [child for child in parent._modules.values() if child is not None]
        for part in (*places, *(p for p in parent._parameters.values() if p is not None)):
            (twice if id(part) in seen else seen).add(id(part))
    return twice


def _report(name: str, module: nn.Module, layer: BlockSparseLinear | None, reason: str) -> LayerReport:
    """Return the report on a layer, which was skipped if there is no new one."""
    before = sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
    shape = (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
    if layer is None:
        return LayerReport(name, shape, 0, 0, 1.0, before, before, reason)
    wide = torch.promote_types(layer.weight.dtype, torch.float32)
    kept, whole = (float(w.detach().to(wide).square().sum()) for w in (layer.weight, module.weight))  # type: ignore[operator]
    return LayerReport(
        name=name,
        shape=shape,
        blocks=layer.coords.shape[1],
        all_blocks=layer.grid[0] * layer.grid[1],
        norm_share=kept / whole if whole else 1.0,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        parameters_before=before,
        skipped="",
    )


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """Return the cells of a layer's row in the table."""
    name, shape = layer.name or "(model)", f"{layer.shape[0]} x {layer.shape[1]}"
    if layer.skipped:
        return name, shape, f"skipped: {layer.skipped}"
    return (
        name,
        shape,
        f"{layer.blocks}/{layer.all_blocks}",
        f"{layer.density:.1%}",
        f"{layer.norm_share:.1%}",
        f"{layer.parameters:,}",
        f"{layer.parameters_before:,}",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row of the table: names to the left, numbers to the right, a reason over all further columns."""
    cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1])]
    rest = row[2:] if len(row) == 3 else [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
    return "  ".join([*cells, *rest])
