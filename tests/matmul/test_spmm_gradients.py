"""Gradients of `spmm` for B and for the values of A, only where A has entries; what is kept serves every mode."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

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
)
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor
from torch.autograd import forward_ad

from insum_ops import spmm
from insum_ops.formats import GroupCOO
from insum_ops.matmul.arrange import Arranged

pytestmark = SPARSE_WARNINGS


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_a_format_and_of_B(kind, reduce):
    form = FORMATS[kind](random_matrix(5, 4))
    values, B = form.values.clone().requires_grad_(), random_dense(4, 2).requires_grad_()
    assert gradcheck(lambda v, B: spmm(form.with_values(v), B, reduce), (values, B))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_second_gradients(reduce):
    form = GroupCOO.from_dense(random_matrix(4, 3))
    values, B = form.values.clone().requires_grad_(), random_dense(3, 2).requires_grad_()
    assert gradgradcheck(lambda v, B: spmm(form.with_values(v), B, reduce), (values, B))


@pytest.mark.parametrize("shape", [(4,), (4, 2), (2, 4, 2), (2, 1, 4, 2)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradients_of_edge_weights(shape, reduce):
    edge_index, weight, size = edges(random_matrix(5, 4))
    B = random_dense(*shape).requires_grad_()
    assert gradcheck(lambda w, B: spmm((edge_index, w, size), B, reduce), (weight.requires_grad_(), B))
    assert gradgradcheck(lambda w, B: spmm((edge_index, w, size), B, reduce), (weight, B))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weights_of_edges_keep_their_tangents(reduce):
    (edge_index, weight, size), B = edges(random_matrix(5, 4)), random_dense(4, 2)
    tangent = torch.randn_like(weight)
    expected = torch.zeros(5, 4, dtype=B.dtype, device=DEVICE)
    expected[edge_index[1], edge_index[0]] = tangent
    if reduce == "mean":
        expected /= torch.bincount(edge_index[1], minlength=5).clamp(min=1)[:, None]
    for _ in range(2):
        spmm((edge_index, weight, size), B, reduce)  # a format is kept for them, without a tangent
        with forward_ad.dual_level():
            product = spmm((edge_index, forward_ad.make_dual(weight, tangent), size), B, reduce)
            assert_matches(forward_ad.unpack_dual(product).tangent, expected @ B)


@pytest.mark.parametrize("kind", {**TENSORS, **BLOCKS})
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_the_gradient_of_a_sparse_tensor_is_sparse_with_its_pattern(kind, reduce):
    dense = blocked(random_matrix(6, 4))
    A = {**TENSORS, **BLOCKS}[kind](dense).requires_grad_()
    B, weight = random_dense(4, 3).requires_grad_(), random_dense(6, 3)
    dA, dB = torch.autograd.grad((spmm(A, B, reduce) * weight).sum(), (A, B))
    twin, B_twin = dense.clone().requires_grad_(), B.detach().clone().requires_grad_()
    stored = is_entry(dense, kind)
    C = twin @ B_twin
    if reduce == "mean":
        C = C / stored.sum(1, keepdim=True).clamp(min=1)
    expected, expected_dB = torch.autograd.grad((C * weight).sum(), (twin, B_twin))
    assert dA.layout == A.layout
    assert dA._nnz() == (A.detach().coalesce() if A.layout is torch.sparse_coo else A)._nnz()
    assert_matches(dA.to_dense(), expected * stored)
    assert_matches(dB, expected_dB)


def test_a_gradient_that_has_none_itself_asks_for_no_coordinates(monkeypatch):
    dense, B = random_matrix(6, 4), random_dense(4, 3).requires_grad_()
    A = csr(dense).requires_grad_()
    for _ in range(3):
        (dA,) = torch.autograd.grad(spmm(A, B).sum(), A)
        assert_matches(dA.to_dense(), B.detach().sum(1) * (dense != 0))
        monkeypatch.delattr(Arranged, "coords", raising=False)


@pytest.mark.parametrize("kind", ["coo", "uncoalesced", "csr"])  # torch accumulates .grad for no other sparse layout
def test_a_sparse_tensor_accumulates_its_gradient(kind):
    dense = random_matrix(6, 4)
    A, B = TENSORS[kind](dense).requires_grad_(), random_dense(4, 3)
    spmm(A, B).sum().backward()
    assert A.grad.layout == A.layout
    assert_matches(A.grad.to_dense(), B.sum(1) * (dense != 0))


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_gradients_flow_through_a_sparse_tensor_to_its_values(kind):
    dense = random_matrix(5, 4)
    pattern, B = dense.to_sparse_csr(), random_dense(4, 3)

    def product(values: Tensor) -> Tensor:
        if kind == "csr":
            A = torch.sparse_csr_tensor(pattern.crow_indices(), pattern.col_indices(), values, pattern.shape)
        else:
            A = torch.sparse_coo_tensor(dense.nonzero().T, values, dense.shape)
        return spmm(A, B)

    assert gradcheck(product, (dense[dense != 0].clone().requires_grad_(),))


def test_a_mixed_second_gradient_reaches_B_through_a_sparse_gradient():
    A, B = csr(random_matrix(5, 4)).requires_grad_(), random_dense(4, 3).requires_grad_()
    (dA,) = torch.autograd.grad(spmm(A, B).pow(2).sum() / 2, A, create_graph=True)
    (got,) = torch.autograd.grad(dA.values().sum(), B)
    dense, twin = A.detach().to_dense().requires_grad_(), B.detach().clone().requires_grad_()
    (dA,) = torch.autograd.grad((dense @ twin).pow(2).sum() / 2, dense, create_graph=True)
    (expected,) = torch.autograd.grad(dA[dense != 0].sum(), twin)
    assert_matches(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_half_precision_trains(dtype, reduce):
    edge_index, weight, size = edges(random_matrix(6, 5, dtype) / 4)
    weight, B = weight.requires_grad_(), (random_dense(5, 4, dtype=dtype) / 4).requires_grad_()
    spmm((edge_index, weight, size), B, reduce).sum().backward()
    assert weight.grad.dtype == B.grad.dtype == dtype
    counts = edge_index[1].bincount(minlength=6).clamp(min=1).double() if reduce == "mean" else torch.ones(6)
    share = 1 / counts.to(DEVICE)[edge_index[1]]
    assert_matches(weight.grad, share * B.detach().double().sum(1)[edge_index[0]])


def test_nothing_is_recorded_without_grad():
    A, B = csr(random_matrix(5, 4)).requires_grad_(), random_dense(4, 3)
    with torch.no_grad():
        assert not spmm(A, B).requires_grad
    assert spmm(A, B).requires_grad
    with torch.inference_mode():
        expected = spmm(csr(A.detach().to_dense()), B)
    assert_matches(spmm(A, B), expected.cpu())


def test_what_is_remembered_in_inference_mode_serves_training():
    dense = random_matrix(5, 4)
    A, graph, B = csr(dense), edges(dense), random_dense(4, 3)
    with torch.inference_mode():
        for reduce in ("sum", "mean"):
            spmm(A, B, reduce), spmm(graph, B, reduce), spmm((graph[0], None, graph[2]), B, reduce)
    B.requires_grad_()
    for reduce in ("sum", "mean"):
        for operand in (A, graph, (graph[0], None, graph[2])):
            spmm(operand, B, reduce).sum().backward()
    assert B.grad.isfinite().all()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", [*FORMATS, *TENSORS, "edges"])
def test_what_comes_out_may_be_changed_in_place(kind, reduce):
    dense = random_matrix(8, 12)
    made = {**FORMATS, **TENSORS}.get(kind)
    A = edges(dense) if made is None else made(dense)
    B = random_dense(12, 3).requires_grad_()
    for _ in range(2):
        C = spmm(A, B, reduce)
        expected = C.detach() * 2
        C *= 2
        assert_matches(C, expected.cpu())
        C.sum().backward()


def taught(A: Tensor, B: Tensor) -> list[Tensor]:
    """The product, and the gradients of what asks for one, dense."""
    C = spmm(A, B)
    asked = [tensor for tensor in (A, B) if tensor.requires_grad]
    grads = torch.autograd.grad(C, asked, torch.linspace(-1, 1, C.numel(), dtype=C.dtype, device=DEVICE).view_as(C))
    return [C.detach(), *[grad.to_dense() for grad in grads]]


def scaled(A: Tensor, B: Tensor) -> Tensor:
    with torch.no_grad():
        (A._values() if A.layout is torch.sparse_coo else A.values()).mul_(3)
    return A


def moved(A: Tensor, B: Tensor) -> Tensor:
    """A with other coordinates in the same memory, of which torch counts no more than of other values."""
    with torch.no_grad():
        if A.layout is torch.sparse_coo:
            others = A._indices()[1]
        else:
            others = A.col_indices() if A.layout in (torch.sparse_csr, torch.sparse_bsr) else A.row_indices()
        others.copy_(others.max() - others)
    return A


def in_turn(*changes: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Changes one after another, with a step between them."""

    def change(A: Tensor, B: Tensor) -> Tensor:
        for each in changes:
            taught(A, B)
            A = each(A, B)
        return A

    return change


CHANGES = {
    "nothing": lambda A, B: A,
    "values in place": scaled,
    "coordinates in place": moved,
    "values, then coordinates": in_turn(scaled, scaled, moved),
    "coordinates, then values": in_turn(moved, scaled, scaled),
    "A asks for no gradient": lambda A, B: A.requires_grad_(False),
    "B asks for no gradient": lambda A, B: (A, B.requires_grad_(False))[0],
    "another tensor": lambda A, B: A.detach().clone().requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_sparse_tensor_that_is_trained_is_read_again_when_it_changes(kind, change):
    A, B = TENSORS[kind](random_matrix(6, 4)).requires_grad_(), random_dense(4, 3).requires_grad_()
    for _ in range(5):
        first = taught(A, B)
    A = CHANGES[change](A, B)
    found = taught(A, B)
    expected = taught(A.detach().clone().requires_grad_(A.requires_grad), B)
    assert (found[0] - first[0]).abs().max() > 0 or change != "values in place"
    for part, right in zip(found, expected, strict=True):
        assert_matches(part, right)


@pytest.mark.parametrize("dense", [random_matrix(6, 4), torch.eye(6, 4)], ids=["values are moved", "values stay"])
@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind in ("coo", "csr", "uncoalesced")])
def test_every_step_of_training_a_sparse_tensor_is_right(kind, dense):
    """Its gradients are collected, and its values are written to after each step."""
    dense = dense.to(DEVICE, torch.float64)
    A, B = TENSORS[kind](dense).requires_grad_(), random_dense(4, 3).requires_grad_()
    upstream = random_dense(6, 3)
    for _ in range(6):
        A.grad = B.grad = None
        spmm(A, B).backward(upstream)
        present = A.detach().to_dense()
        assert A.grad.layout is A.layout
        assert_matches(B.grad, present.T @ upstream)
        assert_matches(A.grad.to_dense(), (upstream @ B.detach().T) * (dense != 0))
        A = scaled(A, B)


@pytest.mark.parametrize("dense", [random_matrix(6, 4), torch.eye(6, 4)], ids=["values are moved", "values stay"])
@pytest.mark.parametrize("kind", TENSORS)
def test_what_is_kept_for_a_sparse_tensor_that_is_trained_dies_with_it(kind, dense):
    A, B = TENSORS[kind](dense.to(DEVICE)).requires_grad_(), random_dense(4, 3).to(dense.dtype).requires_grad_()
    for _ in range(5):
        assert_matches(taught(A, B)[0], A.detach().to_dense().double() @ B.detach().double())
    alive = ref(A)
    del A
    assert alive() is None
