"""What the compiler says when it is handed something it will not run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

__all__ = [
    "IndexRangeError",
    "InsumError",
    "OperandError",
    "ParseError",
    "SettingError",
    "ShapeError",
    "UnsupportedError",
    "on_problem",
    "shortened",
]

Error = TypeVar("Error", bound=Exception)
on_problem: list[Callable[[str], None]] = []  # what is told of each problem before it is raised


class InsumError(ValueError):
    """A statement or its tensors are wrong; nothing was computed and nothing was changed.

    The message states the problem and, where a place in the expression is to blame, shows it:

        expected ']' to close B[
            C[AM[p],n] += AV[p,q] * B[AK[p,q],n
                                               ^
    """

    def __init__(self, problem: str, text: str | None = None, at: int | None = None) -> None:
        if text is not None and at is not None:
            problem = f"{problem}\n    {text}\n    {' ' * at}^"
        for tell in on_problem:
            tell(problem)
        super().__init__(problem)


def shortened(error: Error) -> Error:
    """Return an error to raise anew where the user called: its traceback ends there, not inside the package.

    With INSUM_TRACEBACK=full in the environment the traceback keeps every frame.
    """
    return error if os.environ.get("INSUM_TRACEBACK") == "full" else error.with_traceback(None)


class ParseError(InsumError):
    """Not an indirect Einsum; the caret sits under the first character that is wrong."""


class ShapeError(InsumError):
    """Ranks, extents or sizes that do not fit together."""


class OperandError(InsumError):
    """A tensor is missing, unused, or of a kind that can't stand where it stands."""


class UnsupportedError(InsumError):
    """A legal request that can't be met; the message says what to do instead."""


class SettingError(InsumError):
    """A variable of the environment has a value that it can't have."""


class IndexRangeError(InsumError, IndexError):
    """An index tensor points outside the dimension it indexes."""
