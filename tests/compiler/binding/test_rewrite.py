"""A format in a statement -> the indirect statement of that format; the full text of every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import messages

from insum_ops import insum
from insum_ops.compiler.binding.rewrite import Rewritten, Shape, View, rewrite, sparse_factor
from insum_ops.compiler.language.errors import InsumError, OperandError, UnsupportedError
from insum_ops.compiler.language.parse import parse
from insum_ops.formats import COO as COO_FORMAT
from insum_ops.formats import GroupCOO

pytestmark = pytest.mark.cpu

P, PQ = ("p",), ("p", "q")
FULL, PARTIAL = (False, False), (True, True)  # are there last blocks that are not full
FORMS = {
    "COO": Shape(P, (P, P), (True, True), False, False, FULL),
    "GroupCOO": Shape(PQ, (P, PQ), (True, True), False, True, FULL),
    "GroupCOO by columns": Shape(PQ, (PQ, P), (True, True), False, True, FULL),
    "GroupCOO without padding": Shape(PQ, (P, PQ), (True, True), False, False, FULL),
    "ELL": Shape(PQ, (P, PQ), (False, True), False, True, FULL),
    "BlockCOO": Shape(P, (P, P), (True, True), True, False, FULL),
    "BlockGroupCOO": Shape(PQ, (P, PQ), (True, True), True, True, FULL),
    "BlockCOO with partial blocks": Shape(P, (P, P), (True, True), True, False, PARTIAL),
    "BlockGroupCOO with partial blocks": Shape(PQ, (P, PQ), (True, True), True, True, PARTIAL),
    "BlockGroupCOO with partial columns": Shape(PQ, (P, PQ), (True, True), True, True, (False, True)),
    "padded COO": Shape(P, (P, P), (True, True), False, True, FULL),
    "rows in sets": Shape(PQ, (PQ, P), (True, True), False, True, FULL, True, 0),
    "rows of blocks in sets": Shape(PQ, (PQ, P), (True, True), True, True, FULL, True, 0),
}


def rewritten(expr: str, form: str) -> Rewritten:
    statement = parse(expr)
    return rewrite(statement, sparse_factor(statement, ["A"]), FORMS[form])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("COO", "C[AM[p],n] += AV[p] * B[AK[p],n]"),
        ("GroupCOO", "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"),
        ("GroupCOO by columns", "C[AM[p,q],n] += AV[p,q] * B[AK[p],n]"),
        ("ELL", "C[p,n] += AV[p,q] * B[AK[p,q],n]"),
        ("BlockCOO", "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]"),
        ("BlockGroupCOO", "C[AM[p],bm,n] += AV[p,q,bm,bk] * B[AK[p,q],bk,n]"),
        ("rows in sets", "C[AM[AT[p],q],n] += AV[AS[p,q]] * B[AK[p],n]"),
        ("rows of blocks in sets", "C[AM[AT[p],q],bm,n] += AV[AS[p,q],bm,bk] * B[AK[p],bk,n]"),
    ],
)
def test_the_product_of_two_matrices(form: str, expected: str) -> None:
    assert str(rewritten("C[m,n] += A[m,k] * B[k,n]", form).statement) == expected


@pytest.mark.parametrize(
    ("expr", "form", "expected"),
    [
        ("C[m,k] = A[m,k]", "GroupCOO", "C[AM[p],AK[p,q]] = AV[p,q]"),
        ("C[m] += 0.5 * X[m,k] * A[m,k]", "GroupCOO", "C[AM[p]] += 0.5 * X[AM[p],AK[p,q]] * AV[p,q]"),
        ("C[E[m]] += A[m,k] * B[F[k]]", "COO", "C[E[AM[p]]] += AV[p] * B[F[AK[p]]]"),
        ("C[m,m] += A[m,k] * X[k]", "COO", "C[AM[p],AM[p]] += AV[p] * X[AK[p]]"),
        ("C[m] = max(A[m,k] * X[k])", "COO", "C[AM[p]] = max(AV[p] * X[AK[p]])"),
        ("C[E[m]] += A[m,k] * B[F[k]]", "BlockCOO", "C[E[AM[p],bm]] += AV[p,bm,bk] * B[F[AK[p],bk]]"),
    ],
)
def test_every_index_of_the_format_is_replaced_everywhere(expr: str, form: str, expected: str) -> None:
    assert str(rewritten(expr, form).statement) == expected


@pytest.mark.parametrize(
    ("expr", "form", "expected"),
    [
        ("C[p,q] += A[p,k] * B[q,k]", "GroupCOO", "C[AP[p_],q] += AV[p_,q_] * B[q,AK[p_,q_]]"),
        ("AV[m] += A[m,k] * AK[k]", "COO", "AV[AM[p]] += AV_[p] * AK[AK_[p]]"),
        ("C[m,M] += A[m,M]", "COO", "C[AM[p],AM_[p]] += AV[p]"),
        ("C[m] += A[m,k] * B[bm,k]", "BlockCOO", "C[AM[p],bm_] += AV[p,bm_,bk] * B[bm,AK[p],bk]"),
        ("C[m,m_] += A[m,m_] * B[bm]", "BlockCOO", "C[AM[p],bm_,AM_[p],bm__] += AV[p,bm_,bm__] * B[bm]"),
        ("C[v] += A[v,k] * B[k]", "COO", "C[AV_[p]] += AV[p] * B[AK[p]]"),
        ("C[t] += A[t,k] * B[k]", "rows in sets", "C[AT_[AT[p],q]] += AV[AS[p,q]] * B[AK[p]]"),
        ("C[m] += A[m,k] * AT[k]", "rows in sets", "C[AM[AT_[p],q]] += AV[AS[p,q]] * AT[AK[p]]"),
        ("C[m] += A[m,k] * AS[k]", "rows in sets", "C[AM[AT[p],q]] += AV[AS_[p,q]] * AS[AK[p]]"),
        (
            "C[m,n] += A[m,k] * AS[k,n] * AS[n,k]",
            "rows of blocks in sets",
            "C[AM[AT[p],q],bm,n] += AV[AS_[p,q],bm,bk] * AS[AK[p],bk,n] * AS__[n,AK[p],bk]",
        ),
    ],
)
def test_new_names_keep_clear_of_those_in_use(expr: str, form: str, expected: str) -> None:
    assert str(rewritten(expr, form).statement) == expected


def test_where_the_new_tensors_come_from() -> None:
    found = rewritten("C[m,n] += A[m,k] * B[k,n]", "ELL")
    assert (found.values, found.coords, found.ones) == ("AV", (None, "AK"), {})
    assert (found.source, found.sets) == ("", "")
    assert found.views == {"C": View("C", ()), "B": View("B", ())}
    found = rewritten("C[m,n] += A[m,k] * B[k,n]", "rows in sets")
    assert (found.values, found.source, found.sets, found.coords) == ("AV", "AS", "AT", ("AM", "AK"))


def test_a_coordinate_that_nothing_reads_is_left_out() -> None:
    found = rewritten("C[m] += A[m,k]", "GroupCOO without padding")
    assert str(found.statement) == "C[AM[p]] += AV[p,q]"
    assert found.coords == ("AM", None)


@pytest.mark.parametrize(
    ("form", "factor"), [("GroupCOO", "A1[AK[p,q]]"), ("ELL", "A1[AK[p,q]]"), ("BlockGroupCOO", "A1[AK[p,q],bk]")]
)
def test_padding_stays_hidden_when_nothing_else_reads_its_coordinate(form: str, factor: str) -> None:
    found = rewritten("C[m] += A[m,k]", form)
    assert str(found.statement.factors[-1]) == factor
    assert found.ones == {"A1": 1}
    assert found.coords[1] == "AK"


@pytest.mark.parametrize(
    ("expr", "form", "expected"),
    [
        ("C[m] += A[m,k]", "BlockCOO", "C[AM[p],bm] += AV[p,bm,bk]"),
        ("C[m] += A[m,k]", "BlockCOO with partial blocks", "C[AM[p],bm] += AV[p,bm,bk] * A1[AK[p],bk]"),
        ("C[k] += A[m,k]", "BlockCOO with partial blocks", "C[AK[p],bk] += AV[p,bm,bk] * A1[AM[p],bm]"),
        (
            "C[()] += A[m,k]",
            "BlockGroupCOO with partial blocks",
            "C[()] += AV[p,q,bm,bk] * A1[AM[p],bm] * A1_[AK[p,q],bk]",
        ),
        ("C[k] += A[m,k]", "BlockGroupCOO with partial columns", "C[AK[p,q],bk] += AV[p,q,bm,bk]"),
    ],
)
def test_the_unused_part_of_a_last_block_stays_hidden(expr: str, form: str, expected: str) -> None:
    """What a partial last block stores past the edge is no entry, so it gets no gradient either."""
    assert str(rewritten(expr, form).statement) == expected


def test_one_reading_hides_the_padding_of_all() -> None:
    found = rewritten("C[k] += A[m,k]", "GroupCOO")
    assert str(found.statement) == "C[AK[p,q]] += AV[p,q]"
    assert found.ones == {}
    found = rewritten("C[()] += A[m,k]", "padded COO")
    assert str(found.statement) == "C[()] += AV[p] * A1[AM[p]]"
    assert found.coords == ("AM", None)


@pytest.mark.parametrize(
    ("expr", "form", "expected"),
    [
        ("C[m] = max(A[m,k])", "BlockCOO", "C[AM[p],bm] = max(AV[p,bm,bk])"),
        ("C[k] = min(A[m,k])", "BlockGroupCOO with partial columns", "C[AK[p,q],bk] = min(AV[p,q,bm,bk])"),
    ],
)
def test_rivals_may_be_in_full_blocks_or_in_rows_of_their_own(expr: str, form: str, expected: str) -> None:
    assert str(rewritten(expr, form).statement) == expected


@pytest.mark.parametrize(
    ("expr", "name", "caret"), [("C[m] = max(A[m,k])", "k", 15), ("C[E[k]] = max(A[m,k])", "k", 18)]
)
def test_what_fills_a_last_block_may_not_win(expr: str, name: str, caret: int) -> None:
    with pytest.raises(UnsupportedError) as caught:
        rewritten(expr, "BlockGroupCOO with partial columns")
    problem = f"max runs over {name}, but the last block of A dimension 1 is not full; choose a block_size that divides"
    assert str(caught.value) == f"{problem} the shape\n    {expr}\n    {' ' * caret}^"


def test_a_tensor_read_in_two_ways_gets_a_view_for_each() -> None:
    found = rewritten("C[m,n] += A[m,k] * B[k,n] * B[n,k] * B[k,m]", "BlockCOO")
    assert str(found.statement) == (
        "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n] * B_[n,AK[p],bk] * B__[AK[p],bk,AM[p],bm]"
    )
    assert found.views == {
        "C": View("C", ((0, 0),)),
        "B": View("B", ((0, 1),)),
        "B_": View("B", ((1, 1),)),
        "B__": View("B", ((0, 1), (1, 0))),
    }


SPARSE = GroupCOO.from_dense(torch.eye(3))
DENSE = torch.ones(3, 3)
MISTAKES: list[tuple[type[InsumError], dict[str, Any], str]] = [
    (
        UnsupportedError,
        {"A": SPARSE, "B": COO_FORMAT.from_dense(torch.eye(3))},
        """
one sparse factor per statement, but it has A and B; pass B=B.to_dense()
    C[m,n] += A[m,k] * B[k,n]
                       ^
""",
    ),
    (
        UnsupportedError,
        {"A": SPARSE},
        """
one sparse factor per statement, but it has A twice; name one of them AD and pass AD=A.to_dense()
    C[m,n] += A[m,k] * A[n,k]
                       ^
""",
    ),
    (
        UnsupportedError,
        {"A": SPARSE},
        """
one sparse factor per statement, but it has A twice; name one of them AD and pass AD=A.to_dense()
    C[m,n] += A[m,k] * A[n,k] * A[m,n]
                       ^
""",
    ),
    (
        OperandError,
        {"A": DENSE, "C": SPARSE},
        """
C is the output, which can't be sparse; pass C.to_dense(), or use insum_ops.sddmm for products at its entries alone
    C[m,k] += A[m,k]
    ^
""",
    ),
    (
        OperandError,
        {"A": SPARSE, "B": torch.ones(3)},
        """
A is an index here, which can't be sparse; pass an int32 or int64 tensor
    C[m] += B[A[m,k]]
              ^
""",
    ),
    (
        UnsupportedError,
        {"A": SPARSE},
        """
A is sparse, so its indices must be names, but 0 is not; make it dense with to_dense()
    C[m] += A[m,0]
                ^
""",
    ),
    (
        UnsupportedError,
        {"A": SPARSE, "E": torch.zeros(3, dtype=torch.int64)},
        """
A is sparse, so its indices must be names, but E[m] is not; make it dense with to_dense()
    C[m] += A[m,E[m]]
                ^
""",
    ),
    (
        UnsupportedError,
        {"A": SPARSE},
        """
A is sparse, so its indices must differ, but m stands twice; make it dense with to_dense()
    C[m] += A[m,m]
                ^
""",
    ),
]


@pytest.mark.parametrize(
    ("kind", "tensors", "text"), MISTAKES, ids=[text.split("\n")[2].strip() for *_, text in MISTAKES]
)
def test_message(kind: type[InsumError], tensors: dict[str, Any], text: str) -> None:
    ((expr, expected),) = messages(text)
    with pytest.raises(InsumError) as caught:
        insum(expr, **tensors)
    assert str(caught.value) == expected
    assert type(caught.value) is kind
