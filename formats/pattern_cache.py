"""The cache of a pattern: what is worked out of a format's coordinates once and kept until they change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..lru_cache import LRUCache
from .guard import ChangeGuards, may_keep
from .torch_state import is_compiling

if TYPE_CHECKING:
    from .convert import Gather
    from .facts import RowFacts
    from .row_order import RowOrder

__all__ = ["PatternCache", "Regrouped"]

CALLS = 256  # over one pattern that are kept, of about 10 kB each
RENAMED = {"stamp": "guard", "walks": "row_orders", "known": "pattern_cache"}  # attributes in older pickles


def _memory() -> Any:
    """Return an empty cache of launch plans; a tracer, which keeps nothing and can't look into one, gets a dict."""
    return {} if is_compiling() else LRUCache(CALLS)


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a pickle holds by their present names."""
    return {RENAMED.get(name, name): part for name, part in state.items()}


def _tensors_in(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of facts, an order of rows or a gather."""
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for own in list(vars(part).values()):
            yield from _tensors_in(own)


@dataclass(eq=False)
class PatternCache:
    """What has been worked out about one pattern; every format over the same coordinates shares it.

    A cache is for the coordinates as its guard saw them and is never reused after they change: what a thread works out
    while they change goes into a cache that nobody reads any more.
    """

    num_entries: int  # padding not counted
    num_slots: int  # padding counted
    guard: ChangeGuards  # of the coordinates that all of it was worked out of
    num_values: int | None = None  # padding not counted, nor what blocks hold beyond the shape; None: not counted yet
    facts: RowFacts | None = None
    positions: Tensor | None = None  # of entries among the flattened values; None: all of them, or not worked out yet
    regrouped: dict[tuple[int, int | None], Regrouped] = field(default_factory=dict)
    row_orders: dict[tuple[int, int], RowOrder] = field(default_factory=dict)  # by dimension of rows and rows of a set
    memory: LRUCache[Any] = field(default_factory=_memory)  # launch plans of calls over the pattern
    shares: dict[torch.dtype, Tensor] = field(default_factory=dict)  # 1 / how many entries each row of a matrix holds
    transposed: dict[frozenset[int], PatternCache] = field(default_factory=dict)
    refusal: str = ""  # the error for coordinates that were overwritten; "": they may change
    successor: ClassVar[PatternCache | None] = None  # once the coordinates have changed: the cache for the new ones

    def fix(self, refusal: str) -> None:
        """Forbid that the coordinates change: a use of the format after they have raises FormatError(refusal)."""
        self.refusal = refusal
        self.guard.keep_values()

    def latest(self) -> PatternCache:
        """Return the cache after all changes that some format over the same coordinates has noticed."""
        cache = self
        while cache.successor is not None:
            cache = cache.successor
        return cache

    def renewed(self, fresh: PatternCache) -> PatternCache:
        """Return the successor that all formats sharing this cache go on with: `fresh`, or another thread's."""
        fresh.refusal = self.refusal
        fresh.guard.keep_values()  # coordinates that were written to once may be so at every step
        # in one step: otherwise two threads could each have their own
        successor: PatternCache = vars(self).setdefault("successor", fresh)
        return successor

    def worked_out(self) -> Iterator[Tensor]:
        """Yield the tensors that were worked out of the coordinates, and that nobody else has.

        Regrouped coordinates are among them if nobody has those of this pattern: else a caller may have asked for them.
        """
        for part in (self.facts, self.positions, *list(self.row_orders.values())):
            yield from _tensors_in(part)
        for regrouped in list(self.regrouped.values()):
            own = vars(regrouped)
            parts = own["gather"], own.get("_source"), *(own["coords"] if regrouped.guard.is_private else ())
            for part in parts:
                yield from _tensors_in(part)
            yield from regrouped.pattern_cache.worked_out()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and deepcopy, without launch plans."""
        return {name: part for name, part in vars(self).items() if name != "successor"} | {"memory": LRUCache(CALLS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_renamed(state))


@dataclass(frozen=True, eq=False)
class Regrouped:
    """A pattern grouped along another dimension, and the gather that reorders values for it."""

    coords: tuple[Tensor | None, ...]
    gather: Gather
    pattern_cache: PatternCache
    guard: ChangeGuards  # of its own coordinates when they were made; that of `pattern_cache` may be renewed

    @property
    def source(self) -> Tensor:
        """Where each slot's value lies among the flattened values it comes from, -1 at padding: [P] or [P, Q]."""
        source: Tensor | None = vars(self).get("_source")  # no cached property: a tracer may not keep it
        if source is None:
            source = self._sources()
            if may_keep(source):
                vars(self)["_source"] = source
        return source

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(_renamed(state))

    @torch.inference_mode(False)  # what is kept must be good for training too
    def _sources(self) -> Tensor:
        """Return the value of `source`."""
        source, is_padding = self.gather.source, self.gather.is_padding
        if is_padding is not None:
            source = source.masked_fill(is_padding.view(source.shape), -1)
        return source.int() if source.numel() < 2**31 else source


Known = PatternCache  # its name in older pickles
