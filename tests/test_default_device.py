"""What is made along the way lies where the operands do, whatever torch's default device is.

The default is the meta device here: a tensor that is made there by mistake has no numbers, as one on a GPU would not
meet those on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tolerances import TOLERANCE

from insum_ops import insum, sddmm, spmm
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO
from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseMaxPool3d, SubMConv3d

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor:UserWarning")]
EXACT = TOLERANCE[torch.float64]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu")


@pytest.fixture(autouse=True)
def _elsewhere_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("columns", [1, 12])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_sums_by_row(columns, is_sorted):
    rows = torch.arange(600, device="cpu") % 3
    rows = rows.sort().values if is_sorted else rows
    X = _draw(600, columns).requires_grad_()
    Y = insum("Y[rows[p],n] += X[p,n]", rows=rows, X=X, size=(3, columns))
    expected = torch.stack([X.detach()[rows == row].sum(0) for row in range(3)])
    torch.testing.assert_close(Y, expected, **EXACT)
    upstream = _draw(3, columns)
    Y.backward(upstream)
    torch.testing.assert_close(X.grad, upstream[rows], **EXACT)


def test_weighted_sums_of_long_rows():
    AK, AV, B = torch.arange(600, device="cpu").view(2, 300) % 7, _draw(2, 300), _draw(7, 12)
    C = insum("C[p,n] += AV[p,q] * B[AK[p,q],n]", AK=AK, AV=AV, B=B)
    torch.testing.assert_close(C, (AV.unsqueeze(2) * B[AK]).sum(1), **EXACT)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_graphs(reduce):
    edges, B = torch.tensor([[1, 0, 2], [0, 2, 2]], device="cpu"), _draw(3, 2)
    both = B[[0, 2]]
    last = {"sum": both.sum(0), "mean": both.mean(0), "max": both.amax(0), "min": both.amin(0)}[reduce]
    expected = torch.stack([B[1], torch.zeros(2, dtype=B.dtype, device="cpu"), last])
    torch.testing.assert_close(spmm((edges, None), B, reduce=reduce), expected, **EXACT)


@pytest.mark.parametrize("kind", [COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO], ids=lambda kind: kind.__name__)
def test_formats_and_torch_s_sparse_tensors(kind):
    dense, B = torch.eye(4, dtype=torch.float64, device="cpu") + 1, _draw(4, 2)
    form = kind.from_dense(dense, **({"block_size": (2, 2)} if kind.is_blocked else {}))
    for A in (form, form.to_torch()):
        torch.testing.assert_close(spmm(A, B), dense @ B, **EXACT)
        torch.testing.assert_close(sddmm(A, B, B).to_dense(), B @ B.T, **EXACT)


def test_gradients_of_sparse_tensors():
    B = _draw(4, 2)
    for A in (torch.eye(4, dtype=torch.float64, device="cpu").to_sparse(), torch.eye(4, device="cpu").to_sparse_csr()):
        A = A.requires_grad_()
        spmm(A, B).sum().backward()
        assert A.grad.device == A.device


def test_layers_over_voxels():
    indices = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 2]], device="cpu")
    x = SparseConvTensor(_draw(3, 2).float(), indices, [4, 4, 4], 1)
    for layer in (SubMConv3d(2, 3, 3), SparseConv3d(2, 3, 2, stride=2), SparseMaxPool3d(2, stride=2)):
        assert layer.to_empty(device="cpu")(x).dense().device.type == "cpu"
