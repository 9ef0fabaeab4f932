"""Every line of the table of mistakes gets the words that docs/use/mistakes.md shows, close to the line itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("e3nn")
pytest.importorskip("scipy")

from mistakes import MISTAKES, PAGE, Mistake, outcome_of, page
from sparse_inputs import SPARSE_WARNINGS

ROOT = Path(__file__).parent.parent
RAW = ("KeyError", "IndexError", "AssertionError", "NotImplementedError", "UnboundLocalError")

pytestmark = [pytest.mark.cpu, SPARSE_WARNINGS]


def test_the_page_shows_what_each_mistake_gets() -> None:
    """Otherwise `python tests/mistakes.py` writes it anew: read its diff, it is what users will be told."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_no_two_mistakes_are_the_same() -> None:
    assert len(MISTAKES) >= 100
    assert len({mistake.code for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_an_error_is_raised_close_to_the_line(mistake: Mistake) -> None:
    found = outcome_of(mistake)
    ours = [frame for frame in found.frames if Path(frame).is_relative_to(ROOT) and ".venv" not in frame]
    assert len(ours) <= 4
    assert found.error not in RAW
    if found.error and not mistake.is_torchs and found.frames and not ours:
        assert found.error == "RuntimeError"  # of load_state_dict, which lists what our layers say
