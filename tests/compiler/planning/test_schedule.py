"""Roles of indices, which names are axes, and the table that a schedule prints as."""

from __future__ import annotations

import pytest
from problems import APPLICATIONS, GROUP_SPMM, positions, problem, values
from scheduling import ROWS, TILES, block_gradient, maximum, others, scatter, scheduled, spmm, tiled, ways

from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.schedule import resized

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("name", APPLICATIONS)
def test_an_application_gets_the_scatter_and_product_of_the_paper(name: str) -> None:
    application = APPLICATIONS[name]
    own = application.problem()
    assert application.strategy in ways(own)
    assert scheduled(own, application.strategy).uses_dot == application.uses_dot


ROLES = {
    "gather_matmul_scatter": {"y": "tile", "x": "tile", "r": "step"},
    "group_spmm_owner": {"r": "tile", "n": "tile", "p": "segment", "q": "loop"},
    "group_spmm_store_or_atomic": {"p": "tile", "n": "tile", "q": "loop"},
    "entry_spmm_pieces": {"r": "tile", "n": "tile", "p": "segment"},
    "entry_spmm_packed": {"r": "tile", "n": "tile", "p": "segment"},
    "group_max_owner": {"r": "tile", "n": "tile", "p": "segment", "q": "loop"},
    "group_max_winners_owner": {"r": "tile", "n": "tile", "p": "segment", "q": "loop"},
    "block_spmm_owner": {"r": "grid", "bm": "tile", "n": "tile", "p": "segment", "bk": "step"},
    "block_spmm_together": dict(r="grid", q="merged", bm="merged", c="tile", n="tile", p="segment", bk="step"),
    "block_spmm_together_in_turn": dict(r="grid", q="merged", bm="merged", c="tile", n="tile", p="segment", bk="step"),
    "block_linear_in_turn": {"r": "grid", "t": "tile", "bo": "tile", "p": "segment", "bi": "step"},
    "block_gradient_store_once": dict(p="grid", q="merged", bk="merged", bm="tile", c="tile", n="step"),
    "convolution_atomic": {"p": "grid", "q": "tile", "m": "tile", "c": "step"},
    "convolution_tiled": {"r": "grid", "q": "tile", "m": "tile", "p": "segment", "c": "step"},
    "tensor_product_tables": dict(b="grid", r="grid", i="tile", w="tile", p="segment", j="step", k="step", u="step"),
    "tensor_product_on_chip": {"b": "grid", "s": "tile", "w": "tile", "p": "loop", "q": "step", "u": "step"},
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_roles(name: str) -> None:
    application = APPLICATIONS[name]
    assert dict(scheduled(application.problem(), application.strategy).roles) == ROLES[name]


def test_the_axis_along_memory_is_a_tile() -> None:
    rowwise = problem("C[i,j] = A[i,j] * B[i]", {"A": values(40, 50), "B": values(40)})
    assert scheduled(rowwise, "store").axes == ("i", "j")


def test_a_new_row_keeps_clear_of_names_in_use() -> None:
    tensors = {"AM": positions(300), "AV": values(300), "B": values(128)}
    own = problem("C[AM[p],r] += AV[p] * B[r]", tensors, (200, 128), ROWS)
    assert set(scheduled(own, "owner").roles) == {"r_", "r", "p"}


def test_a_schedule_prints_as_a_table() -> None:
    assert (
        str(scheduled(spmm(), "owner"))
        == """\
scatter: owner, product: multiply-add
index         extent  role
r                200  tile
n                128  tile
p                300  segment
q                  8  loop"""
    )
    assert str(scheduled(maximum(), "owner")).splitlines()[0] == "scatter: owner, product: multiply-max"
    application = APPLICATIONS["tensor_product_on_chip"]
    found = scheduled(application.problem(), "on-chip")
    assert str(found).splitlines()[0] == "scatter: on-chip, product: tl.dot"
    assert str(found.factors[-1]) == "[CGI[p,q] == s]"


@pytest.mark.parametrize(
    ("expr", "shape", "is_cut"),
    [
        ("Y[p,c] = X[G[p],c]", (9, 33), True),
        ("Y[p,c] = X[G[p],c]", (9, 64), False),
        ("Y[p,h,c] = X[G[p],h,c]", (9, 32, 37), True),
        ("Y[p,h,c] = X[G[p],h,c]", (9, 37, 32), False),
        ("Y[c,p] = X[G[p],c]", (9, 33), False),  # a tile is along two memories
        ("Y[G[p],c] += X[p,c]", (70, 33), False),  # rows that are added to are not stored
        ("Y[p,h] += X[G[p],h,c]", (9, 37, 33), False),  # c is summed
    ],
)
def test_rows_that_begin_between_sectors_may_begin_at_another_column(
    expr: str, shape: tuple[int, ...], is_cut: bool
) -> None:
    is_scatter = expr.startswith("Y[G")
    own = problem(expr, {"X": values(*shape), "G": positions(70)}, (9, 33) if is_scatter else None)
    listed = schedules(own.bound, own.strides, "atomic" if is_scatter else "store")
    assert any(way.form == "rows" and way.may_be_aligned for way in listed) == is_cut
    assert any(way.may_be_aligned for way in listed) == is_cut


def test_what_is_summed_stands_between_rows_and_columns() -> None:
    own = spmm()
    _, deep = schedules(own.bound, own.strides, "owner", own.fact)
    assert deep.axes == ("q", "n")  # along memory: columns
    for expr, axes in (("C[i] += A[i,k]", ("k", "i")), ("C[i,0] += A[i,k]", ("i", "k"))):
        rows = problem(expr, {"A": values(40, 50)}, None if axes[0] == "k" else (40, 1))
        assert scheduled(rows, "store").axes == axes
    total = problem("C[()] += A[i]", {"A": values(100)})
    assert scheduled(total, "store").axes == ("i",)


def test_a_schedule_holds_for_other_lengths() -> None:
    tensors = {"AM": positions(500), "AK": positions(500, 8), "AV": values(500, 8), "B": values(700, 128)}
    other = problem(GROUP_SPMM, tensors, (600, 128), ROWS)
    assert resized(scheduled(spmm(), "owner"), other.bound, ROWS) == {"r": 600, "n": 128, "p": 500, "q": 8}
    assert resized(scheduled(spmm(), "store-or-atomic"), other.bound, ROWS) == {"n": 128, "p": 500, "q": 8}
    own, more = block_gradient(Q=8), block_gradient(Q=12)
    extents = resized(scheduled(own, "store"), more.bound, None)
    assert extents == {"p": 300, "q": 12, "o": 32, "i": 32, "t": 512, "c": 384}
    tiles = resized(scheduled(tiled(rows=1000), "owner"), tiled(rows=2000).bound, TILES)
    assert (tiles["r"], tiles["q"]) == (125, 16)
    short, long = (problem("C[()] += A[i,j]", {"A": values(rows, 40)}) for rows in (30, 50))
    assert resized(scheduled(short, "store"), long.bound, None) == {"i": 50, "j": 40, "i_j": 2000}


def test_rows_are_an_axis_however_few_they_are() -> None:
    tensors = {"AM": positions(300), "AV": values(300), "B": values(300, 100, 64)}
    for expr in ("C[AM[p],m,n] += AV[p] * B[p,m,n]", "C[AM[p],m,n] = max(AV[p] * B[p,m,n])"):
        own = problem(expr, tensors, (4, 100, 64), ROWS)
        assert dict(scheduled(own, "owner").roles) == {"m": "grid", "r": "tile", "n": "tile", "p": "segment"}


def test_the_longest_of_the_others_is_an_axis() -> None:
    for a, z, roles in ((100, 10, dict(z="grid", a="tile", n="tile")), (10, 100, dict(a="grid", z="tile", n="tile"))):
        own = problem("C[a,z,n] = max(A[a,z,k,n])", {"A": values(a, z, 3, 64)})
        assert {name: role for name, role in scheduled(own, "store").roles.items() if name != "k"} == roles


def test_what_is_held_on_chip_is_an_axis() -> None:
    own = scatter("Z[b,E[p],w] += V[b,p,w]", 256, 64)
    plain = scheduled(own, "on-chip", use_dot=False)
    assert dict(plain.roles) == {"b": "grid", "s": "tile", "w": "tile", "p": "loop"}
    along = problem("Z[b,E[p]] += V[b,p]", {"E": positions(50), "V": values(256, 50)}, (256, 64))
    assert dict(scheduled(along, "on-chip", use_dot=False).roles) == {"b": "tile", "s": "tile", "p": "loop"}


def test_one_element_lies_along_memory_too() -> None:
    own = problem("C[d] += X[d,I[e]]", {"X": values(1, 40), "I": positions(9)})
    plain, deep = schedules(own.bound, own.strides, "store")
    assert dict(plain.roles) == {"d": "tile", "e": "loop"}
    assert dict(deep.roles) == {"d": "tile", "e": "step"}


def test_a_statement_without_tensors_has_tiles_too() -> None:
    own = problem("C[i] += 2", {"C": values(40)})
    assert dict(scheduled(own, "store").roles) == {"i": "tile"}


def test_a_new_output_lies_along_its_last_dimension_whatever_the_given_one_does() -> None:
    """A lies along i as much as the output along j: the longer one is the last axis."""
    own = problem("C[i,j] += A[i,j]", {"C": values(50, 40).t(), "A": values(50, 40).t()})
    assert scheduled(own, "store").axes == ("i", "j")


def test_a_full_search_repeats_nothing() -> None:
    dots = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(64, 9000), "B": values(9000, 64)}, deterministic=True)
    preferred, rest = schedules(dots.bound, dots.strides, "store", None, True), others(dots, "store")
    assert [(way.is_shared, way.has_copies) for way in preferred] == [(True, True), (False, False)]
    assert rest
    assert not any(way in preferred for way in rest)
    assert not any(way.is_atomic for way in rest)
