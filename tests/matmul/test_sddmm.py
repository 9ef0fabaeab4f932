"""`sddmm` is `X @ Y.T` where the pattern has an entry, and comes back as the pattern came."""

from __future__ import annotations

import re

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from sparse_inputs import (
    BLOCKS,
    FORMATS,
    SPARSE_WARNINGS,
    TENSORS,
    blocked,
    csr,
    edges,
    is_entry,
    random_dense,
    random_matrix,
    scipy_of,
)
from statements import DEVICE
from tolerances import DTYPES, assert_matches
from torch import Tensor

from insum_ops import sddmm
from insum_ops.compiler.language.errors import IndexRangeError, OperandError, ShapeError
from insum_ops.formats import COO, GroupCOO

pytestmark = SPARSE_WARNINGS
KINDS = {**FORMATS, **TENSORS, **BLOCKS}


def sampled(A: Tensor, kind: str, X: Tensor, Y: Tensor) -> Tensor:
    """The dense product with zeros where the pattern has no entry."""
    return X.double().cpu() @ Y.double().cpu().T * is_entry(A, kind).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [1, 5])
def test_every_kind_of_pattern_gives_the_sampled_product(kind, D):
    A = blocked(random_matrix(12, 8))
    pattern, X, Y = KINDS[kind](A), random_dense(12, D), random_dense(8, D)
    V = sddmm(pattern, X, Y)
    assert type(V) is type(pattern)
    if isinstance(pattern, Tensor):
        assert V.layout == pattern.layout
    assert V.dtype == torch.float64
    assert_matches(V.to_dense(), sampled(A, kind, X, Y))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_format_comes_back_over_the_same_pattern(kind):
    pattern = FORMATS[kind](random_matrix(7, 5))
    V = sddmm(pattern, random_dense(7, 3), random_dense(5, 3))
    assert V.coords is pattern.coords
    assert (V.shape, V.group_dim, V.block_size) == (pattern.shape, pattern.group_dim, pattern.block_size)
    if pattern.has_padding:
        is_padding = torch.stack([coord < 0 for coord in pattern.coords if coord is not None and coord.ndim > 1]).any(0)
        assert not V.values[is_padding].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["GroupCOO", "BlockCOO", "csr", "uncoalesced"])
def test_every_dtype(dtype, kind):
    A = random_matrix(7, 5)
    X, Y = random_dense(7, 6, dtype=dtype) / 4, random_dense(5, 6, dtype=dtype) / 4
    V = sddmm(KINDS[kind](A), X, Y)
    assert V.dtype == dtype  # the pattern's own does not matter
    assert_matches(V.to_dense(), sampled(A, kind, X, Y))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_edges_give_one_value_each_in_their_order(index_dtype):
    edge_index, weight, size = edges(random_matrix(7, 5), index_dtype)
    X, Y = random_dense(7, 3), random_dense(5, 3)
    source, target = edge_index.long()
    expected = (X[target] * Y[source]).sum(1)
    for pattern in ((edge_index, weight, size), (edge_index, None), (edge_index, weight, None)):
        assert_matches(sddmm(pattern, X, Y), expected)


def test_a_repeated_edge_is_two():
    edge_index = torch.tensor([[0, 2, 0, 0], [1, 0, 1, 0]], device=DEVICE)
    X, Y = random_dense(2, 3), random_dense(3, 3)
    assert_matches(sddmm((edge_index, None), X, Y), (X[edge_index[1]] * Y[edge_index[0]]).sum(1))


def test_torch_samples_the_same():
    A, X, Y = csr(random_matrix(7, 5)), random_dense(7, 3), random_dense(5, 3)
    zero = torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), torch.zeros_like(A.values()), A.shape)
    try:
        expected = torch.sparse.sampled_addmm(zero, X, Y.T.contiguous())
    except RuntimeError as error:
        pytest.skip(f"this torch has no sampled_addmm here: {error}")
    assert_matches(sddmm(A, X, Y).values(), expected.values())


def test_the_values_of_the_pattern_are_not_read():
    A = random_matrix(7, 5)
    pattern = GroupCOO.from_dense(A)
    nan = pattern.with_values(torch.full_like(pattern.values, float("nan")).requires_grad_())
    X, Y = random_dense(7, 3), random_dense(5, 3)
    V = sddmm(nan, X, Y)
    assert not V.values.requires_grad
    assert_matches(V.to_dense(), sampled(A, "", X, Y))


@pytest.mark.parametrize(("M", "K", "D"), [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0), (4, 5, 3)])
@pytest.mark.parametrize("kind", ["GroupCOO", "COO", "ELL", "BlockCOO", "coo", "csr"])
def test_an_empty_pattern_or_no_features_give_zeros(M, K, D, kind):
    pattern = KINDS[kind](torch.zeros(M, K, dtype=torch.float64, device=DEVICE))
    X, Y = random_dense(M, D).requires_grad_(), random_dense(K, D)
    V = sddmm(pattern, X, Y)
    assert V.shape == (M, K)
    assert not V.to_dense().any()


def test_no_features_give_zeros():
    V = sddmm(GroupCOO.from_dense(random_matrix(4, 3)), random_dense(4, 0), random_dense(3, 0))
    assert not V.values.any()


@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_of_a_format(kind):
    pattern = FORMATS[kind](random_matrix(5, 4))
    X, Y = random_dense(5, 2).requires_grad_(), random_dense(4, 2).requires_grad_()
    assert gradcheck(lambda X, Y: sddmm(pattern, X, Y).values, (X, Y))


@pytest.mark.parametrize("kind", ["GroupCOO", "BlockCOO"])
def test_second_gradients(kind):
    pattern = FORMATS[kind](random_matrix(4, 3))
    X, Y = random_dense(4, 2).requires_grad_(), random_dense(3, 2).requires_grad_()
    assert gradgradcheck(lambda X, Y: sddmm(pattern, X, Y).values, (X, Y))


def test_gradients_of_edges():
    graph = edges(random_matrix(5, 4))
    X, Y = random_dense(5, 2).requires_grad_(), random_dense(4, 2).requires_grad_()
    assert gradcheck(lambda X, Y: sddmm(graph, X, Y), (X, Y))
    assert gradgradcheck(lambda X, Y: sddmm(graph, X, Y), (X, Y))


@pytest.mark.filterwarnings("ignore:sparse_compressed_to_sparse_bs")  # torch's own gradient of `to_dense` on a GPU
@pytest.mark.parametrize("is_made_dense", [False, True])
@pytest.mark.parametrize("kind", {**TENSORS, **BLOCKS})
def test_gradients_flow_through_the_sparse_tensor_that_comes_back(kind, is_made_dense):
    A = blocked(random_matrix(6, 4))
    X, Y = random_dense(6, 2).requires_grad_(), random_dense(4, 2).requires_grad_()
    V = sddmm({**TENSORS, **BLOCKS}[kind](A), X, Y)
    V = V.coalesce() if V.layout is torch.sparse_coo else V
    (V.to_dense() if is_made_dense else V.values()).pow(2).sum().backward()
    twins = [operand.detach().clone().requires_grad_() for operand in (X, Y)]
    (twins[0] @ twins[1].T * is_entry(A, kind)).pow(2).sum().backward()
    assert_matches(X.grad, twins[0].grad)
    assert_matches(Y.grad, twins[1].grad)


def test_columns_of_a_row_that_do_not_ascend_have_their_own_gradients():
    rows, columns = torch.tensor([0, 3, 4], device=DEVICE), torch.tensor([2, 0, 1, 1], device=DEVICE)
    pattern = torch.sparse_csr_tensor(rows, columns, torch.ones(4, device=DEVICE), (2, 3))
    X, Y, weight = random_dense(2, 2).requires_grad_(), random_dense(3, 2), random_dense(2, 3)
    (grad,) = torch.autograd.grad((sddmm(pattern, X, Y).to_dense() * weight).sum(), X)
    assert_matches(grad, (weight * torch.tensor([[1, 1, 1], [0, 1, 0]], device=DEVICE)) @ Y)


def test_second_gradients_of_a_csr_tensor_that_is_made_dense():
    pattern = csr(random_matrix(4, 3))
    X, Y = random_dense(4, 2).requires_grad_(), random_dense(3, 2).requires_grad_()
    assert gradgradcheck(lambda X, Y: sddmm(pattern, X, Y).to_dense(), (X, Y))


def test_the_gradient_of_a_csr_tensor_is_no_matrix():
    N = 400_000  # dense, it would hold 1.3 TB
    rows, columns = torch.arange(N + 1, device=DEVICE), torch.arange(N, device=DEVICE).flip(0)
    pattern = torch.sparse_csr_tensor(rows, columns, torch.ones(N, device=DEVICE), (N, N))
    X, Y = random_dense(N, 1).requires_grad_(), random_dense(N, 1)
    (grad,) = torch.autograd.grad(sddmm(pattern, X, Y).values().sum(), X)
    assert_matches(grad, Y.flip(0))


def test_one_dtype_for_each_gradient():
    X, Y = (
        random_dense(5, 2, dtype=torch.float16).requires_grad_(),
        random_dense(4, 2, dtype=torch.float32).requires_grad_(),
    )
    V = sddmm(GroupCOO.from_dense(random_matrix(5, 4)), X, Y).values
    assert V.dtype == torch.float32
    V.sum().backward()
    assert (X.grad.dtype, Y.grad.dtype) == (torch.float16, torch.float32)


def test_a_format_is_traced_whole():
    A = random_matrix(5, 4)
    pattern = GroupCOO.from_dense(A)
    X, Y = random_dense(5, 2), random_dense(4, 2)
    sddmm(pattern, X, Y)
    traced = torch.compile(lambda X, Y: sddmm(pattern, X, Y).values, backend="eager", fullgraph=True)
    assert_matches(pattern.with_values(traced(X, Y)).to_dense(), sampled(A, "", X, Y))


def fails(error: type[Exception], message: str, pattern: object, X: object, Y: object) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        sddmm(pattern, X, Y)


def test_shapes_that_do_not_fit():
    pattern = GroupCOO.from_dense(torch.eye(3))
    remedy = "for a pattern [M, K], X must be [M, D] and Y [K, D]"
    for X, Y in ((4, 2), (3, 2)), ((3, 2), (4, 2)), ((3, 2), (3, 4)):
        message = f"X is {list(X)} and Y is {list(Y)} but pattern is [3, 3]; {remedy}"
        fails(ShapeError, message, pattern, torch.ones(X), torch.ones(Y))
    cube = COO.from_dense(torch.ones(2, 2, 2))
    message = f"X is [2, 1] and Y is [2, 1] but pattern is [2, 2, 2]; {remedy}"
    fails(ShapeError, message, cube, torch.ones(2, 1), torch.ones(2, 1))


def test_what_X_and_Y_must_be():
    pattern, X = GroupCOO.from_dense(torch.eye(3)), torch.ones(3, 2)
    fails(OperandError, "X is [3]; pass a dense tensor [rows, D]", pattern, X[:, 0], X)
    fails(OperandError, "Y is of type list; pass a dense tensor [rows, D]", pattern, X, [1.0])
    fails(
        OperandError,
        "X holds values, so it must be float16, bfloat16, float32 or float64, not int64; convert it with X.float()\n"
        "    V[p,q] += X[AM[p],d] * Y[AK[p,q],d]\n"
        "              ^",
        pattern,
        X.long(),
        X,
    )


def test_what_the_pattern_must_be():
    X = torch.ones(3, 2)
    fails(
        OperandError,
        "pattern is of type list; pass a format of insum_ops.formats, a torch sparse tensor "
        "or (edge_index, edge_weight, size)",
        [0],
        X,
        X,
    )
    fails(
        OperandError,
        "pattern is of type csr_array; pass insum_ops.formats.GroupCOO.from_scipy(pattern)",
        scipy_of(torch.eye(3), "csr"),
        X,
        X,
    )
    fails(
        OperandError,
        "pattern is a dense tensor; pass insum_ops.formats.GroupCOO.from_dense(pattern), or pattern.to_sparse_csr()",
        torch.eye(3),
        X,
        X,
    )
    fails(
        IndexRangeError,
        "edge_index[1, 0] is 3 but there are 3 targets; "
        "give the numbers of nodes as size=(sources, targets), the third part of the tuple",
        (torch.tensor([[0], [3]]), None),
        X,
        X,
    )


def test_another_device():
    pattern, X = GroupCOO.from_dense(torch.eye(3)), torch.ones(3, 2)
    fails(OperandError, "pattern is on cpu but X is on meta; move them to one device", pattern, X.to("meta"), X)
    fails(OperandError, "pattern is on cpu but Y is on meta; move them to one device", pattern, X, X.to("meta"))


def test_a_tracer_takes_edges():
    e, X = torch.tensor([[0, 1], [1, 2]]), torch.arange(6.0).view(3, 2)
    traced = torch.compile(lambda e, X: sddmm((e, None), X, X), fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(e, X), sddmm((e, None), X, X))
