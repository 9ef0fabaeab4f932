"""Whatever the package keeps for the whole process, emptied: the next call is a first one."""

from __future__ import annotations

import sys

from insum_ops.lru_cache import LRUCache

__all__ = ["forget"]


def forget() -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "insum_ops":
            for kept in list(vars(module).values()):
                if isinstance(kept, LRUCache):
                    kept.clear()
