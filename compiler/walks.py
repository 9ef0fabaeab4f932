"""Rows of blocks that are walked in an order of their own: narrow ones in pairs, which load once what both multiply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from .pipeline import ways_of
from .recipes import recipe_for
from .runtime.torch_state import is_capturing
from .sparse import SparseFormat, fact_tensors

__all__ = ["walked"]

WIDTHS = {32: 2, 128: 1}  # rows to a set, by the rows of a block: two of 32 are the rows of wgmma
# Random blocks of a 4096 x 4096 matrix in float16 by as many columns, one H200, first with a program for each row, then
# as they are walked. 32 x 32 share 40, 30, 22, 18, 16 and 16 percent at a density of .75, .5, .3, .2, .1 and .05: .313
# and .222 ms, .233 and .179, .152 and .120, .109 and .085, .061 and .051, .038 and .034; by 1024 columns at .3 .041 and
# .033, by 512 .023 and .026. 128 x 128 alone at .5, .3, .1 and .05: .125 and .122, .081 and .075, .037 and .034, .026
# and .024; by 1024 columns at .3 .023 and .027. With tokens, at .02 of 32 x 32 .028 and .031. 64 x 64 gain 2 and 7
# percent at .1 and .05, and lose 5 and 4 with tokens.
LEAST_SHARED = 0.15  # of all blocks
LEAST_COLUMNS = {1: 1, 2: 8}  # of a set, on average, by its rows: what follows its sums costs as much however few
LEAST_RESULTS = {1: 4096 * 4096, 2: 4096 * 1024}  # fewer programs leave a GPU idle sooner


def walked(
    expr: str, size: Sequence[int] | None, name: str, form: SparseFormat, group_dim: int, dense: Mapping[str, Any]
) -> SparseFormat | None:
    """The format with its rows as programs walk them, if that pays and a kernel takes them so."""
    width = _width(form, group_dim)
    if width == 0:
        return None
    assert form.block_size is not None
    sets = -(-form.shape[group_dim] // (width * form.block_size[group_dim]))
    if form.values.shape[0] < LEAST_COLUMNS[width] * sets:  # that many at most
        return None
    if prod(recipe_for(expr, size, name, form, dense).final) < LEAST_RESULTS[width]:
        return None
    if _is_captured(form) and not form.is_walked(group_dim, width):  # which reads lengths back
        return None
    found = form.walked(group_dim, width)
    if (width > 1 and found.walk.shared < LEAST_SHARED) or found.sets.numel() < LEAST_COLUMNS[width] * sets:
        return None
    how = recipe_for(expr, size, name, found, dense)
    tensors, facts = how.tensors(found, dense), fact_tensors(found.facts)
    ways = [way.schedule for way in ways_of(how.text, tensors, how.size, how.fact, facts)]
    is_held = any(way.holds_set or way.has_rows_in_turn for way in ways)
    return found if is_held and ways[0].bound.dtype.itemsize == 2 else None


def _width(form: SparseFormat, group_dim: int) -> int:
    """Rows to a set, 0 where none are made."""
    blocks = form.block_size
    if blocks is None or len(form.shape) != 2 or form.value_axes != ("p",) or form.values.element_size() != 2:
        return 0
    return WIDTHS.get(blocks[group_dim], 0)


def _is_captured(form: SparseFormat) -> bool:
    return form.device.type == "cuda" and is_capturing()
