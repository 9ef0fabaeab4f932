"""Some cases of a test with many parameters, so that none of their values is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

__all__ = ["sampled"]


def sampled(items: Sequence[Any], together: Sequence[str], times: int = 1) -> set[Any]:
    """So many cases of one parametrised test as have every value of every parameter `times`, in many combinations.

    All values of a parameter come about as often. Of those that are called `together` all combinations are there.
    """
    values = {}
    for item in items:
        given = {name: id(value) for name, value in item.callspec.params.items()}
        joint = tuple(given[name] for name in together)
        values[item] = {("", joint), *[pair for pair in given.items() if pair[0] not in together]}
    pairs_of = {item: {*product(own, repeat=2)} for item, own in values.items()}
    found: set[Any] = set()
    pairs: set[tuple[object, object]] = set()
    uses: Counter[object] = Counter()

    def best(rest: list[Any], lacking: set[object]) -> Any:
        """The first of those that add most values that are lacking, then most new pairs, then the rarest values."""
        for worth in (
            lambda item: len(values[item] & lacking),
            lambda item: len(pairs_of[item] - pairs),
            lambda item: -sum(uses[value] for value in values[item]),
        ):
            worths = [worth(item) for item in rest]
            most = max(worths)
            rest = [item for item, own in zip(rest, worths) if own == most]
        return rest[0]

    for _ in range(times):
        rest = [item for item in items if item not in found]
        lacking = set().union(*[values[item] for item in rest])
        while lacking:
            item = best(rest, lacking)
            lacking -= values[item]
            pairs |= pairs_of[item]
            uses.update(values[item])
            found.add(item)
    return found
