"""Some cases of a test with many parameters, so that none of their values is left out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

__all__ = ["sampled"]


def sampled(items: Sequence[Any], together: Sequence[str], times: int = 1) -> set[Any]:
    """So many cases of one parametrised test as have every value of every parameter `times`, in many combinations.

    Of the parameters that are called `together` all combinations are there.
    """
    values = {}
    for item in items:
        given = {name: id(value) for name, value in item.callspec.params.items()}
        joint = tuple(given[name] for name in together)
        values[item] = {("", joint), *[pair for pair in given.items() if pair[0] not in together]}
    found: set[Any] = set()
    pairs: set[tuple[object, object]] = set()
    for _ in range(times):
        rest = [item for item in items if item not in found]
        lacking = set().union(*[values[item] for item in rest])
        while lacking:
            best = max(
                rest, key=lambda item: (len(values[item] & lacking), len({*product(values[item], repeat=2)} - pairs))
            )
            lacking -= values[best]
            pairs |= {*product(values[best], repeat=2)}
            found.add(best)
    return found
