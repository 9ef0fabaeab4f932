"""`spmm(reduce="max")` and "min": the largest and smallest product of each row, and who gets the gradient."""

from __future__ import annotations

import numpy
import pytest
import scipy.sparse
import torch
from gradient_checks import gradcheck
from sparse_inputs import (
    EVERY_KIND,
    FORMATS,
    SPARSE_WARNINGS,
    TENSORS,
    csr,
    edges,
    every_kind,
    is_entry,
    random_dense,
    random_matrix,
)
from statements import DEVICE
from tolerances import DTYPES, assert_matches
from torch import Tensor

from insum_ops import spmm
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.formats import BlockCOO, GroupCOO
from insum_ops.nn import SpMM

pytestmark = SPARSE_WARNINGS
REDUCES = ["max", "min"]


def extreme(A: Tensor, B: Tensor, reduce: str, kind: str = "") -> Tensor:
    """Dense float64: the extreme of the products A[m,k] * B[...,k,n] over the stored k; 0 in rows without any."""
    A, B = A.double(), B.double()
    columns = B.unsqueeze(-1) if B.ndim == 1 else B
    products = A[:, :, None] * columns.unsqueeze(-3)  # [..., M, K, N]
    stored = is_entry(A, kind)
    nothing = float("-inf") if reduce == "max" else float("inf")
    products = torch.where(stored[:, :, None], products, nothing)
    found = products.amax(-2) if reduce == "max" else products.amin(-2)
    found = torch.where(stored.any(1)[:, None], found, 0)
    return found.squeeze(-1) if B.ndim == 1 else found


@every_kind
@pytest.mark.parametrize("reduce", REDUCES)
def test_every_kind_of_matrix(kind, reduce):
    A, B = random_matrix(12, 12), random_dense(12, 5)  # blocks divide it
    assert_matches(spmm(EVERY_KIND[kind](A), B, reduce), extreme(A, B, reduce, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("kind", ["GroupCOO", "csr", "edges"])
def test_every_dtype_keeps_its_own(dtype, reduce, kind):
    A, B = random_matrix(9, 8, dtype), random_dense(8, 6, dtype=dtype)
    C = spmm(EVERY_KIND[kind](A), B, reduce)
    assert C.dtype == dtype
    assert_matches(C, extreme(A, B, reduce))


@pytest.mark.parametrize("shape", [(7,), (7, 1), (3, 7, 5), (2, 3, 7, 2)], ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_any_leading_dimensions(shape, reduce):
    A, B = random_matrix(9, 7), random_dense(*shape)
    assert_matches(spmm(csr(A), B, reduce), extreme(A, B, reduce))


@pytest.mark.parametrize(("name", "same"), [("amax", "max"), ("amin", "min")])
def test_the_names_that_torch_has(name, same):
    A, B = random_matrix(6, 5), random_dense(5, 3)
    assert torch.equal(spmm(csr(A), B, name), spmm(csr(A), B, same))


@pytest.mark.parametrize(("M", "K", "N"), [(0, 4, 3), (4, 0, 3), (4, 3, 0), (4, 5, 3)])
@pytest.mark.parametrize("reduce", REDUCES)
def test_nothing_stored_gives_zeros(M, K, N, reduce):
    B = random_dense(K, N)
    C = spmm(csr(torch.zeros(M, K, dtype=torch.float64, device=DEVICE)), B, reduce)
    assert C.shape == (M, N)
    assert not C.any()


@pytest.mark.skipif(DEVICE != "cpu", reason="torch reduces on the CPU alone")
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_equal_to_torch_with_duplicates(reduce):
    """Every listed entry counts: a column that a row lists twice gives two products."""
    A = torch.sparse_csr_tensor(
        torch.tensor([0, 3, 3, 4]), torch.tensor([1, 1, 2, 0]), torch.tensor([1.0, -2.0, 3.0, -4.0]), (3, 3)
    )
    B = random_dense(3, 4, dtype=torch.float32)
    assert_matches(spmm(A, B, reduce), torch.sparse.mm(A, B, reduce).double())


@pytest.mark.parametrize("reduce", REDUCES)
def test_equal_to_a_scatter_over_edges(reduce):
    edge_index = torch.tensor([[0, 0, 1, 2, 0], [1, 1, 1, 0, 3]], device=DEVICE)
    weight, B = random_dense(5), random_dense(3, 2)
    products = weight[:, None] * B[edge_index[0]]
    expected = torch.zeros(4, 2, dtype=torch.float64, device=DEVICE)
    targets = edge_index[1][:, None].expand(-1, 2)
    expected = expected.scatter_reduce(0, targets, products, f"a{reduce}", include_self=False)
    assert_matches(spmm((edge_index, weight, (3, 4)), B, reduce), expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_of_a_format_and_of_B(kind, reduce):
    form = FORMATS[kind](random_matrix(4, 12))
    values, B = form.values.clone().requires_grad_(), random_dense(12, 2).requires_grad_()
    if form.block_size is not None:  # a block's own zeros tie, where no gradient is defined
        values = torch.randn_like(values).requires_grad_()
    assert gradcheck(lambda v, B: spmm(form.with_values(v), B, reduce), (values, B))


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_the_gradient_of_a_sparse_tensor_is_sparse_with_its_pattern(kind, reduce):
    dense, B, upstream = random_matrix(6, 4), random_dense(4, 3).requires_grad_(), random_dense(6, 3)
    A = TENSORS[kind](dense).requires_grad_()
    dA, dB = torch.autograd.grad(spmm(A, B, reduce), (A, B), upstream)
    twins = dense.clone().requires_grad_(), B.detach().clone().requires_grad_()
    expected = torch.autograd.grad(extreme(*twins, reduce), twins, upstream)
    assert dA.layout == A.layout
    assert_matches(dA.to_dense(), expected[0])
    assert_matches(dB, expected[1])


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradients_of_edge_weights(reduce):
    edge_index, weight, size = edges(random_matrix(5, 4))
    B = random_dense(4, 2).requires_grad_()
    assert gradcheck(lambda w, B: spmm((edge_index, w, size), B, reduce), (weight.requires_grad_(), B))


@pytest.mark.parametrize("reduce", REDUCES)
def test_the_layer_takes_it_too(reduce):
    A, B = random_matrix(6, 5), random_dense(5, 3)
    assert_matches(SpMM(csr(A))(B, reduce), extreme(A, B, reduce))


def test_blocks_that_are_not_full_are_refused():
    A, B = BlockCOO.from_dense(random_matrix(4, 7), block_size=(2, 2)), random_dense(7, 3)
    with pytest.raises(UnsupportedError, match="max runs over k, but the last block of A dimension 1 is not full"):
        spmm(A, B, "max")


def test_a_nan_wins():
    A, B = (
        csr(torch.tensor([[1.0, 2.0, 0.0]], device=DEVICE)),
        torch.tensor([[1.0], [float("nan")], [3.0]], device=DEVICE),
    )
    assert spmm(A, B, "max").isnan().all()
    assert spmm(A, B, "min").isnan().all()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_what_a_scipy_array_lists_twice_is_one_entry(kind, reduce):
    """As for scipy itself, whose `toarray` adds it up, and as in a COO tensor of torch."""
    rows, columns = numpy.array([0, 0, 0, 1, 1]), numpy.array([2, 0, 2, 1, 1])
    values = numpy.array([1.0, 5.0, 2.0, 3.0, -3.0])
    if kind == "coo":
        A = scipy.sparse.coo_array((values, (rows, columns)), shape=(3, 3))
    elif kind == "csr":
        A = scipy.sparse.csr_array((values, columns, numpy.array([0, 3, 5, 5])), shape=(3, 3))
    else:
        A = scipy.sparse.csc_array((values, columns, numpy.array([0, 3, 5, 5])), shape=(3, 3))
        rows, columns = columns, rows
    B = torch.randn(3, 4, dtype=torch.float64)
    listed = torch.sparse_coo_tensor(numpy.stack([rows, columns]), values, (3, 3))
    expected = spmm(listed.coalesce(), B, reduce)
    assert_matches(spmm(A, B, reduce), expected)
    assert_matches(spmm(GroupCOO.from_scipy(A), B, reduce), expected)
    assert_matches(torch.from_numpy(A.toarray()) @ B, spmm(A, B))
    assert A.nnz == 5  # it is not changed
