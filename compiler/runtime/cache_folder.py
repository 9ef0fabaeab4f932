"""The cache folder, which outlives a process: where it is, and how its files are written, thinned out and warned of."""

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

try:
    from platformdirs import user_cache_dir
except ImportError:  # torch brings filelock along, but not platformdirs
    user_cache_dir = None  # type: ignore[assignment]

__all__ = [
    "cache_dir",
    "cache_size",
    "remove_abandoned",
    "replace_file",
    "source_path",
    "warn_damaged",
    "warn_unusable",
    "write_source",
]

ABANDONED = 3600.0  # seconds after which a half-written file is that of a process which was killed
MOST_SOURCES = 8192
SOURCES_BETWEEN_LOOKS = 256
_warned: set[Path | None] = set()  # files that were warned of; None stands for the folder
_written = 0  # sources, by this process


def cache_dir() -> Path:
    """Return INSUM_CACHE_DIR, else the user's cache folder; without a home, a path that can't be written."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "insum_ops")
    if user_cache_dir is not None:
        with suppress(RuntimeError):  # newer platformdirs: there is no home
            folder = user_cache_dir("insum_ops")
    folder = os.path.expanduser(os.environ.get("INSUM_CACHE_DIR") or folder)
    return Path(os.path.join(os.devnull, folder) if folder.startswith("~") else os.path.abspath(folder))


def cache_size(folder: Path) -> tuple[int, int]:
    """Return how many files lie below the folder, and their bytes."""
    sizes = []
    for file in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(OSError):  # another process may have removed it
            sizes.append(os.lstat(file).st_size)
    return len(sizes), sum(sizes)


def source_path(digest: str) -> Path:
    """Return where the kernel source of this digest lies once `write_source` has written it."""
    return cache_dir() / "kernels" / f"{digest}.py"


def write_source(text: str) -> Path:
    """Write this text to a file named by its hash, for Triton and debuggers, and return its path.

    Execute the text, not the file: if nothing can be written, as on a full disk, there is no file at the path.
    """
    data = text.encode()
    path = source_path(hashlib.sha256(data).hexdigest()[:32])
    try:
        return _store(path, data)
    except OSError as error:
        warn_unusable(cache_dir(), error)
    try:
        return _store(_private_folder() / path.name, data)
    except OSError:
        return path


def _store(path: Path, data: bytes) -> Path:
    """Write a file unless it is there already, and return its path; raise OSError if it can't be written."""
    stored: bytes | None = None
    try:  # and never ask first: another process may write or remove it in between
        stored = path.read_bytes()
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        stored = b""
    if stored == data:
        with suppress(OSError):  # it is another user's, or gone since
            os.utime(path)
        return path
    if stored is not None:
        warn_damaged(path)
    replace_file(path, data)
    _thin_out(path.parent, keep=path.name)
    return path


def _thin_out(folder: Path, keep: str) -> None:
    """Remove the half of the sources that was used least recently, if there are very many but for `keep`.

    Every config that was ever tried has a source. A process counts them when it first writes one and then now and
    again, since most processes write few.
    """
    global _written
    is_time = _written % SOURCES_BETWEEN_LOOKS == 0
    _written += 1
    if not is_time:
        return
    remove_abandoned(folder)
    sources = [entry for entry in _entries_of(folder) if entry.name.endswith(".py") and entry.name != keep]
    if len(sources) > MOST_SOURCES:
        for entry in sorted(sources, key=_last_used)[: len(sources) // 2]:
            with suppress(OSError):  # another process thins out too, or it is another user's
                os.unlink(entry.path)


def remove_abandoned(folder: Path) -> None:
    """Remove the half-written files of processes that were killed, and no file that may still be written."""
    for entry in _entries_of(folder):
        if entry.name.endswith(".tmp"):
            with suppress(OSError):  # it is written now, or another user's
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                    os.unlink(entry.path)


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, nothing if it can't be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # tidying up is no reason to fail
        return []


def _last_used(entry: os.DirEntry[str]) -> float:
    """Return when a file was last used, 0 if it is gone."""
    try:
        return entry.stat().st_mtime
    except OSError:  # another process thins out too
        return 0.0


@functools.cache
def _private_folder() -> Path:
    """Return a temporary folder of this process, which is removed when it ends."""
    folder = tempfile.mkdtemp(prefix="insum_ops-")
    atexit.register(_remove_folder, folder, os.getpid())
    return Path(folder)


def _remove_folder(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)


if hasattr(os, "register_at_fork"):  # a child has a private folder of its own
    os.register_at_fork(after_in_child=_private_folder.cache_clear)


def replace_file(path: Path, data: bytes) -> None:
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


def warn_damaged(path: Path) -> None:
    """Warn, once for each file, that a cache file could not be read."""
    _warn_once(path, f"the cache file {path} is damaged or of another version, so it is written anew")


def warn_unusable(folder: Path, error: Exception) -> None:
    """Warn, once for each process, that the cache folder can't be used."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
    problem = f"can't use the cache folder {folder} ({reason}), so tuned configs and kernels may be lost"
    _warn_once(None, f"{problem} with this process; set INSUM_CACHE_DIR to a folder that can be written")


def _warn_once(subject: Path | None, text: str) -> None:
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
