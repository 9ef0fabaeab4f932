"""Error messages as tests write them down: paragraphs of full text, the expression and its caret included."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def messages(text: str) -> list[tuple[str, str]]:
    """(expression, full text of its message) for each paragraph: the problem, the expression, the caret."""
    found = []
    for paragraph in text.strip("\n").split("\n\n"):
        problem, expression, caret = paragraph.strip("\n").split("\n")
        assert caret.strip() == "^"
        found.append((expression[4:], f"{problem}\n{expression}\n{caret}"))
    return found


def assert_says(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """The call raises the error with these very words."""
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        call()
