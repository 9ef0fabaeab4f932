"""Tuning with a clock that is pretended: every way that would be timed runs, and a draw or the test says which wins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from zlib import crc32

import pytest
from process_caches import forget

from insum_ops.compiler.routes import choice
from insum_ops.compiler.tuning import Key

__all__ = ["Contests", "drawn_programs", "pretended_clock"]


class Contests(list[tuple[Key, list[str]]]):
    """A stand-in for `fastest`: the key of each choice so far, and the names of its ways."""

    mode = "default"  # of tuning
    runs = 2  # of each way
    # where it is one of the ways, or which of them; else it is drawn, the same in each run for the same key
    winner: str | Callable[[Key, list[str]], str] = ""
    enough = 0.0  # what the last one called fast enough

    def __call__(
        self,
        key: Key,
        ways: Collection[str],
        first: Sequence[str],
        start: Callable[[str], tuple[Callable[[], object], float] | None],
        *_: object,
        enough: float = 0.0,
        others: Callable[[str, dict[str, float]], Sequence[str]] = lambda best, times: (),
        **__: object,
    ) -> str:
        names = [*dict.fromkeys([*first, *[name for best in first for name in others(best, {})]])]
        assert {*names} <= {*ways}
        for name in names if self.runs else ():
            started = start(name)
            for _ in range(self.runs if started is not None else 0):
                started[0]()
        self.append((key, names))
        self.enough = enough
        winner = self.winner if isinstance(self.winner, str) else self.winner(key, [*ways])
        return winner if winner in ways else names[crc32(str(key).encode()) % len(names)]


@contextmanager
def pretended_clock(*modules: ModuleType) -> Iterator[Contests]:
    """These modules choose by such contests, on every device; nothing is known before, and nothing is kept."""
    contests = Contests()
    with pytest.MonkeyPatch.context() as patch:
        pretended = {"INTERPRETED": False, "tuning_mode": lambda: contests.mode}
        pretended["may_be_timed"] = lambda device: contests.mode != "off"
        pretended["pays"] = lambda key: True
        for module in modules:
            patch.setattr(module, "fastest", contests)
            for name in pretended.keys() & vars(module).keys():
                patch.setattr(module, name, pretended[name])
        forget()
        yield contests
    forget()


@contextmanager
def drawn_programs() -> Iterator[Contests]:
    """A CPU's programs are drawn."""
    with pretended_clock(choice) as contests:
        yield contests
