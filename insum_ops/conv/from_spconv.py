"""Conversion of a model built of spconv's layers to one built of ours, weights included; spconv is not imported."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

from torch import nn

from ..compiler import OperandError, UnsupportedError
from ..models.swap_losses import has_tensor_hooks, lost_in_swap, private_names
from . import layers as sparse_conv
from . import pooling as sparse_pool
from .convolution import NOT_OURS, SparseConvolution
from .pooling import SparsePool
from .sequential import SparseBatchNorm, SparseIdentity, SparseReLU, SparseSequential, ToDense

__all__ = ["from_spconv"]

CONVOLUTION = ("ndim", "in_channels", "out_channels", "kernel_size", "subm", "inverse", "transposed", "weight")
POOLS = ("SparseMaxPool", "SparseAvgPool")  # as spconv names them, and as we do
# spconv's name: the class of torch that it is derived from, and ours
PLAIN = {"SparseBatchNorm": (nn.BatchNorm1d, SparseBatchNorm), "SparseReLU": (nn.ReLU, SparseReLU)}
IDENTITIES = ("Identity", "SparseIdentity")
SPCONV_ATTRIBUTES = {  # of the layers of spconv 1.2 to 2.3.8, beside names with an underscore
    *(
        "act_alpha",
        "act_beta",
        "act_type",
        "algo",
        "bias",
        "conv1x1",
        "dilation",
        "enable_int8_test_mode",
        "first_time",
    ),
    *("fp32_accum", "fused_bn", "groups", "in_channels", "indice_key", "inverse", "kernel_size", "name", "ndim"),
    *("out_channels", "output_padding", "padding", "record_voxel_count", "scale", "stride", "subm", "transposed"),
    *("use_hash", "weight", "weight_shape", "zero_point", NOT_OURS),
}


def from_spconv(module: nn.Module) -> nn.Module:
    """Return a copy of a model in which every layer of spconv is ours; all else stays as it is.

    Layers are told by their attributes and names; spconv is not imported. Blocks of your own that derive from spconv's
    `SparseModule` keep their class and get the tensor, as there. The copy takes `insum_ops.nn.SparseConvTensor`: where
    a forward of your own builds spconv's, import ours instead.

    Args:
        module: a model built of spconv's layers, or one of them.

    Returns:
        The copy, or of a single layer its counterpart, with the same weights, mode and device.

    Raises:
        OperandError: `module` is no module.
        UnsupportedError: a layer has no counterpart, or something that would be lost: hooks, also on a parameter, a
            parametrization, a fused activation, a method or an attribute that was set on it or that its class
            overrides; or it is compiled.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from insum_ops.nn import from_spconv
        >>> class SubMConv3d(nn.Module):  # stands for that of spconv.pytorch, which has these attributes
        ...     ndim, in_channels, out_channels, kernel_size, dilation = 3, 16, 32, [3, 3, 3], [1, 1, 1]
        ...     subm, inverse, transposed, indice_key, bias = True, False, False, "subm1", None
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.zeros(32, 3, 3, 3, 16))
        >>> from_spconv(SubMConv3d())
        SubMConv3d(16, 32, kernel_size=[3, 3, 3], bias=False, indice_key='subm1')
    """
    if not isinstance(module, nn.Module):
        raise OperandError(f"module is of type {type(module).__name__}; pass a torch.nn.Module")
    for path, layer in module.named_modules(remove_duplicate=False):
        if _is_replaced(layer):
            lost = _lost(layer, path)
            if lost:
                raise UnsupportedError(f"{path or 'the module'} {lost}")
    for path, parameter in module.named_parameters():
        if has_tensor_hooks([parameter]):
            raise UnsupportedError(
                f"{path} has hooks, which a copy would not have; remove them, convert, and register them again"
            )
    return _replaced(deepcopy(module), "", {})


def _replaced(module: nn.Module, path: str, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return the replacement of a module whose children are replaced first, the same one each time it occurs."""
    replacement = replacements.get(module)
    if replacement is None:
        for name, child in module._modules.items():  # not `named_children`, which leaves out what comes again
            if child is not None:
                setattr(module, name, _replaced(child, f"{path}.{name}" if path else name, replacements))
        replacement = replacements[module] = _converted(module, path)
    return replacement


def _converted(module: nn.Module, path: str) -> nn.Module:
    """Return our layer for one of spconv's, and any other module itself; refuse a layer without a counterpart."""
    name = type(module).__name__
    if _is_replaced(module):
        return _counterpart(module)
    if isinstance(module, (SparseConvolution, SparsePool, SparseSequential)):
        return module
    if name in PLAIN and isinstance(module, PLAIN[name][0]):
        module.__class__ = PLAIN[name][1]  # which adds nothing but spconv's calling convention, as ours of that name
        return module
    if _is_foreign(module):
        raise UnsupportedError(
            f"{path or 'the module'} is spconv's {name}, which has no counterpart here; replace it by hand first"
        )
    return module


def _is_replaced(module: nn.Module) -> bool:
    """Whether a new layer of ours takes the place of a module."""
    if isinstance(module, (SparseConvolution, SparsePool, SparseSequential)):
        return False
    name = type(module).__name__
    if _is_convolution(module) or name == "SparseSequential" or _pool_kind(module):
        return True
    return name in ("ToDense", *IDENTITIES) and _is_foreign(module)


def _counterpart(module: nn.Module) -> nn.Module:
    """Return the layer that takes the place of a module for which `_is_replaced` holds."""
    name, kind = type(module).__name__, _pool_kind(module)
    if _is_convolution(module):
        return _convolution(module)
    if name == "SparseSequential":
        return _sequential(module)
    if kind:
        return _pool(module, kind)
    return ToDense() if name == "ToDense" else SparseIdentity()


def _is_convolution(module: nn.Module) -> bool:
    return all(hasattr(module, attribute) for attribute in CONVOLUTION)


def _pool_kind(module: nn.Module) -> str:
    """Return the kind of a pooling layer of spconv, or "" if the module is none."""
    name = type(module).__name__
    return next((kind for kind in POOLS if name.startswith(kind) and hasattr(module, "ndim")), "")


def _lost(module: nn.Module, path: str) -> str:
    """Return the reason why a layer can't be replaced without loss, or "" if it can."""
    children = set(module._modules) if type(module).__name__ == "SparseSequential" else set()
    lost = lost_in_swap(module, SPCONV_ATTRIBUTES | private_names(module) | children, path)
    if lost:
        return lost
    overridden = _overridden(type(module))
    if overridden:
        return (
            f"is a {type(module).__name__}, which overrides {', '.join(overridden)} of its base class; "
            "derive it from insum_ops.nn's layer instead"
        )
    activation = getattr(getattr(module, "act_type", None), "name", "None_")
    if activation != "None_":
        return f"has the activation {activation} fused into it, which would be lost; put it after the layer instead"
    return ""


def _overridden(kind: type) -> list[str]:
    """Return the names that a class of the model's own overrides in the layer that it derives from.

    The layer is the last class that defines `forward`. Classes of the layer's own package do not count.
    """
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("torch", "builtins")]
    layers = [base for base in bases if "forward" in vars(base)]
    if not layers:
        return []
    home = layers[-1]
    outside = [base for base in bases[: bases.index(home)] if _package(base) != _package(home)]
    names = {name for base in outside for name in vars(base) if hasattr(home, name) and not name.startswith("__")}
    return sorted(names)


def _package(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _is_foreign(module: nn.Module) -> bool:
    return _package(type(module)) == "spconv"


def _is_block(module: nn.Module) -> bool:
    """Whether a module's class derives from spconv's `SparseModule`, so that it takes the sparse tensor."""
    return any(base.__name__ == "SparseModule" for base in type(module).__mro__)


def _convolution(source: Any) -> SparseConvolution:
    """Return our convolution for one of spconv's, over the same parameter objects, which layers may share."""
    kind = "SubMConv" if source.subm else "SparseInverseConv" if source.inverse else "SparseConv"
    if source.transposed and not source.inverse:
        kind = "SparseConvTranspose"
    make = getattr(sparse_conv, f"{kind}{source.ndim}d")
    common: dict[str, Any] = {"bias": source.bias is not None, "indice_key": source.indice_key}
    if not source.inverse:
        common["dilation"] = _sizes(source.dilation)
        if not source.subm:  # a submanifold ignores its stride and its padding
            common |= {"stride": _sizes(source.stride), "padding": _sizes(source.padding)}
            common["output_padding"] = _sizes(getattr(source, "output_padding", 0))
    layer: SparseConvolution = make(source.in_channels, source.out_channels, _sizes(source.kernel_size), **common)
    tensors = {name: getattr(source, name) for name, _ in layer.named_parameters()}
    layer.to(source.weight.device, source.weight.dtype).load_state_dict(tensors)
    for name, parameter in list(layer.named_parameters()):
        if isinstance(tensors[name], nn.Parameter):
            if tensors[name].shape != parameter.shape:
                tensors[name].data = parameter.data  # an older layout
            setattr(layer, name, tensors[name])
        else:
            parameter.requires_grad_(tensors[name].requires_grad)
    return layer.train(source.training)


def _sizes(value: Any) -> Any:
    return value if isinstance(value, int) else tuple(int(size) for size in value)


def _pool(source: Any, kind: str) -> nn.Module:
    """Return our pooling layer for one of spconv's of this kind."""
    make = getattr(sparse_pool, f"{kind}{source.ndim}d")
    subm = bool(getattr(source, "subm", False))
    stride = None if subm else _sizes(source.stride)
    sizes = _sizes(source.kernel_size), stride, _sizes(source.padding), _sizes(source.dilation)
    pool: nn.Module = make(*sizes, indice_key=source.indice_key, subm=subm)
    return pool.train(source.training)


def _sequential(source: nn.Module) -> nn.Module:
    """Return our container for spconv's, over the same children."""
    children: OrderedDict[str, Any] = OrderedDict(source._modules)
    sequential = SparseSequential(children)
    sequential.takers = frozenset(name for name, child in children.items() if _is_block(child))
    sequential.training = source.training  # its own; each child keeps what it had
    return sequential
