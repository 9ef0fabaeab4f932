"""The ways in which a result may reach the output, and which program owns a row of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import APPLICATIONS, positions, problem, values
from scheduling import ROWS, TILES, maximum, scatter, scheduled, spmm, tiled, ways

from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import owned_by, strategies
from insum_ops.compiler.tuning.problem import Problem
from insum_ops.formats.facts import Fact, OwnedRows, WrittenOnce

pytestmark = pytest.mark.cpu


def test_a_full_search_adds_atomically_where_several_programs_may_meet() -> None:
    def all_ways(own: Problem) -> tuple[str, ...]:
        return strategies(own.bound, own.fact, own.deterministic, full=True)

    assert all_ways(spmm()) == ("owner", "store-or-atomic", "atomic")
    assert all_ways(spmm(OwnedRows("AM", is_whole=True))) == ("owner", "atomic")
    assert all_ways(spmm(deterministic=True)) == ("owner",)
    assert all_ways(APPLICATIONS["group_max_owner"].problem()) == ("owner",)
    assert all_ways(APPLICATIONS["block_gradient_store_once"].problem()) == ("store-once",)
    assert all_ways(problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(64, 32), "B": values(32, 64)})) == ("store",)


def test_rows_that_may_be_shared_are_stored_where_something_tells_which_are() -> None:
    assert ways(spmm()) == ("owner", "store-or-atomic")
    assert ways(spmm(OwnedRows("AM", is_whole=True))) == ("owner", "atomic")


def test_a_result_that_is_not_scattered_is_stored() -> None:
    A, B = values(64, 32), values(32, 64)
    own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": A, "B": B})
    assert ways(own) == ("store",)
    assert ways(problem("C[i,j] += A[i,k] * B[k,j]", {"A": A, "B": B}, deterministic=True)) == ("store",)


def test_rows_have_owners_where_facts_about_them_are_known() -> None:
    assert ways(spmm()) == ("owner", "store-or-atomic")
    assert ways(spmm(is_seeded=True)) == ("owner", "atomic")
    assert ways(spmm(fact=None)) == ("atomic",)
    assert ways(spmm(fact=OwnedRows("AK"))) == ("atomic",)


def test_few_rows_for_many_programs_are_summed_on_chip() -> None:
    expr = "Z[b,E[p],w] += V[b,p,w]"
    assert ways(scatter(expr, 256, 64)) == ("on-chip", "atomic")
    assert ways(scatter(expr, 255, 64)) == ("atomic",)
    assert ways(scatter(expr, 256, 65)) == ("atomic",)


def test_only_deterministic_ways_when_asked() -> None:
    assert ways(spmm(deterministic=True)) == ("owner",)
    assert ways(spmm(is_seeded=True, deterministic=True)) == ("owner",)
    assert ways(scatter("Z[b,E[p],w] += V[b,p,w]", 256, 64, deterministic=True)) == ("on-chip",)
    assert ways(spmm(fact=None, deterministic=True)) == ()


def test_rivals_meet_in_the_program_that_owns_their_row_or_nowhere() -> None:
    for deterministic in (False, True):
        assert ways(maximum(deterministic=deterministic)) == ("owner",)
        assert ways(maximum(None, deterministic)) == ()
    few = {"E": positions(50), "V": values(256, 50, 16)}
    assert ways(problem("Z[b,E[p],w] = max(V[b,p,w])", few, (256, 8, 16))) == ()
    dense = problem("C[i,j] = min(A[i,k] * B[k,j])", {"A": values(64, 32), "B": values(32, 64)})
    assert ways(dense) == ("store",)


@pytest.mark.parametrize(
    ("expr", "size"),
    [
        ("C[E[p],F[p]] += V[p]", (40, 40)),
        ("C[E[p],p] += V[p]", (40, 50)),
        ("C[E[p],0] += V[p]", (40, 1)),
        ("C[E[F[p]]] += V[p]", (40,)),
    ],
)
def test_a_scatter_of_another_kind_is_atomic(expr: str, size: tuple[int, ...]) -> None:
    tensors = {"E": positions(50), "V": values(50)}
    if "F" in expr:
        tensors["F"] = positions(50)
    assert ways(problem(expr, tensors, size, fact=OwnedRows("E"))) == ("atomic",)


def test_an_output_that_is_written_whole_needs_no_initial_value() -> None:
    assert scheduled(spmm(), "owner").covers_output
    assert not scheduled(spmm(), "store-or-atomic").covers_output
    diagonal = problem("C[i,i] = A[i]", {"A": values(40)})
    assert not scheduled(diagonal, "store").covers_output


def test_places_that_are_written_once_are_stored_and_need_no_initial_value() -> None:
    application = APPLICATIONS["block_gradient_store_once"]
    for deterministic in (False, True):
        own = replace(application.problem(), deterministic=deterministic)
        assert ways(own) == ("store-once",)
        wide, narrow = schedules(own.bound, own.strides, "store-once", own.fact, deterministic)
        assert wide.covers_output
        assert narrow.covers_output
        assert not wide.is_atomic
    assert ways(replace(own, fact=None, deterministic=False)) == ("atomic",)
    assert ways(replace(own, fact=WrittenOnce("AM"), deterministic=False)) == ("atomic",)


@pytest.mark.parametrize(
    ("scattered", "fact", "owner"),
    [
        ("AM[p]", OwnedRows("AM"), "AM[p]"),
        ("AM[p]", OwnedRows("AK"), None),
        ("AM[p]", None, None),
        ("AM[p]", WrittenOnce("AM"), None),
        ("AM[p]", OwnedRows("ROW", ROWS), None),
        ("AM[AK[p]]", OwnedRows("AM"), None),
        ("AM[AK[p]]", OwnedRows("AK"), None),
        ("ROW[TILE[p],q]", TILES, "TILE[p]"),
        ("ROW[TILE[p],q,s]", TILES, "TILE[p]"),
        ("ROW[TILE[p]]", TILES, "TILE[p]"),
        ("ROW[TILE[p],q]", OwnedRows("ROW"), None),
        ("ROW[TILE[p],q]", OwnedRows("TILE"), None),
        ("ROW[TILE[p],q]", OwnedRows("TILE", "ROW"), None),
        ("ROW[TILE[p],q]", OwnedRows("COLUMN", "TILE"), None),
        ("ROW[TILE[p],q]", OwnedRows("ROW", "TAP"), None),
        ("ROW[p,q]", TILES, None),
        ("ROW[q,TILE[p]]", TILES, None),
        ("ROW[TILE[p],0]", TILES, None),
        ("ROW[TILE[p],K[q]]", TILES, None),
        ("ROW[TILE[I[p]],q]", TILES, None),
        ("ROW[TILE[p],p]", TILES, None),
    ],
)
def test_who_owns_what_is_scattered_to(scattered: str, fact: Fact | None, owner: str | None) -> None:
    (access,) = parse(f"C[{scattered},n] += V[p,q,s,n]").output.indirections
    found = owned_by(access, fact)
    assert owner == (None if found is None else str(found))


@pytest.mark.parametrize("rows", [1000, 48], ids=["", "few rows"])
def test_tiles_that_own_their_rows_need_no_other_way(rows: int) -> None:
    for is_seeded in (False, True):
        for deterministic in (False, True):
            assert ways(tiled(is_seeded=is_seeded, rows=rows, deterministic=deterministic)) == ("owner",)
    assert ways(replace(tiled(rows=rows), fact=None)) == ("atomic",)
    assert ways(replace(tiled(rows=rows), fact=OwnedRows("ROW"))) == ("atomic",)
    assert ways(replace(tiled(rows=rows, deterministic=True), fact=OwnedRows("TILE"))) == ()


def test_tiles_come_before_sums_on_chip() -> None:
    tensors = {"ROW": positions(4, 16), "TILE": positions(50), "V": values(256, 50, 16, 8)}
    own = problem("Z[b,ROW[TILE[p],q],w] += V[b,p,q,w]", tensors, (256, 60, 8), TILES)
    assert ways(own) == ("owner",)
    assert ways(replace(own, fact=None)) == ("on-chip", "atomic")


def test_a_tile_walks_its_taps_and_writes_all_of_its_rows() -> None:
    for is_seeded in (False, True):
        own = tiled(is_seeded=is_seeded)
        dotted, plain = scheduled(own, "owner"), scheduled(own, "owner", use_dot=False)
        assert dotted.covers_output
        assert plain.covers_output
        assert not dotted.is_atomic
        assert dotted.sum_dtype(torch.float32) == torch.float16
        assert dict(plain.roles) == {"r": "grid", "q": "tile", "m": "tile", "p": "segment", "c": "loop"}
    assert str(dotted.output) == "Out[ROW[r,q],m]"
    assert [str(factor) for factor in dotted.factors] == ["In[NBR[p,q],c]", "Weight[TAP[p],c,m]"]
    assert dotted.owner is not None
    assert (dotted.owner.row, dotted.owner.segment, dotted.owner.index) == ("r", "p", "TILE")
    assert (
        str(dotted)
        == """\
scatter: owner, product: tl.dot
index         extent  role
r                 63  grid
q                 16  tile
m                 48  tile
p                300  segment
c                 32  step"""
    )


def test_rivals_meet_in_the_tile_that_owns_their_row() -> None:
    own = tiled("Out[ROW[TILE[p],q],m] = max(In[NBR[p,q],c] * Weight[TAP[p],c,m])")
    assert ways(own) == ("owner",)
    assert scheduled(own, "owner").covers_output


IN_TURN = ("block_spmm_together", "block_spmm_together_in_turn", "block_linear_in_turn")


@pytest.mark.parametrize("name", APPLICATIONS)
def test_rows_are_taken_in_turn_where_they_are_listed(name: str) -> None:
    application = APPLICATIONS[name]
    assert scheduled(application.problem(), application.strategy).has_rows_in_turn == (name in IN_TURN)


@pytest.mark.parametrize(
    ("expr", "given", "is_in_turn"),
    [
        ("Y[t,WO[WT[p]],o] += X[t,WI[p],i] * W[p,o,i]", {"W": values(200, 128, 128)}, True),
        ("Y[t,WT[p],o] += X[t,WI[p],i] * W[p,o,i]", {"W": values(200, 128, 128)}, False),
        ("Y[t,WO[WT[p]],o] += X[t,WI[p],i] * W[WT[p],o,i]", {"W": values(32, 128, 128)}, False),
        ("Y[t,WO[WT[p]],o] += X[t,WI[p],i] * W[i,p,o]", {"W": values(128, 200, 128)}, False),
        (
            "Y[t,WO[WT[p]],o] += X[t,WI[p],i] * W[p,o,i] * D[p,j]",
            {"W": values(200, 128, 128), "D": values(200, 9)},
            False,
        ),
        ("Y[t,WO[WT[p]],o] = max(X[t,WI[p],i] * W[p,o,i])", {"W": values(200, 128, 128)}, False),
    ],
    ids=["listed", "in place", "row in a factor", "varying step", "loop", "rivals"],
)
def test_which_row_it_is_may_matter_only_where_it_is_stored(
    expr: str, given: dict[str, torch.Tensor], is_in_turn: bool
) -> None:
    tensors = {"WT": positions(200), "WI": positions(200), "X": values(4096, 32, 128), **given}
    tensors |= {"WO": positions(32)} if "WO" in expr else {}
    own = problem(expr, tensors, (4096, 32, 128), OwnedRows("WO", "WT") if "WO" in expr else OwnedRows("WT"))
    assert scheduled(own, "owner").has_rows_in_turn == is_in_turn


@pytest.mark.parametrize(("expr", "is_covered"), [("C[i,0] = A[i]", False), ("C[i,j] = A[i] * B[j]", True)])
def test_a_fixed_position_leaves_others_unwritten(expr: str, is_covered: bool) -> None:
    tensors = {"A": values(40), "B": values(50)}
    own = problem(expr, {name: tensor for name, tensor in tensors.items() if f"{name}[" in expr[4:]}, (40, 50))
    assert scheduled(own, "store").covers_output == is_covered
