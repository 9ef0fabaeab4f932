"""Containers: sparse layers and plain modules in a row, and the way to a dense tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from ..compiler.errors import OperandError
from .sparse_conv_tensor import SparseConvTensor
from .sparse_convolution import SparseModule, check_kind

__all__ = ["SparseBatchNorm", "SparseIdentity", "SparseReLU", "SparseSequential", "ToDense"]


class SparseSequential(SparseModule):
    """Modules in a row: sparse ones take the `SparseConvTensor`, plain ones (`nn.ReLU`, `nn.BatchNorm1d`) its features.

    Plain modules run where there is no voxel too: they may change the channels. After `ToDense`, every module takes
    the tensor.

    >>> import torch
    >>> x = SparseConvTensor(torch.tensor([[-1.0], [2.0]]), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
    >>> SparseSequential(nn.ReLU(), ToDense())(x)
    tensor([[[0., 0., 2.]]])
    """

    takers: frozenset[str] = frozenset()  # modules that take the tensor, though not derived from SparseModule

    def __init__(self, *modules: nn.Module | OrderedDict[str, nn.Module], **named: nn.Module) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], OrderedDict):
            named = {**modules[0], **named}
            modules = ()
        for module in modules:
            self.add(module)  # type: ignore[arg-type]
        for name, module in named.items():
            self.add(module, name)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module; its name is its number unless given."""
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise OperandError(f"a module is named {name!r} already; give this one another name")
        self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        for name, module in self._modules.items():
            if isinstance(module, SparseModule) or name in self.takers or not isinstance(x, SparseConvTensor):
                x = module(x)  # type: ignore[misc]
            else:
                x = x.replace_feature(module(x.features))  # type: ignore[misc]
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, at: int) -> nn.Module:
        return list(self._modules.values())[at]  # type: ignore[return-value]  # `children` leaves out what comes again


class ToDense(SparseModule):
    """[batch, channels, *spatial_shape]; zero where there is no voxel."""

    def forward(self, x: SparseConvTensor) -> Tensor:
        check_kind(self, x)
        return x.dense()


class SparseIdentity(SparseModule):
    """What goes in comes out."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x


class SparseBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` that takes a `SparseConvTensor` as well, and normalises its features."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, SparseConvTensor):
            return x.replace_feature(super().forward(x.features))
        return super().forward(x)


class SparseReLU(nn.ReLU):
    """`nn.ReLU` that takes a `SparseConvTensor` as well."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, SparseConvTensor):
            return x.replace_feature(super().forward(x.features))
        return super().forward(x)
