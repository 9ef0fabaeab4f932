"""A model built of spconv's layers -> the same model built of ours, weights included; spconv is not imported."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

from torch import nn

from ..compiler.errors import UnsupportedError
from . import sparse_conv, sparse_pool
from .hooks import has_hooks
from .sparse_convolution import SparseConvolution
from .sparse_pool import SparsePool
from .sparse_sequential import SparseBatchNorm, SparseIdentity, SparseReLU, SparseSequential, ToDense

__all__ = ["from_spconv"]

CONVOLUTION = ("ndim", "in_channels", "out_channels", "kernel_size", "subm", "inverse", "transposed", "weight")
POOLS = {"SparseMaxPool": "SparseMaxPool", "SparseAvgPool": "SparseAvgPool"}
# what each of spconv's is derived from, and ours
PLAIN = {"SparseBatchNorm": (nn.BatchNorm1d, SparseBatchNorm), "SparseReLU": (nn.ReLU, SparseReLU)}
IDENTITIES = ("Identity", "SparseIdentity")


def from_spconv(module: nn.Module) -> nn.Module:
    """A copy of `module` in which every layer of spconv is ours; all else stays as it is.

    Layers are told by their attributes and names; blocks of your own that derive from spconv's `SparseModule` keep
    their class and get the tensor, as there. The copy takes `insum_ops.nn.SparseConvTensor`: where a forward
    of your own builds spconv's, import ours instead. A layer with hooks is refused: they would be lost.
    """
    return _replaced(deepcopy(module), "", {})


def _replaced(module: nn.Module, path: str, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """What stands in the place of a module, whose children are replaced first; one that comes again has been `made`."""
    found = made.get(module)
    if found is None:
        for name, child in module._modules.items():  # not `named_children`, which leaves out what comes again
            if child is not None:
                setattr(module, name, _replaced(child, f"{path}.{name}" if path else name, made))
        found = made[module] = _converted(module, path)
    return found


def _converted(module: nn.Module, path: str) -> nn.Module:
    """Our layer in the place of spconv's; a module that is not spconv's is itself."""
    name = type(module).__name__
    if isinstance(module, (SparseConvolution, SparsePool, SparseSequential)):
        return module
    made = _counterpart(module)
    if made is not None:
        if has_hooks(module):
            raise UnsupportedError(
                f"{path or 'the module'} has hooks, which would be lost; remove them, convert, and register them again"
            )
        return made
    if name in PLAIN and isinstance(module, PLAIN[name][0]):
        module.__class__ = PLAIN[name][1]  # which adds nothing but spconv's calling convention, as ours of that name
        return module
    if _is_foreign(module):
        raise UnsupportedError(
            f"{path or 'the module'} is spconv's {name}, which has no counterpart here; replace it by hand first"
        )
    return module


def _counterpart(module: nn.Module) -> nn.Module | None:
    """A new layer of ours; None where there is none, or the module itself becomes one."""
    name = type(module).__name__
    if all(hasattr(module, attribute) for attribute in CONVOLUTION):
        return _convolution(module)
    if name == "SparseSequential":
        return _sequential(module)
    for known in POOLS:
        if name.startswith(known) and hasattr(module, "ndim"):
            return _pool(module, known)
    if name in ("ToDense", *IDENTITIES) and _is_foreign(module):
        return ToDense() if name == "ToDense" else SparseIdentity()
    return None


def _is_foreign(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "spconv"


def _is_block(module: nn.Module) -> bool:
    """A class of the model's own, derived from spconv's SparseModule."""
    return any(base.__name__ == "SparseModule" for base in type(module).__mro__)


def _convolution(source: Any) -> SparseConvolution:
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
    given = {name: getattr(source, name) for name, _ in layer.named_parameters()}
    layer.to(source.weight.device, source.weight.dtype).load_state_dict(given)
    for name, own in list(layer.named_parameters()):
        if isinstance(given[name], nn.Parameter) and given[name].shape == own.shape:
            setattr(layer, name, given[name])  # the very one: layers may share it
        else:
            own.requires_grad_(given[name].requires_grad)
    return layer.train(source.training)


def _sizes(value: Any) -> Any:
    return value if isinstance(value, int) else tuple(int(size) for size in value)


def _pool(source: Any, known: str) -> nn.Module:
    make = getattr(sparse_pool, f"{POOLS[known]}{source.ndim}d")
    subm = bool(getattr(source, "subm", False))
    stride = None if subm else _sizes(source.stride)
    sizes = _sizes(source.kernel_size), stride, _sizes(source.padding), _sizes(source.dilation)
    pool: nn.Module = make(*sizes, indice_key=source.indice_key, subm=subm)
    return pool.train(source.training)


def _sequential(source: nn.Module) -> nn.Module:
    children: OrderedDict[str, Any] = OrderedDict(source._modules)
    made = SparseSequential(children)
    made.takers = frozenset(name for name, child in children.items() if _is_block(child))
    made.training = source.training  # its own; each child keeps what it had
    return made
