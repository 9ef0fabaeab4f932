"""The order in which the factors of a sum are contracted, two by two, so that the least work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import opt_einsum

from ...lru_cache import LRUCache

__all__ = ["contraction_path", "example_of"]

PATHS = 1024  # that are remembered: while a statement is planned, its path is asked for several times
UNKNOWN = 64  # what stands for a length of which a tracer has no example

_paths: LRUCache[tuple[tuple[int, ...], ...]] = LRUCache(PATHS)


def example_of(extent: Any) -> int:
    """Return a length, or the example that a tracer has for its symbol: what only saves work may depend on that.

    >>> example_of(5)
    5
    """
    if isinstance(extent, int):
        return extent
    example = extent.node.hint
    return example if isinstance(example, int) else UNKNOWN


def contraction_path(
    factors: Sequence[Sequence[str]], free: Sequence[str], extents: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    """Return which factors are contracted with each other, step by step, as opt_einsum counts: each result comes last.

    `factors` holds the index names of each factor, `free` those that are kept.

    >>> contraction_path(["ij", "jk", "kl"], "il", {"i": 9, "j": 2, "k": 9, "l": 2})
    ((1, 2), (0, 1))
    """
    letters = {name: opt_einsum.get_symbol(at) for at, name in enumerate(extents)}
    kept = [name for name in free if any(name in names for names in factors)]
    terms = ["".join([letters[name] for name in names]) for names in (*factors, kept)]
    shapes = tuple([tuple([example_of(extents[name]) for name in names]) for names in factors])
    equation = f"{','.join(terms[:-1])}->{terms[-1]}"
    found = _paths.get((equation, shapes))
    if found is None:
        path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True)
        found = _paths[equation, shapes] = tuple([tuple(pair) for pair in path])
    return found
