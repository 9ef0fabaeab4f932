"""Statements as data."""

from __future__ import annotations

import dataclasses

import pytest

from insum_ops.compiler.language.ir import Access, Const, Number, Statement, Var, walk
from insum_ops.compiler.language.parse import parse

pytestmark = pytest.mark.cpu

CONVOLUTION = parse("Out[MAPX[p,q],m] += MAPV[p,q] * In[MAPY[p,q],c] * Weight[MAPZ[p],c,m] * 0.5")


def test_names_come_in_order_of_appearance_the_outputs_first() -> None:
    assert CONVOLUTION.names == ("p", "q", "m", "c")
    assert CONVOLUTION.free == ("p", "q", "m")
    assert CONVOLUTION.summed == ("c",)


def test_reduced_names_are_those_that_an_output_element_does_not_tell() -> None:
    assert CONVOLUTION.direct == ("m",)
    assert CONVOLUTION.reduced == ("p", "q", "c")
    statement = parse("C[i,E[p,i],i] = max(A[q,p])")
    assert statement.direct == ("i",)
    assert statement.reduced == ("p", "q")


def test_tensor_names_are_what_is_read() -> None:
    assert CONVOLUTION.tensor_names == ("MAPX", "MAPV", "MAPY", "In", "MAPZ", "Weight")
    assert parse("C[i] += C[i] * A[A_[i]]").tensor_names == ("C", "A_", "A")


def test_accesses_leave_the_numbers_out() -> None:
    assert [access.name for access in CONVOLUTION.accesses] == ["MAPV", "In", "Weight"]
    assert CONVOLUTION.factors[-1] == Number(0.5)


def test_index_accesses_come_once_and_innermost_first() -> None:
    statement = parse("C[E[F[p]]] += A[E[F[p]],F[p]] * B[F[q]]")
    assert list(map(str, statement.index_accesses)) == ["F[p]", "E[F[p]]", "F[q]"]


def test_names_inside_indirections_belong_to_the_access() -> None:
    access = parse("C[i] = A[i,E[j,F[k]],0,j]").accesses[0]
    assert access.names == ("i", "j", "k")
    assert list(map(str, access.indirections)) == ["E[j,F[k]]"]
    assert access.is_indirect
    assert not access.indirections[0].indirections[0].is_indirect


def test_walk_goes_from_the_inside_out() -> None:
    access = parse("C[i] = A[E[F[i]],G[i]]").accesses[0]
    assert [inner.name for inner in walk(access)] == ["F", "E", "G", "A"]


@pytest.mark.parametrize(("text", "scale"), [("C[i] = A[i]", 1), ("C[i] = 2 * A[i] * -1.5", -3.0), ("C[i] = 0", 0)])
def test_scale_is_the_product_of_the_numbers(text: str, scale: float) -> None:
    assert parse(text).scale == scale


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Var("row"), "row"),
        (Const(7), "7"),
        (Number(0.1), "0.1"),
        (Number(-2), "-2"),
        (Access("A", (Var("i"), Access("E", (Const(0), Var("j"))))), "A[i,E[0,j]]"),
        (Access("A", ()), "A[()]"),
        (Statement(Access("C", (Var("i"),)), (Number(2), Access("A", (Var("i"),))), "="), "C[i] = 2 * A[i]"),
        (Statement(Access("C", (Var("i"),)), (Access("A", (Var("i"),)),), "=", "max"), "C[i] = max(A[i])"),
    ],
)
def test_str_gives_the_text(part: object, text: str) -> None:
    assert str(part) == text


def test_where_a_part_stands_is_no_part_of_what_it_is() -> None:
    one, other = parse("C[i] += A[i] * B[E[i]]"), parse("C [i]  +=  A[i]*B[ E[i] ]")
    assert one == other
    assert hash(one) == hash(other)
    assert one.accesses[1].at != other.accesses[1].at
    assert one != parse("C[i] = A[i] * B[E[i]]")
    assert len({parse("C[i] = A[i]"), parse("C[i] = max(A[i])"), parse("C[i] = min(A[i])")}) == 3


@pytest.mark.parametrize("part", [CONVOLUTION, *CONVOLUTION.factors, *CONVOLUTION.output.indices])
def test_nothing_can_be_changed(part: object) -> None:
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field.name, None)


def test_reads_and_pointings() -> None:
    statement = parse("C[n,E[F[p]]] += A[E[F[p]],n]")
    assert [str(access) for access in statement.reads] == ["F[p]", "E[F[p]]", "A[E[F[p]],n]"]
    assert [pointing[:3] for pointing in statement.pointings] == [
        ("F", "E", 0),
        ("E", "C", 1),
        ("F", "E", 0),
        ("E", "A", 0),
    ]
    assert [pointing.is_output for pointing in statement.pointings] == [False, True, False, False]
    assert statement.index_names == ("F", "E")
    assert statement.scatter_dim == 1
    assert parse("C[n] = A[E[n]]").scatter_dim == 0
