"""In which order tensors on the way have their dimensions, so that products of them are matrix products without copies.

A product of two tensors is one call of a matrix product if in each of them, and in the result, the names that are
summed, the rows' names and the columns' names lie side by side, in the same order wherever they are, and the last of
them is no name that all three have. What does not lie so has to be copied first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import combinations, permutations
from math import prod
from typing import NamedTuple

from ...lru_cache import LRUCache
from .contraction_path import example_of

__all__ = ["MatrixProduct", "copied_numbers", "laid_out"]

FEW = 4  # names of a tensor, of which all orders are tried
LAYOUTS = 1024  # that are remembered: while a statement is planned, its layouts are asked for several times
ROUNDS = 2  # over all tensors: the order of one depends on those of its neighbours
CHOICES = [chosen for count in range(4) for chosen in combinations(range(3), count)]  # which of three are copied

Names = tuple[str, ...]
Extents = Mapping[str, int]

_layouts: LRUCache[tuple[Names, ...]] = LRUCache(LAYOUTS)


class MatrixProduct(NamedTuple):
    """A product of two tensors: the index names of each, and of the result, in the order of their dimensions."""

    left: Names
    right: Names
    result: Names

    @property
    def tensors(self) -> tuple[Names, Names, Names]:
        return (self.left, self.right, self.result)

    @property
    def groups(self) -> tuple[set[str], ...]:
        """The names that all three have, the rows', the columns' and the summed ones."""
        left, right, result = map(set, self.tensors)
        return left & right & result, (left & result) - right, (right & result) - left, (left & right) - result

    @property
    def natural(self) -> Names:
        """The order of a result that a matrix product writes: what all three have, then rows, then columns."""
        batch, rows, columns, _ = self.groups
        ordered = [[name for name in self.left if name in batch], [name for name in self.left if name in rows]]
        return (*ordered[0], *ordered[1], *[name for name in self.right if name in columns])


def copied_numbers(product: MatrixProduct, extents: Extents) -> int:
    """Return the fewest numbers that have to be copied so that the rest is one matrix product.

    >>> sizes = dict(b=2, i=3, j=5, k=7)
    >>> copied_numbers(MatrixProduct(("i", "j"), ("j", "k"), ("k", "i")), sizes)
    0
    >>> copied_numbers(MatrixProduct(("i", "j", "k"), ("k", "j"), ("i",)), sizes)
    35
    """
    groups = product.groups
    seen = [tuple([name for name in names if extents[name] > 1]) for names in product.tensors]
    if _agree(seen, groups):
        return 0
    sizes = [prod(extents[name] for name in names) for names in product.tensors]
    costs = sorted((sum(sizes[at] for at in chosen), chosen) for chosen in CHOICES)
    return next(
        cost for cost, chosen in costs if _agree([names for at, names in enumerate(seen) if at not in chosen], groups)
    )


def _agree(tensors: Sequence[Names], groups: Sequence[set[str]]) -> bool:
    """Return whether each of these tensors is a matrix as it lies, and each group has one order in all of them."""
    for number, group in enumerate(groups):
        if not group:
            continue
        orders = {tuple([name for name in names if name in group]) for names in tensors}
        if len(orders - {()}) > 1:
            return False
        for names in tensors:
            places = [at for at, name in enumerate(names) if name in group]
            if places and (places[-1] - places[0] >= len(places) or (number == 0 and places[-1] == len(names) - 1)):
                return number == 0 and {*names} <= group  # one number for each: nothing to multiply in rows
    return True


def laid_out(orders: Sequence[Names], products: Sequence[tuple[int, int, int]], extents: Extents) -> list[Names]:
    """Return the names of each tensor in an order for which the fewest numbers are copied.

    `orders` are those of all tensors, and `products` say by their numbers which two are multiplied to which third.
    Results change their order, but for that of the last product: one after another, with the others as they are.

    >>> laid_out(["ab", "bc", "cd", "db", "ad"], [(1, 2, 3), (0, 3, 4)], dict(a=9, b=9, c=9, d=9))
    [('a', 'b'), ('b', 'c'), ('c', 'd'), ('b', 'd'), ('a', 'd')]
    """
    sizes = tuple([(name, example_of(extent)) for name, extent in extents.items()])  # no guards for what is cheaper
    key = tuple([tuple(names) for names in orders]), tuple(products), sizes
    found = _layouts.get(key)
    if found is None:
        found = _layouts[key] = tuple(_laid_out(key[0], products, dict(sizes)))
    return [*found]


def _laid_out(orders: Sequence[Names], products: Sequence[tuple[int, int, int]], extents: Extents) -> list[Names]:
    """Return what `laid_out` does, of lengths that are numbers, searched for anew."""
    placed = [*orders]
    results = [result for _, _, result in products[:-1]]
    for left, right, result in products[:-1]:
        placed[result] = MatrixProduct(placed[left], placed[right], placed[result]).natural

    cost = cache(partial(copied_numbers, extents=extents))  # a second round asks for most of them again

    def copied(at: int, names: Names) -> int:
        """The numbers that are copied for the products of one tensor, with its names in another order."""
        own = [[names if part == at else placed[part] for part in parts] for parts in products if at in parts]
        return sum(cost(MatrixProduct(*parts)) for parts in own)

    for _ in range(ROUNDS):
        before = list(placed)
        for at in results:
            if len(placed[at]) <= FEW and copied(at, placed[at]):
                placed[at] = min((placed[at], *permutations(placed[at])), key=partial(copied, at))
        if placed == before:
            break
    return placed
