"""Which statements are products of tiles, and which of their names are the sides of a dot."""

from __future__ import annotations

import pytest
import torch
from problems import APPLICATIONS, positions, problem, values
from scheduling import ROWS, others, scheduled

from insum_ops.compiler.planning.contraction import Dot, Leaf, Product, Sum
from insum_ops.compiler.planning.rules import schedules
from insum_ops.compiler.tuning.problem import Problem

pytestmark = pytest.mark.cpu


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


def test_half_and_double_get_the_same_roles() -> None:
    for dtype in (torch.float16, torch.float64):
        A, B = values(64, 64, dtype=dtype), values(64, 64, dtype=dtype)
        own = problem("C[i,j] += A[i,k] * B[k,j]", {"A": A, "B": B})
        assert dict(scheduled(own, "store").roles) == {"i": "tile", "j": "tile", "k": "step"}


@pytest.mark.parametrize(("b", "i", "tile"), [(1000, 16, "b"), (16, 100, "b_i"), (64, 65, "b_i"), (128, 129, "b")])
def test_a_dot_has_the_tiles_that_load_least(b: int, i: int, tile: str) -> None:
    """Two names side by side are one axis where neither fills a tile."""
    own = problem("C[b,i,j] += A[b,i,k] * B[k,j]", {"A": values(b, i, 64), "B": values(64, 64)})
    assert scheduled(own, "store").axes == (tile, "k", "j")


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_dot_has_the_tiles_along_memory(is_turned: bool) -> None:
    """Alone, an element of A costs eight: the axis beside k is then the one along which A lies."""
    A = values(64, 64, 100).transpose(1, 2) if is_turned else values(64, 100, 64)
    own = problem("C[i,b,j] += A[k,b,i] * B[k,j]", {"A": A, "B": values(64, 64)})
    assert scheduled(own, "store").axes == ("b" if is_turned else "i", "k", "j")


def test_an_element_alone_costs_as_much_as_eight() -> None:
    """With A along i, tiles over b load 8 * 32 * 4 + 32 * 4 elements for each k, tiles over i 32 * 4 + 32 * 32."""
    for i, tile in ((3, "b"), (4, "i")):
        own = problem("C[i,b,j] += A[k,b,i] * B[k,j]", {"A": values(64, 32, i), "B": values(64, 32)})
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
            "C[e,b,a] += X[f,b,I[c]] * Y[c,e,a] * Z[a,e]",
            {"X": values(7, 7, 40), "I": positions(130), "Y": values(130, 130, 7), "Z": values(7, 130)},
            ("b", "c", "a"),
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
    assert dict(found.roles) == {"c": "grid", "d": "tile", "e": "step", "a": "step", "b": "step"}


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


def test_a_full_search_has_a_few_choices_of_the_tiles_of_a_dot() -> None:
    own = problem("C[a,b,e,c,d] += X[a,b,e,k] * Y[c,d,k]", {"X": values(*[32] * 4), "Y": values(*[32] * 3)})
    ways = (*schedules(own.bound, own.strides, "store"), *others(own, "store"))
    alone = [way for way in ways if way.uses_dot and way.merged is None and not way.is_shared]
    assert len({way.names("tile") for way in alone}) == len(alone) == 4  # of six


@pytest.mark.parametrize(("dtype", "has_dots"), [(torch.float16, False), (torch.float32, True), (torch.float64, True)])
def test_halves_that_are_added_to_float64_have_no_dots(dtype: torch.dtype, has_dots: bool) -> None:
    tensors = {name: values(64, 64, dtype=dtype) for name in "AB"} | {"C": values(64, 64, dtype=torch.float64)}
    own = problem("C[i,j] += A[i,k] * B[k,j]", tensors)
    ways = (*schedules(own.bound, own.strides, "store"), *others(own, "store"))
    assert any(way.uses_dot for way in ways) == has_dots
