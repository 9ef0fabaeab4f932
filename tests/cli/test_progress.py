"""A progress bar is for people who wait at a terminal, and for no log file."""

from __future__ import annotations

import sys

import pytest

from insum_ops.cli import progress as progress_module
from insum_ops.cli.progress import progress, say

pytestmark = pytest.mark.cpu


def test_no_bar_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress_module, "BAR_AFTER", 0.0)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_after_a_while(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert "counting" not in capsys.readouterr().err
    monkeypatch.setattr(progress_module, "BAR_AFTER", 0.0)
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    printed = capsys.readouterr()
    assert "counting:   0%" in printed.err
    assert printed.out == ""


def test_what_is_said_goes_to_standard_output(capsys):
    say("a line")
    assert capsys.readouterr() == ("a line\n", "")
