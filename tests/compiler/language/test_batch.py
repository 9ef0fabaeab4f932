"""A batch of statements is a statement."""

from __future__ import annotations

import pytest
import torch

from insum_ops.compiler.autograd.operators import batch_call
from insum_ops.compiler.language.batch import batched
from insum_ops.formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("expr", "names", "expected"),
    [
        ("C[i,j] += A[i,k] * B[k,j]", ("A",), "C[b,i,j] += A[b,i,k] * B[k,j]"),
        ("C[i,j] += A[i,k] * B[k,j]", ("A", "B"), "C[b,i,j] += A[b,i,k] * B[b,k,j]"),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", ("AM",), "C[b,AM[b,p],n] += AV[p,q] * B[AK[p,q],n]"),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", ("AK",), "C[b,AM[p],n] += AV[p,q] * B[AK[b,p,q],n]"),
        ("C[i] += A[F[E[i]]]", ("E", "A"), "C[b,i] += A[b,F[E[b,i]]]"),
        ("C[()] = 0.5 * A[i,i]", ("A",), "C[b] = 0.5 * A[b,i,i]"),
        ("C[i,0] += C[i,0] * A[1,i]", ("C",), "C[b,i,0] += C[b,i,0] * A[1,i]"),
        ("C[b] += A[b,b_]", ("A",), "C[b__,b] += A[b__,b,b_]"),
        ("C[I[p]] = max(A[p,k] * 2)", ("A", "I"), "C[b,I[b,p]] = max(A[b,p,k] * 2)"),
    ],
)
def test_what_differs_gains_an_index_and_so_does_the_output(expr: str, names: tuple[str, ...], expected: str) -> None:
    assert batched(expr, names) == expected


@pytest.mark.parametrize(
    ("fact", "is_kept"),
    [
        (OwnedRows("I"), False),
        (OwnedRows("I", "J"), False),
        (OwnedRows("J", "I"), False),
        (WrittenOnce("I"), False),
        (ConstantTables({"J": [0], "I": [0]}), False),
        (OwnedRows("J"), True),
        (ConstantTables({"J": [0]}), True),
        (None, True),
    ],
)
def test_a_fact_about_an_index_tensor_that_differs_is_no_fact_any_more(fact: Fact | None, is_kept: bool) -> None:
    tensors = [torch.zeros(4, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.ones(3)]
    *_, left = batch_call(4, (0, None, None), "C[I[p],J[p]] += V[p]", "I,J,V", (2, 2), tensors, fact)
    assert left is (fact if is_kept else None)
