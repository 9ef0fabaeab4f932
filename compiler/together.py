"""Narrow rows of blocks that are walked in pairs: what both of them multiply with is loaded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .launch import is_capturing
from .pipeline import ways_of
from .recipes import recipe_for
from .sparse import SparseFormat, fact_tensors

__all__ = ["together"]

ROWS = 32  # of a block: two of them are the rows of wgmma
# Random blocks of a 4096 x 4096 matrix in float16 by as many columns, one H200, rows alone and in pairs. They share 40,
# 30, 22, 18, 16 and 16 percent at a density of .75, .5, .3, .2, .1 and .05: .315 and .219 ms, .233 and .187, .152 and
# .131, .109 and .096, .0611 and .0603, .0371 and .0403; by 1024 columns at .3 .041 and .036, by 512 .023 and .026.
# A matrix of 2048 by 2048 columns at .3 .0234 and .0192, of 8192 by 1024 at .2 .096 and .083.
LEAST_SHARED = 0.15  # of all blocks
LEAST_COLUMNS = 16  # of a pair, on average: what follows its sums costs as much however few they are
LEAST_RESULTS = 4096 * 1024  # half as many programs leave a GPU idle sooner


def together(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat | None:
    """The format with its rows in pairs, if they have enough in common and a kernel holds both."""
    if not _is_narrow(form, group_dim):
        return None
    pairs = -(-form.shape[group_dim] // (2 * ROWS))
    if form.values.shape[0] < LEAST_COLUMNS * pairs:  # that many at most
        return None
    if prod(recipe_for(expr, size, name, form, dense).final) < LEAST_RESULTS:
        return None
    if _is_captured(form) and not form.is_paired(group_dim):  # which reads lengths back
        return None
    found = form.together(group_dim)
    if found.shared < LEAST_SHARED or found.sets.numel() < LEAST_COLUMNS * pairs:
        return None
    how = recipe_for(expr, size, name, found, dense)
    tensors, facts = how.tensors(found, dense), fact_tensors(found.facts)
    ways = [way.schedule for way in ways_of(how.text, tensors, how.size, how.fact, facts)]
    return found if any(way.holds_set and way.bound.dtype.itemsize == 2 for way in ways) else None


def _is_narrow(form: SparseFormat, group_dim: int) -> bool:
    blocks = form.block_size
    if blocks is None or len(form.shape) != 2 or form.value_axes != ("p",):
        return False
    return blocks[group_dim] == ROWS and form.values.element_size() == 2


def _is_captured(form: SparseFormat) -> bool:
    return form.device.type == "cuda" and is_capturing()
