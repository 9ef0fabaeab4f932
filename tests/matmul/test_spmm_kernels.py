"""`spmm` and `sddmm` through the generated kernels: tiny shapes, for Triton's interpreter and for a GPU."""

from __future__ import annotations

import pytest
import torch
from sparse_inputs import EVERY_KIND, SPARSE_WARNINGS, edges, is_entry, random_dense, random_matrix
from tolerances import assert_matches

from insum_ops import insum, sddmm, spmm
from insum_ops.compiler import pipeline
from insum_ops.formats import COO, GroupCOO

pytestmark = [SPARSE_WARNINGS, pytest.mark.kernels]
SPMM = "C[m,n] += A[m,k] * B[k,n]"
KINDS = ["GroupCOO", "ELL", "BlockCOO", "csr int32", "uncoalesced", "edges"]


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_products(kind, reduce):
    A, B = random_matrix(5, 4, torch.float32), random_dense(4, 3, dtype=torch.float32)
    expected = A.double() @ B.double()
    if reduce == "mean":
        expected = expected / is_entry(A, kind).sum(1, keepdim=True).clamp(min=1)
    assert_matches(spmm(EVERY_KIND[kind](A), B, reduce), expected)


def test_pieces_of_rows_at_other_lengths():
    for rows in (66, 71):  # one class of shapes, of which none tells how many pieces there are
        A, B = random_matrix(rows, 40, torch.float32), random_dense(40, 3, dtype=torch.float32)
        A = torch.where(torch.rand(rows, 1, device=A.device) < 0.1, A, A * (torch.rand_like(A) < 0.05))
        assert_matches(insum(SPMM, A=GroupCOO.from_dense(A, group_size=1), B=B), A.double() @ B.double())


def test_pieces_of_new_matrices_are_not_planned_again(monkeypatch):
    torch.manual_seed(0)
    planned, runner_of = [], pipeline.runner_of
    monkeypatch.setattr(pipeline, "runner_of", lambda *args: planned.append(args) or runner_of(*args))
    B = random_dense(100, 3, dtype=torch.float32)
    for length in (150, 157, 165, 171, 179, 181, 186):  # whose rows are of other lengths too, cut into other pieces
        place = torch.randperm(100 * 100)[:length].to(B.device)
        A = COO.from_coo(torch.stack([place // 100, place % 100]), torch.randn(length, device=B.device), (100, 100))
        assert_matches(insum(SPMM, A=A, B=B), A.to_dense().double() @ B.double())
    assert len(planned) <= 4


@pytest.mark.parametrize("shape", [(4,), (2, 4, 3)], ids=str)
def test_vectors_and_batches(shape):
    A, B = random_matrix(5, 4, torch.float32), random_dense(*shape, dtype=torch.float32)
    assert_matches(spmm(EVERY_KIND["csr"](A), B), torch.matmul(A.double(), B.double()))


@pytest.mark.cpu
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients(reduce):
    edge_index, weight, size = edges(random_matrix(5, 4, torch.float32))
    weight, B = weight.requires_grad_(), random_dense(4, 3, dtype=torch.float32).requires_grad_()
    upstream = random_dense(5, 3, dtype=torch.float32)
    got = torch.autograd.grad(spmm((edge_index, weight, size), B, reduce), (weight, B), upstream)
    twins = [operand.detach().double().requires_grad_() for operand in (weight, B)]
    C = torch.zeros_like(upstream, dtype=torch.float64)
    C = C.index_add(0, edge_index[1], twins[0][:, None] * twins[1][edge_index[0]])
    if reduce == "mean":
        C = C / edge_index[1].bincount(minlength=5).clamp(min=1)[:, None]
    for one, other in zip(got, torch.autograd.grad(C, twins, upstream.double())):
        assert_matches(one, other)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["GroupCOO", "csr", "csc", "edges"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_what_a_transform_worked_out_first_is_good_for_kernels(kind, reduce):
    A, B = random_matrix(5, 4, torch.float32), random_dense(4, 3, dtype=torch.float32)
    source, expected = EVERY_KIND[kind](A), A.double() @ B.double()
    if reduce == "mean":
        expected = expected / is_entry(A, kind).sum(1, keepdim=True).clamp(min=1)
    torch.func.grad(lambda B: spmm(source, B, reduce).sum())(B)
    assert_matches(spmm(source, B, reduce), expected)


@pytest.mark.parametrize("kind", ["GroupCOO", "BlockCOO", "csr"])
def test_sampled_products_and_their_gradients(kind):
    A = random_matrix(5, 4, torch.float32)
    X, Y = (random_dense(rows, 3, dtype=torch.float32).requires_grad_() for rows in (5, 4))
    V = sddmm(EVERY_KIND[kind](A), X, Y)
    twins = [operand.detach().double().requires_grad_() for operand in (X, Y)]
    expected = twins[0] @ twins[1].T * is_entry(A, kind)
    assert_matches(V.to_dense(), expected)
    values = V.values() if isinstance(V, torch.Tensor) else V.values
    got = torch.autograd.grad(values.sum(), (X, Y))
    for one, other in zip(got, torch.autograd.grad(expected.sum(), twins)):
        assert_matches(one, other)
