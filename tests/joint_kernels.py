"""Has statements share a kernel wherever they can, with a config of the test's choice: nothing is timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pretended_clock import Contests, pretended_clock

from insum_ops.compiler.routes import joint
from insum_ops.compiler.tuning import Key

__all__ = ["outputs", "share_kernels"]


@contextmanager
def share_kernels(config: int) -> Iterator[Contests]:
    """All statements of a joint call share the kernel of one config; of a number too large, or of -1, the last one."""
    with pretended_clock(joint) as contests:
        contests.runs = 0

        def winner(_: Key, ways: list[str]) -> str:
            shared = [way for way in ways if way != joint.APART and " alone: " not in way]
            return shared[min(config, len(shared) - 1)] if shared else joint.APART

        contests.winner = winner
        yield contests


def outputs(contests: Contests) -> list[tuple[str, ...]]:
    """Return what the statements of each choice write."""
    return [tuple(re.findall(r"(?:: |; )(\w+)\[", key.statement)) for key, _ in contests]
