"""FlopCounterMode counts statements and layers as it counts the dense products that they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SpMM, SubMConv3d

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
    A = GroupCOO.from_dense(torch.eye(8))
    B = torch.randn(8, 3)
    assert counted(lambda: spmm(A, B)) == counted(lambda: SpMM(A)(B)) == 2 * A.values.numel() * 3
    layer = BlockSparseLinear(64, 64, block_size=16, density=0.5)
    assert counted(lambda: layer(torch.randn(4, 64))) == 2 * 4 * layer.weight.numel()
    voxels = torch.tensor([[0, i, i, i] for i in range(5)])
    assert counted(lambda: SubMConv3d(4, 4, 3)(SparseConvTensor(torch.randn(5, 4), voxels, [8, 8, 8], 1))) > 0
