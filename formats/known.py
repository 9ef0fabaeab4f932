"""What is worked out about a pattern once and kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..lru_cache import LRUCache
from .convert import Gather
from .facts import RowFacts
from .stamp import Stamp
from .walks import Walk

__all__ = ["Known", "Regrouped"]

CALLS = 256  # over one pattern that are kept, of about 10 kB each


@dataclass(eq=False)
class Known:
    """What has been worked out about one pattern; every object over the same coordinates shares it."""

    num_entries: int  # padding not counted
    num_slots: int  # padding counted
    stamp: Stamp  # of the coordinates that all of it was worked out of
    facts: RowFacts | None = None
    positions: Tensor | None = None  # of what is no padding among the flattened values; None: all, or not known yet
    regrouped: dict[tuple[int, int | None], Regrouped] = field(default_factory=dict)
    walks: dict[tuple[int, int], Walk] = field(default_factory=dict)  # by the dimension of rows, and rows to a set
    memory: LRUCache[Any] = field(default_factory=partial(LRUCache, CALLS))  # how they run: the compiler's own
    transposed: dict[frozenset[int], Known] = field(default_factory=dict)

    def renew(self, fresh: Known) -> None:
        """Forget everything but what is `fresh`, for all objects that share it."""
        fresh.stamp.keep_values()  # coordinates that were written to once may be so at every step
        vars(self).update(vars(fresh))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: kernels stay behind."""
        return {**vars(self), "memory": LRUCache(CALLS)}


@dataclass(frozen=True, eq=False)
class Regrouped:
    """A pattern grouped along another dimension, and the gather that brings values along."""

    coords: tuple[Tensor | None, ...]
    gather: Gather
    known: Known
    stamp: Stamp  # of its own coordinates when they were made: what is known of them may be renewed

    @cached_property
    @torch.inference_mode(False)  # what is kept must be good for training too
    def source(self) -> Tensor:
        """Where each slot's value lies among the flattened values it comes from, -1 at padding: [P] or [P, Q]."""
        source, is_padding = self.gather.source, self.gather.is_padding
        if is_padding is not None:
            source = source.masked_fill(is_padding.view(source.shape), -1)
        return source.int() if source.numel() < 2**31 else source
