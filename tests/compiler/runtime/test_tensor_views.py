"""A sign that a tensor carries beside its memory is never lost, and what is handed on is no view."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler import owned
from insum_ops.formats import COO

PRODUCT = "C[m,n] += A[m,k] * B[k,n]"


def negative(*shape):
    """A tensor whose memory holds the negatives of its values."""
    made = torch.randn(*shape, dtype=torch.complex128).conj().imag
    assert made.is_neg()
    return made


@pytest.mark.parametrize("view", [lambda B: B, lambda B: B.T, lambda B: B[0, 0].expand(3, 3), lambda B: B[:, :1]])
def test_memory_that_holds_the_negatives_of_values(view):
    A, B = torch.randn(3, 3, dtype=torch.float64), view(negative(3, 3))
    like = B.resolve_neg().clone()
    plain = torch.empty_strided(B.shape, B.stride(), dtype=B.dtype)
    for _ in range(2):
        insum(PRODUCT, A=A, B=plain.zero_())  # a call like it, but of a plain tensor, is remembered
        assert_matches(insum(PRODUCT, A=A, B=B), A @ like)
        assert_matches(insum(PRODUCT, A=A, B=B, C=B), A @ like + like)


def test_the_one_column_of_a_negative_vector():
    A, column = torch.randn(3, 3, dtype=torch.float64), negative(3).unsqueeze(-1)
    for _ in range(2):
        assert_matches(insum(PRODUCT, A=A, B=column), A @ column.resolve_neg())


def test_negatives_in_the_values_of_a_format_and_in_gradients():
    dense = torch.eye(3, dtype=torch.float64)
    values, B = negative(3), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    A = COO.from_dense(dense).with_values(values)
    C = insum(PRODUCT, A=A, B=B)
    assert_matches(C, values.resolve_neg()[:, None] * B)
    upstream = negative(3, 2)
    (dB,) = torch.autograd.grad(C, B, upstream)
    assert_matches(dB, values.resolve_neg()[:, None] * upstream.resolve_neg())


def test_an_imaginary_part_gets_its_gradient():
    z = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)
    A = torch.randn(3, 3, dtype=torch.float64)
    insum(PRODUCT, A=A, B=z.conj().imag).sum().backward()
    assert_matches(z.grad.imag, -A.sum(0)[:, None].expand(3, 2))


def test_a_view_is_handed_on_as_a_tensor_over_the_same_memory():
    whole = torch.arange(6.0)
    view, rows = whole.view(2, 3), []
    handed = owned(view)
    assert handed._base is None
    assert handed.data_ptr() == whole.data_ptr()
    assert owned(handed) is handed
    assert torch.equal(handed, view)
    leaf = whole.clone().requires_grad_()
    owned(leaf.view(2, 3)).mul_(2).sum().backward()  # and its gradient is not lost
    assert leaf.grad.tolist() == [2.0] * 6
    torch.func.vmap(lambda row: rows.append(owned(row.view(3, 1)).shape) or row)(view)
    assert rows == [(3, 1)]
    assert torch.equal(torch.func.jvp(lambda x: owned(x.view(2, 3)) * 1, (whole,), (whole + 1,))[1], view + 1)
