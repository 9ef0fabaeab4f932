"""What one call of a tiny problem costs the host, in microseconds: what is left when the device has nothing to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO

from ..case import DEVICE, OURS, Case
from ..conftest import Note
from ..harness import host_us

CALLS = {
    "raw statement": (OURS, "torch.mm"),
    "raw statement, B learns": (OURS, "torch.mm"),
    "format": (OURS, "torch.sparse"),
    "spmm of a CSR tensor": (OURS, "torch.sparse"),
}
ROWS = [(name, provider) for name, providers in CALLS.items() for provider in providers]


def call_of(name: str, provider: str) -> Callable[[], object]:
    B = torch.randn(16, 16, device=DEVICE, requires_grad="learns" in name)
    identity = torch.eye(16, device=DEVICE)
    if provider == "torch.mm":
        return lambda: torch.mm(identity, B)
    sparse = identity.to_sparse_csr()
    if provider == "torch.sparse":
        return lambda: torch.sparse.mm(sparse, B)
    A = GroupCOO.from_dense(identity, group_size=1)
    if name.startswith("raw"):
        raw = dict(AM=A.AM, AK=A.AK, AV=A.AV)
        return lambda: insum("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", B=B, size=(16, 16), **raw)
    if name == "format":
        return lambda: insum("C[m,n] += A[m,k] * B[k,n]", A=A, B=B)
    return lambda: spmm(sparse, B)


@pytest.mark.parametrize(("name", "provider"), ROWS, ids=lambda value: str(value))
def test_host(name: str, provider: str, note: Note) -> None:
    note(Case("host", name), provider, host_us(call_of(name, provider)), "us")
