"""What a tensor carries besides its memory is resolved, or refused in words, never lost."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from tolerances import assert_matches
from torch.autograd import forward_ad

from insum_ops import insum
from insum_ops.compiler.errors import UnsupportedError
from insum_ops.formats import COO

PRODUCT = "C[m,n] += A[m,k] * B[k,n]"
TRANSFORM = (
    "B is inside a transform of torch.func or torch.vmap, which a statement can't take part in; "
    "write a batch as one more index, and differentiate with torch.autograd"
)
TANGENT = "B has a forward-mode tangent, which a statement can't pass on; differentiate with torch.autograd.grad"


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


TRANSFORMS = {
    "vmap": lambda run, B: torch.vmap(run)(B.expand(2, 3, 2)),
    "grad": lambda run, B: torch.func.grad(lambda B: run(B).sum())(B),
    "jvp": lambda run, B: torch.func.jvp(run, (B,), (B,)),
    "jacrev": lambda run, B: torch.func.jacrev(run)(B),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["tensor", "format"])
def test_a_transform_is_refused_in_words(transform, kind):
    A, B = torch.eye(3), torch.randn(3, 2)
    operand = A if kind == "tensor" else COO.from_dense(A)
    insum(PRODUCT, A=operand, B=B)  # what is remembered is refused as well
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch loads its decompositions with a deprecated function of its own
        with pytest.raises(UnsupportedError, match=f"^{re.escape(TRANSFORM)}$"):
            TRANSFORMS[transform](lambda B: insum(PRODUCT, A=operand, B=B), B)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_forward_mode_tangent_is_refused_in_words(wants_grad):
    A, B = torch.eye(3).requires_grad_(wants_grad), torch.randn(3, 2)
    insum(PRODUCT, A=A, B=B)
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        dual = forward_ad.make_dual(B, torch.ones(3, 2))
        with pytest.raises(UnsupportedError, match=f"^{re.escape(TANGENT)}$"):
            insum(PRODUCT, A=A, B=dual)
        assert_matches(insum(PRODUCT, A=A, B=B), B.double())  # who has no tangent loses none
