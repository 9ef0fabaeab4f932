"""Trees of products, dots and sums, written `(0 * 1)`, `(0 @k 1)` and `sum_k(0)`."""

from __future__ import annotations

import pytest

from insum_ops.compiler.planning.contraction import Dot, Leaf, Node, Product, contract, dots

pytestmark = pytest.mark.cpu


def tree(leaves: str, kept: str, use_dot: bool = True, **sizes: int) -> Node | None:
    """`leaves` are words of one-letter axes; `-` is a factor without any."""
    axes = [frozenset(word.replace("-", "")) for word in leaves.split()]
    return contract(axes, frozenset(kept), dict.fromkeys("abijkmnquvw", 16) | sizes, use_dot)


def show(node: Node | None) -> str:
    """Which side of a product comes first makes no difference, so the one with the first leaf does."""
    if node is None:
        return "none"
    if isinstance(node, Leaf):
        return str(node.at)
    if isinstance(node, (Product, Dot)):
        left, right = sorted((node.left, node.right), key=lambda side: min(leaves_of(side)))
        between = "*" if isinstance(node, Product) else f"@{node.over}"
        return f"({show(left)} {between} {show(right)})"
    return f"sum_{node.over}({show(node.of)})"


def leaves_of(node: Node) -> list[int]:
    if isinstance(node, Leaf):
        return [node.at]
    return [*leaves_of(node.left), *leaves_of(node.right)] if isinstance(node, (Product, Dot)) else leaves_of(node.of)


@pytest.mark.parametrize(
    ("leaves", "kept", "expected"),
    [
        ("mk kn", "mn", "(0 @k 1)"),
        ("mk kn m", "mn", "((0 * 2) @k 1)"),
        ("- mk kn", "mn", "((0 * 1) @k 2)"),
        ("mk kn mn", "mn", "((0 @k 1) * 2)"),
        ("q qu q uw", "qw", "(((0 * 2) * 1) @u 3)"),
        ("mk kj jn", "mn", "((0 @k 1) @j 2)"),
    ],
)
def test_factors_meet_in_dots(leaves: str, kept: str, expected: str) -> None:
    assert show(tree(leaves, kept)) == expected


@pytest.mark.parametrize(
    ("leaves", "kept", "expected"),
    [
        ("ijk ju k uw", "iw", "(sum_k((0 * 2)) @j (1 @u 3))"),  # a tensor product
        ("ijk ju k iw", "uw", "((sum_k((0 * 2)) @j 1) @i 3)"),  # the gradient of its weights
        ("ijk ju uw iw bk", "b", "(sum_i((0 * ((1 @u 2) @w 3))) @k 4)"),  # of its second input; the root keeps j
    ],
)
def test_a_table_of_three_short_axes_is_summed_on_the_way(leaves: str, kept: str, expected: str) -> None:
    assert show(tree(leaves, kept, i=8, j=8, k=8)) == expected
    assert tree(leaves, kept, i=9, j=9, k=8) is None
    assert tree(leaves, kept, use_dot=False, i=8, j=8, k=8) is None


@pytest.mark.parametrize(
    ("leaves", "kept", "expected"),
    [
        ("n n", "n", "(0 * 1)"),
        ("mn n m", "mn", "((0 * 1) * 2)"),
        ("m n", "mn", "(0 * 1)"),
        ("qn q", "n", "(0 * 1)"),  # the root keeps q: it is summed after the loops
        ("mk n", "mn", "(sum_k(0) * 1)"),
        ("mn", "mn", "0"),
    ],
)
def test_factors_are_multiplied_and_added_without_a_dot(leaves: str, kept: str, expected: str) -> None:
    found = tree(leaves, kept, use_dot=False)
    assert show(found) == expected
    assert dots(found) == []


def test_no_tile_has_three_axes() -> None:
    assert tree("mkn m", "mn") is None
    assert tree("mk kn", "mn", use_dot=False) is None


def test_a_kept_axis_is_never_summed_by_a_dot() -> None:
    assert show(tree("mk kn", "mkn")) == "none"


def test_no_factors_no_tree() -> None:
    assert tree("", "mn") is None
    assert dots(None) == []


def test_a_factor_multiplies_into_the_smallest_other_one() -> None:
    assert show(tree("mk kn k", "mn", m=128, n=16)) == "(0 @k (1 * 2))"
    assert show(tree("mk kn k", "mn", m=16, n=128)) == "((0 * 2) @k 1)"


def test_inner_dots_come_first() -> None:
    assert [dot.over for dot in dots(tree("mk kj jn", "mn"))] == ["k", "j"]


def test_every_leaf_is_used_once() -> None:
    found = tree("q qu q sq uw", "sw", s=16)
    assert found is not None
    assert sorted(leaves_of(found)) == [0, 1, 2, 3, 4]
    assert found.axes == frozenset("sw")
