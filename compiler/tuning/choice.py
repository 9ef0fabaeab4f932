"""Which of several calls with one result is the fastest: timed once, and remembered by the tuning cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...lru_cache import LRUCache
from .clock import ALIKE, HOPELESS, device_milliseconds, is_out_of_memory, waited_milliseconds
from .tuning_cache import Entry, Key, current_cache

__all__ = ["fastest", "pays"]

UNTIMED_CALLS = 4  # of one kind, before ways are timed: about as many as a call has ways
KEYS = 4096  # of which it is counted how many calls had them


class _Thread(threading.local):
    is_at_once: bool | None = None  # whether choices in a call that is timed are made at once, or put off
    has_put_off = False  # one of them


_thread, _calls = _Thread(), LRUCache[int](KEYS)

Others = Callable[[str, Mapping[str, float]], Sequence[str]]  # names to be timed next, by the best one and all times


def fastest(
    key: Key,
    ways: Collection[str],
    first: Sequence[str],
    start: Callable[[str], tuple[Callable[[], object], float] | None],
    times: dict[str, float] | None = None,
    is_new: bool = False,
    is_waited_for: bool = False,
    enough: float = 0.0,
    others: Others = lambda best, times: (),
) -> str:
    """Return the name of the fastest of several calls with one result, which the tuning cache remembers.

    The device's time decides, since the host's is hidden where calls are queued or captured. Of those that take about
    the least, the one that keeps the host busy the least wins. If the GPU has no memory for one of them, the choice is
    not remembered.

    Args:
        key: what the choice is remembered by.
        ways: all names, so that the result of a full search serves a smaller one.
        first: the names that are timed first, the likeliest at the front.
        start: from a name to its call, and for how many milliseconds that keeps the host busy; None if it is not worth
            a try.
        times: filled with the milliseconds of each call as it is timed.
        is_new: whether the cache is not read.
        is_waited_for: whether each call waits for the device anyway and none is captured: then the time until its
            result is there decides, the host's included.
        enough: all that take no more milliseconds of the device are alike, and the first of them that takes no more of
            the host wins at once, so that the rest is never built.
        others: from the best name and all times so far to the names that are timed next; it ends when none is new.
    """
    tuning_cache, milliseconds = current_cache(), waited_milliseconds if is_waited_for else device_milliseconds
    entry = None if is_new else tuning_cache.get(key)
    way = None if entry is None else entry.config.get("way")
    if way in ways:
        return str(way)
    times, hosts = {} if times is None else times, dict[str, float]()
    names, best, has_room = first, first[0], True
    while names:
        for name in names:
            try:
                started = start(name)
                if started is None:
                    continue
                call, hosts[name] = started
                limit = HOPELESS * min(times.values(), default=float("inf"))
                for is_at_once in (False, True):
                    with _choices_inside(is_at_once):
                        call()  # compiles and tunes
                        with tuning_cache.lock(key):
                            times[name] = milliseconds(call, limit)  # a graph needs memory of its own
                    if not _thread.has_put_off or times[name] > limit:
                        break
                if max(times[name], hosts[name]) <= enough:
                    break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                has_room = False  # the calls that were timed still serve this caller
        about = max(enough, ALIKE * min(times.values(), default=0.0))
        equals = [name for name, ms in times.items() if ms <= about]
        best = min(equals, key=lambda name: (hosts[name], times[name]), default=best)
        is_enough = best in times and max(times[best], hosts[best]) <= enough
        names = [name for name in others(best, times) if name not in times and has_room and not is_enough]
    if has_room:
        ranked = sorted(times.items(), key=lambda pair: pair[1])
        tuning_cache.put(key, Entry({"way": best}, tuple(({"way": name}, ms) for name, ms in ranked)))
    return best


def pays(key: Key) -> bool:
    """Return whether a choice is remembered, or may be timed by now.

    Any call may be the last one of its kind. So time is spent on timing when calls with this key have taken about as
    much: they are counted here. In a call that is itself timed a choice is put off only until the call has proved to be
    fast enough without.
    """
    _calls[key] = count = (_calls.get(key) or 0) + 1
    is_due = count > UNTIMED_CALLS if _thread.is_at_once is None else _thread.is_at_once
    is_due = is_due or current_cache().get(key) is not None
    _thread.has_put_off = _thread.has_put_off or not is_due
    return is_due


@contextmanager
def _choices_inside(is_at_once: bool) -> Iterator[None]:
    """Time choices inside the context at once, or put them off."""
    before, _thread.is_at_once, _thread.has_put_off = _thread.is_at_once, is_at_once, False
    try:
        yield
    finally:
        _thread.is_at_once = before
