"""What one call of a tiny problem costs the host, in microseconds: what is left when the device has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SpMM, SubMConv3d

from ..case import DEVICE, OURS, Case, held
from ..conftest import Note
from ..harness import host_us_in_turns

pytestmark = pytest.mark.alone
EMPTY = "empty function"  # what torch takes of a step that computes nothing
CALLS = {
    "raw statement": (OURS, "torch.mm"),
    "raw statement, B learns": (OURS, "torch.mm"),
    "format": (OURS, "torch.sparse"),
    "spmm of a CSR tensor": (OURS, "torch.sparse"),
    "spmm of a CSR tensor, step": (OURS, "torch.sparse", EMPTY),
    "SpMM": (OURS, "torch.sparse"),
    "linear layer": (OURS, "torch dense"),
    "linear layer, step": (OURS, "torch dense", EMPTY),
    "convolution layer": (OURS,),
    "convolution layer, step": (OURS, EMPTY),
}
ROWS = [(name, provider) for name, providers in CALLS.items() for provider in providers]


def call_of(name: str, provider: str) -> Callable[[], object]:
    """The call that a row times; a step is forward and backward, for every gradient that there is."""
    forward, leaves = _forward(name, provider)
    if "step" not in name:
        return torch.no_grad()(forward) if "layer" in name else forward
    upstream = torch.randn_like(forward().detach())

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(upstream)

    return step


Forward = tuple[Callable[[], Tensor], list[Tensor]]


def _forward(name: str, provider: str) -> Forward:
    """What a provider computes, and its leaves."""
    if provider == EMPTY:
        forward, leaves = _forward(name, OURS)
        size, dense = forward().shape, [_dense(leaf) for leaf in leaves]
        return lambda: _Empty.apply(size, *dense), dense
    if "layer" not in name:
        return _product(name, provider)
    return _linear(provider) if "linear" in name else _convolution()


class _Empty(torch.autograd.Function):
    """Memory for a value and for the gradient of each leaf, all of it left as it is."""

    @staticmethod
    def forward(ctx: Any, size: torch.Size, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return leaves[0].new_empty(size)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return None, *map(torch.empty_like, ctx.saved_tensors)


def _dense(leaf: Tensor) -> Tensor:
    """The leaf; for a sparse one a dense leaf of as many numbers: an empty sparse gradient takes torch longer."""
    return leaf if leaf.layout is torch.strided else torch.zeros_like(leaf.detach().values()).requires_grad_()


def _product(name: str, provider: str) -> Forward:
    learns = "learns" in name or "step" in name
    B = torch.randn(16, 16, device=DEVICE, requires_grad=learns)
    identity = torch.eye(16, device=DEVICE)
    if provider == "torch.mm":
        return lambda: torch.mm(identity, B), [B]
    sparse = identity.to_sparse_csr().requires_grad_("step" in name)
    if provider == "torch.sparse":
        return lambda: torch.sparse.mm(sparse, B), [sparse, B]
    A = GroupCOO.from_dense(identity, group_size=1)
    if name.startswith("raw"):
        raw = dict(AM=A.AM, AK=A.AK, AV=A.AV)
        return lambda: insum("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", B=B, size=(16, 16), **raw), [B]
    if name == "format":
        return lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B), [B]
    if name == "SpMM":
        layer = SpMM(sparse)
        return lambda: layer(B), [B]
    return lambda: spmm(sparse, B), [sparse, B]


def _linear(provider: str) -> Forward:
    layer: nn.Module = nn.Linear(64, 64, device=DEVICE)
    if provider == OURS:
        layer = BlockSparseLinear(64, 64, block_size=16, density=0.3, device=DEVICE)
    x = torch.randn(32, 64, device=DEVICE, requires_grad=True)
    return lambda: layer(x), [x, *layer.parameters()]


def _convolution() -> Forward:
    indices = torch.ones(1, 6, 6, 6, device=DEVICE).nonzero().int()
    features = torch.randn(len(indices), 16, device=DEVICE, requires_grad=True)
    layer = SubMConv3d(16, 16, 3).to(DEVICE)
    x = SparseConvTensor(features, indices, [6, 6, 6], batch_size=1)
    return lambda: layer(x).features, [features, *layer.parameters()]


@held
def times_of(name: str) -> dict[str, float]:
    """Microseconds of the host of each provider of a case, timed in turns: a ratio is of one and the same while."""
    return dict(zip(CALLS[name], host_us_in_turns([call_of(name, provider) for provider in CALLS[name]])))


@pytest.mark.parametrize(("name", "provider"), ROWS, ids=lambda value: str(value))
def test_host(name: str, provider: str, note: Note) -> None:
    note(Case("host", name), provider, times_of(name)[provider], "us")
