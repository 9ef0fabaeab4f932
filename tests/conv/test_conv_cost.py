"""How long forms of a convolution are reckoned to take, beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from insum_ops.compiler.planning.device import H200
from insum_ops.conv.cost import MEASURED, MEASURED_SUMS, Measured, Work, grouping_milliseconds, milliseconds
from insum_ops.conv.forms import GROUP_SIZE_OF_SUMS, PAYS_AFTER

pytestmark = pytest.mark.cpu
FORMS = ("table", "tiles", "groups")
MAKING_TILES = 0.15  # ms, of the room
rows = pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.voxels} voxels, {row.channels} channels")


def reckoned(row: Measured) -> dict[str, float]:
    work = Work(row.voxels, row.voxels, 27, row.channels, itemsize=2, sum_itemsize=2)
    return {form: milliseconds(form, work, row.pairs, H200) for form in FORMS}


@rows
def test_times_are_near_what_was_measured(row: Measured) -> None:
    for form, time in reckoned(row).items():
        assert time == pytest.approx(getattr(row, form), rel=0.15), form


@rows
def test_the_fastest_is_the_one_that_was_or_as_good(row: Measured) -> None:
    times = reckoned(row)
    best = min(times, key=lambda form: times[form])
    assert getattr(row, best) <= 1.02 * min(row.table, row.tiles, row.groups)


@rows
def test_tiles_have_paid_before_a_map_is_taken_to_last(row: Measured) -> None:
    times = reckoned(row)
    assert MAKING_TILES / (times["table"] - times["tiles"]) < PAYS_AFTER
    assert MAKING_TILES / (row.table - row.tiles) < PAYS_AFTER


def test_making_groups_takes_what_first_convolutions_took_longer() -> None:
    assert 0.1 < grouping_milliseconds(H200) < 0.3


def test_slower_memory_costs_groups_the_most_and_fewer_multiprocessors_a_table() -> None:
    work = Work(80_000, 80_000, 27, 256, itemsize=2, sum_itemsize=2)
    ratio = lambda device: milliseconds("groups", work, 400_000, device) / milliseconds("table", work, 0, device)
    assert ratio(replace(H200, bandwidth=H200.bandwidth / 2)) > ratio(H200)
    assert ratio(replace(H200, multiprocessors=66)) < ratio(H200)
    assert ratio(replace(H200, l2_bytes=2 * H200.l2_bytes)) < ratio(H200)


def test_sums_start_with_the_size_that_loses_the_least() -> None:
    assert GROUP_SIZE_OF_SUMS == 512
    assert all(row.by_size[512] <= 1.2 * min(row.by_size.values()) for row in MEASURED_SUMS)
