"""Roles of indices, the ways a result may reach the output, and the table that a schedule prints as."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import APPLICATIONS, CONVOLUTION_TILED, GROUP_MAX, GROUP_SPMM, positions, problem, values

from insum_ops.compiler.language.parse import parse
from insum_ops.compiler.planning.contraction import Dot, Leaf, Product, Sum
from insum_ops.compiler.planning.scatter import Flat, Merged, owned_by, strategies
from insum_ops.compiler.planning.schedule import Schedule, other_schedules, resized, schedules
from insum_ops.compiler.tuning.problem import Problem
from insum_ops.compiler.tuning.space import configs
from insum_ops.formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce

pytestmark = pytest.mark.cpu

ROWS, TILES = OwnedRows("AM"), OwnedRows("ROW", "TILE")


def ways(own: Problem) -> tuple[str, ...]:
    return strategies(own.bound, own.fact, own.deterministic)


def scheduled(own: Problem, strategy: str, use_dot: bool | None = None) -> Schedule:
    return schedules(own.bound, own.strides, strategy, own.fact, own.deterministic, use_dot)[0]


def others(own: Problem, strategy: str) -> tuple[Schedule, ...]:
    return other_schedules(own.bound, own.strides, strategy, own.fact, own.deterministic)


def spmm(fact: Fact | None = ROWS, is_seeded: bool = False, deterministic: bool = False) -> Problem:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(200, 128)}
    if is_seeded:
        tensors["C"] = values(200, 128)
    size = None if is_seeded else (200, 128)
    return problem(GROUP_SPMM, tensors, size, fact, deterministic=deterministic)


def scatter(expr: str, batch: int, extent: int, deterministic: bool = False) -> Problem:
    tensors = {"E": positions(50), "V": values(batch, 50, 16)}
    return problem(expr, tensors, (batch, extent, 16), deterministic=deterministic)


@pytest.mark.parametrize("name", APPLICATIONS)
def test_an_application_gets_the_scatter_and_product_of_the_paper(name: str) -> None:
    application = APPLICATIONS[name]
    own = application.problem()
    assert application.strategy in ways(own)
    assert scheduled(own, application.strategy).uses_dot == application.uses_dot


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


def test_a_long_sum_over_few_outputs_is_shared_in_a_fixed_order_if_that_matters() -> None:
    tensors = {"A": values(10000), "B": values(10000)}
    loose = problem("C[()] += A[i] * B[i]", tensors)
    strict = problem("C[()] += A[i] * B[i]", tensors, deterministic=True)
    ways = schedules(loose.bound, loose.strides, "store")
    assert [(way.strategy, way.is_shared, way.has_copies) for way in ways] == [
        ("atomic", True, False),
        ("store", True, True),
        ("store", False, False),
    ]
    assert all(dict(way.roles) == {"i": "step"} for way in ways)
    assert schedules(strict.bound, strict.strides, "store", deterministic=True) == ways[1:]


@pytest.mark.parametrize("expr", ["C[()] += A[r,p] * W[r]", "C[i] += B[i,r,p] * W[r]", "C[i] += B[i,r,p]"])
def test_every_way_to_cut_a_sum_adds_its_parts(expr: str) -> None:
    given = {"A": values(8, 8192), "B": values(3, 8, 8192), "W": values(8)}
    own = problem(expr, {name: tensor for name, tensor in given.items() if f"{name}[" in expr[4:]})
    for way in schedules(own.bound, own.strides, "store"):
        assert way.is_atomic or set(way.names("grid", "tile")) <= set(way.free)


def test_programs_share_sums_where_results_are_few() -> None:
    expr = "dW[u,w] += T[b,u] * dZ[b,w]"
    tensors = {"T": values(50_000, 64), "dZ": values(50_000, 64)}
    own = problem(expr, tensors)
    shared, alone = schedules(own.bound, own.strides, "store")
    assert (shared.strategy, shared.is_shared) == ("atomic", True)
    assert (alone.strategy, alone.is_shared) == ("store", False)
    assert shared.roles == alone.roles
    assert str(shared).startswith("scatter: atomic, product: tl.dot, sums shared by programs\n")
    assert shared.sum_dtype(None) == torch.float32  # hundreds of parts would lose too much in float16
    assert alone.sum_dtype(torch.float32) == torch.float16
    strict = problem(expr, tensors, deterministic=True)
    strict_ways = schedules(strict.bound, strict.strides, "store", deterministic=True)
    assert [(way.strategy, way.has_copies) for way in strict_ways] == [("store", True), ("store", False)]
    many = problem(expr, {"T": values(50_000, 1024), "dZ": values(50_000, 1024)})
    assert [way.is_shared for way in schedules(many.bound, many.strides, "store")] == [False]
    short = problem(expr, {"T": values(1000, 64), "dZ": values(1000, 64)})
    assert [way.is_shared for way in schedules(short.bound, short.strides, "store")] == [False]


def test_programs_share_a_sum_over_several_names_none_of_which_is_long() -> None:
    expr = "M[i,r] += X[i,j,k] * B[j,r] * C[k,r]"
    for lengths, is_shared in (((149, 135), True), ((4, 135), False), ((40, 20), False)):
        j, k = lengths
        own = problem(expr, {"X": values(89, j, k), "B": values(j, 9), "C": values(k, 9)})
        assert any(way.is_shared for way in schedules(own.bound, own.strides, "store")) == is_shared


def maximum(fact: Fact | None = ROWS, deterministic: bool = False) -> Problem:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "AV": values(300, 8), "B": values(200, 128)}
    return problem(GROUP_MAX, tensors, (200, 128), fact, deterministic=deterministic)


def test_rivals_meet_in_the_program_that_owns_their_row_or_nowhere() -> None:
    for deterministic in (False, True):
        assert ways(maximum(deterministic=deterministic)) == ("owner",)
        assert ways(maximum(None, deterministic)) == ()
    few = {"E": positions(50), "V": values(256, 50, 16)}
    assert ways(problem("Z[b,E[p],w] = max(V[b,p,w])", few, (256, 8, 16))) == ()
    dense = problem("C[i,j] = min(A[i,k] * B[k,j])", {"A": values(64, 32), "B": values(32, 64)})
    assert ways(dense) == ("store",)


def test_rivals_are_never_added_by_a_dot_nor_cut_over_programs() -> None:
    dense = problem("C[i,j] = max(A[i,k] * B[k,j])", {"A": values(64, 64), "B": values(64, 64)})
    for use_dot in (None, True):
        assert not scheduled(dense, "store", use_dot).uses_dot
    long = problem("C[()] = max(A[i] * B[i])", {"A": values(10000), "B": values(10000)})
    assert scheduled(long, "store").strategy == "store"
    assert dict(scheduled(long, "store").roles) == {"i": "step"}


def test_rivals_are_multiplied_one_by_one() -> None:
    """A sum may be taken over k before B is multiplied in; the largest product may not."""
    tensors = {"A": values(64, 64), "B": values(64), "D": values(64)}
    tree = scheduled(problem("C[i] = max(A[i,k] * B[i] * D[k])", tensors), "store").tree
    assert isinstance(tree, Product)
    assert isinstance(tree.left, Product)
    assert tree.axes == {"i", "k"}


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


def test_a_dot_can_be_forbidden() -> None:
    application = APPLICATIONS["convolution_atomic"]
    plain = scheduled(application.problem(), "atomic", use_dot=False)
    assert not plain.uses_dot
    assert "step" not in plain.roles.values()


def test_a_dot_can_be_forced_where_extents_are_too_short() -> None:
    own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(3, 3), "B": values(3, 3)})
    assert not scheduled(own, "store").uses_dot
    assert scheduled(own, "store", use_dot=True).uses_dot


@pytest.mark.parametrize(
    ("extents", "is_worth_it"), [((16, 16, 16), True), ((4, 16, 16), True), ((3, 64, 64), False), ((8, 8, 64), False)]
)
def test_two_sides_of_a_dot_must_be_long(extents: tuple[int, int, int], is_worth_it: bool) -> None:
    m, n, k = extents
    own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(m, k), "B": values(k, n)})
    assert scheduled(own, "store").uses_dot == is_worth_it


SHORT_TABLE = "Z[b,i,w] += T[p,i,j,k] * X[b,p,j,u] * Y[b,p,k] * W[b,p,u,w]"


def short_table(paths: int = 23, short: int = 8, wide: int = 32) -> Problem:
    tensors = {"T": values(paths, short, short, short), "X": values(900, paths, short, wide)}
    return problem(SHORT_TABLE, {**tensors, "Y": values(900, paths, short), "W": values(900, paths, wide, wide)})


@pytest.mark.parametrize("paths", [3, 23])
@pytest.mark.parametrize("short", [4, 7, 8])
def test_a_table_of_short_axes_is_no_loop(paths: int, short: int) -> None:
    own = scheduled(short_table(paths, short), "store")
    assert own.has_table
    assert dict(own.roles) == dict(b="grid", i="tile", w="tile", p="loop", j="step", k="step", u="step")


@pytest.mark.parametrize(("short", "wide"), [(16, 32), (3, 32), (8, 8)])
def test_a_table_is_worth_it_beside_a_dot(short: int, wide: int) -> None:
    """Not with axes that are long, and not where the dot is too small."""
    assert not scheduled(short_table(short=short, wide=wide), "store").has_table


def test_rows_with_many_entries_take_several_at_once() -> None:
    own = spmm()
    plain, deep = schedules(own.bound, own.strides, "owner", own.fact)
    assert plain.names("step") == ()
    assert dict(deep.roles) == {"r": "grid", "n": "tile", "p": "segment", "q": "step"}


def test_the_axis_along_memory_is_a_tile() -> None:
    rowwise = problem("C[i,j] = A[i,j] * B[i]", {"A": values(40, 50), "B": values(40)})
    assert scheduled(rowwise, "store").axes == ("i", "j")


def test_an_output_that_is_written_whole_needs_no_initial_value() -> None:
    assert scheduled(spmm(), "owner").covers_output
    assert not scheduled(spmm(), "store-or-atomic").covers_output
    diagonal = problem("C[i,i] = A[i]", {"A": values(40)})
    assert not scheduled(diagonal, "store").covers_output


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


# neighbours side by side

BLOCK_GRADIENT = "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i]"


def block_gradient(
    o: int = 32, i: int = 32, Q: int = 8, expr: str = BLOCK_GRADIENT, dtype: torch.dtype = torch.float16
) -> Problem:
    dense = {"dY": values(512, 40, o, dtype=dtype), "X": values(512, 50, i, dtype=dtype)}
    return problem(expr, {"AM": positions(300), "AK": positions(300, Q), **dense})


def test_narrow_blocks_that_share_a_side_stand_side_by_side() -> None:
    own = block_gradient()
    wide, narrow = schedules(own.bound, own.strides, "store")
    assert wide.merged == Merged("c", outer="q", inner="i", width=32)
    assert wide.extents["c"] == 256
    assert wide.axes == ("o", "t", "c")
    assert narrow.merged is None
    assert narrow.axes == ("o", "t", "i")
    assert (
        str(wide)
        == """\
scatter: store, product: tl.dot
index         extent  role
p                300  grid
q                  8  merged
i                 32  merged
o                 32  tile
c                256  tile
t                512  step"""
    )


def test_blocks_of_64_in_half_precision_do_too() -> None:
    own = block_gradient(o=64, i=64)
    wide, _ = schedules(own.bound, own.strides, "store")
    assert wide.merged == Merged("c", outer="q", inner="i", width=64)


def test_either_side_may_be_the_one_with_neighbours() -> None:
    own = block_gradient(expr="dW[p,q,i,o] += X[t,AK[p,q],i] * dY[t,AM[p],o]")
    wide, _ = schedules(own.bound, own.strides, "store")
    assert wide.axes == ("c", "t", "o")


@pytest.mark.parametrize(
    "own",
    [
        block_gradient(o=128),
        block_gradient(i=128),
        block_gradient(o=64, dtype=torch.float32),
        block_gradient(o=65, i=64),
        block_gradient(o=33, dtype=torch.float32),
        block_gradient(o=33, dtype=torch.float64),
        block_gradient(i=24),
        block_gradient(Q=1),
        problem("C[q,i,j] += A[i,k] * B[q,k,j]", {"A": values(32, 64), "B": values(8, 64, 32)}),
        problem("C[p,q,i,j] += A[p,q,i,k] * B[p,q,k,j]", {"A": values(9, 8, 32, 64), "B": values(9, 8, 64, 32)}),
        problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(32, 64), "B": values(64, 32)}),
    ],
    ids=[
        "wide rows",
        "wide columns",
        "wide numbers",
        "just too wide",
        "just too wide in single precision",
        "just too wide in double precision",
        "no power of two",
        "alone",
        "varying",
        "nothing shared",
        "no neighbour",
    ],
)
def test_other_dots_stay_alone(own: Problem) -> None:
    assert [way.merged for way in schedules(own.bound, own.strides, "store")] == [None]


def test_a_merged_axis_keeps_clear_of_names_in_use() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(512, 50, 32)}
    own = problem("dW[c,q,o,i] += dY[t,AM[c],o] * X[t,AK[c,q],i]", tensors)
    assert scheduled(own, "store").axes == ("o", "t", "c_")


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


# tiles that own their rows


def tiled(
    expr: str = CONVOLUTION_TILED, is_seeded: bool = False, rows: int = 1000, deterministic: bool = False
) -> Problem:
    tensors = {"ROW": positions(-(-rows // 16), 16), "TILE": positions(300), "NBR": positions(300, 16)}
    tensors |= {"TAP": positions(300), "In": values(rows, 32), "Weight": values(27, 32, 48)}
    if is_seeded:
        tensors["Out"] = values(48).expand(rows, 48)
    return problem(expr, tensors, None if is_seeded else (rows, 48), TILES, deterministic=deterministic)


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
        assert dict(plain.roles) == {"q": "grid", "r": "tile", "m": "tile", "p": "segment", "c": "loop"}
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


def in_sets(rows: int = 32) -> Schedule:
    """Blocks in sets of two rows."""
    indices = {"AM": positions(64, 2), "AT": positions(700), "AS": positions(700, 2), "AK": positions(700)}
    tensors = {**indices, "AV": values(900, rows, 32), "B": values(128, 32, 1024)}
    expr = "C[AM[AT[p],q],i,n] += AV[AS[p,q],i,j] * B[AK[p],j,n]"
    return scheduled(problem(expr, tensors, (128, rows, 1024), OwnedRows("AM", "AT")), "owner")


def test_rows_of_a_set_are_side_by_side() -> None:
    made = in_sets()
    assert made.merged == Merged("c", "q", "i", 32)
    assert made.covers_output
    assert [str(factor) for factor in made.factors] == ["AV[AS[p,q],i,j]", "B[AK[p],j,n]"]
    assert all(dict(config.blocks)["c"] == 64 for config in configs(made, has_order=True))


def test_rows_of_no_power_of_two_are_not() -> None:
    assert in_sets(rows=24).merged is None


def test_rivals_meet_in_the_tile_that_owns_their_row() -> None:
    own = tiled("Out[ROW[TILE[p],q],m] = max(In[NBR[p,q],c] * Weight[TAP[p],c,m])")
    assert ways(own) == ("owner",)
    assert scheduled(own, "owner").covers_output


def test_few_places_with_long_sums_are_shared_by_programs() -> None:
    application = APPLICATIONS["block_gradient_store_once"]
    tensors = {**application.tensors, "AS": positions(5, 8), "AM": positions(5), "AK": positions(5, 8)}
    own = problem(application.expr, tensors, (40, 32, 32), WrittenOnce("AS"))
    shared, wide, narrow = schedules(own.bound, own.strides, "store-once", own.fact)
    assert (shared.strategy, shared.is_shared, shared.merged) == ("atomic", True, wide.merged)
    assert not shared.covers_output
    assert (wide.strategy, narrow.strategy) == ("store-once", "store-once")


def test_half_and_double_get_the_same_roles() -> None:
    for dtype in (torch.float16, torch.float64):
        A, B = values(64, 64, dtype=dtype), values(64, 64, dtype=dtype)
        own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": A, "B": B})
        assert dict(scheduled(own, "store").roles) == {"i": "tile", "j": "tile", "k": "step"}


# what the code generator asks of a schedule

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


def test_parts_of_a_sum_meet_in_the_type_that_is_wanted_where_they_meet_in_memory() -> None:
    for wanted in (torch.float32, torch.float16):
        assert scheduled(spmm(), "store-or-atomic").sum_dtype(wanted) == wanted
        assert scheduled(spmm(), "owner").sum_dtype(wanted) == torch.float16
    assert scheduled(spmm(), "store-or-atomic").sum_dtype(None) == torch.float16
    for dtype in (torch.float32, torch.float64):
        tensors = {"T": values(50_000, 64, dtype=dtype), "dZ": values(50_000, 64, dtype=dtype)}
        shared = scheduled(problem("dW[u,w] += T[b,u] * dZ[b,w]", tensors), "store")
        assert shared.is_shared
        assert shared.sum_dtype(None) == dtype


@pytest.mark.parametrize(("columns", "dtype"), [(7, torch.float32), (8, torch.float16)])
def test_halves_are_added_to_memory_in_pairs_and_to_copies_as_float32(columns: int, dtype: torch.dtype) -> None:
    own = problem("C[E[p],n] += A[p,n]", {"E": positions(90), "A": values(90, columns)}, (5, columns))
    alone = scheduled(own, "atomic")
    copies = alone.in_copies()
    assert copies is not None
    assert (alone.sum_dtype(None), copies.sum_dtype(None)) == (dtype, torch.float32)


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


def test_what_is_kept_is_summed_nowhere() -> None:
    own = block_gradient()
    wide, narrow = schedules(own.bound, own.strides, "store")
    assert [name for name in ("p", "q", "o", "i", "t", "c") if wide.is_kept(name)] == ["p", "q", "o", "i", "c"]
    assert [name for name in ("p", "q", "o", "i", "t", "c") if narrow.is_kept(name)] == ["p", "q", "o", "i"]


@pytest.mark.parametrize(("expr", "is_covered"), [("C[i,0] = A[i]", False), ("C[i,j] = A[i] * B[j]", True)])
def test_a_fixed_position_leaves_others_unwritten(expr: str, is_covered: bool) -> None:
    tensors = {"A": values(40), "B": values(50)}
    own = problem(expr, {name: tensor for name, tensor in tensors.items() if f"{name}[" in expr[4:]}, (40, 50))
    assert scheduled(own, "store").covers_output == is_covered


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


def test_neighbours_that_are_no_set_are_not_taken_in_turn() -> None:
    indices = {"WO": positions(32), "WT": positions(200), "WI": positions(200)}
    tensors = {**indices, "W": values(200, 8, 32, 32), "X": values(32, 32, 64)}
    own = problem("Y[WO[WT[p]],q,o,n] += W[p,q,o,i] * X[WI[p],i,n]", tensors, (32, 8, 32, 64), OwnedRows("WO", "WT"))
    wide = scheduled(own, "owner")
    assert wide.merged == Merged("c", "q", "o", 32)
    assert not wide.has_rows_in_turn


# which names are axes


@pytest.mark.parametrize(("b", "i", "tile"), [(1000, 16, "b"), (16, 1000, "i"), (64, 65, "i"), (128, 129, "b")])
def test_a_dot_has_the_tiles_that_load_least(b: int, i: int, tile: str) -> None:
    own = problem("C[b,i,j] += A[b,i,k] * B[k,j]", {"A": values(b, i, 64), "B": values(64, 64)})
    assert scheduled(own, "store").axes == (tile, "k", "j")


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_dot_has_the_tiles_along_memory(is_turned: bool) -> None:
    """Alone, an element of A costs eight: the axis beside k is then the one along which A lies."""
    A = values(64, 64, 100).transpose(1, 2) if is_turned else values(64, 100, 64)
    own = problem("C[b,i,j] += A[k,b,i] * B[k,j]", {"A": A, "B": values(64, 64)})
    assert scheduled(own, "store").axes == ("b" if is_turned else "i", "k", "j")


def test_an_element_alone_costs_as_much_as_eight() -> None:
    """With A along i, tiles over b load 8 * 32 * 4 + 32 * 4 elements for each k, tiles over i 32 * 4 + 32 * 32."""
    for i, tile in ((4, "b"), (5, "i")):
        own = problem("C[b,i,j] += A[k,b,i] * B[k,j]", {"A": values(64, 32, i), "B": values(64, 32)})
        assert scheduled(own, "store").axes == (tile, "k", "j")


@pytest.mark.parametrize(
    ("expr", "tensors", "axes"),
    [
        (  # Z is loaded for each a, and would be for each b
            "C[a,b,d] += X[b,a] * Y[b,a,c] * Z[c,d]",
            {"X": values(129, 33), "Y": values(129, 33, 129), "Z": values(129, 16)},
            ("b", "c", "d"),
        ),
        (  # X lies along e and Y along a, and Y is the larger one
            "C[c,f] += X[f,a,e] * Y[b,e,c,a]",
            {"X": values(16, 32, 32), "Y": values(8, 32, 16, 32)},
            ("c", "a", "f"),
        ),
        (  # Y lies along a, and is what most is loaded of
            "C[a,b,e] += X[f,b,I[c]] * Y[c,e,a] * Z[a,e]",
            {"X": values(7, 7, 40), "I": positions(130), "Y": values(130, 130, 7), "Z": values(7, 130)},
            ("a", "c", "b"),
        ),
    ],
    ids=["loaded again", "sums along memory", "rows along memory"],
)
def test_what_is_loaded_counts_for_all_factors(
    expr: str, tensors: dict[str, torch.Tensor], axes: tuple[str, ...]
) -> None:
    assert scheduled(problem(expr, tensors), "store", use_dot=True).axes == axes


@pytest.mark.parametrize(("j", "i", "side"), [(129, 128, 0), (128, 129, 0), (120, 128, 0), (128, 120, 1)])
def test_a_vector_is_multiplied_into_the_smaller_tile(j: int, i: int, side: int) -> None:
    """Of tiles that are equally large, which no side longer than 128 makes otherwise, into the first."""
    own = problem("C[j,i] += B[k,j] * A[i,k] * D[k]", {"B": values(64, j), "A": values(i, 64), "D": values(64)})
    tree = scheduled(own, "store").tree
    assert isinstance(tree, Dot)
    assert tree.right == Product(Leaf(side, frozenset(("kj", "ik")[side])), Leaf(2, frozenset("k")))


def test_what_no_other_factor_shares_is_no_side_of_a_dot() -> None:
    separate = problem("C[d] += X[b,a] * Y[d,e]", {"X": values(32, 32), "Y": values(32, 32)})
    plain = scheduled(separate, "store", use_dot=True)
    assert not plain.uses_dot
    assert dict(plain.roles) == {"d": "tile", "b": "merged", "a": "merged", "e": "loop", "b_a": "step"}
    assert plain.tree == Product(Leaf(1, frozenset("d")), Sum(Leaf(0, frozenset({"b_a"})), "b_a"))
    tensors = {"X": values(128, 128), "Y": values(128, 64), "Z": values(64, 64)}
    beside = scheduled(problem("C[b,f] += X[e,b] * Y[e,f] * Z[a,d]", tensors), "store")
    assert dict(beside.roles) == {"b": "tile", "f": "tile", "a": "loop", "d": "loop", "e": "step"}


def test_one_side_of_a_dot_is_no_tile() -> None:
    """b stands beside the product over e, and only the short a would make it two-dimensional."""
    tensors = {"X": values(5), "Y": values(2, 40), "I": positions(64), "Z": values(64, 64)}
    own = problem("C[b,f] += X[b] * Y[a,I[e]] * Z[e,f]", tensors)
    assert not scheduled(own, "store", use_dot=True).uses_dot


def test_tiles_have_two_axes_when_they_meet() -> None:
    """Neither a table's axes nor the sum that is left over is a third axis of what a dot has made."""
    tensors = {"X": values(5, 5, 5), "Y": values(5, 40), "I": positions(5), "J": positions(5), "Z": values(5, 40, 5)}
    own = problem("C[c,d] += X[e,a,b] * Y[b,I[d]] * Z[d,J[c],a]", tensors)
    found = scheduled(own, "store", use_dot=True)
    assert found.uses_dot
    assert dict(found.roles) == {"d": "grid", "c": "tile", "e": "step", "a": "step", "b": "step"}


def test_a_table_may_stand_beside_two_long_sums() -> None:
    Y = values(16, 5, 8, 5).permute(0, 3, 2, 1)
    tensors = {"X": values(8, 40).t(), "Y": Y, "Z": values(16, 16, 5)}
    own = problem("C[a] += X[f,a] * Y[g,b,c,d] * Z[g,e,d]", tensors)
    found = scheduled(own, "store", use_dot=True)
    assert found.has_table
    assert dict(found.roles) == {"a": "tile", "g": "loop", **dict.fromkeys("bcdfe", "step")}


def test_tiles_that_allow_no_dot_leave_others_to_be_tried() -> None:
    tensors = {"X": values(40, 5, 5), "Y": values(40, 8, 16), "Z": values(5, 40)}
    own = problem("C[a,d,f] += X[b,a,e] * Y[b,g,f] * Z[e,d]", tensors)
    found = scheduled(own, "store")
    assert found.uses_dot
    assert dict(found.roles) == {"a": "grid", "d": "tile", "f": "tile", "g": "loop", "b": "step", "e": "step"}


def test_two_short_names_are_no_table() -> None:
    X = values(130, 4, 33, 40).permute(2, 3, 0, 1)
    own = problem("C[a,c,e] += X[d,I[f],a,e] * Y[f,e,c,a]", {"X": X, "I": positions(33), "Y": values(33, 4, 4, 130)})
    assert not any(way.uses_dot for way in schedules(own.bound, own.strides, "store"))


def test_several_dots_in_a_row() -> None:
    tensors = {"A": values(64, 64), "B": values(64, 64), "D": values(64, 64)}
    own = problem("C[i] += A[i,j] * B[j,k] * D[k,l]", tensors)
    found = scheduled(own, "store")
    assert found.uses_dot
    assert dict(found.roles) == {"i": "tile", "j": "step", "k": "step", "l": "step"}


def test_an_owned_row_is_no_side_of_a_dot() -> None:
    tensors = {"AM": positions(300), "A": values(300, 64), "B": values(64, 128)}
    own = problem("C[AM[p],n] += A[p,k] * B[k,n]", tensors, (200, 128), ROWS)
    for use_dot in (None, True):
        assert not scheduled(own, "owner", use_dot).uses_dot


@pytest.mark.parametrize(("extents", "is_worth_it"), [((4, 12, 12), True), ((4, 11, 64), False), ((64, 12, 4), True)])
def test_a_side_of_a_dot_may_be_padded(extents: tuple[int, int, int], is_worth_it: bool) -> None:
    m, n, k = extents
    own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(m, k), "B": values(k, n)})
    assert scheduled(own, "store").uses_dot == is_worth_it


@pytest.mark.parametrize(
    "own",
    [
        problem("C[p,q,i,j] += A[p,i,k] * B[p,k,j]", {"A": values(9, 32, 64), "B": values(9, 64, 32)}, (9, 8, 32, 32)),
        problem(
            "dW[p,q,o,i] += dY[t,AM[p],o] * X[i,AK[p,q],t]",
            {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(32, 50, 512)},
        ),
        problem(
            "dW[p,q,o,i] += dY[t,AM[p],o] * X[t,AK[p,q],i] * D[o,i]",
            {"AM": positions(300), "AK": positions(300, 8), "dY": values(512, 40, 32), "X": values(512, 50, 32)}
            | {"D": values(32, 32)},
        ),
    ],
    ids=["nothing moved", "varying columns", "a factor over both sides"],
)
def test_neighbours_share_what_one_of_them_moves(own: Problem) -> None:
    assert [way.merged for way in schedules(own.bound, own.strides, "store")] == [None]


def test_owned_rows_are_no_neighbours() -> None:
    """Though they would share X: each has as many groups as it happens to have."""
    tensors = {"WT": positions(200), "W": values(200, 32, 32), "X": values(32, 64)}
    own = problem("Y[WT[p],o,n] += W[p,o,i] * X[i,n]", tensors, (32, 32, 64), OwnedRows("WT"))
    (way,) = schedules(own.bound, own.strides, "owner", own.fact)
    assert way.merged is None
    assert dict(way.roles) == {"r": "grid", "o": "tile", "n": "tile", "p": "segment", "i": "step"}


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


def test_several_summands_stand_beside_results_of_several_names() -> None:
    tensors = {"AM": positions(300), "AV": values(300, 9), "AK": positions(300, 9), "B": values(200, 16, 8)}
    own = problem("C[AM[p],m,n] += AV[p,q] * B[AK[p,q],m,n]", tensors, (200, 16, 8), ROWS)
    plain, deep = schedules(own.bound, own.strides, "owner", own.fact)
    assert plain.flats == deep.flats == (Flat("m_n", ("m", "n")),)
    parts = dict.fromkeys("mn", "merged")
    assert dict(plain.roles) == {**parts, "r": "tile", "m_n": "tile", "p": "segment", "q": "loop"}
    assert dict(deep.roles) == {"r": "grid", **parts, "m_n": "tile", "p": "segment", "q": "step"}
    assert deep.extents["m_n"] == 128


def test_a_long_loop_over_stretches_takes_several_summands_or_none() -> None:
    for length, ways in ((1023, 2), (1024, 1)):
        own = problem("C[q,n] += A[q,k,n]", {"A": values(300, length, 300)})
        assert len(schedules(own.bound, own.strides, "store")) == ways


def test_several_summands_at_once_are_those_of_the_longest_loop() -> None:
    tensors = {"AM": positions(300), "AV": values(300, 9, 16), "AK": positions(300, 9, 16), "B": values(200, 128)}
    own = problem("C[AM[p],n] += AV[p,q,k] * B[AK[p,q,k],n]", tensors, (200, 128), ROWS)
    _, deep = schedules(own.bound, own.strides, "owner", own.fact)
    assert dict(deep.roles) == {"r": "grid", "n": "tile", "p": "segment", "q": "loop", "k": "step"}
    assert deep.tree is not None
    columns = problem("C[n] += A[q,n] * B[q]", {"A": values(100, 64), "B": values(100)})
    deep, plain = schedules(columns.bound, columns.strides, "store")
    assert dict(plain.roles) == {"n": "tile", "q": "loop"}
    assert dict(deep.roles) == {"n": "tile", "q": "step"}


def test_summands_along_memory_are_taken_at_once_already() -> None:
    own = problem("C[i] += A[i,r,p] * W[r]", {"A": values(300, 20, 64), "W": values(20)})
    (way,) = schedules(own.bound, own.strides, "store")
    assert dict(way.roles) == {"i": "tile", "r": "loop", "p": "step"}


def test_summed_names_that_memory_goes_on_along_are_one_axis() -> None:
    own = problem("C[()] += A[i,j,k] * B[i,j,k]", dict.fromkeys("AB", values(30, 40, 50)))
    assert scheduled(own, "store").names("step") == ("i_j_k",)
    gap = {"A": values(30, 40, 60)[..., :50], "B": values(30, 40, 60)[..., :50]}
    assert scheduled(problem("C[()] += A[i,j,k] * B[i,j,k]", gap), "store").names("step") == ("k",)
    assert scheduled(problem("C[k] += A[i,j,k]", {"A": values(30, 40, 50)}), "store").names("step") == ("i_j",)
    assert scheduled(problem("C[j] += A[i,j,k]", {"A": values(30, 40, 50)}), "store").names("step") == ("k",)
    weighted = problem("C[()] += A[i,j] * W[j]", {"A": values(30, 40), "W": values(40)})
    assert scheduled(weighted, "store").names("step") == ("j",)
    traced = problem("C[()] += A[i,i,j]", {"A": values(30, 30, 40)})
    assert scheduled(traced, "store").names("step") == ("j",)
    pointed = {"A": values(30, 40), "E": positions(30), "B": values(9)}
    assert scheduled(problem("C[()] += A[i,j] * B[E[i]]", pointed), "store").names("step") == ("j",)


def test_scatters_into_few_places_have_copies_of_them() -> None:
    def has_copies(numbers: int, places: int, **options: bool) -> bool:
        own = problem("C[E[p]] += A[p]", {"E": positions(numbers), "A": values(numbers)}, (places,))
        return schedules(own.bound, own.strides, "atomic", **options)[0].has_copies

    assert has_copies(64_000, 1000)
    assert not has_copies(63_999, 1000)
    assert not has_copies(10**9, 2**22)  # two copies would not stay in the cache
    own = problem("C[E[p]] += A[p]", {"E": positions(64_000), "A": values(64_000)}, (1000,), deterministic=True)
    assert ways(own) == ()


def test_copies_are_of_what_has_none_and_adds_up_in_any_order() -> None:
    scattered = problem(
        "C[E[p],n] += A[p,k] * B[k,n]", {"E": positions(90), "A": values(90, 3), "B": values(3, 7)}, (5, 7)
    )
    copies = scheduled(scattered, "atomic").in_copies()
    assert copies is not None
    assert (copies.strategy, copies.is_shared) == ("atomic", False)  # though its loop could be shared
    assert str(copies).splitlines()[0] == "scatter: atomic, product: multiply-add, copies of the output"
    assert copies.in_copies() is None
    summed = scheduled(problem("C[i] += A[i,k]", {"A": values(400, 99)}), "store").in_copies()
    assert summed is not None
    assert (summed.strategy, summed.is_shared) == ("store", True)
    assert str(summed).splitlines()[0] == (
        "scatter: store, product: multiply-add, sums shared by programs, copies of the output"
    )
    assert scheduled(problem("C[i,j] = A[i,j]", {"A": values(40, 50)}), "store").in_copies() is None
    assert scheduled(block_gradient(), "store").in_copies() is None  # several side by side
    assert scheduled(spmm(), "owner").in_copies() is None  # nobody else adds to a row
    neighbours = problem("C[E[p],n] += A[p,n]", {"E": positions(9000), "A": values(9000, 32)}, (5, 32))
    listed = schedules(neighbours.bound, neighbours.strides, "atomic")
    assert {bool(way.run) for way in listed if not way.has_copies} == {False, True}
    assert {bool(way.run) for way in listed if way.has_copies} == {False}  # sums of neighbours meet elsewhere already


# what a full search has besides


def test_a_full_search_has_a_few_choices_of_the_tiles_of_a_dot() -> None:
    own = problem("C[a,b,e,c,d] += X[a,b,e,k] * Y[c,d,k]", {"X": values(*[32] * 4), "Y": values(*[32] * 3)})
    ways = (*schedules(own.bound, own.strides, "store"), *others(own, "store"))
    alone = [way for way in ways if way.uses_dot and way.merged is None and not way.is_shared]
    assert len({way.names("tile") for way in alone}) == len(alone) == 4  # of six


def test_a_full_search_takes_two_summands_at_once() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 2), "AV": values(300, 2), "B": values(200, 128)}
    own = problem(GROUP_SPMM, tensors, (200, 128), ROWS)
    assert [way.names("step") for way in others(own, "owner")] == [("q",)]


def test_a_full_search_shares_loops() -> None:
    own = problem("C[n] += A[q,n] * B[q]", {"A": values(100, 64), "B": values(100)})
    assert [way.names("loop") for way in others(own, "store") if way.strategy == "atomic"] == [(), ("q",)]


def test_a_full_search_repeats_nothing() -> None:
    dots = problem("C[i,j] += A[i,k] * B[k,j]", {"A": values(64, 9000), "B": values(9000, 64)}, deterministic=True)
    preferred, rest = schedules(dots.bound, dots.strides, "store", None, True), others(dots, "store")
    assert [(way.is_shared, way.has_copies) for way in preferred] == [(True, True), (False, False)]
    assert rest
    assert not any(way in preferred for way in rest)
    assert not any(way.is_atomic for way in rest)


@pytest.mark.parametrize(
    ("expr", "tensors", "preferred", "others_of_rules"),
    [
        (
            "dW[p,q,s,o,i] += dY[t,AM[p],s,o] * X[t,AK[p,q],i]",
            {"dY": values(512, 40, 4, 32), "X": values(512, 50, 32)},
            "so pq t",
            ["qi ps t", "iq ps t", "so pi t", "os pq t", "qi po t", "iq po t", "os pi t"],
        ),
        (
            "dW[p,q,o,i] += dY[t,u,AM[p],o] * X[t,u,AK[p,q],i]",
            {"dY": values(512, 64, 40, 32), "X": values(512, 64, 50, 32)},
            "qi p t",
            ["qi p u", "iq p t", "iq p u"],
        ),
    ],
    ids=["several sides", "several sums"],
)
def test_a_full_search_has_all_neighbours_once(
    expr: str, tensors: dict[str, torch.Tensor], preferred: str, others_of_rules: list[str]
) -> None:
    """Two names side by side, what is left of the grid, and the sum; rules prefer one of them."""

    def neighbours(ways: tuple[Schedule, ...], is_shared: bool) -> list[str]:
        held = [(way.merged, way) for way in ways if way.is_shared == is_shared]
        return [
            f"{merged.outer}{merged.inner} {''.join(way.names('grid'))} {''.join(way.names('step'))}"
            for merged, way in held
            if merged is not None
        ]

    own = problem(expr, {"AM": positions(300), "AK": positions(300, 8), **tensors})
    assert neighbours(schedules(own.bound, own.strides, "store"), is_shared=False) == [preferred]
    rest = others(own, "store")
    assert neighbours(rest, is_shared=False) == others_of_rules
    assert neighbours(rest, is_shared=True) == [preferred, *others_of_rules]


def is_shared(expr: str, strategy: str, size: tuple[int, ...] | None = None, **tensors: torch.Tensor) -> bool:
    own = problem(expr, tensors, size)
    return schedules(own.bound, own.strides, strategy)[0].is_shared


def test_loops_and_scattered_sums_are_shared_too() -> None:
    assert is_shared("C[i] += A[i,r,p] * W[r]", "store", A=values(3, 2000, 64), W=values(2000))
    tensors = {"E": positions(3), "T": values(50_000, 3, 64), "dZ": values(50_000, 64)}
    assert is_shared("C[E[e],u,w] += T[b,e,u] * dZ[b,w]", "atomic", (5, 64, 64), **tensors)


def test_programs_that_are_enough_share_nothing() -> None:
    """128 of them, each with a tile of up to 64 x 64 of a dot, or of 32 columns, or of one row."""
    for g, n, is_few in ((127, 64, True), (128, 64, False), (31, 65, True), (32, 65, False)):
        tensors = {"T": values(2000, g, n), "dZ": values(2000, n)}
        assert is_shared("dW[g,u,w] += T[b,g,u] * dZ[b,w]", "store", **tensors) == is_few
    for columns in (4064, 4096):
        assert is_shared("C[u] += T[b,u]", "store", T=values(2000, columns)) == (columns < 4096)
    for rows in (127, 128):
        assert is_shared("C[b] += T[b,u]", "store", T=values(rows, 2000)) == (rows < 128)


# tables whose numbers the source holds


def over_tables(
    expr: str, fixed: dict[str, torch.Tensor], size: tuple[int, ...], strategy: str = "store", **moving: torch.Tensor
) -> tuple[Schedule, ...]:
    meta = {name: values(*t.shape) if t.is_floating_point() else positions(*t.shape) for name, t in fixed.items()}
    own = problem(expr, {**moving, **meta}, size, ConstantTables.of(fixed))
    return schedules(own.bound, own.strides, strategy, own.fact)


TABLES = {"T": torch.tensor([[0.5, -2.0], [1.5, 1.0]]), "I": torch.tensor([[1, 0], [2, 1]])}


@pytest.mark.parametrize(
    ("indices", "shape", "axes"),
    [
        ("b,{},a", (1000, 3, 64), ("a",)),
        ("b,{},a,c", (1000, 3, 64, 8), ("a", "c")),
        ("b,{},a,c,d", (1000, 3, 64, 16, 8), ("a", "d")),
        ("b,{},c,a", (1000, 3, 8, 64), ("c", "a")),
    ],
)
def test_tables_have_axes_along_memory(indices: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    expr = f"Z[{indices.format('i')}] += T[i,r] * X[{indices.format('I[i,r]')}]"
    size = (shape[0], 2, *shape[2:])
    way, *others = over_tables(expr, TABLES, size, X=values(*shape))
    assert way.tables
    assert way.axes == axes
    assert bool(others) == (len(axes) == 1)
    grid = [name for name in "bacd" if name in indices and name not in axes]
    assert dict(way.roles) == {
        **dict.fromkeys(grid, "grid"),
        **dict.fromkeys(axes, "tile"),
        "i": "unrolled",
        "r": "unrolled",
    }


def test_an_axis_that_varies_is_alone() -> None:
    """The length along memory changes from call to call, since it is also that of Y."""
    expr = "Z[i,a,b] += T[i,r] * X[I[i,r],a,b] * Y[b]"
    way, *_ = over_tables(expr, TABLES, (2, 5, 64), X=values(3, 5, 64), Y=values(64))
    assert way.axes == ("b",)
    assert dict(way.roles) == {"a": "grid", "b": "tile", "i": "unrolled", "r": "unrolled"}
    way, *_ = over_tables("Z[i,b] += T[i,r] * X[I[i,r],b] * Y[b]", TABLES, (2, 64), X=values(3, 64), Y=values(64))
    assert way.axes == ("b",)


def test_results_over_tables_may_be_added_in_memory() -> None:
    expr = "Z[DST[b],i,u] += T[i,r] * X[SRC[b],I[i,r],u]"
    moving = {"X": values(1000, 3, 64), "SRC": positions(1000), "DST": positions(1000)}
    way, *_ = over_tables(expr, TABLES, (700, 2, 64), "atomic", **moving)
    assert way.tables
    assert dict(way.roles) == {"b": "grid", "u": "tile", "i": "unrolled", "r": "unrolled"}
    assert way.in_copies() is None


def test_positions_that_a_table_would_choose_are_not_in_the_source() -> None:
    expr = "Z[b,i,u] += T[i,r] * X[J[b,i],I[i,r],u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64), X=values(50, 3, 64), J=positions(1000, 2))
    assert way.tables == {}


@pytest.mark.parametrize(("channels", "is_held"), [(4096, True), (4097, False)])
def test_what_is_summed_over_tables_fits_one_tile(channels: int, is_held: bool) -> None:
    expr = "dY[b,i] += T[i,r] * X[b,I[i,r],u] * W[b,u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2), X=values(1000, 3, channels), W=values(1000, channels))
    assert bool(way.tables) == is_held


@pytest.mark.parametrize(("channels", "is_held"), [(256, True), (257, False)])
def test_beside_what_is_summed_a_tile_has_16_columns(channels: int, is_held: bool) -> None:
    """Which are as few as there may be, however many there are: 256 x 16 fits a tile."""
    expr = "Z[b,i,a] += T[i,r] * X[b,I[i,r],u,a] * W[b,u]"
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64), X=values(1000, 3, channels, 64), W=values(1000, channels))
    assert bool(way.tables) == is_held


def test_the_last_axis_over_tables_is_the_one_along_memory() -> None:
    """More is read along a than is written along c."""
    expr, X = "Z[b,i,a,c] += T[i,r] * X[b,I[i,r],a,c]", values(1000, 3, 8, 64).transpose(2, 3)
    way, *_ = over_tables(expr, TABLES, (1000, 2, 64, 8), X=X)
    assert way.axes == ("c", "a")


@pytest.mark.parametrize(("entries", "is_held"), [(512, True), (513, False)])
def test_a_source_holds_so_many_numbers(entries: int, is_held: bool) -> None:
    fixed = {"T": torch.ones(entries), "I": torch.arange(entries) % 3}
    way, *_ = over_tables("Z[b,i,u] += T[i] * X[b,I[i],u]", fixed, (1000, entries, 64), X=values(1000, 3, 64))
    assert bool(way.tables) == is_held


def test_a_table_may_have_a_single_entry() -> None:
    fixed = {"T": torch.tensor([[0.5]]), "I": torch.tensor([[2]])}
    way, *_ = over_tables("Z[b,i,u] += T[i,r] * X[b,I[i,r],u]", fixed, (1000, 1, 64), X=values(1000, 3, 64))
    assert way.tables


def test_asked_for_a_kind_of_product_tables_are_read() -> None:
    meta = {"T": values(2, 2), "I": positions(2, 2), "X": values(1000, 3, 64)}
    own = problem("Z[b,i,u] += T[i,r] * X[b,I[i,r],u]", meta, (1000, 2, 64), ConstantTables.of(TABLES))
    for use_dot in (True, False):
        assert not scheduled(own, "store", use_dot).tables
