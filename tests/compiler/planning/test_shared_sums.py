"""Sums that programs share, copies of outputs that many add to, and summands that are taken at once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from problems import APPLICATIONS, GROUP_SPMM, positions, problem, values
from scheduling import ROWS, block_gradient, others, scheduled, spmm, ways

from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.planning.scatter import Flat
from insum_ops.formats.facts import OwnedRows, WrittenOnce

pytestmark = pytest.mark.cpu


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
    shared, copies, alone = schedules(own.bound, own.strides, "store")
    assert (shared.strategy, shared.is_shared) == ("atomic", True)
    assert (copies.strategy, copies.is_shared, copies.has_copies) == ("store", True, True)
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
    for length, kinds in ((1000, [False, True, True]), (256, [False, True, True]), (255, [False])):
        short = problem(expr, {"T": values(length, 64), "dZ": values(length, 64)})
        assert [way.is_shared for way in schedules(short.bound, short.strides, "store")] == kinds


def test_programs_share_a_sum_over_several_names_none_of_which_is_long() -> None:
    expr = "M[i,r] += X[i,j,k] * B[j,r] * C[k,r]"
    for lengths, is_shared in (((149, 135), True), ((4, 50), False), ((12, 20), False)):
        j, k = lengths
        own = problem(expr, {"X": values(89, j, k), "B": values(j, 9), "C": values(k, 9)})
        assert any(way.is_shared for way in schedules(own.bound, own.strides, "store")) == is_shared


@pytest.mark.parametrize(
    ("columns", "kinds"), [(1000, [True, True, False]), (6000, [False, True, True]), (40_000, [False])]
)
def test_programs_may_share_sums_of_columns_that_narrow_tiles_could_fill_the_gpu_with(
    columns: int, kinds: list[bool]
) -> None:
    own = problem("Y[j] += X[i,j]", {"X": values(8000, columns)})
    assert [way.is_shared for way in schedules(own.bound, own.strides, "store")] == kinds


def test_the_owner_of_a_row_may_add_up_outer_products() -> None:
    """Rows side by side have entries of their own, and share nothing of what they load."""
    tensors = {"X": values(50, 24, 31), "D": values(50, 24, 35), "F": positions(24), "P": positions(24)}
    expr, fact = "W[b,F[t],u,w] += X[b,P[t],u] * D[b,P[t],w]", OwnedRows("F", is_whole=True)
    own = problem(expr, tensors, (50, 7, 31, 35), fact)
    outer, rows = schedules(own.bound, own.strides, "owner", own.fact)
    assert outer.adds_outer_products
    assert not rows.adds_outer_products
    assert (outer.names("tile"), outer.names("segment")) == (("u", "w"), ("t",))
    both = problem(expr.replace("X[b,P[t],u]", "X[b,u,w]"), {**tensors, "X": values(50, 31, 35)}, (50, 7, 31, 35), fact)
    assert not any(way.adds_outer_products for way in schedules(both.bound, both.strides, "owner", both.fact))


def tiles_of_outer_products(
    expr: str, sizes: Mapping[str, int], fact: OwnedRows, strategy: str = "owner"
) -> list[tuple[str, ...]]:
    tensors = {"F": positions(24), "P": positions(24), "X": values(50, 24, *[sizes[name] for name in "uv"])}
    tensors["D"] = values(50, 24, sizes["w"])
    own = problem(expr, tensors, (sizes["u"], 50, sizes["v"], 7, sizes["w"]), fact)
    ways = schedules(own.bound, own.strides, strategy, own.fact)
    return [way.names("tile") for way in ways if way.adds_outer_products]


def test_outer_products_are_over_the_longest_axis_and_of_sums_whose_rows_one_program_has() -> None:
    expr, whole = "W[u,b,v,F[t],w] += X[b,P[t],u,v] * D[b,P[t],w]", OwnedRows("F", is_whole=True)
    assert tiles_of_outer_products(expr, {"u": 9, "v": 5, "w": 35}, whole) == [("u", "w")]
    assert tiles_of_outer_products(expr, {"u": 5, "v": 9, "w": 35}, whole) == [("v", "w")]
    assert tiles_of_outer_products(expr, {"u": 4, "v": 3, "w": 35}, whole) == [("u", "w")]
    assert tiles_of_outer_products(expr, {"u": 3, "v": 3, "w": 35}, whole) == []
    for is_packed, expected in ((False, [("u", "w")]), (True, [])):
        pieces = OwnedRows("F", cut=32, is_packed=is_packed)
        assert tiles_of_outer_products(expr, {"u": 9, "v": 5, "w": 35}, pieces, "store-or-atomic") == expected
    greatest = expr.replace("+=", "= max(") + ")"
    assert tiles_of_outer_products(greatest, {"u": 9, "v": 5, "w": 35}, whole) == []


def test_rows_with_many_entries_take_several_at_once() -> None:
    own = spmm()
    plain, deep = schedules(own.bound, own.strides, "owner", own.fact)
    assert plain.names("step") == ()
    assert dict(deep.roles) == {"r": "grid", "n": "tile", "p": "segment", "q": "step"}


def test_few_places_with_long_sums_are_shared_by_programs() -> None:
    application = APPLICATIONS["block_gradient_store_once"]
    tensors = {**application.tensors, "AS": positions(5, 8), "AM": positions(5), "AK": positions(5, 8)}
    own = problem(application.expr, tensors, (40, 32, 32), WrittenOnce("AS"))
    shared, wide, narrow = schedules(own.bound, own.strides, "store-once", own.fact)
    assert (shared.strategy, shared.is_shared, shared.merged) == ("atomic", True, wide.merged)
    assert not shared.covers_output
    assert (wide.strategy, narrow.strategy) == ("store-once", "store-once")


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
    for length, number in ((1023, 2), (1024, 1)):
        own = problem("C[q,n] += A[q,k,n]", {"A": values(300, length, 300)})
        assert len(schedules(own.bound, own.strides, "store")) == number


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


def test_a_full_search_takes_two_summands_at_once() -> None:
    tensors = {"AM": positions(300), "AK": positions(300, 2), "AV": values(300, 2), "B": values(200, 128)}
    own = problem(GROUP_SPMM, tensors, (200, 128), ROWS)
    assert [way.names("step") for way in others(own, "owner")] == [("q",)]


def test_a_full_search_shares_loops() -> None:
    own = problem("C[n] += A[q,n] * B[q]", {"A": values(100, 64), "B": values(100)})
    assert [way.names("loop") for way in others(own, "store") if way.strategy == "atomic"] == [(), ("q",)]


def is_shared(expr: str, strategy: str, size: tuple[int, ...] | None = None, **tensors: torch.Tensor) -> bool:
    own = problem(expr, tensors, size)
    return schedules(own.bound, own.strides, strategy)[0].is_shared


def test_loops_and_scattered_sums_are_shared_too() -> None:
    assert is_shared("C[i] += A[i,r,p] * W[r]", "store", A=values(3, 2000, 64), W=values(2000))
    tensors = {"E": positions(3), "T": values(50_000, 3, 64), "dZ": values(50_000, 64)}
    assert is_shared("C[E[e],u,w] += T[b,e,u] * dZ[b,w]", "atomic", (5, 64, 64), **tensors)


def test_programs_that_are_enough_share_nothing() -> None:
    """128 of them, each with a tile of up to 64 x 64 of a dot, or of 32 columns, or of one row."""
    for g, n, is_few in ((127, 64, True), (128, 64, False), (62, 65, True), (63, 65, False)):
        tensors = {"T": values(2000, g, n), "dZ": values(2000, n)}
        assert is_shared("dW[g,u,w] += T[b,g,u] * dZ[b,w]", "store", **tensors) == is_few
    for columns in (4064, 4096):
        assert is_shared("C[u] += T[b,u]", "store", T=values(2000, columns)) == (columns < 4096)
    for rows in (127, 128):
        assert is_shared("C[b] += T[b,u]", "store", T=values(rows, 2000)) == (rows < 128)
