"""sparsify: the linear layers of a model become block-sparse ones, by magnitude."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ..compiler import OperandError
from ..formats.check import VALUE_DTYPES
from ..models.swap_losses import has_tensor_hooks, lost_in_swap
from .fused_encoder import keep_from_fused_kernels
from .layer import BlockSparseLinear
from .patterns import check_block_size, check_density
from .pretrained import attach, is_conv1d, other_quantizers

__all__ = ["LayerReport", "Sparsified", "sparsify"]

Filter = Callable[[str, nn.Module], bool]
HEAD = ("layer", "weight", "blocks", "density", "norm² kept", "parameters", "before")
# the last is an attribute that Hugging Face sets on all layers
LINEAR_ATTRIBUTES = {"in_features", "out_features", "weight", "bias", "_is_hf_initialized"}
CONV1D_ATTRIBUTES = {"nx", "nf", "weight", "bias", "_is_hf_initialized"}


@dataclass(frozen=True)
class LayerReport:
    """What `sparsify` did to one linear layer.

    Args:
        name: where the layer is in the model, "" for the model itself.
        shape: the dense weight's (out_features, in_features), of experts' weights as the model has them.
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
    shape: tuple[int, ...]  # of the dense weight
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

    `Conv1D` layers of Hugging Face's transformers, whose weight is [in, out], are swapped too. A model of theirs is
    saved with `save_pretrained` and loaded with `from_pretrained`, where `insum_ops.huggingface` is imported.

    What can't be swapped is left as it is, and the table says why: a layer smaller than a block, with a shared weight,
    with hooks on itself or its parameters, with buffers, attributes, parametrizations or a forward that an nn.Linear
    has not, compiled, of a subclass of nn.Linear, quantized, and weights of several experts in one tensor. Make the
    optimizer afterwards.

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
    layers: list[LayerReport] = []
    shared, quantized = _shared(model), other_quantizers(model)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, BlockSparseLinear)) and not is_conv1d(module):
            layers.extend(_expert_reports(name, module))
            continue
        reason = _obstacle(name, module, pair, filter, shared, quantized)
        if not reason:
            swaps[name] = BlockSparseLinear.from_dense(_as_linear(module), pair, density)
        layers.append(_report(name, module, swaps.get(name), reason))
    for name, layer in swaps.items():
        if name == "":
            model = layer
        else:
            model.set_submodule(name, layer)
    keep_from_fused_kernels(model)
    attach(model)
    return Sparsified(model, tuple(layers))


def _obstacle(
    name: str,
    module: nn.Module,
    block_size: tuple[int, int],
    filter: Filter | None,
    shared: set[int],
    quantized: dict[int, str],
) -> str:
    """Return the reason why a linear layer stays as it is, or "" if it can be swapped."""
    if isinstance(module, BlockSparseLinear):
        return "block-sparse already"
    if any(map(is_lazy, module.parameters())):
        return "has no values yet, before its first call"
    expected = CONV1D_ATTRIBUTES if is_conv1d(module) else LINEAR_ATTRIBUTES
    if is_parametrized(module):  # which makes it a class of its own, too
        return lost_in_swap(module, expected, name)
    if type(module) is not nn.Linear and not is_conv1d(module, or_subclass=False):
        return f"a subclass, {type(module).__name__}"
    if filter is not None and not filter(name, module):
        return "left out by filter"
    if id(module) in shared or any(id(parameter) in shared for parameter in module.parameters()):
        return "shared with another layer"
    if id(module) in quantized:
        return f"its model is quantized with {quantized[id(module)]}, and can be saved with one method only"
    lost = lost_in_swap(module, expected, name) or _lost_of_parameters(module)
    if lost:
        return lost
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter"
    if weight.is_meta:
        return "has no values yet, on the meta device"
    if weight.dtype not in VALUE_DTYPES:
        return f"its weight is {weight.dtype}"
    out_features, in_features = _features(module)
    if out_features < block_size[0] or in_features < block_size[1]:
        return "smaller than a block"
    return ""


def _features(module: nn.Module) -> tuple[int, int]:
    """Return (out_features, in_features) of a linear layer."""
    names = ("nf", "nx") if is_conv1d(module) else ("out_features", "in_features")
    return int(getattr(module, names[0])), int(getattr(module, names[1]))


def _as_linear(module: nn.Module) -> nn.Linear:
    """Return a linear layer, or for a Conv1D one with views of its parameters."""
    if isinstance(module, nn.Linear):
        return module
    out_features, in_features = _features(module)
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert weight is not None  # `_obstacle` has seen it
    linear = nn.Linear(in_features, out_features, bias is not None, device="meta").train(module.training)
    linear.weight = nn.Parameter(weight.detach().T, weight.requires_grad)
    if bias is not None:
        linear.bias = bias
    return linear


def _expert_reports(name: str, module: nn.Module) -> Iterator[LayerReport]:
    """Yield a report on each weight [experts, out, in] of a module, which reads it in a forward of its own."""
    if type(module).__module__.startswith("torch."):  # convolutions have weights of three dimensions too
        return
    for key, parameter in module._parameters.items():
        if parameter is not None and not is_lazy(parameter) and parameter.ndim == 3 and len(parameter) > 1:
            reason = f"the weights of {len(parameter)} experts, which {type(module).__name__} multiplies itself"
            place, size = f"{name}.{key}" if name else key, parameter.numel()
            yield LayerReport(place, tuple(parameter.shape), 0, 0, 1.0, size, size, reason)


def _lost_of_parameters(module: nn.Module) -> str:
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
    shape = _features(module)
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
    name, shape = layer.name or "(model)", " x ".join(map(str, layer.shape))
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
