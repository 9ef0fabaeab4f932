"""A format in other groups whose values stay where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .convert import block_grid
from .facts import RowFacts
from .group_size import pieces_of
from .guard import may_keep
from .pattern_cache import PatternCache, Regrouped
from .row_facts import row_facts

__all__ = ["RegroupedView", "facts_of"]

Sizes = tuple[int, ...]


def facts_of(
    cache: PatternCache, coords: tuple[Tensor | None, ...], group_dim: int, shape: Sizes, block_size: Sizes | None
) -> RowFacts | None:
    """Return the facts about the rows of groups, cached with the pattern; None if p is the row."""
    rows, facts = coords[group_dim], cache.facts
    if facts is None and rows is not None and may_keep(rows):  # a tracer does without
        # programs walk single entries without padding; groups and blocks of them are what a program takes as they are
        is_single = block_size is None and all(place is None or place.numel() == len(rows) for place in coords)
        others = [place.flatten() for dim, place in enumerate(coords) if dim != group_dim and place is not None]
        num_rows = block_grid(shape, block_size)[group_dim]
        cut, is_packed = pieces_of(len(rows), num_rows) if is_single else (0, False)
        with torch.inference_mode(False):  # what is kept must be good for training too
            facts = row_facts(rows, num_rows, cut, is_packed, others[-1] if cut and others else None)
        if may_keep(facts.pointers, facts.is_shared, facts.rows_to_zero, facts.order):
            cache.facts = facts
    return facts


class RegroupedView:
    """A format in other groups, its values in place: slot p, q holds values[value_source[p,q]]."""

    def __init__(self, form: Any, pattern: Regrouped, group_dim: int, value_axes: tuple[str, ...] = ()) -> None:
        self.shape, self.block_size, self.value_axes = form.shape, form.block_size, value_axes or form.value_axes
        self.values, self.dtype, self.device = form.flat_values, form.dtype, form.device
        self.coords, self.value_source, self.group_dim = pattern.coords, pattern.source, group_dim
        self._pattern_cache = pattern.pattern_cache
        self.sets: Tensor | None = None

    @property
    def coord_axes(self) -> tuple[tuple[str, ...], ...]:
        return tuple(("p",) if dim == self.group_dim else self.value_axes for dim in range(len(self.shape)))

    @property
    def has_padding(self) -> bool:
        return self._pattern_cache.num_entries < self._pattern_cache.num_slots

    @property
    def facts(self) -> RowFacts | None:
        return facts_of(self._pattern_cache, self.coords, self.group_dim, self.shape, self.block_size)
