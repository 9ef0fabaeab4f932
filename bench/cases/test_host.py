"""What one call of a tiny problem costs the host, in microseconds: what is left when the device has nothing to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SpMM, SubMConv3d

from ..case import DEVICE, OURS, Case
from ..conftest import Note
from ..harness import host_us

pytestmark = pytest.mark.alone
CALLS = {
    "raw statement": (OURS, "torch.mm"),
    "raw statement, B learns": (OURS, "torch.mm"),
    "format": (OURS, "torch.sparse"),
    "spmm of a CSR tensor": (OURS, "torch.sparse"),
    "spmm of a CSR tensor, step": (OURS, "torch.sparse"),
    "SpMM": (OURS, "torch.sparse"),
    "linear layer": (OURS, "torch dense"),
    "linear layer, step": (OURS, "torch dense"),
    "convolution layer": (OURS,),
    "convolution layer, step": (OURS,),
}
ROWS = [(name, provider) for name, providers in CALLS.items() for provider in providers]


def call_of(name: str, provider: str) -> Callable[[], object]:
    """The call that a row times; a step is forward and backward, for every gradient that there is."""
    if "layer" in name:
        forward, leaves = _linear(provider) if "linear" in name else _convolution()
    else:
        forward, leaves = _product(name, provider)
    if "step" not in name:
        return torch.no_grad()(forward) if "layer" in name else forward
    upstream = torch.randn_like(forward().detach())

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(upstream)

    return step


Forward = tuple[Callable[[], Tensor], list[Tensor]]


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


@pytest.mark.parametrize(("name", "provider"), ROWS, ids=lambda value: str(value))
def test_host(name: str, provider: str, note: Note) -> None:
    note(Case("host", name), provider, host_us(call_of(name, provider)), "us")
