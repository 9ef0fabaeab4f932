"""What outlives a process: tuned configs, one JSON file per key, and the sources of generated kernels."""

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

try:
    from platformdirs import user_cache_dir
except ImportError:  # torch brings filelock along, but not platformdirs
    user_cache_dir = None  # type: ignore[assignment]

from ..lru_cache import LRUCache

Config = dict[str, int | str | bool]
SCHEMA = 1  # of the JSON files; part of every digest, so that two versions can share a folder
LOCK_TIMEOUT = 600.0  # seconds: a full search takes minutes, and a dead process holds no lock
ENTRIES = 1024  # kept in memory, of some 10 kB each: every config that was tried and its time
ABANDONED = 3600.0  # seconds after which a half-written file is that of a process which was killed
_warned: set[Path | None] = set()  # files that were warned of; None stands for the folder
_turn = threading.RLock()  # one tuning at a time, so that none disturbs another's times


def bucket(n: int) -> int:
    """The power of two not below n, for extents that vary from call to call: 0, 1, 3, 5 -> 0, 1, 4, 8."""
    return 1 << (n - 1).bit_length() if n else 0


@dataclass(frozen=True)
class Key:
    """All that a tuned config depends on; calls with equal keys share one."""

    statement: str  # canonical text
    codegen: str  # the version of the code generator, and a digest of the candidates there were
    dtypes: tuple[str, ...]  # of the tensors in order of appearance, index tensors included
    extents: tuple[tuple[str, int], ...]  # (index name, extent): exact where dense, a `bucket` where nnz-like
    layout: str  # class of the strides
    device: str  # GPU name, compute capability, SM count
    triton: str  # version
    precision: str  # of fp32 dots and of partial sums
    deterministic: bool  # atomics are ruled out

    def digest(self) -> str:
        """The name of this key's file: a prefix of the SHA-256 of its canonical JSON."""
        return hashlib.sha256(json.dumps([SCHEMA, asdict(self)], sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Entry:
    """The config to launch with; from disk, only its types are checked, so look up its choices before use."""

    config: Config
    times: tuple[tuple[Config, float], ...] = ()  # every config measured and its milliseconds, best first
    refused: tuple[tuple[Config, str], ...] = ()  # every config that could not be built, and why

    def __post_init__(self) -> None:
        for config in (self.config, *(config for config, _ in (*self.times, *self.refused))):
            if not isinstance(config, dict) or not all(isinstance(v, (int, str)) for v in config.values()):
                raise TypeError(f"a config maps names to int, str or bool, got {config!r}")
        times = [ms for _, ms in self.times]
        if not all(isinstance(t, float) and 0 <= t < float("inf") for t in times) or sorted(times) != times:
            raise ValueError(f"times are finite floats in milliseconds, best first, got {times}")


def cache_dir() -> Path:
    """INSUM_CACHE_DIR, else the user's cache folder; without a home, a path that can't be written."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "insum_ops")
    if user_cache_dir is not None:
        with suppress(RuntimeError):  # newer platformdirs: there is no home
            folder = user_cache_dir("insum_ops")
    folder = os.path.expanduser(os.environ.get("INSUM_CACHE_DIR") or folder)
    return Path(os.path.join(os.devnull, folder) if folder.startswith("~") else os.path.abspath(folder))


def cache_size(folder: Path) -> tuple[int, int]:
    """How many files lie below the folder, and their bytes."""
    sizes = []
    for file in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(OSError):  # another process may have removed it
            sizes.append(os.lstat(file).st_size)
    return len(sizes), sum(sizes)


class TuningCache:
    """Key -> Entry, on disk, and in memory if used lately; `with cache.lock(key): entry = cache.get(key) or tune()`.

    Where the disk can't be used, an entry that memory has forgotten has to be tuned again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir()
        self._memory: LRUCache[Entry] = LRUCache(ENTRIES)  # by Key

    def get(self, key: Key) -> Entry | None:
        """The entry of the key, None when it has to be tuned."""
        entry = self._memory.get(key)
        if entry is not None:
            return entry
        path = self._path(key)
        try:
            entry = self._memory[key] = _decode(path.read_bytes(), key)
            return entry
        except FileNotFoundError:
            pass
        except (IsADirectoryError, KeyError, TypeError, ValueError, RecursionError):
            _warn_damaged(path)
        except OSError as error:
            _warn_unusable(self.folder, error)
        return None

    def put(self, key: Key, entry: Entry) -> None:
        """Keep the entry in memory and, if the folder lets us, on disk."""
        self._memory[key] = entry
        content = {"schema": SCHEMA, "key": asdict(key), "config": entry.config, "times": entry.times}
        content["refused"] = entry.refused
        try:
            _replace(self._path(key), json.dumps(content, indent=1).encode())
        except OSError as error:
            _warn_unusable(self.folder, error)
        else:
            _remove_abandoned(self._path(key).parent)

    @contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Keep other processes from tuning this key, other threads from tuning at all; not to be nested."""
        path = self._path(key).with_suffix(".lock")
        with _turn, ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path, timeout=LOCK_TIMEOUT, fallback_to_soft=False))
            except (OSError, NotImplementedError) as error:  # the latter: no locks here, to older filelocks
                _warn_unusable(self.folder, error)
            yield

    def _path(self, key: Key) -> Path:
        return self.folder / "tuning" / f"{key.digest()}.json"


MOST_SOURCES = 8192
SOURCES_BETWEEN_LOOKS = 256
_written = 0  # by this process


def source_path(digest: str) -> Path:
    """Where the kernel source of this digest lies once `write_source` has written it."""
    return cache_dir() / "kernels" / f"{digest}.py"


def write_source(text: str) -> Path:
    """A file of this text, named by its hash, for Triton and debuggers; execute the text, not the file.

    Where nothing can be written, as on a full disk, the path is that of a file which is not there.
    """
    data = text.encode()
    path = source_path(hashlib.sha256(data).hexdigest()[:32])
    try:
        return _store(path, data)
    except OSError as error:
        _warn_unusable(cache_dir(), error)
    try:
        return _store(_private_folder() / path.name, data)
    except OSError:
        return path


def _store(path: Path, data: bytes) -> Path:
    held: bytes | None = None
    try:  # and never ask first: another process may write or remove it in between
        held = path.read_bytes()
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        held = b""
    if held == data:
        with suppress(OSError):  # it is another user's, or gone since
            os.utime(path)
        return path
    if held is not None:
        _warn_damaged(path)
    _replace(path, data)
    _thin_out(path.parent, keep=path.name)
    return path


def _thin_out(folder: Path, keep: str) -> None:
    """Of very many sources the older half, by when they were last used, goes: every config ever tried has one.

    A process looks when it first writes one and then now and again, since most of them write few.
    """
    global _written
    is_time = _written % SOURCES_BETWEEN_LOOKS == 0
    _written += 1
    if not is_time:
        return
    _remove_abandoned(folder)
    found = [entry for entry in _listed(folder) if entry.name.endswith(".py") and entry.name != keep]
    if len(found) > MOST_SOURCES:
        for entry in sorted(found, key=_age)[: len(found) // 2]:
            with suppress(OSError):  # another process thins out too, or it is another user's
                os.unlink(entry.path)


def _remove_abandoned(folder: Path) -> None:
    """Remove the half-written files of processes that were killed, and no file that may still be written."""
    for entry in _listed(folder):
        if entry.name.endswith(".tmp"):
            with suppress(OSError):  # it is written now, or another user's
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                    os.unlink(entry.path)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # tidying up is no reason to fail
        return []


def _age(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # another process thins out too
        return 0.0


@functools.cache
def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="insum_ops-")
    atexit.register(_remove_folder, folder, os.getpid())
    return Path(folder)


def _remove_folder(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


def _after_fork_in_child() -> None:
    """Take new locks, since a thread that held one is not in this process, and a private folder of its own."""
    global _turn
    _turn = threading.RLock()
    _private_folder.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _decode(data: bytes, key: Key) -> Entry:
    """The entry in a file's content; KeyError, TypeError or ValueError unless it is this very key's."""
    content = json.loads(data)
    if content["schema"] != SCHEMA or content["key"] != json.loads(json.dumps(asdict(key))):
        raise ValueError("another version or another key")
    times = tuple((config, ms) for config, ms in content["times"])
    return Entry(content["config"], times, tuple((config, str(why)) for config, why in content.get("refused", ())))


def _replace(path: Path, data: bytes) -> None:
    """Write the file in one step, so that no reader sees half of it; a folder in its place is moved aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        written.write_bytes(data)
        if path.is_dir():
            path.rename(written.with_suffix(".aside"))
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _warn_damaged(path: Path) -> None:
    _warn_once(path, f"the cache file {path} is damaged or of another version, so it is written anew")


def _warn_unusable(folder: Path, error: Exception) -> None:
    reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
    problem = f"can't use the cache folder {folder} ({reason}), so tuned configs and kernels may be lost"
    _warn_once(None, f"{problem} with this process; set INSUM_CACHE_DIR to a folder that can be written")


def _warn_once(subject: Path | None, text: str) -> None:
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
