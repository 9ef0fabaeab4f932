"""The gradient of a statement is a statement."""

from __future__ import annotations

import pytest

from insum_ops.compiler.language.differentiate import (
    fresh_name,
    gradient,
    tangent,
    tangent_terms,
    terms,
    upstream_name,
    winners,
)
from insum_ops.compiler.language.parse import parse

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("expr", "wrt", "expected"),
    [
        ("C[i,j] += A[i,k] * B[k,j]", 0, "dA[i,k] += dC[i,j] * B[k,j]"),
        ("C[i,j] += A[i,k] * B[k,j]", 1, "dB[k,j] += dC[i,j] * A[i,k]"),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", 0, "dAV[p,q] += dC[AM[p],n] * B[AK[p,q],n]"),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", 1, "dB[AK[p,q],n] += dC[AM[p],n] * AV[p,q]"),
        ("C[()] = 0.5 * A[i,i]", 1, "dA[i,i] += dC[()] * 0.5"),
        ("C[i] = A[0,i] * A[1,i]", 0, "dA[0,i] += dC[i] * A[1,i]"),
        ("C[i] = A[0,i] * A[1,i]", 1, "dA[1,i] += dC[i] * A[0,i]"),
        ("C[i] += C[E[i]]", 0, "dC_[E[i]] += dC[i]"),
        ("C[i] += A[i] * dC[i] * dA[i]", 0, "dA_[i] += dC_[i] * dC[i] * dA[i]"),
    ],
)
def test_a_factor_and_the_output_trade_places(expr: str, wrt: int, expected: str) -> None:
    assert str(gradient(parse(expr), wrt)) == expected


@pytest.mark.parametrize(
    ("expr", "wrt", "expected"),
    [
        ("C[i,j] = max(A[i,k] * B[k,j])", 0, "dA[i,K[i,j]] += dC[i,j] * B[K[i,j],j]"),
        (
            "C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])",
            1,
            "dB[AK[P[i,n],Q[i,n]],n] += dC[i,n] * AV[P[i,n],Q[i,n]]",
        ),
        ("C[()] = min(0.5 * A[i,i])", 1, "dA[I[()],I[()]] += dC[()] * 0.5"),
        ("C[i,i,0] = max(A[i,k])", 0, "dA[i,K[i,i,0]] += dC[i,i,0]"),
        ("C[p,E[p]] = max(A[p,k])", 0, "dA[p,K[p,i]] += dC[p,i]"),
        ("C[E[i],F[i_]] = max(A[i,i_])", 0, "dA[I[i__,i___],I_[i__,i___]] += dC[i__,i___]"),
        ("C[i] = max(K[i,k] * dC[k])", 0, "dK[i,K_[i]] += dC_[i] * dC[K_[i]]"),
        ("C[i] = max(A[i,k] * dA[k])", 0, "dA_[i,K[i]] += dC[i] * dA[K[i]]"),
        ("C[E[p]] = max(A[()])", 0, "dA[()] += dC[i] * ones[P[i]]"),  # or C where nothing won would count
        ("C[E[p]] = max(A[()] * ones[()])", 0, "dA[()] += dC[i] * ones[()] * ones_[P[i]]"),
        ("C[E[i]] = max(2 * A[i])", 1, "dA[I[i_]] += dC[i_] * 2"),
        ("C[i,E[i]] = max(A[i])", 0, "dA[i] += dC[i,E[i]]"),  # no products meet
    ],
)
def test_a_reduced_index_is_read_where_the_winner_is(expr: str, wrt: int, expected: str) -> None:
    assert str(gradient(parse(expr), wrt)) == expected


def test_winners_are_named_with_what_tells_their_extents() -> None:
    assert winners("C[AM[p],n] = max(AV[p,q] * B[AK[p,q],n])") == ((("P", "AM", 0), ("Q", "AV", 1)), "")
    assert winners("C[i] = max(A[i])") == ((), "")
    assert winners("C[E[p]] = max(A[()])") == ((("P", "E", 0),), "ones")  # which its gradient reads


def test_the_gradients_gradient_is_the_factor_again() -> None:
    once = gradient(parse("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]"), 1)
    assert str(gradient(once, 0)) == "ddC[AM[p],n] += ddB[AK[p,q],n] * AV[p,q]"


def test_a_tensor_gets_one_term_for_each_place_where_it_stands() -> None:
    assert terms("C[i,j] = A[i] * B[i,j] * A[j]", "A") == (
        ("dA[i] += dC[i,j] * B[i,j] * A[j]", "dC", ("B", "A")),
        ("dA[j] += dC[i,j] * A[i] * B[i,j]", "dC", ("A", "B")),
    )
    assert terms("C[i] = A[i] * 2", "B") == ()
    assert terms("C[E[i]] = A[i]", "E") == ()


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("Y[()] += X[i,j] * X[i,j]", ["dX[i,j] += dY[()] * X[i,j] * 2"]),
        ("Y[()] += X[i,j] * X[j,i]", ["dX[i,j] += dY[()] * X[j,i] * 2"]),
        ("Y[i] += X[i,k] * A[k] * X[i,k] * 0.5 * X[i,k]", ["dX[i,k] += dY[i] * A[k] * X[i,k] * 0.5 * X[i,k] * 3"]),
        ("Y[i,j] += X[i,k] * X[j,k]", ["dX[i,k] += dY[i,j] * X[j,k]", "dX[j,k] += dY[i,j] * X[i,k]"]),
        ("Y[i] += X[i] * X[E[i]]", ["dX[i] += dY[i] * X[E[i]]", "dX[E[i]] += dY[i] * X[i]"]),
    ],
)
def test_gradients_that_are_equal_are_one_statement(expr, expected):
    assert [derived for derived, _, _ in terms(expr, "X")] == expected


def test_tangents_that_are_equal_are_one_statement():
    assert tangent_terms("Y[i] += X[i,k] * X[i,k]", "X") == (("tY[i] += tX[i,k] * X[i,k] * 2", "tX", ("X",)),)


def test_a_terms_text_can_be_read_again() -> None:
    for derived, upstream, others in terms("C[E[p],0] += -1e-30 * A[p,F[p]] * B[()]", "A"):
        statement = parse(derived)
        assert str(statement) == derived
        assert set(statement.tensor_names) == {upstream, *others}


def test_fresh_names() -> None:
    assert fresh_name("p", ()) == "p"
    assert fresh_name("p", ("q", "p")) == "p_"
    assert fresh_name("p", ("p", "p_", "p__")) == "p___"
    assert upstream_name(parse("C[i] += A[i] * dC[i]")) == "dC_"


def test_a_number_has_no_gradient() -> None:
    with pytest.raises(AssertionError, match=r"^a number has no gradient$"):
        gradient(parse("C[i] = 2 * A[i]"), 0)


@pytest.mark.parametrize(
    ("expr", "wrt", "expected"),
    [
        ("C[i,j] += A[i,k] * B[k,j]", 1, "tC[i,j] += A[i,k] * tB[k,j]"),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", 0, "tC[AM[p],n] += tAV[p,q] * B[AK[p,q],n]"),
        ("C[()] = 0.5 * A[i,i]", 1, "tC[()] += 0.5 * tA[i,i]"),
        ("C[i] += A[i] * tA[i] * tC[i]", 0, "tC_[i] += tA_[i] * tA[i] * tC[i]"),
        ("C[i,j] = max(A[i,k] * B[k,j])", 0, "tC[i,j] += tA[i,K[i,j]] * B[K[i,j],j]"),
        (
            "C[AM[p],n] = min(AV[p,q] * B[AK[p,q],n])",
            1,
            "tC[i,n] += AV[P[i,n],Q[i,n]] * tB[AK[P[i,n],Q[i,n]],n]",
        ),
        ("C[i] = max(2 * A[i,k] * tC[k])", 1, "tC_[i] += 2 * tA[i,K[i]] * tC[K[i]]"),
        ("C[E[p]] = max(A[0])", 0, "tC[i] += tA[0] * ones[P[i]]"),
    ],
)
def test_a_tangent_stands_where_its_factor_stood(expr: str, wrt: int, expected: str) -> None:
    assert str(tangent(parse(expr), wrt)) == expected


def test_a_tensor_in_two_places_has_two_tangents() -> None:
    assert tangent_terms("C[i,j] += A[i,k] * A[k,j]", "A") == (
        ("tC[i,j] += tA[i,k] * A[k,j]", "tA", ("A",)),
        ("tC[i,j] += A[i,k] * tA[k,j]", "tA", ("A",)),
    )
    assert tangent_terms("C[i] = 2 * A[i]", "A") == (("tC[i] += 2 * tA[i]", "tA", ()),)
