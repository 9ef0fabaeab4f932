"""A cache holds no more than its limit, keeps what is used, and is right for several threads."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insum_ops.lru_cache import ASKS, NEWCOMERS, LRUCache

keys = st.integers(0, 40)
steps = st.lists(st.tuples(st.sampled_from(["get", "get", "put", "pop"]), keys), max_size=300)


def put(cache: LRUCache[int], key: int) -> None:
    """Make an entry, as whoever did not find it does."""
    if cache.get(key) is None:
        cache[key] = -key - 1


@given(limit=st.integers(3, 40), steps=steps)
def test_it_is_a_mapping_that_may_forget_but_never_errs(limit: int, steps: list[tuple[str, int]]) -> None:
    cache, written = LRUCache[int](limit), dict[int, int]()
    for number, (step, key) in enumerate(steps, 1):
        held = dict(cache.items())
        assert held.items() <= written.items()
        assert len(cache) == len(held) <= limit
        assert list(cache) == list(held)
        if step == "get":
            assert (key in cache) == (key in held)
            assert cache.get(key) == held.get(key)
            assert key not in held or key in cache  # asking forgets nothing that was asked for
        elif step == "put":
            cache[key] = written[key] = number
            assert cache.get(key) == number
        else:
            assert cache.pop(key) == held.get(key)
            assert key not in cache


@given(limit=st.integers(8, 64), order=st.lists(st.integers(0, 200), max_size=300))
def test_what_was_used_last_of_entries_in_use_is_kept(limit: int, order: list[int]) -> None:
    """Of entries that have proved themselves, as many as a generation holds."""
    cache = LRUCache[int](limit)
    recent = list[int]()
    half = (limit - max(limit // NEWCOMERS, 1)) // 2
    for key in order:
        put(cache, key)
        for _ in range(ASKS):
            assert cache.get(key) is not None
        recent = [key, *[other for other in recent if other != key]][:half]
        assert all(other in cache for other in recent)


def test_a_stream_of_entries_that_are_used_once_displaces_nothing() -> None:
    cache = LRUCache[int](64)
    for key in range(20):
        put(cache, key)
        for _ in range(ASKS):
            cache.get(key)
    for key in range(1000, 3000):
        put(cache, key)
        assert len(cache) <= 20 + 64 // NEWCOMERS
    assert all(cache.get(key) == -key - 1 for key in range(20))


def test_entries_that_come_again_and_again_are_found_whatever_their_number_up_to_a_generation() -> None:
    """More than there are places for newcomers: in the third round all of them are known."""
    cache = LRUCache[int](64)
    for _ in range(3):
        for key in range(28):
            put(cache, key)
    assert all(key in cache for key in range(28))


def test_an_entry_can_be_replaced_and_taken_out_wherever_it_is() -> None:
    cache = LRUCache[int](3 * NEWCOMERS)  # three newcomers, and 22 in each generation
    for key in range(30):
        cache[key] = key
        for _ in range(ASKS):
            cache.get(key)
    for key in (40, 41):
        cache[key] = key
    assert len(cache) == 32  # 22 are old, 8 are young, 2 are new
    for key in (0, 29, 40):
        cache[key] = key + 100
        assert cache.get(key) == key + 100
        del cache[key]
        assert key not in cache
        with pytest.raises(KeyError):
            del cache[key]
        assert cache.pop(key) is None
    assert len(cache) == 29
    assert repr(cache) == "LRUCache(48) of 29 entries"
    cache.clear()
    assert not cache
    assert cache.get(1) is None


def test_a_copy_is_empty() -> None:
    cache = LRUCache[int](24)
    cache[1] = 1
    for twin in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert isinstance(twin, LRUCache)
        assert twin.limit == 24
        assert not twin
    assert cache.get(1) == 1


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_find_right_values_and_never_too_many() -> None:
    cache = LRUCache[int](32)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(3000):
            key = draw.randrange(60)
            found = cache.get(key)
            assert found in (None, -key - 1)
            if found is None:
                cache[key] = -key - 1
            elif draw.random() < 0.05:
                cache.pop(key)
            assert len(list(cache)) <= 32

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert all(value == -key - 1 for key, value in cache.items())
