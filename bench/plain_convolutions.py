"""spconv's layers in plain torch, one matmul a tap: what a network must compute, in any precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .inputs import submanifold_map

__all__ = ["SparseConv3d", "SparseConvTensor", "SparseInverseConv3d", "SparseSequential", "SubMConv3d"]

Pairs = list[tuple[Tensor, Tensor]]  # input and output voxel of each pair, for each tap


class SparseConvTensor:
    """Features at voxels; pairs are kept by the key of the layers that share them."""

    def __init__(self, features: Tensor, indices: Tensor, shape: list[int], batch_size: int) -> None:
        self.features, self.indices, self.shape = features, indices, shape
        self.known: dict[str, tuple[Pairs, Tensor]] = {}  # with the voxels at their other end

    def replace_feature(self, features: Tensor) -> SparseConvTensor:
        return self.at(features, self.indices)

    def at(self, features: Tensor, indices: Tensor) -> SparseConvTensor:
        made = SparseConvTensor(features, indices, self.shape, 1)
        made.known = self.known
        return made


class _Convolution(nn.Module):
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, kernel: int, bias: bool, indice_key: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, kernel, kernel, kernel, inputs))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)
        self.indice_key = indice_key

    def convolve(self, features: Tensor, pairs: Pairs, rows: int) -> Tensor:
        Out = features.new_zeros(rows, len(self.weight))
        for matrix, (source, target) in zip(self.weight.flatten(1, 3).permute(1, 2, 0), pairs):
            Out = Out.index_add(0, target, features[source] @ matrix)
        return Out if self.bias is None else Out + self.bias


class SubMConv3d(_Convolution):
    """Out[x] += In[x + tap - 1] @ Weight[tap] wherever both are voxels."""

    def __init__(self, inputs: int, outputs: int, kernel: int, bias: bool = True, indice_key: str = "") -> None:
        super().__init__(inputs, outputs, kernel, bias, indice_key)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        if self.indice_key not in x.known:
            triples = submanifold_map(x.indices[:, 1:].long())
            taps = triples[1:].split(triples[0].bincount(minlength=27).tolist(), 1)
            x.known[self.indice_key] = [(source, target) for source, target in taps], x.indices
        return x.replace_feature(self.convolve(x.features, x.known[self.indice_key][0], len(x.features)))


class SparseConv3d(_Convolution):
    """Out[cell] += In[2 cell + tap] @ Weight[tap], for kernels of two with a stride of two."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, bias: bool = True, indice_key: str = ""
    ) -> None:
        super().__init__(inputs, outputs, kernel, bias, indice_key)
        if (kernel, stride) != (2, 2):
            raise ValueError(f"kernel {kernel} and stride {stride} are not 2 and 2, the only ones here")

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        places = x.indices[:, 1:].long()
        cells, target = (places // 2).unique(dim=0, return_inverse=True)
        tap = (places % 2 * places.new_tensor([4, 2, 1])).sum(1)
        sources = [(tap == number).nonzero().flatten() for number in range(8)]
        pairs = [(source, target[source]) for source in sources]
        x.known[self.indice_key] = pairs, x.indices
        coarse = torch.cat([torch.zeros_like(cells[:, :1]), cells], 1)
        return x.at(self.convolve(x.features, pairs, len(cells)), coarse)


class SparseInverseConv3d(_Convolution):
    """The pairs of a strided convolution backwards, to the voxels it came from."""

    def __init__(self, inputs: int, outputs: int, kernel: int, indice_key: str, bias: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, bias, indice_key)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        pairs, fine = x.known[self.indice_key]
        backwards = [(target, source) for source, target in pairs]
        return x.at(self.convolve(x.features, backwards, len(fine)), fine)


class SparseSequential(nn.Sequential):
    """Modules in a row; those that are not of this file take the features."""

    def forward(self, x: Any) -> Any:
        for module in self:
            is_sparse = isinstance(module, (_Convolution, SparseSequential))
            x = module(x) if is_sparse else x.replace_feature(module(x.features))
        return x
