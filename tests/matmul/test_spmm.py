"""`spmm` is a dense product with the zeros left out, for every kind of operand."""

from __future__ import annotations

import pytest
import scipy.sparse
import torch
from sparse_inputs import (
    BLOCKS,
    EVERY_KIND,
    SPARSE_WARNINGS,
    blocked,
    csr,
    edges,
    every_kind,
    is_entry,
    random_dense,
    random_matrix,
    scipy_of,
    uncoalesced,
)
from statements import DEVICE
from tolerances import DTYPES, assert_matches
from torch import Tensor

from insum_ops import spmm
from insum_ops.formats import BlockCOO

pytestmark = SPARSE_WARNINGS


def product(A: Tensor, B: Tensor, reduce: str, kind: str = "") -> Tensor:
    """Dense float64: the sum over k, or over as many entries as the row stores."""
    A, B = A.double().cpu(), B.double().cpu()
    if reduce == "sum":
        return A @ B
    counts = is_entry(A, kind).sum(1).clamp(min=1)
    return A @ B / (counts if B.ndim == 1 else counts[:, None])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_kind_of_matrix_gives_the_dense_product(kind, dtype):
    A, B = random_matrix(11, 7, dtype), random_dense(7, 5, dtype=dtype)
    C = spmm(EVERY_KIND[kind](A), B)
    assert C.dtype == dtype
    assert_matches(C, product(A, B, "sum"))
    assert_matches(spmm(EVERY_KIND[kind](A), B, reduce="mean"), product(A, B, "mean", kind))


@pytest.mark.parametrize("kind", ["GroupCOO", "ELL", "BlockCOO", "csr", "uncoalesced", "edges"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_every_dtype_keeps_its_own(kind, dtype, reduce):
    A, B = random_matrix(9, 8, dtype) / 4, random_dense(8, 6, dtype=dtype) / 4
    C = spmm(EVERY_KIND[kind](A), B, reduce=reduce)
    assert C.dtype == dtype
    assert_matches(C, product(A, B, reduce, kind))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_stay_blocks(kind, dtype):
    A, B = blocked(random_matrix(12, 8, dtype)) / 4, random_dense(8, 5, dtype=dtype) / 4
    assert_matches(spmm(BLOCKS[kind](A), B), product(A, B, "sum"))
    assert_matches(spmm(BLOCKS[kind](A), B, "mean"), product(A, B, "mean", kind))


def test_mixed_dtypes_are_promoted_as_torch_does():
    A, B = random_matrix(5, 4, torch.float32), random_dense(4, 3, dtype=torch.float16)
    for reduce in ("sum", "mean"):
        assert spmm(csr(A), B, reduce).dtype == torch.float32
        assert spmm(csr(A.half()), B.bfloat16(), reduce).dtype == torch.float32
        assert spmm(csr(A), B.double(), reduce).dtype == torch.float64


@pytest.mark.parametrize(
    "shape", [(7,), (7, 1), (3, 7, 5), (2, 3, 7, 5), (1, 2, 1, 7, 2), (0, 7, 3), (2, 0, 7, 3)], ids=str
)
@pytest.mark.parametrize("kind", ["GroupCOO", "BlockCOO", "csr", "edges"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_any_leading_dimensions(shape, kind, reduce):
    A, B = random_matrix(9, 7), random_dense(*shape)
    C = spmm(EVERY_KIND[kind](A), B, reduce)
    assert C.shape == (*shape[:-2], 9, *shape[-1:]) if len(shape) > 1 else (9,)
    assert_matches(C, product(A, B, reduce, kind))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_noncontiguous_operands(reduce):
    A, base = random_matrix(9, 7), random_dense(4, 14, 3)
    for B in (
        base[0, ::2],
        base[0].T[:, ::2].T,
        base.transpose(0, 2)[1, 1::2],
        base.permute(2, 1, 0)[:, ::2],
        base[:, ::2],
    ):
        expected = A @ B if reduce == "sum" else A @ B / (A != 0).sum(1, keepdim=True).clamp(min=1)
        assert_matches(spmm(csr(A), B, reduce), expected)


@pytest.mark.parametrize(("M", "K", "N"), [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0), (1, 1, 1), (4, 5, 3)])
@pytest.mark.parametrize("kind", ["GroupCOO", "COO", "ELL", "BlockCOO", "coo", "csr", "csc", "edges", "scipy csr"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_nothing_stored_gives_zeros(M, K, N, kind, reduce):
    if kind.startswith("scipy") and 0 in (M, K):
        A = scipy.sparse.csr_array((M, K))
    elif kind == "BlockCOO" and M == 1:
        A = BlockCOO.from_dense(torch.zeros(M, K, dtype=torch.float64, device=DEVICE), block_size=(1, 1))
    else:
        A = EVERY_KIND[kind](torch.zeros(M, K, dtype=torch.float64, device=DEVICE))
    B = random_dense(K, N).requires_grad_()
    C = spmm(A, B, reduce)
    assert C.shape == (M, N)
    assert not C.any()
    C.sum().backward()
    assert not B.grad.any()


def test_a_nan_beside_the_pattern_stays_out():
    A = torch.zeros(5, 6, dtype=torch.float64, device=DEVICE)
    A[0, 1], A[2, 0], A[2, 1], A[2, 3] = 1, 2, 3, 4
    B = random_dense(6, 3)
    B[[2, 4, 5]] = float("nan")
    for kind in ("GroupCOO", "csr", "edges", "uncoalesced"):
        assert_matches(spmm(EVERY_KIND[kind](A), B), A @ B.nan_to_num())


def test_linear_in_both_operands():
    A, B, D = random_matrix(8, 6), random_dense(6, 4), random_dense(6, 4)
    S = csr(A)
    assert_matches(spmm(S, 2 * B - 3 * D), (2 * spmm(S, B) - 3 * spmm(S, D)).cpu())
    assert_matches(spmm(csr(-4 * A), B), (-4 * spmm(S, B)).cpu())


def test_the_transpose_is_the_adjoint():
    A, B, D = random_matrix(8, 6), random_dense(6, 4), random_dense(8, 4)
    assert_matches((spmm(csr(A), B) * D).sum(), (B * spmm(csr(A.T), D)).sum())


@pytest.mark.parametrize("kind", ["GroupCOO", "csr", "edges"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_autocast_takes_its_type(kind, reduce):
    A, B = random_matrix(8, 6, torch.float32) / 4, random_dense(6, 4, dtype=torch.float32) / 4
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        C = spmm(EVERY_KIND[kind](A), B, reduce)
    assert C.dtype == torch.bfloat16
    assert_matches(C, product(A, B, reduce))


def test_the_order_of_edges_does_not_matter():
    A, B = random_matrix(8, 6), random_dense(6, 4)
    edge_index, weight, size = edges(A)
    order = torch.randperm(len(weight)).to(DEVICE)
    for reduce in ("sum", "mean"):
        one, other = (
            spmm((edge_index, weight, size), B, reduce),
            spmm((edge_index[:, order], weight[order], size), B, reduce),
        )
        assert_matches(one, other.cpu())


def test_equal_to_torch_and_scipy():
    A, B = random_matrix(8, 6), random_dense(6, 4)
    assert_matches(spmm(csr(A), B), torch.sparse.mm(csr(A), B).cpu())
    assert_matches(spmm(scipy_of(A, "csr"), B), torch.from_numpy(scipy_of(A, "csr") @ B.cpu().numpy()))


@pytest.mark.skipif(DEVICE != "cpu", reason="torch reduces on the CPU alone")
def test_a_duplicate_counts_as_in_torch():
    """Every listed entry of a compressed matrix is one, as torch.sparse.mm(reduce=...) has it."""
    A = torch.sparse_csr_tensor(
        torch.tensor([0, 3, 3, 4]), torch.tensor([1, 1, 2, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), (3, 3)
    )
    B = random_dense(3, 2, dtype=torch.float32)
    for reduce in ("sum", "mean"):
        assert_matches(spmm(A, B, reduce), torch.sparse.mm(A, B, reduce).double())


def test_a_repeated_edge_counts_as_in_scatter():
    edge_index = torch.tensor([[0, 0, 1, 2, 0], [1, 1, 1, 0, 3]], device=DEVICE)
    weight, B = random_dense(5), random_dense(3, 2)
    products = weight[:, None] * B[edge_index[0]]
    targets = edge_index[1][:, None].expand(-1, 2)
    for reduce in ("sum", "mean"):
        expected = torch.zeros(4, 2, dtype=torch.float64, device=DEVICE)
        expected = expected.scatter_reduce(0, targets, products, reduce, include_self=False)
        assert_matches(spmm((edge_index, weight, (3, 4)), B, reduce), expected)


def test_an_uncoalesced_entry_is_one():
    A, B = random_matrix(6, 5), random_dense(5, 3)
    for reduce in ("sum", "mean"):
        assert_matches(spmm(uncoalesced(A), B, reduce), spmm(uncoalesced(A).coalesce(), B, reduce).cpu())


def test_an_explicit_zero_is_an_entry_of_the_mean():
    A = torch.sparse_coo_tensor([[0, 0], [0, 1]], [0.0, 6.0], (1, 2), device=DEVICE)
    assert spmm(A, torch.ones(2, 1, device=DEVICE), "mean").tolist() == [[3.0]]


def test_a_mean_of_many_halves_neither_overflows_nor_underflows():
    edge_index = torch.stack([torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)]).to(DEVICE)
    B = torch.full((100_000, 1), 3.0, dtype=torch.float16, device=DEVICE)
    mean = spmm((edge_index, None, (100_000, 1)), B, "mean")
    assert_matches(mean, torch.tensor([[3.0]], dtype=torch.float64))


@pytest.mark.parametrize("size", [(6, 8), [6, 8]], ids=["tuple", "list"])
def test_a_graph_is_summed_over_edges_into_each_target(size):
    edge_index, weight, _ = edges(random_matrix(8, 6))
    B = random_dense(6, 4)
    expected = torch.zeros(8, 4, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, edge_index[1], weight[:, None] * B[edge_index[0]])
    assert_matches(spmm((edge_index, weight, size), B), expected)


def test_a_square_graph_needs_no_size():
    edge_index = torch.tensor([[0, 2], [1, 1]], device=DEVICE)
    B = random_dense(5, 2, dtype=torch.float32)
    expected = torch.zeros_like(B)
    expected[1] = B[0] + B[2]
    for A in ((edge_index, None), (edge_index, None, None), (edge_index, None, 5), (edge_index, None, (5, 5))):
        assert_matches(spmm(A, B), expected.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges_without_weights_weigh_one_in_the_dtype_of_B(dtype):
    edge_index, _, size = edges(random_matrix(8, 6))
    B = random_dense(6, 2, dtype=dtype)
    C = spmm((edge_index, None, size), B)
    assert C.dtype == dtype
    expected = torch.zeros(8, 2, dtype=torch.float64, device=DEVICE)
    assert_matches(C, expected.index_add_(0, edge_index[1], B.double()[edge_index[0]]))
