"""Export of all tuned configs of a cache folder to one file for another machine, and import of such a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..language import UnsupportedError
from ..runtime import TRITON_VERSION, cache_dir, replace_file
from .problem import generator_version
from .tuning_cache import SCHEMA, Entry, Key, TuningCache

__all__ = ["Imported", "Tuned", "clear_cache", "export_tuned", "import_tuned", "tuned"]

TITLE = "insum_ops tuned configs"
HEX, UNFINISHED = "[0-9a-f]", r"(\.[0-9a-f]{16}\.tmp)?"
OURS = re.compile(
    rf"{HEX}{{32}}\.(json|py|lock){UNFINISHED}|{HEX}{{32}}\.{HEX}{{16}}\.aside|{HEX}{{16}}\.txt{UNFINISHED}"
)
Watch = Callable[[list[Any]], Iterable[Any]]  # a progress bar around a list


@dataclass(frozen=True)
class Tuned:
    """A tuned statement: its tuning key and its entry."""

    key: Key
    entry: Entry

    @property
    def is_usable(self) -> bool:
        """Whether this Triton and this code generator could use it, on the GPU that it was measured on."""
        return self.key.triton == TRITON_VERSION and self.key.codegen.split(" ")[0] == generator_version()


@dataclass(frozen=True)
class Imported:
    """How many tuned statements of a file were added, present already, and unusable."""

    added: int
    present: int  # not added, since the folder had a config for them, which was measured there
    unusable: int  # left out: measured with another Triton or another version of the code generator


def tuned(watch: Watch = iter) -> Iterator[Tuned]:
    """Read every tuned statement of the cache folder; files that are damaged or of another version are left out."""
    for path in watch(sorted((cache_dir() / "tuning").glob("*.json"))):
        with suppress(OSError, KeyError, TypeError, ValueError, RecursionError):
            statement = _decoded(json.loads(path.read_bytes()))
            if statement.key.digest() == path.stem:
                yield statement


def export_tuned(path: Path, watch: Watch = iter) -> int:
    """Write the tuned statements of the cache folder that this version can use to one file; return how many."""
    if path.is_dir():
        raise UnsupportedError(f"{path} is a folder; name a file to write")
    entries = [_encoded(statement) for statement in tuned(watch=watch) if statement.is_usable]
    if not entries:
        raise UnsupportedError(
            f"{cache_dir()} holds no tuned config of this version, so there is nothing to export; run statements on a "
            "GPU first, or tune them"
        )
    content = {"title": TITLE, "schema": SCHEMA, "sha256": _digest(entries), "entries": entries}
    replace_file(path, json.dumps(content, indent=1).encode())
    return len(entries)


def import_tuned(path: Path, watch: Watch = iter) -> Imported:
    """Put the tuned statements of a file that `export_tuned` wrote into the cache folder, without replacing any."""
    statements = _read(path)
    usable = [statement for statement in statements if statement.is_usable]
    if not usable:
        raise UnsupportedError(
            f"{path} holds nothing for this version: its configs were measured with {_versions(statements)}, and here "
            f"are Triton {TRITON_VERSION} and code generator {generator_version()}"
        )
    folder = cache_dir() / "tuning"
    added = 0
    for statement in watch(usable):
        target = folder / f"{statement.key.digest()}.json"
        if not target.exists():
            replace_file(target, TuningCache.encode(statement.key, statement.entry))
            added += 1
    return Imported(added, len(usable) - added, len(statements) - len(usable))


def clear_cache() -> int:
    """Remove the tuned configs and kernel sources of the cache folder, and no file of another name; return how many."""
    removed = 0
    for folder in (cache_dir() / name for name in ("tuning", "kernels", "generator")):
        paths = sorted(folder.glob("*"), key=lambda path: path.suffix == ".lock")
        for path in (path for path in paths if OURS.fullmatch(path.name) and path.is_file()):
            with suppress(Timeout, FileNotFoundError):  # another process tunes this statement now, or clears too
                if path.suffix == ".lock":
                    with FileLock(path, timeout=0):
                        path.unlink(missing_ok=True)
                else:
                    path.unlink()
                removed += 1
    return removed


def _read(path: Path) -> list[Tuned]:
    """Return the tuned statements of a file; raise UnsupportedError for one that is damaged or of another kind."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UnsupportedError(f"can't read {path} ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UnsupportedError(f"{path} is no file of tuned configs, or only a part of one: it is not JSON") from None
    if not isinstance(content, dict) or content.get("title") != TITLE:
        raise UnsupportedError(f"{path} is no file of tuned configs, as `python -m insum_ops cache export` writes them")
    if content.get("schema") != SCHEMA:
        raise UnsupportedError(
            f"{path} was written by another version of insum_ops (layout {content.get('schema')}, here {SCHEMA}); "
            "export it again with this version"
        )
    entries = content.get("entries")
    if not isinstance(entries, list) or content.get("sha256") != _digest(entries):
        raise UnsupportedError(f"{path} is damaged: its content is not what was written; copy or export it again")
    try:
        return [_decoded(entry) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{path} is damaged: {error}; export it again") from None


def _encoded(statement: Tuned) -> Any:
    return json.loads(TuningCache.encode(statement.key, statement.entry))


def _decoded(content: Any) -> Tuned:
    """Return the tuned statement of a JSON object; raise KeyError, TypeError or ValueError unless it is one."""
    if not isinstance(content, dict) or not isinstance(content["key"], dict):
        raise TypeError("an entry is no object with a key")
    values = {field.name: content["key"][field.name] for field in fields(Key)}
    pairs = tuple((str(name), int(extent)) for name, extent in values["extents"])
    key = Key(**{**values, "dtypes": tuple(map(str, values["dtypes"])), "extents": pairs})
    for name, value in asdict(key).items():
        kind = {"dtypes": tuple, "extents": tuple, "deterministic": bool}.get(name, str)
        if not isinstance(value, kind):
            raise TypeError(f"{name} of a key is {value!r}")
    return Tuned(key, TuningCache.decode(json.dumps(content).encode(), key))


def _digest(entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _versions(statements: list[Tuned]) -> str:
    versions = {
        f"Triton {statement.key.triton} and code generator {statement.key.codegen.split(' ')[0]}"
        for statement in statements
    }
    return "; ".join(sorted(versions)) or "nothing"
