"""A dense linear layer with a mask on its weight: what a block-sparse one must equal, in float64 and plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from insum_ops.nn import BlockSparseLinear


def dense_weight(layer: BlockSparseLinear, blocks: Tensor | None = None) -> Tensor:
    """The layer's weight, or other blocks in its place, put together block by block: float64 [out, in]."""
    bo, bi = layer.block_size
    blocks = (layer.weight if blocks is None else blocks).detach().cpu().double()
    dense = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64, device=blocks.device)
    for block, row, column in zip(blocks, *layer.coords.tolist(), strict=True):
        part = dense[row * bo : (row + 1) * bo, column * bi : (column + 1) * bi]
        part += block[: part.shape[0], : part.shape[1]]
    return dense


def element_mask(layer: BlockSparseLinear) -> Tensor:
    """Which elements of the dense weight are stored: 0 or 1 in float64 [out, in]."""
    return dense_weight(layer, torch.ones(layer.coords.shape[1], *layer.block_size))


class MaskedLinear(nn.Module):
    """y = x @ (weight * mask).T + bias, in float64."""

    def __init__(self, layer: BlockSparseLinear) -> None:
        super().__init__()
        self.weight = nn.Parameter(dense_weight(layer))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().cpu().double().clone())
        self.mask = element_mask(layer)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ (self.weight * self.mask).T
        return y if self.bias is None else y + self.bias

    def follow(self, layer: BlockSparseLinear, optimizer: torch.optim.Optimizer) -> None:
        """Take on the layer's new pattern: what is dropped or new is zero, in the optimizer's state too."""
        kept = self.mask * element_mask(layer)
        self.mask = element_mask(layer)
        self.weight.data *= kept
        for value in optimizer.state[self.weight].values():
            if isinstance(value, Tensor) and value.shape == kept.shape:
                value *= kept


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eye(*sizes: int) -> torch.Tensor:
    return torch.eye(*sizes, dtype=torch.bool)
