"""Voxels on a line, layers over them, and torch's own convolution of the dense grid beside them."""

from __future__ import annotations

from typing import Any

import torch
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor
from torch.nn import functional

from insum_ops import nn
from insum_ops.conv import forms
from insum_ops.conv.convolution import SparseConvolution
from insum_ops.formats import KernelMap

SHAPE, BATCH = [12], 2


def cloud(channels: int = 4, voxels: int = 18, length: int = SHAPE[0]) -> nn.SparseConvTensor:
    """18 voxels are a full tile of 16 and one that is not."""
    indices = torch.cartesian_prod(torch.arange(BATCH), torch.arange(length)).int()
    indices = indices[torch.randperm(len(indices))[:voxels]].to(DEVICE)
    features = torch.randn(voxels, channels, dtype=torch.float64, device=DEVICE, requires_grad=True)
    return nn.SparseConvTensor(features, indices, [length], BATCH)


def submanifold(channels: int = 4, out: int = 4, **options: object) -> nn.SubMConv1d:
    return nn.SubMConv1d(channels, out, 3, indice_key="own", **options).double().to(DEVICE)


def strided(channels: int = 4, out: int = 4, **options: object) -> nn.SparseConv1d:
    return nn.SparseConv1d(channels, out, 2, 2, 1, indice_key="own", **options).double().to(DEVICE)


def map_of(x: nn.SparseConvTensor) -> KernelMap:
    return x.indice_dict["own"].kernel_map


def expected_of(layer: SparseConvolution, x: nn.SparseConvTensor, y: nn.SparseConvTensor) -> Tensor:
    """The features of y = layer(x)."""
    batch, *position = x.indices.long().T
    dense = torch.zeros(x.batch_size, *x.spatial_shape, x.features.shape[1], dtype=torch.float64, device=DEVICE)
    dense = dense.index_put((batch, *position), x.features).movedim(-1, 1)
    made = functional.conv1d(dense, layer.weight.movedim(-1, 1), layer.bias, layer.stride, 1, groups=layer.groups)
    batch, *position = y.indices.long().T
    return made.movedim(1, -1)[(batch, *position)]


def check_step(layer: SparseConvolution, x: nn.SparseConvTensor) -> nn.SparseConvTensor:
    """Return layer(x), whose values and gradients are right."""
    y = layer(x)
    expected = expected_of(layer, x, y)
    assert_matches(y.features, expected)
    upstream, leaves = torch.randn_like(expected), [x.features, *layer.parameters()]
    actual, wanted = (torch.autograd.grad(made, leaves, upstream) for made in (y.features, expected))
    for one, other in zip(actual, wanted, strict=True):
        assert_matches(one, other)
    return y


def call_over(layer: SparseConvolution, found: KernelMap, is_swapped: bool = False) -> Any:
    """Return the statement and operands that a map keeps for a layer."""
    kind = layer.weight.shape, layer.groups, is_swapped
    return found.memory[("statement", *kind, *forms.settings_of(layer.weight.dtype))]
