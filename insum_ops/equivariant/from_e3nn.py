"""`from_e3nn`: the tensor products of an e3nn model, replaced by ours, with their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.nn.utils.parametrize import is_parametrized

from ..compiler import OperandError
from ..models.swap_losses import lost_in_swap, private_names
from .clebsch_gordan import e3nn_o3
from .layers import FullyConnectedTensorProduct, TensorProduct
from .paths import MODES, Instruction

__all__ = ["Conversion", "from_e3nn"]

E3NN_ATTRIBUTES = {  # that every product of e3nn has, beside names with an underscore
    "instructions",
    "internal_weights",
    "irreps_in1",
    "irreps_in2",
    "irreps_out",
    "output_mask",
    "shared_weights",
    "weight",
    "weight_numel",
}


@dataclass(frozen=True)
class Row:
    """One of e3nn's tensor products: where it is, what it is, why it was left; "" if it was replaced."""

    name: str
    module: str
    reason: str


@dataclass(frozen=True)
class Conversion:
    """What `from_e3nn` returns: the converted model and what became of its tensor products; prints as a table.

    Args:
        model: the model with its products replaced; of a tensor product itself, the replacement.
        rows: a row for each of e3nn's tensor products, with its `name` in the model, the `module` as e3nn prints it and
            the `reason` why it was left, "" if it was replaced.

    Example:
        >>> from e3nn import o3
        >>> from insum_ops.nn import from_e3nn
        >>> conversion = from_e3nn(o3.FullyConnectedTensorProduct("4x0e", "1x0e", "8x0e"))
        >>> print(conversion)
        1 replaced, 0 left
        (itself)  replaced  FullyConnectedTensorProduct(4x0e x 1x0e -> 8x0e | 32 paths | 32 weights)
        >>> len(conversion.replaced), len(conversion.left)
        (1, 0)
    """

    model: nn.Module
    rows: tuple[Row, ...]

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of the tensor products that were replaced."""
        return tuple(row for row in self.rows if not row.reason)

    @property
    def left(self) -> tuple[Row, ...]:
        """The rows of the tensor products that were left as they are, each with its `reason`."""
        return tuple(row for row in self.rows if row.reason)

    def __str__(self) -> str:
        rows = [(row.name or "(itself)", f"left: {row.reason}" if row.reason else "replaced") for row in self.rows]
        wide = [max(map(len, column)) for column in zip(*rows)]
        lines = [f"{name:{wide[0]}}  {fate:{wide[1]}}  {row.module}" for (name, fate), row in zip(rows, self.rows)]
        return "\n".join([f"{len(self.replaced)} replaced, {len(self.left)} left", *lines])


def from_e3nn(model: nn.Module) -> Conversion:
    """Replace e3nn's tensor products in a model, in place; of a tensor product itself, `.model` is the replacement.

    Parameters stay the same objects, so optimizers and ties between modules hold. What can't be replaced is left as it
    is, and the result, which prints as a table, says why: a product with hooks or a parametrization, one on which
    `forward` or anything else was set, one that is compiled, one of a class of its own, a connection mode of another
    kind.

    Args:
        model: a model with tensor products of `e3nn.o3`, or one of them.

    Returns:
        A `Conversion` with the `model` and `rows` that say what became of each tensor product.

    Raises:
        OperandError: `model` is no `torch.nn.Module`.
        ImportError: e3nn is not installed.

    Example:
        >>> import torch
        >>> from e3nn import o3
        >>> from insum_ops.nn import from_e3nn
        >>> model = torch.nn.ModuleDict({"mix": o3.FullyConnectedTensorProduct("4x0e", "1x0e", "8x0e")})
        >>> print(from_e3nn(model))
        1 replaced, 0 left
        mix  replaced  FullyConnectedTensorProduct(4x0e x 1x0e -> 8x0e | 32 paths | 32 weights)
        >>> type(model["mix"]).__module__
        'insum_ops.equivariant.layers'
    """
    o3 = e3nn_o3()
    if not isinstance(model, nn.Module):
        raise OperandError(f"model is of type {type(model).__name__}; pass a torch.nn.Module")
    rows: list[Row] = []
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not _is_product(module, o3.TensorProduct):
            continue
        reason = _obstacle(name, module, (o3.TensorProduct, *_same_products(o3)))
        rows.append(Row(name, _described(module), reason))
        if reason:
            continue
        if module not in replacements:
            replacements[module] = _converted(module, isinstance(module, o3.FullyConnectedTensorProduct))
        if not name:
            return Conversion(replacements[module], tuple(rows))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, replacements[module])
    return Conversion(model, tuple(rows))


def _same_products(o3: Any) -> tuple[type, ...]:
    """Return e3nn's subclasses that multiply as their base class does."""
    return (o3.FullyConnectedTensorProduct, o3.ElementwiseTensorProduct, o3.FullTensorProduct)


def _is_product(module: nn.Module, base: type) -> bool:
    """Whether a module is a tensor product of e3nn, scripted or not."""
    if isinstance(module, ScriptModule):
        return str(getattr(module, "original_name", "")).endswith(("TensorProduct", "TensorSquare"))
    return isinstance(module, base)


def _described(module: nn.Module) -> str:
    """Return the first line that a module prints, or the class name of a scripted one."""
    return str(module).partition("\n")[0] if not isinstance(module, ScriptModule) else str(module.original_name)


def _obstacle(name: str, module: nn.Module, kinds: tuple[type, ...]) -> str:
    """Return the reason why a tensor product can't be replaced, or "" if it can."""
    if isinstance(module, ScriptModule):
        return "compiled by TorchScript; convert the model before it is compiled"
    if type(module) not in kinds and not is_parametrized(module):  # which makes it a class of its own, too
        return f"{type(module).__name__} is a class of its own, whose forward may differ"
    lost = lost_in_swap(module, E3NN_ATTRIBUTES | private_names(module), name)
    if lost:
        return lost
    paths: Any = module.instructions
    others = sorted({path.connection_mode for path in paths} - set(MODES))
    if others:
        return f"connection mode {', '.join(others)} is not supported"
    return ""


def _converted(module: Any, is_fully_connected: bool) -> TensorProduct:
    """Return our layer for one of e3nn's, with its paths and the same parameter objects."""
    kind = FullyConnectedTensorProduct if is_fully_connected else TensorProduct
    product = kind.__new__(kind)
    nn.Module.__init__(product)
    irreps = (module.irreps_in1, module.irreps_in2, module.irreps_out)
    paths = tuple(Instruction(*path) for path in module.instructions)
    parts = (module.weight, module.output_mask)
    product._set_up(irreps, paths, module.internal_weights, module.shared_weights, "mul_ir", parts)
    return product.train(module.training)
