"""Progress bars: on a terminal alone, and only where a command takes more than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

__all__ = ["progress", "say"]

Item = TypeVar("Item")
BAR_AFTER = 1.0  # seconds


def progress(items: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a bar on standard error that goes away at the end; nothing where that is no terminal."""
    is_hidden = not sys.stderr.isatty()
    yield from tqdm(items, title, total, leave=False, delay=BAR_AFTER, disable=is_hidden, file=sys.stderr)


def say(text: str) -> None:
    """Print a text above a bar that may be there."""
    tqdm.write(text)
