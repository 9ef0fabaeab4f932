"""Gradients and calls beside tensors that stay are remembered, and worked out anew when what decides them changes."""

from __future__ import annotations

import pytest
import torch
from remembered import calls
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler import autograd, gradients, ready
from insum_ops.compiler.errors import IndexRangeError, OperandError
from insum_ops.compiler.runtime.torch_state import outside_transforms
from insum_ops.formats import BlockCOO, GroupCOO
from insum_ops.formats.errors import FormatError
from insum_ops.functional import insum_beside, insum_once

pytestmark = pytest.mark.cpu

SPMM = "C[m,n] += A[m,k] * B[k,n]"


def counted(monkeypatch, module, *names):
    """A list that grows by a function's name whenever it is called."""
    seen = []

    def count(name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (seen.append(name), original(*given))[1])

    for name in names:
        count(name)
    return seen


@pytest.fixture
def long_way(monkeypatch):
    """Counts the calls that are worked out from their beginning."""
    ready._plans.clear()
    return counted(monkeypatch, autograd, "_evaluate_plain", "_evaluate_sparse")


def matrix():
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return dense * (torch.rand(6, 5, generator=generator) < 0.5)


@pytest.fixture
def long_backward(monkeypatch):
    """Counts the gradients of formats and of dense tensors that are worked out from their beginning."""
    return counted(monkeypatch, gradients, "values_gradient", "gradient_of")


def blocked(dense):
    return BlockCOO.from_dense(dense, block_size=(2, 5))


def assert_gradients(expr, A, dense, B, upstream, C=None):
    """Of the values, of B and of the tensor that sums start from, against the dense product's."""
    values, own = A.values.detach().clone().requires_grad_(), B.detach().clone().requires_grad_()
    start = {} if C is None else {"C": C.detach().clone().requires_grad_()}
    insum(expr, A=A.with_values(values), B=own, **start).backward(upstream)
    assert_matches(own.grad, dense.T @ upstream)
    assert_matches(A.with_values(values.grad).to_dense(), upstream @ B.T * (dense != 0))
    if C is not None:
        assert_matches(start["C"].grad, upstream)


@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize("kind", [GroupCOO.from_dense, blocked], ids=["groups", "blocks"])
def test_all_gradients_of_a_statement_are_worked_out_once(long_backward, kind, has_start):
    dense = matrix()
    if kind is blocked:
        dense = dense + (dense == 0)  # every block is full
    A, C = kind(dense), torch.randn(6, 4, dtype=torch.float64) if has_start else None
    for _ in range(3):
        B, upstream = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
        assert_gradients(SPMM, A, dense, B, upstream, C)
    assert sorted(long_backward) == ["gradient_of"] * (1 + has_start) + ["values_gradient"]


def test_backward_notices_another_upstream_and_other_settings(long_backward):
    dense = matrix()
    A, B = GroupCOO.from_dense(dense), torch.randn(5, 4, dtype=torch.float64)
    upstream = torch.randn(6, 4, dtype=torch.float64)
    assert_gradients(SPMM, A, dense, B, upstream)
    negated = torch.complex(upstream, -upstream).conj().imag
    assert negated.is_neg()
    for other in (upstream.T.contiguous().T, torch.ones((), dtype=torch.float64).expand(6, 4), negated):
        before = len(long_backward)
        assert_gradients(SPMM, A, dense, B, other)
        assert len(long_backward) == before + 2
    torch.use_deterministic_algorithms(True)
    try:
        assert_gradients(SPMM, A, dense, B, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(long_backward) == before + 4
    assert_gradients(SPMM, A, dense, B, upstream)
    assert len(long_backward) == before + 4


def test_a_gradient_that_is_differentiated_is_no_remembered_one():
    dense = matrix()
    A = GroupCOO.from_dense(dense)
    values, B = A.values.clone().requires_grad_(), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        C = insum(SPMM, A=A.with_values(values), B=B)
        (dB,) = torch.autograd.grad(C.square().sum(), B, create_graph=True)
        assert_matches(dB, 2 * dense.T @ (dense @ B.detach()))
        (d_values,) = torch.autograd.grad(dB.sum(), values)
        full = dense.clone().requires_grad_()
        (expected,) = torch.autograd.grad((2 * full.T @ (full @ B.detach())).sum(), full)
        assert_matches(A.with_values(d_values).to_dense(), expected * (dense != 0))
        insum(SPMM, A=A.with_values(values), B=B).sum().backward()  # one that is remembered, between


@pytest.mark.parametrize("kind", [GroupCOO.from_dense, blocked], ids=["groups", "blocks"])
def test_a_gradient_for_the_values_alone_is_remembered_too(long_way, long_backward, kind):
    A, B = kind(matrix()), torch.randn(5, 4, dtype=torch.float64)
    for _ in range(4):
        values = A.values.clone().requires_grad_()
        insum(SPMM, A=A.with_values(values), B=B).sum().backward()
        expected = A.with_values(torch.ones_like(values)).to_dense() * B.sum(1)
        assert_matches(A.with_values(values.grad).to_dense(), expected)
    assert long_way.count("_evaluate_sparse") == 1


def test_a_coordinate_changed_in_place_is_noticed_by_a_remembered_call():
    A, B = GroupCOO.from_dense(torch.eye(4).double(), group_size=2), torch.randn(4, 3, dtype=torch.float64)
    for _ in range(3):
        assert_matches(insum(SPMM, A=A, B=B), B)
    A.AK[1, 0] = 3
    assert_matches(insum(SPMM, A=A, B=B), B[[0, 3, 2, 3]])
    A.AK[1, 0] = -1
    assert_matches(insum(SPMM, A=A, B=B), B * torch.tensor([[1.0], [0.0], [1.0], [1.0]]))
    A.AK[1, 0] = 9
    words = r"^coords\[1\]\[1, 0\] is 9; along dimension 1 it is -1 for padding, or at least 0 and less than 4$"
    for _ in range(2):
        with pytest.raises(FormatError, match=words):
            insum(SPMM, A=A, B=B)


GATHER = "C[i,n] += B[I[i],n]"


def test_a_call_beside_tensors_that_stay_compares_the_others_alone(long_way):
    memory, fixed = {}, {"I": torch.tensor([2, 0, -1])}
    for columns in (4, 4, 3, 4):
        B = torch.randn(5, columns, dtype=torch.float64)
        assert_matches(insum_beside(memory, GATHER, fixed, B=B), B[[2, 0, 0]] * torch.tensor([[1.0], [1.0], [0.0]]))
    assert len(calls(memory)) == 2
    assert not long_way  # not even the first time
    B = torch.randn(3, 5, dtype=torch.float64).T
    assert_matches(insum_beside(memory, GATHER, fixed, B=B)[:2], B[[2, 0]])
    fixed["I"][1] = 4
    assert_matches(insum_beside(memory, GATHER, fixed, B=B)[:2], B[[2, 4]])
    fixed["I"][1] = 7
    with pytest.raises(IndexRangeError, match=r"^I\[1\] is 7, outside B dimension 0, which has size 5;"):
        insum_beside(memory, GATHER, fixed, B=B)


def test_a_call_beside_tensors_that_stay_is_differentiable_and_cast():
    memory, fixed = {}, {"I": torch.tensor([2, 0, 0])}
    B = torch.randn(5, 4)
    insum_beside(memory, GATHER, fixed, B=B)
    leaf = B.clone().requires_grad_()
    insum_beside(memory, GATHER, fixed, B=leaf).sum().backward()
    assert_matches(leaf.grad, torch.tensor([2.0, 0.0, 1.0, 0.0, 0.0])[:, None].expand(5, 4).double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert insum_beside(memory, GATHER, fixed, B=B).dtype == torch.bfloat16
    tangent = torch.func.jvp(lambda B: insum_beside(memory, GATHER, fixed, B=B), (B,), (torch.ones_like(B),))[1]
    assert_matches(tangent, torch.ones(3, 4).double())
    with torch.inference_mode():
        assert_matches(insum_beside(memory, GATHER, fixed, B=B), B[[2, 0, 0]].double())


def once(B, index):
    return insum_once(GATHER, (len(index), B.shape[1]), {"B": B, "I": index})


def test_a_call_of_sizes_that_may_not_come_again_is_remembered_when_they_do(long_way, monkeypatch):
    monkeypatch.setattr(ready, "_plans", {})
    index = torch.tensor([2, 0, 1])
    for times in range(4):
        B = torch.randn(5, 4, dtype=torch.float64)
        assert_matches(once(B, index), B[index])
        assert len(calls(ready._plans)) == (times > 0)
    assert not long_way
    assert_matches(insum(GATHER, size=(3, 4), B=B, I=index), B[index])  # which finds it too
    assert not long_way
    for rows in (6, 7):
        B = torch.randn(rows, 4, dtype=torch.float64)
        assert_matches(once(B, index), B[index])
    assert len(calls(ready._plans)) == 1
    index[1] = 7
    with pytest.raises(IndexRangeError, match=r"^I\[1\] is 7, outside B dimension 0, which has size 5;"):
        once(B[:5], index)


def test_a_call_of_sizes_that_may_not_come_again_is_differentiable_and_cast():
    index = torch.tensor([2, 0, 0])
    leaf = torch.randn(5, 4, requires_grad=True)
    once(leaf, index).sum().backward()
    assert_matches(leaf.grad, torch.tensor([2.0, 0.0, 1.0, 0.0, 0.0])[:, None].expand(5, 4).double())
    B = leaf.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert once(B, index).dtype == torch.bfloat16
    tangent = torch.func.jvp(lambda B: once(B, index), (B,), (torch.ones_like(B),))[1]
    assert_matches(tangent, torch.ones(3, 4).double())
    twice = torch.func.vmap(lambda B: once(B, index))(torch.stack([B, -B]))
    assert_matches(twice, torch.stack([B[index], -B[index]]).double())
    negative = torch.complex(B, B).conj().imag  # memory that holds its negatives
    assert negative.is_neg()
    assert_matches(once(negative, index), -B[index].double())


def test_what_outlives_a_call_is_made_outside_of_what_the_call_is_in():
    made = []

    @outside_transforms()
    def make(depth=1):
        if depth:
            make(depth - 1)
        made.append(torch.ones(2))

    def inside(x):
        with outside_transforms():
            made.append(torch.ones(2))
        make()
        return x * 2

    assert_matches(torch.func.vmap(inside)(torch.ones(3)), torch.full((3,), 2.0).double())
    with torch.inference_mode():
        inside(torch.ones(3))
        assert torch.is_inference_mode_enabled()
        with pytest.raises(ZeroDivisionError), outside_transforms():
            raise ZeroDivisionError
        assert torch.is_inference_mode_enabled()
    inside(torch.ones(3))
    assert len(made) == 9
    for tensor in made:
        assert type(tensor) is torch.Tensor
        assert not tensor.is_inference()
        tensor.requires_grad_().sum().backward()


def test_a_tensor_without_strides_is_refused_by_whoever_knows_how():
    with pytest.raises(
        OperandError, match=r"^B is a torch\.sparse_coo tensor; pass insum_ops\.formats\.COO\.from_torch"
    ):
        insum_beside({}, GATHER, {"I": torch.tensor([0])}, B=torch.eye(3).to_sparse())
