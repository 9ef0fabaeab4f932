"""Containers: sparse layers and plain modules in a row, and the way to a dense tensor."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from ..compiler import OperandError
from .convolution import SparseModule, check_kind
from .tensor import SparseConvTensor

__all__ = ["SparseBatchNorm", "SparseIdentity", "SparseReLU", "SparseSequential", "ToDense"]

Features = TypeVar("Features", Tensor, SparseConvTensor)


class SparseSequential(SparseModule):
    """Modules in a row: sparse ones take the `SparseConvTensor`, plain ones (`nn.ReLU`, `nn.BatchNorm1d`) its features.

    Plain modules run where there is no voxel too: they may change the channels. After `ToDense`, every module takes the
    tensor. `len` counts the modules, and `sequential[i]` is the one in place i.

    Args:
        *modules: the modules in their order, named by their numbers, or one OrderedDict of names and modules.
        **named: further modules by their names.

    Raises:
        OperandError: two modules have one name.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseSequential, ToDense
        >>> x = SparseConvTensor(torch.tensor([[-1.0], [2.0]]), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
        >>> SparseSequential(torch.nn.ReLU(), ToDense())(x)
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
        """Append a module.

        Args:
            module: a sparse module, or a plain one, which gets the features.
            name: its name; None for its number.

        Raises:
            OperandError: a module has that name already.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseSequential
            >>> layers = SparseSequential()
            >>> layers.add(torch.nn.ReLU(), "act")
            >>> layers
            SparseSequential(
              (act): ReLU()
            )
        """
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise OperandError(f"a module is named {name!r} already; give this one another name")
        self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        """Call the modules one after the other.

        Args:
            x: a `SparseConvTensor`, or what the first module takes.

        Returns:
            What the last module returns: a `SparseConvTensor`, or after `ToDense` a tensor.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SparseSequential
            >>> x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
            >>> SparseSequential(torch.nn.Linear(4, 8), torch.nn.ReLU())(x)
            SparseConvTensor(voxels=2, channels=8, spatial_shape=[3], batch_size=1, dtype=torch.float32)
        """
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
    """The features on the whole grid [batch_size, C, *spatial_shape], zero where there is no voxel.

    As a layer, for the place in a `SparseSequential` where sparse modules end and dense ones begin.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, ToDense
        >>> x = SparseConvTensor(torch.tensor([[-1.0], [2.0]]), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
        >>> ToDense()(x)
        tensor([[[-1.,  0.,  2.]]])
    """

    def forward(self, x: SparseConvTensor) -> Tensor:
        """Return the features of a tensor on the whole grid.

        Args:
            x: features [N, C] on voxels.

        Returns:
            [batch_size, C, *spatial_shape].

        Raises:
            OperandError: x is no `SparseConvTensor`.
            FormatError: a voxel is given twice or lies outside the grid.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, ToDense
            >>> x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0, 1], [1, 2, 0]]), [3, 2], batch_size=2)
            >>> ToDense()(x).shape
            torch.Size([2, 4, 3, 2])
        """
        check_kind(self, x)
        return x.dense()

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: SparseConvTensor) -> Tensor: ...


class SparseIdentity(SparseModule):
    """A sparse module that returns what it is given.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseIdentity
        >>> x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
        >>> SparseIdentity()(x) is x
        True
    """

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Return x itself.

        Args:
            x: any tensor on voxels.

        Returns:
            x.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseConvTensor, SparseIdentity
            >>> x = SparseConvTensor(torch.ones(2, 4), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
            >>> SparseIdentity()(x) is x
            True
        """
        return x

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: SparseConvTensor) -> SparseConvTensor: ...


class SparseBatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` that takes a `SparseConvTensor` as well, and normalises its features over all voxels.

    Args:
        num_features: channels C of the features [N, C].
        eps: what is added to the variance before its root is taken.
        momentum: share of a batch in the running statistics; None for the mean over all batches.
        affine: whether there are a trained scale and shift for each channel.
        track_running_stats: whether running statistics are kept, for evaluation.
        device: where the parameters lie.
        dtype: of what type they are.

    Raises:
        ValueError: torch's, while training on a single voxel.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseBatchNorm, SparseConvTensor
        >>> x = SparseConvTensor(torch.tensor([[1.0], [3.0]]), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
        >>> SparseBatchNorm(1)(x).features.detach().round()
        tensor([[-1.],
                [ 1.]])
    """

    def forward(self, x: Features) -> Features:
        """Normalise the features of a tensor, or a tensor of features.

        Args:
            x: a `SparseConvTensor` of features [N, C], or a tensor as `nn.BatchNorm1d` takes it.

        Returns:
            The same kind of tensor with normalised features.

        Raises:
            ValueError: torch's, while training on a single voxel.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseBatchNorm
            >>> SparseBatchNorm(4)(torch.randn(10, 4)).shape
            torch.Size([10, 4])
        """
        if isinstance(x, SparseConvTensor):
            return x.replace_feature(super().forward(x.features))
        return super().forward(x)

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: Features) -> Features: ...


class SparseReLU(nn.ReLU):
    """`nn.ReLU` that takes a `SparseConvTensor` as well.

    Args:
        inplace: whether to write over the features that it is given.

    Example:
        >>> import torch
        >>> from insum_ops.nn import SparseConvTensor, SparseReLU
        >>> x = SparseConvTensor(torch.tensor([[-1.0], [3.0]]), torch.tensor([[0, 0], [0, 2]]), [3], batch_size=1)
        >>> SparseReLU()(x).features
        tensor([[0.],
                [3.]])
    """

    def forward(self, x: Features) -> Features:
        """Return the features of a tensor, or a tensor of features, with 0 in the place of what is negative.

        Args:
            x: a `SparseConvTensor`, or any tensor.

        Returns:
            The same kind of tensor.

        Example:
            >>> import torch
            >>> from insum_ops.nn import SparseReLU
            >>> SparseReLU()(torch.tensor([-1.0, 3.0]))
            tensor([0., 3.])
        """
        if isinstance(x, SparseConvTensor):
            return x.replace_feature(super().forward(x.features))
        return super().forward(x)

    if TYPE_CHECKING:
        # nn.Module's own returns Any
        def __call__(self, x: Features) -> Features: ...
