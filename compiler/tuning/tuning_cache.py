"""Tuned configs, kept in memory and on disk, one JSON file per key."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

from ...lru_cache import LRUCache
from ..runtime import cache_dir, remove_abandoned, replace_file, warn_damaged, warn_unusable

__all__ = ["Choices", "Entry", "Key", "TuningCache", "current_cache"]

Choices = dict[str, int | str | bool]
SCHEMA = 1  # of the JSON files; part of every digest, so that two versions can share a folder
LOCK_TIMEOUT = 600.0  # seconds: a full search takes minutes, and a dead process holds no lock
ENTRIES = 1024  # kept in memory, of some 10 kB each: every config that was tried and its time
_tuning = threading.RLock()  # one tuning at a time, so that none disturbs another's times


@dataclass(frozen=True)
class Key:
    """All that a tuned config depends on; calls with equal keys share one."""

    statement: str  # canonical text
    codegen: str  # the version of the code generator, and a digest of the candidates there were
    dtypes: tuple[str, ...]  # of the tensors in order of appearance, index tensors included
    extents: tuple[tuple[str, int], ...]  # (index name, extent): exact where dense, its power of two where nnz-like
    layout: str  # class of the strides
    device: str  # GPU name, compute capability, SM count
    triton: str  # version
    precision: str  # of fp32 dots and of partial sums
    deterministic: bool  # atomics are ruled out

    def digest(self) -> str:
        """Return the name of this key's file: a prefix of the SHA-256 of its canonical JSON."""
        return hashlib.sha256(json.dumps([SCHEMA, asdict(self)], sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Entry:
    """A tuned config and all times; an entry from disk is checked for types only, so its config may be no candidate."""

    config: Choices
    times: tuple[tuple[Choices, float], ...] = ()  # every config measured and its milliseconds, best first
    refused: tuple[tuple[Choices, str], ...] = ()  # every config that could not be built, and why

    def __post_init__(self) -> None:
        for config in (self.config, *(config for config, _ in (*self.times, *self.refused))):
            if not isinstance(config, dict) or not all(isinstance(v, (int, str)) for v in config.values()):
                raise TypeError(f"a config maps names to int, str or bool, got {config!r}")
        times = [ms for _, ms in self.times]
        if not all(isinstance(t, float) and 0 <= t < float("inf") for t in times) or sorted(times) != times:
            raise ValueError(f"times are finite floats in milliseconds, best first, got {times}")


class TuningCache:
    """Entries by key, on disk and in memory: `with cache.lock(key): entry = cache.get(key) or tune()`.

    Memory holds the entries that were used lately. If the disk can't be used, an entry that memory no longer holds is
    tuned again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir()
        self._memory: LRUCache[Entry] = LRUCache(ENTRIES)  # by Key

    def get(self, key: Key) -> Entry | None:
        """Return the entry of a key, or None if it has to be tuned; warn of a damaged file or an unusable folder."""
        entry = self._memory.get(key)
        if entry is not None:
            return entry
        path = self._path(key)
        try:
            entry = self._memory[key] = self.decode(path.read_bytes(), key)
            return entry
        except FileNotFoundError:
            pass
        except (IsADirectoryError, KeyError, TypeError, ValueError, RecursionError):
            warn_damaged(path)
        except OSError as error:
            warn_unusable(self.folder, error)
        return None

    def put(self, key: Key, entry: Entry) -> None:
        """Keep an entry in memory and, if the folder can be written, on disk."""
        self._memory[key] = entry
        try:
            replace_file(self._path(key), self.encode(key, entry))
        except OSError as error:
            warn_unusable(self.folder, error)
        else:
            remove_abandoned(self._path(key).parent)

    @contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Keep other processes from tuning this key, other threads from tuning at all; not to be nested."""
        path = self._path(key).with_suffix(".lock")
        with _tuning, ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path, timeout=LOCK_TIMEOUT, fallback_to_soft=False))
            except (OSError, NotImplementedError) as error:  # the latter: no locks here, to older filelocks
                warn_unusable(self.folder, error)
            yield

    @staticmethod
    def encode(key: Key, entry: Entry) -> bytes:
        """Return the content of a key's file."""
        content = {"schema": SCHEMA, "key": asdict(key), "config": entry.config, "times": entry.times}
        return json.dumps({**content, "refused": entry.refused}, indent=1).encode()

    @staticmethod
    def decode(data: bytes, key: Key) -> Entry:
        """Return the entry in a file's content; raise KeyError, TypeError or ValueError unless it is of this key."""
        content = json.loads(data)
        if content["schema"] != SCHEMA or content["key"] != json.loads(json.dumps(asdict(key))):
            raise ValueError("another version or another key")
        times = tuple((config, ms) for config, ms in content["times"])
        return Entry(content["config"], times, tuple((config, str(why)) for config, why in content.get("refused", ())))

    def _path(self, key: Key) -> Path:
        return self.folder / "tuning" / f"{key.digest()}.json"


def current_cache() -> TuningCache:
    """Return the cache of the folder that the environment names now."""
    return _cache_of(cache_dir())


@cache
def _cache_of(folder: Path) -> TuningCache:
    return TuningCache(folder)


def _take_a_new_lock() -> None:
    """Replace the lock in a forked child: a thread that held the old one is not in this process."""
    global _tuning
    _tuning = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_take_a_new_lock)
