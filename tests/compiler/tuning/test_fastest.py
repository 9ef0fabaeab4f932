"""`fastest`, of calls that return how long they take: what is timed, in which order, and what is remembered of it."""

from __future__ import annotations

import json

import pytest
import torch

from insum_ops.compiler.tuning import choice, clock, tuning_cache
from insum_ops.compiler.tuning.tuning_cache import Key


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Nothing is remembered yet, and a call takes as many milliseconds as it returns."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choice, "device_milliseconds", lambda call, hopeless: call())
    return tmp_path


def key_of(statement="a"):
    return Key(statement, "", (), (), "", "cpu", "", "", False)


def contest(times, first, others=None, hosts=None, statement="a", more=(), enough=0.0):
    """The winner and the names that were started, in their order."""
    started = []

    def start(name):
        started.append(name)
        return lambda: times[name], (hosts or {}).get(name, 0.0)

    others = others or {}
    ways = {*first, *more, *[name for added in others.values() for name in added]}
    vary = lambda best, _: others.get(best, ())
    return choice.fastest(key_of(statement), ways, list(first), start, enough=enough, others=vary), started


@pytest.mark.usefixtures("folder")
def test_the_one_that_takes_the_least_wins():
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc") == ("b", ["a", "b", "c"])


@pytest.mark.usefixtures("folder")
def test_what_is_fast_enough_ends_the_search_and_is_remembered():
    assert contest({"a": 3.0, "b": 1.5, "c": 1.0}, "abc", {"b": ["x"]}, enough=2.0) == ("b", ["a", "b"])
    assert contest({"a": 3.0, "b": 1.5, "c": 1.0}, "abc", {"b": ["x"]}) == ("b", [])
    assert contest({"a": 3.0, "b": 2.5, "x": 1.0}, "ab", {"b": ["x"]}, statement="b", enough=2.0)[0] == "x"


@pytest.mark.usefixtures("folder")
def test_of_those_that_are_fast_enough_the_one_that_asks_least_of_the_host_wins():
    times, hosts = {"a": 1.0, "b": 1.9, "c": 1.5}, {"a": 2.5, "b": 2.0, "c": 2.0}
    assert contest(times, "abc", hosts=hosts, enough=2.0) == ("b", ["a", "b"])
    assert contest(times, "abc", hosts={**hosts, "b": 2.1}, statement="b", enough=2.0) == ("c", ["a", "b", "c"])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("is_waited_for", "winner"), [(False, "tables"), (True, "kernel")])
def test_calls_that_wait_are_ranked_by_the_time_until_their_result(monkeypatch, is_waited_for, winner):
    """By a clock that the host and the device move on, the device not before it is waited for."""
    milliseconds, queued = [0.0], [0.0]
    host, device = {"tables": 0.4, "kernel": 0.1, "slow": 9.0}, {"tables": 0.1, "kernel": 0.3, "slow": 9.0}
    counts = dict.fromkeys(host, 0)

    def call(name):
        counts[name] += 1
        milliseconds[0] += host[name]
        queued[0] += device[name]
        return device[name]

    def synchronize():
        milliseconds[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(clock, "perf_counter", lambda: 1e-3 * milliseconds[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    start = lambda name: (lambda: call(name), 0.0)
    times = {}
    ways = ["tables", "kernel", "slow"]
    assert choice.fastest(key_of(), ways, ways, start, times, is_waited_for=is_waited_for) == winner
    if is_waited_for:
        assert times == pytest.approx({"tables": 0.5, "kernel": 0.4, "slow": 18.0})
        assert counts["slow"] == 2  # built, and timed once
        assert counts["kernel"] > 10


@pytest.mark.usefixtures("folder")
def test_others_are_timed_only_after_the_one_that_they_vary():
    others = {"a": ["x"], "b": ["y", "z"]}
    times = {"a": 3.0, "b": 2.0, "x": 0.0, "y": 1.0, "z": 1.5}
    assert contest(times, "ab", others) == ("y", ["a", "b", "y", "z"])
    assert contest({**times, "y": 2.5, "z": 2.5}, "ab", others, statement="b") == ("b", ["a", "b", "y", "z"])


@pytest.mark.usefixtures("folder")
def test_the_host_decides_between_those_that_the_device_finds_equally_good_alone():
    hosts = {"a": 5.0, "b": 9.0, "c": 1.0}
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc", hosts=hosts)[0] == "b"
    assert contest({"a": 1.01, "b": 1.0, "c": 1.02}, "abc", hosts=hosts, statement="b")[0] == "c"


def test_a_winner_is_remembered_with_the_times_of_all(folder):
    assert contest({"a": 3.0, "b": 1.0}, "ab")[0] == "b"
    assert contest({}, "ab") == ("b", [])
    (file,) = (folder / "tuning").glob("*.json")
    stored = json.loads(file.read_text())
    assert (stored["config"], stored["times"]) == ({"way": "b"}, [[{"way": "b"}, 1.0], [{"way": "a"}, 3.0]])
    tuning_cache._cache_of.cache_clear()  # another process
    assert contest({}, "ab") == ("b", [])
    assert contest({}, "a", {"a": ["b"]}) == ("b", [])


@pytest.mark.usefixtures("folder")
def test_a_name_that_there_is_no_more_is_timed_anew():
    assert contest({"a": 3.0, "b": 1.0}, "ab")[0] == "b"
    assert contest({"a": 3.0, "c": 4.0}, "ac") == ("a", ["a", "c"])


@pytest.mark.usefixtures("folder")
def test_what_a_full_search_found_is_good_for_those_who_search_less():
    assert contest({"a": 3.0, "x": 1.0}, "a", {"a": ["x"]})[0] == "x"
    assert contest({}, "a", more="x") == ("x", [])
    assert contest({"a": 3.0}, "a") == ("a", ["a"])


def test_without_memory_for_all_the_rest_decide_for_now(folder):
    def start(name):
        def call():
            if name in missing[0]:
                raise torch.OutOfMemoryError
            return times[name]

        return call, 0.0

    times = {"a": 3.0, "b": 1.0, "c": 2.0, "x": 0.0}
    vary = lambda best, _: ["x"] if best == "c" else []
    missing = [""]
    for missing[0], winner in (("b", "c"), ("abc", "a")):
        assert choice.fastest(key_of(), [*"abcx"], ["a", "b", "c"], start, others=vary) == winner
        assert not [*(folder / "tuning").glob("*.json")]
    missing[0] = ""
    assert choice.fastest(key_of(), [*"abcx"], ["a", "b", "c"], start, others=vary) == "b"


def test_what_runs_but_can_not_be_timed_for_lack_of_memory_is_left_out(folder, monkeypatch):
    def timed(call, hopeless):
        if call() == 1.0:  # a graph can't have what others have freed
            raise torch.OutOfMemoryError
        return call()

    monkeypatch.setattr(choice, "device_milliseconds", timed)
    assert contest({"a": 3.0, "b": 1.0, "c": 2.0}, "abc", {"c": ["x"]}) == ("c", ["a", "b", "c"])
    assert not [*(folder / "tuning").glob("*.json")]


@pytest.mark.cpu
@pytest.mark.usefixtures("folder")
def test_a_long_call_on_a_cpu_is_timed_once_and_a_short_one_a_few_times(monkeypatch):
    """By a clock that the calls move on; before it is timed, each runs once."""
    milliseconds, counts = [0.0], {"long": 0, "longer": 0, "short": 0, "shorter": 0}

    def start(name):
        def call():
            counts[name] += 1
            milliseconds[0] += {"long": 60.0, "longer": 80.0, "short": 1.5, "shorter": 0.1}[name]

        return call, 0.0

    monkeypatch.setattr(clock, "thread_time", lambda: 1e-3 * milliseconds[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert choice.fastest(key_of("a"), [*counts], ["long", "longer"], start, is_waited_for=True) == "long"
    assert (counts["long"], counts["longer"]) == (2, 2)
    assert choice.fastest(key_of("b"), [*counts], ["shorter", "short"], start, is_waited_for=True) == "shorter"
    assert counts["shorter"] > 10
    assert 2 < counts["short"] < 10


@pytest.mark.cpu
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("before", [4.0, 20.0])
def test_calls_that_make_a_launch_plan_are_not_timed(monkeypatch, before):
    """By a clock that the calls move on: the first three take `before` milliseconds, unless a long one ends that."""
    milliseconds, made = [0.0], dict.fromkeys("ab", 0)

    def start(name):
        def call():
            made[name] += 1
            milliseconds[0] += before if made[name] <= 3 else {"a": 0.6, "b": 0.1}[name]

        return call, 0.0

    monkeypatch.setattr(clock, "thread_time", lambda: 1e-3 * milliseconds[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    times = {}
    way = choice.fastest(key_of(), ["a", "b"], ["a", "b"], start, times, is_waited_for=True, unsettled=2)
    assert way == "b" or before > 10
    assert times == pytest.approx({"a": 0.6, "b": 0.1} if before < 10 else {"a": 20.0, "b": 20.0})


@pytest.mark.cpu
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("scale", "is_timed_again"), [(1, True), (5, False)])
def test_short_calls_that_are_close_are_timed_in_a_second_turn(monkeypatch, scale, is_timed_again):
    """By a clock that the calls move on; "b" is disturbed in its first turn, and "c" is far from the best in it."""
    milliseconds, turns = [0.0], []

    def start(name):
        def call():
            turns.extend([] if turns[-1:] == [name] else [name])
            milliseconds[0] += scale * {"a": 0.6, "b": 0.7 if turns.count("b") == 1 else 0.4, "c": 1.0}[name]

        return call, 0.0

    monkeypatch.setattr(clock, "thread_time", lambda: 1e-3 * milliseconds[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    way = choice.fastest(key_of(), ["a", "b", "c"], ["a", "b", "c"], start, is_waited_for=True)
    assert (way, turns) == (("b", [*"abcba"]) if is_timed_again else ("a", [*"abc"]))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("ms", "is_chosen", "winner"), [(9.0, True, "b"), (11.0, False, "a")])
def test_a_call_with_a_choice_of_its_own_makes_it_if_it_is_not_hopeless_without(monkeypatch, ms, is_chosen, winner):
    """Without the choice there is no launch plan, beside which a few milliseconds say little."""
    inner = []

    def call():
        inner.append(not choice.is_put_off(key_of("inner")))
        return 0.5 if inner[-1] else ms

    start = lambda name: (call if name == "b" else lambda: 1.0, 0.0)
    monkeypatch.setattr(choice, "waited_milliseconds", lambda call, hopeless, unsettled=0: call())
    assert choice.fastest(key_of("outer"), {"a", "b"}, ["a", "b"], start, is_waited_for=True) == winner
    assert inner == [False, False, *[True, True] * is_chosen]
    contest({"a": 1.0}, "a", statement="inner")
    inner.clear()
    choice.fastest(key_of("another"), {"a", "b"}, ["a", "b"], start, is_waited_for=True)
    assert inner == [True, True]  # it is remembered
