"""Tests of what tuning does with its candidates have all of them built, however fast they are said to be."""

import pytest

from insum_ops.compiler.tuning import search


@pytest.fixture(autouse=True)
def _enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FIRST", 1000)
    monkeypatch.setattr(search, "FAR", float("inf"))
    monkeypatch.setattr(search, "BUILDERS", 1000)
    monkeypatch.setattr(search, "_cores", lambda: 1000)
