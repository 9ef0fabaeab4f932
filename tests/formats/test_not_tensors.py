"""A format is no tensor: operators, names and functions of torch are answered with what to write instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import assert_says

from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO

pytestmark = pytest.mark.cpu

DENSE = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [6.0, 0.0, 7.0]])
A = GroupCOO.from_dense(DENSE)
B = torch.ones(3, 2)
ARITHMETIC = (
    "a GroupCOO has no arithmetic; use A.with_values(f(A.values)) for each of its values, a statement of "
    "insum_ops.insum for products, or A.to_dense()"
)


def test_a_product_is_spmm() -> None:
    assert_says(TypeError, "a GroupCOO is not multiplied with @; use insum_ops.spmm(A, B)", lambda: A @ B)
    words = "a GroupCOO is not multiplied with @; use insum with the statement C[m,n] += B[m,k] * A[k,n]"
    assert_says(TypeError, words, lambda: B.T @ A)


@pytest.mark.parametrize(
    "call",
    [
        lambda: A * 2,
        lambda: 2 * A,
        lambda: A + A,
        lambda: 1 + A,
        lambda: A - A,
        lambda: 1 - A,
        lambda: A / 2,
        lambda: 2 / A,
        lambda: A**2,
        lambda: -A,
    ],
)
def test_there_is_no_arithmetic(call: Callable[[], Any]) -> None:
    assert_says(TypeError, ARITHMETIC, call)


def test_a_format_is_neither_indexed_nor_iterated() -> None:
    words = "a GroupCOO is not indexed; use A.to_dense()[...], or A.coords and A.values"
    assert_says(TypeError, words, lambda: A[0])
    assert_says(TypeError, "'GroupCOO' object is not iterable", lambda: iter(A))
    assert bool(A)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("todense", "A.to_dense()"),
        ("toarray", "A.to_dense().numpy()"),
        ("t", "A.T"),
        ("requires_grad_", "A.with_values(A.values.requires_grad_())"),
        ("grad", "A.values.grad"),
        ("is_shared", "A.values.is_shared()"),
        ("to_scipy", "A.to_torch(), whose indices and values scipy.sparse takes"),
        ("coalesce", "A itself, since conversion has merged its entries"),
        ("matmul", "insum_ops.spmm(A, B)"),
        ("indices", "A.coords"),
        ("from_numpy_dense", "A.from_dense"),
        ("to_densse", "A.to_dense"),
    ],
)
def test_names_of_torch_and_scipy_are_translated(name: str, instead: str) -> None:
    assert_says(AttributeError, f"a GroupCOO has no {name}; use {instead}", lambda: getattr(A, name))


def test_a_name_like_no_other() -> None:
    assert_says(AttributeError, "a GroupCOO has no unrelated", lambda: A.unrelated)
    assert_says(AttributeError, "an ELL has no unrelated", lambda: ELL.from_dense(torch.eye(2)).unrelated)
    assert_says(AttributeError, "a GroupCOO has no _values", lambda: A._values)


@pytest.mark.parametrize("kind", [COO, GroupCOO, ELL, BlockCOO, BlockGroupCOO])
def test_a_format_is_copied_and_pickled_as_ever(kind: Any) -> None:
    form = kind.from_dense(DENSE, **({"block_size": (2, 2)} if kind.is_blocked else {}))
    for other in (copy.copy(form), copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
        torch.testing.assert_close(other.to_dense(), DENSE, rtol=0, atol=0)
