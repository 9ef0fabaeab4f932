"""The sparse U-Net of which a training step is measured; `bench/cases/test_unet.py` takes its layers from a library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SparseSequential, SubMConv3d

__all__ = ["UNet"]


class Level(nn.Module):
    """Blocks at one resolution around the rest of the network at half of it."""

    def __init__(self, channels: int, wider: tuple[int, ...], name: str = "0") -> None:
        super().__init__()
        self.before = _block(channels, channels, f"level{name}")
        self.below: Level | None = None
        if wider:
            key = f"down{name}"
            self.down = _followed(SparseConv3d(channels, wider[0], 2, 2, bias=False, indice_key=key), wider[0])
            self.below = Level(wider[0], wider[1:], str(int(name) + 1))
            self.up = _followed(SparseInverseConv3d(wider[0], channels, 2, indice_key=key, bias=False), channels)
            self.after = _block(2 * channels, channels, f"level{name}")

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        x = self.before(x)
        if self.below is None:
            return x
        y = self.up(self.below(self.down(x)))
        return self.after(x.replace_feature(torch.cat([x.features, y.features], 1)))


class UNet(nn.Module):
    """Submanifold blocks, strided convolutions down, inverse convolutions up; one score for each label and voxel."""

    def __init__(self, inputs: int, labels: int, channels: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = SubMConv3d(inputs, channels[0], 3, indice_key="level0")
        self.levels = Level(channels[0], channels[1:])
        self.head = nn.Linear(channels[0], labels)

    def forward(self, x: SparseConvTensor) -> Tensor:
        return self.head(self.levels(self.stem(x)).features)


def _followed(layer: nn.Module, channels: int) -> SparseSequential:
    return SparseSequential(layer, nn.BatchNorm1d(channels), nn.ReLU())


def _block(inputs: int, outputs: int, key: str) -> SparseSequential:
    first = SubMConv3d(inputs, outputs, 3, bias=False, indice_key=key)
    second = SubMConv3d(outputs, outputs, 3, bias=False, indice_key=key)
    return SparseSequential(_followed(first, outputs), _followed(second, outputs))
