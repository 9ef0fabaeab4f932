"""Names in messages: what one that is not there may have meant, and the article of one."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from opcode import opmap
from typing import Any, NoReturn

__all__ = ["close_name", "refuser", "with_article"]


def close_name(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is closest to `name`, whatever the case; None if none is close.

    >>> close_name("SubMConv3D", ["SubMConv2d", "SubMConv3d", "spmm"])
    'SubMConv3d'
    """
    by_lower = {known.lower(): known for known in sorted(names)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else None


def with_article(name: str) -> str:
    """Return "a" or "an" and a name, as it is said.

    >>> with_article("ELL"), with_article("ndarray"), with_article("GroupCOO")
    ('an ELL', 'an ndarray', 'a GroupCOO')
    """
    return f"{'an' if name.lower().startswith((*'aeiou', 'nd')) else 'a'} {name}"


def refuser(
    module: str, names: Iterable[str], elsewhere: Mapping[str, str] = {}, others: str = ""
) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__`, which says what a name that it lacks may have meant.

    `elsewhere` maps names of other libraries, or of other modules of this one, to what to write; `others` says what
    there is where no name is close. In `from module import name` Python replaces an AttributeError by words of its own,
    so an ImportError is raised there.
    """
    offered = tuple(names)

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{module} has no {name}")
        close = name if name in elsewhere else close_name(name, offered) or close_name(name, elsewhere)
        if close is None:
            meant = f"; {others}" if others else ""
        else:
            meant = f"; use {elsewhere[close]}" if close in elsewhere else f"; did you mean {close}?"
        problem = f"{module} has no {name}{meant}"
        frame: Any = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
            raise ImportError(problem)
        raise AttributeError(problem, obj=sys.modules.get(module))  # with no name, to which Python adds its own guess

    return __getattr__
