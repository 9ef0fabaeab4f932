"""Whatever the package keeps for the whole process, emptied: the next call is a first one."""

from __future__ import annotations

import sys
from functools import lru_cache

from insum_ops.lru_cache import LRUCache

__all__ = ["caches", "forget"]


def caches() -> list[LRUCache[object]]:
    return _caches(len(sys.modules))


@lru_cache
def _caches(_: int) -> list[LRUCache[object]]:
    """Those of all modules that are imported now; their number tells whether there are others."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "insum_ops"]
    return [kept for module in modules for kept in list(vars(module).values()) if isinstance(kept, LRUCache)]


def forget() -> None:
    for kept in caches():
        kept.clear()
