"""Of a table of cases so many are sampled as leave out no value of a parameter."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis.internal.conjecture import providers
from sampling import sampled

pytestmark = pytest.mark.cpu

LETTERS, NUMBERS, ANSWERS = "abcdefg", range(1, 4), (True, False)


@dataclass(frozen=True)
class Spec:
    params: dict[str, object]


class Case:
    """Like a test of pytest's."""

    def __init__(self, **params: object) -> None:
        self.callspec = Spec(params)

    def values(self, *names: str) -> tuple[object, ...]:
        return tuple(self.callspec.params[name] for name in names)


TABLE = [Case(letter=x, number=y, answer=z) for x, y, z in product(LETTERS, NUMBERS, ANSWERS)]


def test_every_value_of_every_parameter_is_sampled() -> None:
    found = sampled(TABLE, ())
    assert len(found) == len(LETTERS)
    for name, values in (("letter", LETTERS), ("number", NUMBERS), ("answer", ANSWERS)):
        assert {case.values(name) for case in found} == {(value,) for value in values}


def test_every_value_of_a_parameter_comes_about_as_often() -> None:
    table = [Case(letter=letter, number=number) for letter, number in product(LETTERS, NUMBERS)]
    uses = Counter(case.values("number") for case in sampled(table, ()))
    assert sorted(uses.values()) == [2, 2, 3]


def test_values_meet_in_many_combinations() -> None:
    assert {case.values("number", "answer") for case in sampled(TABLE, ())} == {*product(NUMBERS, ANSWERS)}


def test_all_combinations_of_parameters_that_are_named_together_are_sampled() -> None:
    found = sampled(TABLE, ("letter", "answer"))
    assert len(found) == 14
    assert {case.values("letter", "answer") for case in found} == {*product(LETTERS, ANSWERS)}


def test_every_value_may_be_wanted_several_times() -> None:
    found = sampled(TABLE, (), times=2)
    assert all(sum(case.values("letter") == (letter,) for case in found) == 2 for letter in LETTERS)
    assert sampled(TABLE, (), times=99) == {*TABLE}


def test_a_table_with_gaps_is_sampled_too() -> None:
    table = [case for case in TABLE if case.values("letter", "answer") != ("c", True)]
    found = sampled(table, ())
    assert {case.values("letter") for case in found} == {(letter,) for letter in LETTERS}


def test_the_same_cases_are_sampled_every_time() -> None:
    assert sampled(TABLE, ("number",), 2) == sampled(TABLE, ("number",), 2)


def test_examples_hold_no_numbers_of_the_source():
    """So that a change of the source does not change them: `tests/conftest.py` says so to hypothesis."""
    assert len(providers._get_local_constants()) == 0
