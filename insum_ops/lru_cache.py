"""A mapping that holds a bounded number of entries: what was used least recently is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, ItemsView, Iterator, KeysView
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["LRUCache"]

NEWCOMERS = 16  # of as many entries one may be a newcomer
ASKS = 3  # for a newcomer before it is kept: whoever makes an entry may ask for it twice on the way

Value = TypeVar("Value")

_lock = RLock()  # of all who write; letting go of a value may run code that writes too


class LRUCache(dict[Any, Value]):
    """At most `limit` entries, none of which is None.

    Most sizes that come once never come again, so an entry has to prove itself first. A new one waits among the
    newcomers, a small part of the limit: when as many others have come it is forgotten, and its key's hash is noted.
    If it comes again after that, or is asked for several times before, it is kept longer, in one of two generations.
    It is young until half the rest of the limit is young; all of that is old from then on, and what was old already is
    forgotten, except for entries that were asked for meanwhile, which are young again. So a stream of entries that are
    used once holds little memory and displaces nothing.

    A hit among the young, which are the dict itself, costs what `dict.get` costs and takes no lock. Several threads may
    use one cache: an entry that one of them has just put there may be gone for another, but it is never a wrong one.

    >>> cache = LRUCache(16)
    >>> cache["a"] = 1
    >>> cache.get("a"), cache.get("a"), cache.get("a"), cache.get("b")
    (1, 1, 1, None)
    >>> for number in range(100):
    ...     cache[number] = number
    >>> cache.get("a"), cache.get(99), cache.get(0), len(cache)
    (1, 99, None, 2)
    """

    __slots__ = ("_asks", "_half", "_known_hashes", "_newcomers", "_old", "_places", "limit")

    def __init__(self, limit: int) -> None:
        super().__init__()
        assert limit >= 3, "one newcomer, one young and one old entry"
        self.limit = limit
        self._places = max(limit // NEWCOMERS, 1)  # of newcomers
        self._half = (limit - self._places) // 2
        self._newcomers: OrderedDict[Any, Value] = OrderedDict()
        self._asks: dict[Any, int] = {}  # how often newcomers were asked for
        self._known_hashes: OrderedDict[int, None] = OrderedDict()  # of keys that were forgotten as newcomers
        self._old: dict[Any, Value] = {}

    if TYPE_CHECKING:

        def get(self, key: Hashable, /) -> Value | None:  # type: ignore[override]
            """The value of a key, None if there is none."""
    else:
        get = dict.__getitem__  # which asks `__missing__`, as `dict.get` does not

    def __missing__(self, key: Hashable) -> Value | None:
        if key not in self._old and key not in self._newcomers:
            return None
        with _lock:
            asks = self._asks.get(key, 0) + 1
            if key in self._newcomers and asks < ASKS:
                self._asks[key] = asks
                return self._newcomers[key]
            value = self._taken(key)
            if value is None:  # another thread was quicker
                return super().get(key)
            self._keep(key, value)
            return value

    def __setitem__(self, key: Hashable, value: Value) -> None:
        with _lock:
            is_kept = super().__contains__(key) or key in self._old or hash(key) in self._known_hashes
            self._taken(key)
            if is_kept:
                self._keep(key, value)
                return
            self._newcomers[key] = value
            if len(self._newcomers) > self._places:
                forgotten = next(iter(self._newcomers))
                self._taken(forgotten)
                self._known_hashes[hash(forgotten)] = None
                if len(self._known_hashes) > self.limit:
                    self._known_hashes.popitem(last=False)

    def _keep(self, key: Hashable, value: Value) -> None:
        """Among the young; where they are too many, these are the old ones from now on."""
        if super().__len__() >= self._half and not super().__contains__(key):
            self._old = dict(super().items())
            super().clear()
        super().__setitem__(key, value)

    def _taken(self, key: Hashable) -> Value | None:
        """The value of an entry that was old or new, and is neither now; None: there was none."""
        self._asks.pop(key, None)
        old, new = self._old.pop(key, None), self._newcomers.pop(key, None)
        return new if old is None else old

    def pop(self, key: Hashable, default: Any = None) -> Any:
        with _lock:
            young, other = super().pop(key, None), self._taken(key)
            value = other if young is None else young
            return default if value is None else value

    def __delitem__(self, key: Hashable) -> None:
        if self.pop(key) is None:
            raise KeyError(key)

    def clear(self) -> None:
        with _lock:
            super().clear()
            self._newcomers.clear()
            self._asks.clear()
            self._known_hashes.clear()
            self._old = {}

    def items(self) -> ItemsView[Any, Value]:  # type: ignore[override]
        """The entries at this moment."""
        with _lock:
            return {**self._newcomers, **self._old, **dict(super().items())}.items()

    def keys(self) -> KeysView[Any]:  # type: ignore[override]
        return dict(self.items()).keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._old or key in self._newcomers

    def __len__(self) -> int:
        return super().__len__() + len(self._old) + len(self._newcomers)

    def __repr__(self) -> str:
        return f"LRUCache({self.limit}) of {len(self)} entries"

    def __reduce__(self) -> Any:
        """A copy or a pickle is empty: whatever is in a cache can be made again."""
        return type(self), (self.limit,)
