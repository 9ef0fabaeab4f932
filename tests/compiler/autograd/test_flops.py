"""FlopCounterMode counts statements and layers as it counts the dense products that they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    SparseConv3d,
    SparseConvTensor,
    SparseConvTranspose3d,
    SpMM,
    SubMConv3d,
)

pytestmark = pytest.mark.cpu

X, W = torch.randn(6, 4), torch.randn(4, 5)
PRODUCT = "C[i,k] += X[i,j] * W[j,k]"


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("calls_before", [0, 3])  # a plan must not hide a call
def test_a_statement_counts_as_its_product_does(calls_before):
    for _ in range(calls_before):
        insum(PRODUCT, X=X, W=W)
    assert counted(lambda: insum(PRODUCT, X=X, W=W)) == counted(lambda: X @ W) == 240


def test_gradients_count():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    assert counted(lambda: insum(PRODUCT, X=x, W=w).sum().backward()) == counted(lambda: (x @ w).sum().backward())


@pytest.mark.parametrize(
    ("expr", "flops"),
    [
        ("C[i] += X[i,j]", 0),
        ("C[i,j] += X[i,j] * X[i,j] * X[i,j]", 3 * 24),
        ("C[i] = max(X[i,j] * X[i,j])", 2 * 24),
    ],
)
def test_factors_count(expr, flops):
    assert counted(lambda: insum(expr, X=X)) == flops


def test_layers_count_what_they_store():
    A = GroupCOO.from_dense(torch.eye(8), group_size=4)  # of which three in four are padding
    B = torch.randn(8, 3)
    assert counted(lambda: spmm(A, B)) == counted(lambda: SpMM(A)(B)) == 2 * 8 * 3
    layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
    assert counted(lambda: layer(torch.randn(4, 64))) == 2 * 4 * layer.weight.numel()
    convolve = _features(SubMConv3d(4, 6, 3))  # over five voxels on a diagonal: of 135 pairs 13 are there
    assert counted(lambda: convolve(torch.randn(5, 4))) == 2 * 13 * 4 * 6


def test_without_numbers_every_position_counts():
    expr, tensors = "Y[i,c] += X[I[i],c] * W[i]", dict(X=X, W=torch.randn(3), I=torch.tensor([0, -1, 2]))
    assert counted(lambda: insum(expr, **tensors)) == 2 * 2 * 4
    assert counted(lambda: insum(expr, **{name: each.to("meta") for name, each in tensors.items()})) == 2 * 3 * 4


def _features(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    voxels = torch.tensor([[0, i, i, i] for i in range(5)])
    return lambda x: layer(SparseConvTensor(x, voxels, [8, 8, 8], 1)).features


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (SpMM(GroupCOO.from_dense(torch.eye(5)), trainable=True), 3),
        (BlockSparseLinear(64, 48, block_size=16, density=0.5), 64),
        (BlockSparseLinear(60, 50, block_size=16, density=0.5), 60),
        (_features(SubMConv3d(4, 6, 3)), 4),
        (_features(SubMConv3d(4, 6, 1)), 4),
        (_features(SparseConv3d(4, 6, 3, 2)), 4),
        (_features(SparseConvTranspose3d(4, 6, 3)), 4),
    ],
)
def test_the_gradients_of_a_layer_count_as_two_of_it(layer, width):
    x = torch.randn(5, width, requires_grad=True)
    forward = counted(lambda: layer(x))
    assert forward > 0
    assert counted(lambda: layer(x).sum().backward()) == 3 * forward


def test_the_gradients_of_a_tensor_product_count():
    layer = FullyConnectedTensorProduct("8x0e+8x1o", "1x0e+1x1o", "8x0e+8x1o")
    x, y = torch.randn(5, 32, requires_grad=True), torch.randn(5, 4)
    assert counted(lambda: layer(x, y).sum().backward()) > 2 * counted(lambda: layer(x, y)) > 0
