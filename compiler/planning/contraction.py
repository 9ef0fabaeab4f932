"""The contraction of one tile's factors: a tree of elementwise products, `tl.dot`s and sums.

Tiles have at most two axes, a table over short ones three. A tree is found greedily: a factor whose axes lie inside
another's is multiplied into it; two factors that share one summed axis become a dot; an axis that only one factor has
is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Union

__all__ = ["SHORT", "Dot", "Leaf", "Node", "Product", "Sum", "contract", "dots", "leaves", "multiply"]

SHORT = 8  # an axis up to this long may be the third of a tile: the rows of a table of coefficients


@dataclass(frozen=True)
class Leaf:
    """Factor number `at`, a tile over `axes`."""

    at: int
    axes: frozenset[str]


@dataclass(frozen=True)
class Product:
    """An elementwise product of nodes, the axes of one inside those of the other, or disjoint."""

    left: Node
    right: Node

    @property
    def axes(self) -> frozenset[str]:
        return self.left.axes | self.right.axes


@dataclass(frozen=True)
class Dot:
    """(y, over) x (over, x) -> (y, x): on Tensor Cores, or by multiply-adds where `over` is shorter than they take."""

    left: Node
    right: Node
    over: str

    @property
    def axes(self) -> frozenset[str]:
        return (self.left.axes | self.right.axes) - {self.over}


@dataclass(frozen=True)
class Sum:
    """A node summed over one axis."""

    of: Node
    over: str

    @property
    def axes(self) -> frozenset[str]:
        return self.of.axes - {self.over}


Node = Union[Leaf, Product, Dot, Sum]  # noqa: UP007 - evaluated before the classes exist on Python 3.10


def contract(
    leaves: Sequence[frozenset[str]], kept: frozenset[str], sizes: Mapping[str, int], use_dot: bool
) -> Node | None:
    """Return a tree over `leaves` in which no tile has more than two axes, or three with two short ones, or None.

    Axes in `kept` are not summed. The root may keep others: they are summed once, after the loops.
    """
    nodes: list[Node] = [Leaf(at, axes) for at, axes in enumerate(leaves)]
    if any(len(node.axes) > (3 if use_dot and _has_short_axes(node.axes, sizes) else 2) for node in nodes):
        return None
    while len(nodes) > 1:
        nodes = _absorb(nodes, sizes)
        if len(nodes) == 1:
            break
        merged = (_dot(nodes, kept, sizes) if use_dot else None) or _sum(nodes, kept) or _outer(nodes)
        if merged is None:
            return None
        nodes = merged
    return nodes[0] if nodes else None


def multiply(leaves: Sequence[frozenset[str]]) -> Node | None:
    """Return the product of all leaves, with nothing summed, for a reduction that compares single products."""
    nodes: list[Node] = [Leaf(at, axes) for at, axes in enumerate(leaves)]
    return reduce(Product, nodes) if nodes else None


def dots(node: Node | None) -> list[Dot]:
    """Return every dot of a tree, inner ones first."""
    if isinstance(node, (Product, Dot)):
        return [*dots(node.left), *dots(node.right), *([node] if isinstance(node, Dot) else [])]
    return dots(node.of) if isinstance(node, Sum) else []


def leaves(node: Node | None) -> list[Leaf]:
    """Return every factor of a tree."""
    if isinstance(node, (Product, Dot)):
        return [*leaves(node.left), *leaves(node.right)]
    return leaves(node.of) if isinstance(node, Sum) else [node] if node is not None else []


def _has_short_axes(axes: frozenset[str], sizes: Mapping[str, int]) -> bool:
    return sum(sizes[axis] <= SHORT for axis in axes) >= 2


def _area(axes: frozenset[str], sizes: Mapping[str, int]) -> int:
    area = 1
    for axis in axes:
        area *= sizes[axis]
    return area


def _absorb(nodes: list[Node], sizes: Mapping[str, int]) -> list[Node]:
    """Return the nodes with each multiplied into the smallest other one whose axes contain its own."""
    while True:
        for small in sorted(nodes, key=lambda node: len(node.axes)):
            hosts = [node for node in nodes if node is not small and small.axes <= node.axes]
            if hosts:
                host = min(hosts, key=lambda node: (_area(node.axes, sizes), len(dots(node))))
                nodes = [node for node in nodes if node is not small and node is not host] + [Product(host, small)]
                break
        else:
            return nodes


def _dot(nodes: list[Node], kept: frozenset[str], sizes: Mapping[str, int]) -> list[Node] | None:
    """Return the nodes with the cheapest pair that shares one axis, which no other node has, as a dot; or None."""
    best: tuple[int, list[Node]] | None = None
    for i, left in enumerate(nodes):
        for right in nodes[i + 1 :]:
            shared = left.axes & right.axes
            if len(shared) != 1 or len(left.axes) != 2 or len(right.axes) != 2:
                continue
            (over,) = shared
            others = [node for node in nodes if node is not left and node is not right]
            if over in kept or any(over in node.axes for node in others):
                continue
            cost = _area(left.axes | right.axes, sizes)
            if best is None or cost < best[0]:
                best = cost, [*others, Dot(left, right, over)]
    return best[1] if best else None


def _sum(nodes: list[Node], kept: frozenset[str]) -> list[Node] | None:
    """Return the nodes with one summed over an axis that only it has, or None."""
    for node in nodes:
        others = [other for other in nodes if other is not node]
        for axis in sorted(node.axes - kept):
            if not any(axis in other.axes for other in others):
                return [*others, Sum(node, axis)]
    return None


def _outer(nodes: list[Node]) -> list[Node] | None:
    """Return the nodes with two multiplied whose axes together are at most two, or None."""
    for i, left in enumerate(nodes):
        for right in nodes[i + 1 :]:
            if len(left.axes | right.axes) <= 2:
                others = [node for node in nodes if node is not left and node is not right]
                return [*others, Product(left, right)]
    return None
