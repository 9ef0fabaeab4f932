"""What a command says when it can't be run as it was asked for; `main` prints it and exits with 2."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(ValueError):
    """An argument of the command line is wrong; the message is one sentence and says what to give."""
