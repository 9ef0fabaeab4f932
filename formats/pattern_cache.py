"""What is worked out about a pattern once and kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..lru_cache import LRUCache
from .convert import Gather
from .facts import RowFacts
from .guard import ChangeGuards, may_keep
from .row_order import Walk
from .torch_state import is_compiling

__all__ = ["Known", "Regrouped"]

CALLS = 256  # over one pattern that are kept, of about 10 kB each


def _memory() -> Any:
    """For how calls run; nothing of what a tracer works out is kept, and it can't look into a cache."""
    return {} if is_compiling() else LRUCache(CALLS)


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a pickle holds of an object by its present names; in those of version 0.1.0 a guard is a stamp."""
    return {"guard" if name == "stamp" else name: part for name, part in state.items()}


@dataclass(eq=False)
class Known:
    """What has been worked out about one pattern; every object over the same coordinates shares it.

    It is about the coordinates that its guard tells of, and never becomes about others: a thread that works something
    out while they change adds it to what nobody asks any more.
    """

    num_entries: int  # padding not counted
    num_slots: int  # padding counted
    guard: ChangeGuards  # of the coordinates that all of it was worked out of
    num_values: int | None = None  # padding not counted, nor what blocks hold beyond the shape; None: not known yet
    facts: RowFacts | None = None
    positions: Tensor | None = None  # of what is no padding among the flattened values; None: all, or not known yet
    regrouped: dict[tuple[int, int | None], Regrouped] = field(default_factory=dict)
    walks: dict[tuple[int, int], Walk] = field(default_factory=dict)  # by the dimension of rows, and rows to a set
    memory: LRUCache[Any] = field(default_factory=_memory)  # how they run: the compiler's own
    shares: dict[torch.dtype, Tensor] = field(default_factory=dict)  # 1 / how many entries each row of a matrix holds
    transposed: dict[frozenset[int], Known] = field(default_factory=dict)
    refusal: str = ""  # what to tell who has overwritten the coordinates; "": they may change
    successor: ClassVar[Known | None] = None  # of one whose coordinates have changed: what is known of them since

    def fix(self, refusal: str) -> None:
        """From now on the coordinates may not change: a use of the format after they have raises `refusal`."""
        self.refusal = refusal
        self.guard.keep_values()

    def latest(self) -> Known:
        """What is known after all changes that some object over the same coordinates has noticed."""
        known = self
        while known.successor is not None:
            known = known.successor
        return known

    def renewed(self, fresh: Known) -> Known:
        """What all objects that share this one go on with: `fresh`, or what another thread was sooner with."""
        fresh.refusal = self.refusal
        fresh.guard.keep_values()  # coordinates that were written to once may be so at every step
        found: Known = vars(self).setdefault("successor", fresh)  # in one step: two would each have their own
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: kernels stay behind."""
        return {name: part for name, part in vars(self).items() if name != "successor"} | {"memory": LRUCache(CALLS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_renamed(state))


@dataclass(frozen=True, eq=False)
class Regrouped:
    """A pattern grouped along another dimension, and the gather that brings values along."""

    coords: tuple[Tensor | None, ...]
    gather: Gather
    known: Known
    guard: ChangeGuards  # of its own coordinates when they were made: what is known of them may be renewed

    @property
    def source(self) -> Tensor:
        """Where each slot's value lies among the flattened values it comes from, -1 at padding: [P] or [P, Q]."""
        found: Tensor | None = vars(self).get("_source")  # no cached property: not all who ask may keep it
        if found is None:
            found = self._sources()
            if may_keep(found):
                vars(self)["_source"] = found
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_renamed(state))

    @torch.inference_mode(False)  # what is kept must be good for training too
    def _sources(self) -> Tensor:
        source, is_padding = self.gather.source, self.gather.is_padding
        if is_padding is not None:
            source = source.masked_fill(is_padding.view(source.shape), -1)
        return source.int() if source.numel() < 2**31 else source
