"""TorchScript is refused in one sentence, wherever it meets the library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from insum_ops import insum, sddmm, sparse_conv3d, spmm, tensor_product
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear, FullyConnectedTensorProduct, SpMM, SubMConv3d

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

WORDS = (
    "torch.jit.script and torch.jit.trace have no operator for a statement; use torch.compile, or torch.export for a "
    "model in a file"
)
A = GroupCOO.from_dense(torch.eye(8))


def layers():
    yield BlockSparseLinear(64, 64, block_size=16, density=0.5)
    yield SpMM(A)
    yield SubMConv3d(4, 4, 3)
    yield FullyConnectedTensorProduct("2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o")


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("within", [lambda layer: layer, lambda layer: nn.Sequential(nn.ReLU(), layer)])
def test_scripts(layer, within):
    with pytest.raises(TypeError) as error:
        torch.jit.script(within(layer))
    assert str(error.value) == WORDS


def attention(scores: Tensor, rows: Tensor) -> Tensor:
    return insum("Y[i] += scores[rows[i]]", scores=scores, rows=rows)


class Attention(nn.Module):
    def forward(self, scores: Tensor, rows: Tensor) -> Tensor:
        return attention(scores, rows)


@pytest.mark.parametrize("call", [insum, spmm, sddmm, sparse_conv3d, tensor_product, attention, Attention()])
def test_scripts_of_functions(call):
    with pytest.raises(TypeError) as error:
        torch.jit.script(call)
    assert str(error.value) == WORDS


CALLS = {
    "statement": (lambda X: insum("Y[i] += X[i,j]", X=X), (torch.randn(3, 4),)),
    "spmm": (lambda B: spmm(A, B), (torch.randn(8, 3),)),
    "spmm of a torch tensor": (lambda B: spmm(torch.eye(8).to_sparse(), B), (torch.randn(8, 3),)),
    "linear": (BlockSparseLinear(64, 64, block_size=16, density=0.5), (torch.randn(4, 64),)),
    "SpMM": (SpMM(A), (torch.randn(8, 4),)),
    "product": (FullyConnectedTensorProduct("2x0e", "0e", "2x0e"), (torch.randn(5, 2), torch.randn(5, 1))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_warm", [False, True])
def test_traces(name, is_warm):
    call, arguments = CALLS[name]
    if is_warm:
        for _ in range(3):
            call(*arguments)
    with pytest.raises(TypeError) as error:
        torch.jit.trace(call, arguments)
    assert str(error.value) == WORDS
    call(*arguments)  # as before
