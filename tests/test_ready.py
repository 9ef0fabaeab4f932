"""A remembered call gives what the first one gave, and is forgotten when anything that decides it changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tolerances import assert_matches
from torch.utils._python_dispatch import TorchDispatchMode

from insum_ops import insum
from insum_ops.compiler import autograd, ready
from insum_ops.compiler.errors import IndexRangeError, ShapeError
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

pytestmark = pytest.mark.cpu

SPMM = "C[m,n] += A[m,k] * B[k,n]"


@pytest.fixture
def long_way(monkeypatch):
    """Counts the calls that are worked out from their beginning."""
    seen = []

    def count(name):
        original = getattr(autograd, name)
        monkeypatch.setattr(autograd, name, lambda *given: (seen.append(name), original(*given))[1])

    count("_evaluate_plain")
    count("_evaluate_sparse")
    ready._plans.clear()
    return seen


def matrix(rows=6, columns=5):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return dense * (torch.rand(rows, columns, generator=generator) < 0.5)


def test_a_plain_call_is_worked_out_once(long_way):
    A = matrix()
    for _ in range(3):
        B = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(insum(SPMM, A=A, B=B), A @ B)
    assert long_way == ["_evaluate_plain"]


@pytest.mark.parametrize(
    "change",
    [
        lambda B: B[:, :2],
        lambda B: B.T.contiguous().T,
        lambda B: B.float().double().to(torch.float32),
    ],
    ids=["shape", "strides", "dtype"],
)
def test_a_call_over_other_tensors_is_worked_out_anew(long_way, change):
    A, B = matrix(), torch.randn(5, 4, dtype=torch.float64)
    insum(SPMM, A=A, B=B)
    other = change(B)
    assert_matches(insum(SPMM, A=A, B=other), A @ other.double())
    assert len(long_way) == 2


def test_settings_are_part_of_a_call(long_way):
    A, B = matrix(), torch.randn(5, 4, dtype=torch.float64)
    insum(SPMM, A=A, B=B)
    torch.use_deterministic_algorithms(True)
    try:
        insum(SPMM, A=A, B=B)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(long_way) == 2


@pytest.mark.parametrize("kind", [GroupCOO, BlockCOO])
def test_a_pattern_remembers_its_calls_whatever_the_values(long_way, kind):
    dense = matrix()
    A = kind.from_dense(dense) if kind is GroupCOO else kind.from_dense(dense, block_size=(4, 2))
    for factor in (1.0, 2.0, 3.0):
        B = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(insum(SPMM, A=A.with_values(A.values * factor), B=B), factor * dense @ B)
    assert long_way.count("_evaluate_sparse") == 1


def test_another_pattern_of_the_same_sizes_is_another_call():
    one, other = torch.eye(4).double(), torch.eye(4).double().flip(0)
    B = torch.randn(4, 3, dtype=torch.float64)
    for dense in (one, other):
        A = GroupCOO.from_dense(dense, group_size=1)
        torch.testing.assert_close(insum(SPMM, A=A, B=B), dense @ B)


def test_a_regrouped_pattern_moves_its_values(long_way):
    dense = matrix()
    A = GroupCOO.from_dense(dense)
    for factor in (1.0, 2.0):
        D = torch.randn(6, 3, dtype=torch.float64)
        found = insum("dB[k,n] += A[m,k] * dC[m,n]", A=A.with_values(A.values * factor), dC=D)
        torch.testing.assert_close(found, factor * dense.T @ D)
    assert long_way.count("_evaluate_sparse") == 1


def test_a_gradient_is_still_recorded_after_calls_without_one():
    A, B = GroupCOO.from_dense(matrix()), torch.randn(5, 4, dtype=torch.float64)
    insum(SPMM, A=A, B=B)
    B.requires_grad_()
    insum(SPMM, A=A, B=B).sum().backward()
    torch.testing.assert_close(B.grad, matrix().sum(0)[:, None].expand(5, 4))
    values = A.values.clone().requires_grad_()
    assert insum(SPMM, A=A.with_values(values), B=B.detach()).requires_grad


def test_an_index_changed_out_of_range_is_still_refused():
    given = dict(I=torch.tensor([0, 1]), X=torch.ones(2), size=(2,))
    insum("C[I[p]] += X[p]", **given)
    given["I"][1] = 7
    with pytest.raises(IndexRangeError, match=r"^I\[1\] is 7, outside C dimension 0, which has size 2;"):
        insum("C[I[p]] += X[p]", **given)


@pytest.mark.parametrize("kind", [COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO])
@pytest.mark.parametrize("expr", [SPMM, "C[k,n] += A[m,k] * B[m,n]", "C[k,n] = max(A[m,k] * B[m,n])"])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_a_pattern_first_used_in_inference_mode_can_be_trained(kind, expr, group_dim):
    dense = matrix()
    A = kind.from_dense(dense, group_dim=group_dim, **{"block_size": (2, 5)} if kind.is_blocked else {})
    B = torch.randn(6 if "B[m" in expr else 5, 3, dtype=torch.float64)
    with torch.inference_mode():
        first = insum(expr, A=A, B=B)
    values, dense_B = A.values.clone().requires_grad_(), B.clone().requires_grad_()
    for operand in (B, dense_B):
        second = insum(expr, A=A.with_values(values), B=operand)
        torch.testing.assert_close(second.detach(), first.clone())
        second.sum().backward()
    assert values.grad is not None
    assert dense_B.grad is not None
    A.with_values(values).to_dense().sum().backward()


def test_a_mode_sees_a_remembered_call():
    A = B = torch.eye(3)
    insum(SPMM, A=A, B=B)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        insum(SPMM, A=A, B=B)
    assert "insum_ops.run.default" in seen


def test_autocast_takes_the_long_way():
    A = B = torch.eye(3)
    insum(SPMM, A=A, B=B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert insum(SPMM, A=A, B=B).dtype == torch.bfloat16


def test_a_mistake_is_never_remembered():
    for _ in range(2):
        with pytest.raises(ShapeError):
            insum(SPMM, A=torch.ones(2, 3), B=torch.ones(4, 2))


def test_a_pattern_that_remembers_calls_can_be_copied_and_pickled():
    A, B = GroupCOO.from_dense(matrix()), torch.randn(5, 4, dtype=torch.float64)
    expected = insum(SPMM, A=A, B=B)
    for twin in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        assert not twin.memory
        torch.testing.assert_close(insum(SPMM, A=twin, B=B), expected)


def test_values_that_change_their_type_in_place_are_another_call():
    dense = matrix()
    weight = torch.nn.Parameter(GroupCOO.from_dense(dense).values, requires_grad=False)
    A = GroupCOO.from_dense(dense).with_values(weight)
    B = torch.randn(5, 4, dtype=torch.float64)
    assert insum(SPMM, A=A, B=B).dtype == torch.float64
    weight.data = weight.data.to(torch.float32)  # as module.float() does
    found = insum(SPMM, A=A, B=B.float())
    assert found.dtype == torch.float32
    assert_matches(found, dense @ B)


@pytest.mark.parametrize("kind", [GroupCOO, BlockCOO])
def test_values_read_through_positions_are_the_regrouped_ones(kind):
    dense = matrix()
    A = kind.from_dense(dense, group_size=2) if kind is GroupCOO else kind.from_dense(dense, block_size=(2, 2))
    along, copied = A.along(1), A.regroup(1)
    assert along.values.data_ptr() == A.values.data_ptr()
    is_entry = along.value_source >= 0
    assert torch.equal(along.values[along.value_source.clamp(min=0).long()][is_entry], copied.values[is_entry])
    assert bool((copied.values[~is_entry] == 0).all())
    for mine, theirs in zip(along.coords, copied.coords):
        assert torch.equal(mine, theirs)
    assert torch.equal(along.facts.pointers, copied.facts.pointers)


def test_a_call_with_gradients_is_worked_out_once_whatever_the_order(long_way):
    A, B = GroupCOO.from_dense(matrix()), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        insum(SPMM, B=B, A=A).sum().backward()
    assert long_way.count("_evaluate_sparse") == 3  # once outside and once inside autograd's function, once for dB
