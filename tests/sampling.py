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
    found: set[Any] = set()
    pairs: set[tuple[object, object]] = set()
    uses: Counter[object] = Counter()

    def worth(item: Any) -> tuple[int, int, int]:
        """How much of it is new, and how rare the rest of it is."""
        new = {*product(values[item], repeat=2)} - pairs
        return len(values[item] & lacking), len(new), -sum(uses[value] for value in values[item])

    for _ in range(times):
        rest = [item for item in items if item not in found]
        lacking = set().union(*[values[item] for item in rest])
        while lacking:
            best = max(rest, key=worth)
            lacking -= values[best]
            pairs |= {*product(values[best], repeat=2)}
            uses.update(values[best])
            found.add(best)
    return found
