"""Two recorded runs over other lengths make the plan of all such calls, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_plans import Function, Surroundings, assert_same, joined, recorded
from torch import Tensor

from insum_ops.compiler.binding import LengthClass
from insum_ops.compiler.runtime.generalise import generalised
from insum_ops.compiler.runtime.plan import plan_of
from insum_ops.compiler.runtime.plan_cache import _Plans, planned
from insum_ops.compiler.runtime.plan_steps import Length, Steps
from insum_ops.compiler.runtime.recording import active

pytestmark = pytest.mark.cpu


def test_two_lengths_make_a_plan_for_any():
    function = lambda x: torch.cat([x.new_zeros(2 * len(x), 3), x]).view(len(x), 9)[: len(x)] * 2
    plan = joined(function, [torch.randn(4, 3)], [torch.randn(7, 3)])
    for length in (4, 7, 5, 1, 30):
        x = torch.randn(length, 3)
        assert_same(plan.replay(x), function(x))


def test_lengths_that_differ_alike_are_not_told_apart():
    function = lambda x, y: (x.new_zeros(len(y)), y.new_ones(len(x)))
    assert joined(function, [torch.zeros(4), torch.zeros(2)], [torch.zeros(8), torch.zeros(4)]) is None
    plan = joined(function, [torch.zeros(4), torch.zeros(3)], [torch.zeros(8), torch.zeros(4)])
    x, y = torch.zeros(5), torch.zeros(11)
    assert_same(plan.replay(x, y), function(x, y))


def test_equal_lengths_must_be_equal_and_one_that_has_not_changed_must_not():
    function = lambda x, y, z: (x.new_zeros(len(y)), z.new_ones(len(z)))
    made = lambda *lengths: [torch.zeros(length) for length in lengths]
    plan = joined(function, made(4, 4, 6), made(9, 9, 6))
    assert_same(plan.replay(*made(5, 5, 6)), function(*made(5, 5, 6)))
    assert plan.replay(*made(5, 4, 6)) is None
    assert plan.replay(*made(5, 5, 7)) is None


def test_numbers_vary_as_lengths_do():
    def recorded_with(length: int, rows: int) -> Steps:
        return recorded(lambda x: x.sum() + x.new_zeros(rows), torch.zeros(length))

    classes = [LengthClass(1, 8, 2), LengthClass(1, 100, 1)]
    found = generalised(recorded_with(4, 10), recorded_with(6, 12), [4, 10], [6, 12], classes)
    assert found is not None
    assert found[1] == classes
    plan = plan_of(found[0], Surroundings().services, found[1])
    assert plan is not None
    assert plan.replay(torch.zeros(2), 3).shape == (3,)
    for length, rows in ((5, 3), (10, 3), (0, 3), (2, 101), (2, 0)):  # not divided, or not within the class
        assert plan.replay(torch.zeros(length), rows) is None


def test_lengths_that_are_equal_are_of_both_classes():
    runs = [recorded(lambda x, y: x + y, torch.zeros(length), torch.zeros(length)) for length in (4, 6)]
    found = generalised(*runs, [4, 4], [6, 6], [LengthClass(1, 8, 1), LengthClass(3, 100, 2)])
    assert found is not None
    assert found[1] == [LengthClass(3, 8, 2), Length(1, 0)]


def in_tiles(length: int, tile: int = 4) -> int:
    return length // tile + 2


def tiled(known: LengthClass | None = None) -> Function:
    """Return a function whose result has tiles, noted as a length that is derived; None: a kernel knows how many."""

    def function(x: Tensor) -> Tensor:
        tiles, recording = in_tiles(len(x)), active()
        if recording is not None:
            recording.derive(in_tiles, len(x), 4, known=known or tiles)
        return x.new_zeros(tiles, 3)

    return function


def test_a_derived_length_is_worked_out_for_each_call():
    function = tiled(LengthClass(2, 20, 1))
    plan = joined(function, [torch.zeros(8)], [torch.zeros(15)])
    for length in (8, 15, 3, 16, 72):
        assert_same(plan.replay(torch.zeros(length)), function(torch.zeros(length)))
    assert plan.replay(torch.zeros(100)) is None  # of another class


@pytest.mark.parametrize("known", [LengthClass(2, 20, 1), None])
def test_a_derived_length_that_is_equal_by_chance_must_be_so_in_each_call(known):
    function = tiled(known)
    plan = joined(function, [torch.zeros(8)], [torch.zeros(11)])
    for length in (8, 9, 11):
        assert_same(plan.replay(torch.zeros(length)), function(torch.zeros(length)))
    assert plan.replay(torch.zeros(7)) is plan.replay(torch.zeros(12)) is None


def test_a_derived_length_of_which_a_kernel_knows_all_makes_no_plan_for_others():
    assert joined(tiled(None), [torch.zeros(8)], [torch.zeros(15)]) is None


def test_a_derived_length_that_differs_as_an_input_does_is_not_told_apart_from_it():
    function = tiled(LengthClass(2, 20, 1))
    assert joined(lambda x, y: function(x), [torch.zeros(8), torch.zeros(4)], [torch.zeros(16), torch.zeros(6)]) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.new_zeros(len(x) + 1),
        lambda x: x.new_zeros(len(x) // 2),
        lambda x: x + 1 if len(x) == 4 else x + 2,
        lambda x: x.add(1) if len(x) == 4 else x.sub(1),
        lambda x: x[0] if len(x) == 4 else x[0] * 1,
        lambda x: x * (0.5 * len(x)),
    ],
    ids=["more", "half", "another number", "another function", "another step", "a fraction"],
)
def test_runs_that_differ_otherwise_have_no_common_plan(function):
    assert joined(function, [torch.randn(4)], [torch.randn(7)]) is None


def test_plans_of_kernels_that_know_a_divisor_are_asked_first():
    cache, function = dict[Any, Any](), lambda x: x.new_ones(len(x))
    for length in (80, 96, 112, 81, 83, 85, 208, 144):
        assert_same(planned(cache, "", function, (torch.zeros(length),), varies=True), function(torch.zeros(length)))
    (plans,) = [each for each in cache.values() if isinstance(each, _Plans) and each.varying is not None]
    assert [plan.divisor for plan in plans.plans] == [16, 1]
    for length, served in (
        (96, [True] * 2),
        (128, [True] * 2),
        (97, [False, True]),
        (129, [False] * 2),
        (64, [False] * 2),
    ):
        assert [plan.replay(torch.zeros(length)) is not None for plan in plans.plans] == served


def test_calls_at_any_lengths_are_right():
    cache, function = dict[Any, Any](), lambda x, y: torch.cat([x, y[: len(x)]]).view(2, len(x), 3).sum(0)
    for length in (600, 601, 602, 700, 600, 1100, 3, 601, 2, 900, 3):
        x, y = torch.randn(length, 3), torch.randn(length, 3)
        assert_same(planned(cache, "", function, (x, y), varies=True), function(x, y))
