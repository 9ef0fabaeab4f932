"""Which of several calls with one result is the fastest: timed once, and remembered by the tuning cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .clock import ALIKE, HOPELESS, LONG_CALL, device_milliseconds, is_out_of_memory, waited_milliseconds
from .tuning_cache import Entry, Key, current_cache

__all__ = ["fastest", "is_put_off"]

CLOSE = 1.5  # times the best one's milliseconds: a second that takes more than that is timed in one turn
SHORT_CALL = 2.0  # milliseconds; so is one that takes more than these


class _Thread(threading.local):
    puts_off = False  # choices within a call that is timed itself
    has_put_off = False  # one of them


_thread = _Thread()

Others = Callable[[str, Mapping[str, float]], Sequence[str]]  # names to be timed next, by the best one and all times


def fastest(
    key: Key,
    ways: Collection[str],
    first: Sequence[str],
    start: Callable[[str], tuple[Callable[[], object], float] | None],
    times: dict[str, float] | None = None,
    is_new: bool = False,
    is_waited_for: bool = False,
    unsettled: int = 0,
    enough: float = 0.0,
    others: Others = lambda best, times: (),
) -> str:
    """Return the name of the fastest of several calls with one result, which the tuning cache remembers.

    The device's time decides, since the host's is hidden where calls are queued or captured. Of those that take about
    the least, the one that keeps the host busy the least wins. If the GPU has no memory for one of them, the choice is
    not remembered. The two best of short calls on a CPU are timed once more if they are close to each other: other work
    may have had the processor's caches in their first turn.

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
        unsettled: how many of such calls, beyond the first, take longer than those to come.
        enough: all that take no more milliseconds of the device are alike, and the first of them that takes no more of
            the host wins at once, so that the rest is never built.
        others: from the best name and all times so far to the names that are timed next; it ends when none is new.
    """
    tuning_cache, milliseconds = current_cache(), device_milliseconds
    if is_waited_for:
        milliseconds = partial(waited_milliseconds, unsettled=unsettled)
    entry = None if is_new else tuning_cache.get(key)
    way = None if entry is None else entry.config.get("way")
    if way in ways:
        return str(way)
    times, hosts = {} if times is None else times, dict[str, float]()
    calls = dict[str, Callable[[], object]]()
    names, best, has_room = first, first[0], True
    while names:
        for name in names:
            try:
                started = start(name)
                if started is None:
                    continue
                call, hosts[name] = started
                calls[name] = call
                limit = HOPELESS * min(times.values(), default=float("inf"))
                for puts_off in (True, False):
                    with _choices_within(puts_off):
                        call()  # compiles and tunes
                        with tuning_cache.lock(key):
                            times[name] = milliseconds(call, limit)  # a graph needs memory of its own
                        has_put_off = _thread.has_put_off
                    if not has_put_off or times[name] > max(limit, LONG_CALL):  # a short one is its lack of a plan
                        break
                if max(times[name], hosts[name]) <= enough:
                    break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                has_room = False  # the calls that were timed still serve this caller
        best = _best(times, hosts, enough) or best
        is_enough = best in times and max(times[best], hosts[best]) <= enough
        names = [name for name in others(best, times) if name not in times and has_room and not is_enough]
    two = sorted(times, key=lambda name: times[name])[:2]
    is_close = len(two) == 2 and times[two[1]] <= min(SHORT_CALL, CLOSE * times[two[0]])
    if is_waited_for and is_close and not torch.cuda.is_initialized():
        for name in two[::-1]:
            with tuning_cache.lock(key):
                times[name] = min(times[name], waited_milliseconds(calls[name], HOPELESS * times[best]))
        best = _best(times, hosts, enough) or best
    if has_room:
        ranked = sorted(times.items(), key=lambda pair: pair[1])
        tuning_cache.put(key, Entry({"way": best}, tuple(({"way": name}, ms) for name, ms in ranked)))
    return best


def _best(times: Mapping[str, float], hosts: Mapping[str, float], enough: float) -> str | None:
    """Return, of those that take about the least, the one that keeps the host busy the least; None if nothing ran."""
    about = max(enough, ALIKE * min(times.values(), default=0.0))
    equals = [name for name, ms in times.items() if ms <= about]
    return min(equals, key=lambda name: (hosts[name], times[name]), default=None)


def is_put_off(key: Key) -> bool:
    """Return whether a choice is to be made later: in a call that is timed, once that is fast enough without."""
    is_late = _thread.puts_off and current_cache().get(key) is None
    _thread.has_put_off = _thread.has_put_off or is_late
    return is_late


@contextmanager
def _choices_within(puts_off: bool) -> Iterator[None]:
    """Put choices off inside of the context, or make them at once."""
    before = _thread.puts_off, _thread.has_put_off
    _thread.puts_off, _thread.has_put_off = puts_off, False
    try:
        yield
    finally:
        _thread.puts_off, _thread.has_put_off = before
