"""Error messages as tests write them down: paragraphs of full text, the expression and its caret included."""

from __future__ import annotations


def messages(text: str) -> list[tuple[str, str]]:
    """(expression, full text of its message) for each paragraph: the problem, the expression, the caret."""
    found = []
    for paragraph in text.strip("\n").split("\n\n"):
        problem, expression, caret = paragraph.strip("\n").split("\n")
        assert caret.strip() == "^"
        found.append((expression[4:], f"{problem}\n{expression}\n{caret}"))
    return found
