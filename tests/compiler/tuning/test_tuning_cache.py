"""The tuning cache: what is kept comes back, in other processes too; what is damaged is never trusted."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import json
import linecache
import math
import os
import pwd
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import Field, asdict, fields, replace
from pathlib import Path

import pytest
from filelock import FileLock

from insum_ops import lru_cache
from insum_ops.compiler.binding.shape_class import bucket
from insum_ops.compiler.runtime import cache_folder, launch
from insum_ops.compiler.runtime.cache_folder import cache_dir, cache_size, source_path, write_source
from insum_ops.compiler.tuning import tuning_cache as cache
from insum_ops.compiler.tuning.tuning_cache import Entry, Key, TuningCache

pytestmark = pytest.mark.cpu

KEY = Key(
    statement="C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
    codegen="5f1d",
    dtypes=("float32", "int32", "float32", "int32"),
    extents=(("p", 1024), ("q", 8), ("n", 128)),
    layout="contiguous",
    device="NVIDIA H200, 9.0, 132",
    triton="3.6.0",
    precision="ieee",
    deterministic=False,
)
BEST: cache.Config = {"BLOCK_N": 128, "num_warps": 4, "scatter": "owner", "is_swapped": True}
ENTRY = Entry(BEST, ((BEST, 0.125), ({**BEST, "num_warps": 8}, 0.25)))
SOURCE = "# C[i] += A[i], a µ-kernel\nx = 1\n"

FOLDERS = {
    "insum_ops": str(Path(lru_cache.__file__).parent),
    "insum_ops.compiler": str(Path(cache.__file__).parents[1]),
    "insum_ops.compiler.runtime": str(Path(cache_folder.__file__).parent),
    "insum_ops.compiler.tuning": str(Path(cache.__file__).parent),
}
# what another process runs: the modules and what they import, without the packages around them and so without torch
LOAD_CACHE = f"""
import importlib, pathlib, sys, time, types
for name, folder in {FOLDERS!r}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from insum_ops.compiler.runtime import cache_folder
vars(sys.modules["insum_ops.compiler.runtime"]).update(vars(cache_folder))
from insum_ops.compiler.tuning import tuning_cache as cache
assert "torch" not in sys.modules
Key, Entry, TuningCache = cache.Key, cache.Entry, cache.TuningCache
key, entry = {KEY!r}, {ENTRY!r}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, not made yet, of a process that has warned of nothing yet."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def unusable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder below a regular file: not even root can make it."""
    folder.write_text("a file")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(folder / "sub"))
    return folder / "sub"


def path_of(key: Key) -> Path:
    return cache_dir() / "tuning" / f"{key.digest()}.json"


def is_damaged(path: Path) -> str:
    return f"^{re.escape(f'the cache file {path} is damaged or of another version, so it is written anew')}$"


def is_unusable(folder: Path, reason: str) -> str:
    problem = f"can't use the cache folder {folder} ({reason}), so tuned configs and kernels may be lost"
    return f"^{re.escape(f'{problem} with this process; set INSUM_CACHE_DIR to a folder that can be written')}$"


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", LOAD_CACHE + script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    results = [process.communicate(timeout=60) for process in processes]
    assert [(process.returncode, errors) for process, (_, errors) in zip(processes, results, strict=True)] == [
        (0, "")
    ] * len(processes)
    return [output for output, _ in results]


def tune(tuning: TuningCache, key: Key = KEY) -> list[Key]:
    """The keys that had to be tuned: this one or none."""
    with tuning.lock(key):
        if tuning.get(key) is not None:
            return []
        time.sleep(0.05)
        tuning.put(key, ENTRY)
        return [key]


def raise_(error: Exception) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (2**40 + 1, 2**41)])
def test_bucket_is_the_power_of_two_not_below(n: int, expected: int) -> None:
    assert bucket(n) == expected


def test_equal_keys_have_one_digest_and_it_is_a_file_name() -> None:
    assert replace(KEY).digest() == KEY.digest()
    assert re.fullmatch("[0-9a-f]{32}", KEY.digest())


@pytest.mark.parametrize("field", fields(Key), ids=lambda field: field.name)
def test_every_field_of_the_key_counts(field: Field[object]) -> None:
    value = getattr(KEY, field.name)
    other = replace(KEY, **{field.name: not value if isinstance(value, bool) else value + value})
    tuning = TuningCache()
    tuning.put(KEY, ENTRY)
    assert other.digest() != KEY.digest()
    assert tuning.get(other) is None
    assert TuningCache().get(other) is None


def test_the_schema_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = KEY.digest()
    monkeypatch.setattr(cache, "SCHEMA", 2)
    assert KEY.digest() != before


@pytest.mark.parametrize("config", [{"BLOCK_N": 1.5}, {"BLOCK_N": None}, ["BLOCK_N"]])
def test_a_config_of_another_type_is_refused(config: cache.Config) -> None:
    problem = f"^{re.escape(f'a config maps names to int, str or bool, got {config!r}')}$"
    with pytest.raises(TypeError, match=problem):
        Entry(config)
    with pytest.raises(TypeError, match=problem):
        Entry(BEST, ((config, 1.0),))


@pytest.mark.parametrize("times", [[math.nan], [math.inf], [-1.0], [1], ["fast"], [2.0, 1.0]])
def test_times_are_finite_and_best_first(times: list[float]) -> None:
    problem = f"times are finite floats in milliseconds, best first, got {times}"
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        Entry(BEST, tuple((BEST, time) for time in times))


def test_an_entry_comes_back_from_memory_and_from_disk() -> None:
    tuning = TuningCache()
    assert tuning.get(KEY) is None
    tuning.put(KEY, ENTRY)
    assert tuning.get(KEY) is ENTRY
    assert TuningCache().get(KEY) == ENTRY


def test_memory_stands_in_front_of_the_disk() -> None:
    tuning = TuningCache()
    tuning.put(KEY, ENTRY)
    path_of(KEY).write_text("damaged")
    assert tuning.get(KEY) is ENTRY


def test_of_many_entries_few_are_in_memory_and_all_of_them_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES", 16)
    tuning = TuningCache()
    keys = [replace(KEY, statement=f"C[i] += {number} * A[i]") for number in range(50)]
    entries = {key: Entry({"number": number}, (({"number": number}, 0.5),)) for number, key in enumerate(keys)}
    for key, entry in entries.items():
        tuning.put(key, entry)
        assert tuning.get(key) == entry
    for _ in range(3):  # by the second time some are known to come again, and are kept
        assert {key: tuning.get(key) for key in keys} == entries
        assert len(tuning._memory) <= 16
    tuning.put(keys[0], ENTRY)
    for key in keys[1:]:
        tuning.get(key)
    assert tuning.get(keys[0]) == ENTRY


def test_without_a_folder_a_forgotten_entry_is_tuned_again(unusable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES", 16)
    first, *keys = [replace(KEY, statement=f"C[i] += {number} * A[i]") for number in range(50)]
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match="can't use the cache folder"):
        tuning.put(first, ENTRY)
    for key in keys:
        tuning.put(key, ENTRY)
        assert tuning.get(key) == ENTRY
    assert len(tuning._memory) <= 16
    assert tune(tuning, first) == [first]
    assert tuning.get(first) == ENTRY


def test_a_second_put_replaces_the_first() -> None:
    TuningCache().put(KEY, ENTRY)
    TuningCache().put(KEY, Entry({"BLOCK_N": 64}))
    assert TuningCache().get(KEY) == Entry({"BLOCK_N": 64})


def test_the_file_tells_the_whole_key_and_every_time(folder: Path) -> None:
    TuningCache().put(KEY, ENTRY)
    assert list(folder.rglob("*.*")) == [path_of(KEY)]
    content = json.loads(path_of(KEY).read_text())
    assert content == json.loads(
        json.dumps(
            {"schema": 1, "key": asdict(KEY), "config": ENTRY.config, "times": ENTRY.times, "refused": ENTRY.refused}
        )
    )


def test_the_environment_is_read_when_a_cache_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TuningCache()
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "other"))
    first.put(KEY, ENTRY)
    assert TuningCache().get(KEY) is None
    assert TuningCache(first.folder).get(KEY) == ENTRY
    assert cache_dir() == tmp_path / "other"


def test_the_folder_may_be_relative_or_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("INSUM_CACHE_DIR", "here/insum")
    assert cache_dir() == tmp_path / "here" / "insum"
    monkeypatch.setenv("INSUM_CACHE_DIR", "~/insum")
    assert cache_dir() == Path("/home/me/insum")


def test_the_default_folder_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSUM_CACHE_DIR", "")
    monkeypatch.setattr(cache_folder, "user_cache_dir", lambda name: f"/caches/{name}")
    assert cache_dir() == Path("/caches/insum_ops")


def test_the_default_folder_needs_no_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSUM_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    process = start(
        'sys.modules["platformdirs"] = None\nimportlib.reload(cache_folder)\nprint(cache_folder.cache_dir())'
    )
    assert outputs(process) == ["/home/me/.cache/insum_ops\n"]
    monkeypatch.setattr(cache_folder, "user_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_dir() == Path("/caches/insum_ops")


def test_the_size_counts_all_files_below(folder: Path) -> None:
    assert cache_size(folder) == (0, 0)
    TuningCache().put(KEY, ENTRY)
    path = write_source(SOURCE)
    assert cache_size(folder) == (2, path_of(KEY).stat().st_size + path.stat().st_size)


def edited(**changes: object) -> bytes:
    """A valid file with some fields changed; ... takes one away."""
    content = {"schema": 1, "key": asdict(KEY), "config": BEST, "times": ENTRY.times, **changes}
    return json.dumps({name: value for name, value in content.items() if value is not ...}).encode()


DAMAGED = {
    "truncated": edited()[:200],
    "empty": b"",
    "binary": b"\x80\x00\xff",
    "source": b"import os; os._exit(3)",
    "too_deep": b"[" * 100_000,
    "null": b"null",
    "list": b"[]",
    "text": b'"schema"',
    "older_version": edited(schema=0),
    "newer_version": edited(schema=2),
    "no_version": edited(schema=...),
    "another_key": edited(key=asdict(replace(KEY, triton="3.7.0"))),
    "no_key": edited(key=...),
    "no_config": edited(config=...),
    "config_null": edited(config=None),
    "config_list": edited(config=["BLOCK_N"]),
    "config_float": edited(config={"BLOCK_N": 12.5}),
    "config_nested": edited(config={"BLOCK_N": {}}),
    "no_times": edited(times=...),
    "times_number": edited(times=3),
    "times_text": edited(times="best"),
    "times_not_pairs": edited(times=[[BEST, 1.0, 2.0]]),
    "times_without_config": edited(times=[[None, 1.0]]),
    "times_nan": edited(times=[[BEST, math.nan]]),
    "times_infinite": edited(times=[[BEST, math.inf]]),
    "times_worst_first": edited(times=[[BEST, 2.0], [BEST, 1.0]]),
}


def test_the_file_that_the_damaged_ones_are_made_from_is_valid() -> None:
    path_of(KEY).parent.mkdir(parents=True)
    path_of(KEY).write_bytes(edited())
    assert TuningCache().get(KEY) == ENTRY


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_reported_once_and_rebuilt(data: bytes) -> None:
    path = path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match=is_damaged(path)) as caught:
        found = [tuning.get(KEY), tuning.get(KEY), TuningCache().get(KEY)]
    assert found == [None, None, None]
    assert len(caught) == 1
    tuning.put(KEY, ENTRY)
    assert TuningCache().get(KEY) == ENTRY


def test_a_folder_in_place_of_a_file_is_moved_aside() -> None:
    path = path_of(KEY)
    path.mkdir(parents=True)
    (path / "precious").write_text("kept")
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match=is_damaged(path)):
        assert tuning.get(KEY) is None
    tuning.put(KEY, ENTRY)
    assert TuningCache().get(KEY) == ENTRY
    assert [file.read_text() for file in path.parent.glob("*.aside/precious")] == ["kept"]


def test_without_a_folder_memory_takes_over_with_one_warning(unusable: Path) -> None:
    tuning, other = TuningCache(), replace(KEY, layout="strided")
    with pytest.warns(RuntimeWarning, match=is_unusable(unusable, "Not a directory")) as caught:
        tuned = [tune(tuning), tune(tuning), tune(tuning, other), tune(tuning, other), tune(TuningCache())]
    assert len(caught) == 1
    assert tuned == [[KEY], [], [other], [], [KEY]]
    assert tuning.get(KEY) is ENTRY
    assert write_source(SOURCE).read_text(encoding="utf-8") == SOURCE
    assert cache_size(unusable) == (0, 0)


@pytest.mark.parametrize(
    "use",
    [
        lambda: TuningCache().get(KEY),
        lambda: TuningCache().put(KEY, ENTRY),
        lambda: ExitStack().enter_context(TuningCache().lock(KEY)),
        lambda: write_source(SOURCE),
    ],
    ids=["get", "put", "lock", "write_source"],
)
def test_whatever_comes_first_warns(use: Callable[[], object], unusable: Path) -> None:
    with pytest.warns(RuntimeWarning, match=is_unusable(unusable, "Not a directory")):
        use()


@pytest.mark.parametrize("has_platformdirs", [True, False])
def test_without_a_home_memory_takes_over_with_one_warning(
    has_platformdirs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("INSUM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raise_(KeyError("uid not found")))
    if not has_platformdirs:
        monkeypatch.setattr(cache_folder, "user_cache_dir", None)
    monkeypatch.chdir(tmp_path)
    tuning = TuningCache()
    assert tuning.folder.parts[1:4] == ("dev", "null", "~")
    with pytest.warns(RuntimeWarning, match=is_unusable(tuning.folder, "Not a directory")):
        tuning.put(KEY, ENTRY)
    assert tuning.get(KEY) is ENTRY
    assert write_source(SOURCE).read_text(encoding="utf-8") == SOURCE
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_entry_in_memory_and_no_rubbish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", raise_(OSError(errno.ENOSPC, "No space left on device")))
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match=is_unusable(folder, "No space left on device")):
        tuning.put(KEY, ENTRY)
    assert tuning.get(KEY) is ENTRY
    assert cache_size(folder) == (0, 0)


def test_a_read_only_folder_is_still_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TuningCache().put(KEY, ENTRY)
    source = write_source(SOURCE)
    read_only = raise_(OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(cache, "FileLock", read_only)
    monkeypatch.setattr(Path, "write_bytes", read_only)
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match=is_unusable(folder, "Read-only file system")) as caught:
        tuned = [tune(tuning), tune(tuning, replace(KEY, layout="strided"))]
    assert len(caught) == 1
    assert tuned == [[], [replace(KEY, layout="strided")]]
    assert write_source(SOURCE) == source


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOLCK, "No locks available"), "No locks available"),
        (
            NotImplementedError("FileSystem does not appear to support flock."),
            "FileSystem does not appear to support flock",
        ),
    ],
)
def test_without_locks_tuning_goes_on(
    error: Exception, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FileLock", raise_(error))
    tuning = TuningCache()
    with pytest.warns(RuntimeWarning, match=is_unusable(folder, reason)) as caught:
        tuned = [tune(tuning), tune(tuning)]
    assert len(caught) == 1
    assert tuned == [[KEY], []]


@pytest.mark.skipif(not hasattr(FileLock, "fallback_to_soft"), reason="this filelock makes a soft lock instead")
def test_a_system_without_flock_is_a_folder_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", raise_(OSError(errno.ENOSYS, "Function not implemented")))
    with (
        pytest.warns(RuntimeWarning, match=re.escape(f"can't use the cache folder {folder} (")),
        TuningCache().lock(KEY),
    ):
        pass


def test_a_lock_that_never_comes_free_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    path = path_of(KEY).with_suffix(".lock")
    path.parent.mkdir(parents=True)
    reason = f"The file lock '{path}' could not be acquired"
    with (
        FileLock(path),
        pytest.warns(RuntimeWarning, match=is_unusable(folder, reason)),
        TuningCache().lock(KEY),
    ):
        pass


def test_an_error_while_tuning_passes_through_and_frees_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    tuning = TuningCache()
    with pytest.raises(OSError, match=r"^of the tuner$"), tuning.lock(KEY):
        raise OSError("of the tuner")
    with tuning.lock(KEY), TuningCache().lock(replace(KEY, layout="strided")):
        pass


@pytest.mark.parametrize("is_usable", [True, False])
def test_two_threads_tune_one_key_once(is_usable: bool, request: pytest.FixtureRequest) -> None:
    if not is_usable:
        cache_folder._warned.add(None)  # the warning has a test of its own
        request.getfixturevalue("unusable")
    tuning = TuningCache()
    with ThreadPoolExecutor(4) as pool:
        tuned = list(pool.map(tune, [tuning] * 4))
    assert sorted(tuned) == [[], [], [], [KEY]]


def test_processes_that_tune_one_key_at_once_do_it_once(tmp_path: Path) -> None:
    script = """
work = pathlib.Path(sys.argv[1])
(work / f"ready-{sys.argv[2]}").touch()
while len(list(work.glob("ready-*"))) < 3:
    time.sleep(0.01)
tuning = TuningCache()
with tuning.lock(key):
    found = tuning.get(key)
    if found is None:
        print("tuned")
        time.sleep(0.3)
        tuning.put(key, entry)
assert tuning.get(key) == entry
assert "torch" not in sys.modules
"""
    said = outputs(*(start(script, tmp_path, number) for number in range(3)))
    assert sorted(said) == ["", "", "tuned\n"]
    assert TuningCache().get(KEY) == ENTRY


def test_processes_that_write_at_once_never_show_half_a_file(folder: Path) -> None:
    script = """
for _ in range(100):
    TuningCache().put(key, entry)
    assert TuningCache().get(key) == entry
"""
    outputs(*(start(script) for _ in range(3)))
    assert cache_size(folder) == (1, path_of(KEY).stat().st_size)


def test_a_killed_process_leaves_its_lock_free() -> None:
    process = start('with TuningCache().lock(key):\n    print("locked", flush=True)\n    time.sleep(60)')
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    process.kill()
    process.communicate()
    began = time.monotonic()
    with TuningCache().lock(KEY):
        assert time.monotonic() - began < 5


def test_source_is_written_once_under_its_hash(folder: Path) -> None:
    path = write_source(SOURCE)
    assert path == source_path(path.stem)
    assert path.parent == folder / "kernels"
    assert path.read_text(encoding="utf-8") == SOURCE
    written = path.stat().st_ino
    os.utime(path, (1, 1))
    assert write_source(SOURCE) == path
    assert path.stat().st_ino == written
    assert path.stat().st_mtime > 1  # it is in use
    assert write_source(SOURCE + "\n") != path


def test_of_very_many_sources_those_go_that_were_used_longest_ago(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "MOST_SOURCES", 4)
    monkeypatch.setattr(cache_folder, "SOURCES_BETWEEN_LOOKS", 1)
    paths = [write_source(f"{SOURCE}# {at}\n") for at in range(4)]
    for at, path in enumerate(paths):
        os.utime(path, (100 + at, 100 + at))
    write_source(f"{SOURCE}# 0\n")  # used again
    write_source(f"{SOURCE}# 4\n")
    last = write_source(f"{SOURCE}# 5\n")
    assert last.exists()
    assert paths[0].exists()
    assert not paths[1].exists()


def test_a_source_just_written_stays_though_clocks_were_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST_SOURCES", 4)
    monkeypatch.setattr(cache_folder, "SOURCES_BETWEEN_LOOKS", 1)
    for at in range(4):
        os.utime(write_source(f"{SOURCE}# {at}\n"), (1e10, 1e10))  # in the year 2286
    for at in range(4, 8):
        assert write_source(f"{SOURCE}# {at}\n").exists()


def test_a_kernel_is_loaded_though_its_file_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may thin out the folder at any time."""
    real = launch.write_source

    def vanishing(text: str) -> Path:
        path = real(text)
        path.unlink()
        return path

    monkeypatch.setattr(launch, "write_source", vanishing)
    source = "import triton\n\n\n@triton.jit\ndef vanished(x_ptr):\n    pass\n"
    assert "def vanished" in launch.load(source, "vanished").src


def kernel_source(number: int) -> str:
    return f"import triton\n\n\n@triton.jit\ndef numbered(x_ptr):\n    x = {number}\n"


def test_a_kernel_that_nobody_keeps_leaves_nothing_behind() -> None:
    """Neither its function nor its lines, of which Python and Triton would keep one for each kernel that was tried."""
    function = launch.load(kernel_source(-1), "numbered")
    gc.collect()
    lines, functions = len(linecache.cache), len(launch._functions)
    for number in range(50):
        assert f"x = {number}" in launch.load(kernel_source(number), "numbered").src
    gc.collect()
    assert len(linecache.cache) - lines <= 1  # Triton keeps the last one
    assert len(launch._functions) - functions <= 1
    assert launch.load(kernel_source(-1), "numbered") is function
    assert "x = 7" in launch.load(kernel_source(7), "numbered").src


def test_the_lines_of_a_kernel_stay_with_its_second_function() -> None:
    """Which is made when the first one is no longer found but has not been freed yet."""
    source = kernel_source(100)
    first = launch.load(source, "numbered")
    launch._functions.clear()
    second = launch.load(source, "numbered")
    path = str(source_path(hashlib.sha256(source.encode()).hexdigest()[:32]))
    assert second is not first
    del first
    gc.collect()
    assert "".join(linecache.getlines(path)) == source
    assert path in linecache.cache


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_source_file_of_other_content_is_reported_and_rewritten(is_folder: bool) -> None:
    path = write_source(SOURCE)
    path.unlink()
    if is_folder:
        path.mkdir()
    else:
        path.write_text("import os; os._exit(3)")
    with pytest.warns(RuntimeWarning, match=is_damaged(path)):
        assert write_source(SOURCE) == path
    assert path.read_text(encoding="utf-8") == SOURCE


def test_without_a_folder_source_goes_to_a_private_one(unusable: Path) -> None:
    with pytest.warns(RuntimeWarning, match=is_unusable(unusable, "Not a directory")):
        path = write_source(SOURCE)
    assert path.read_text(encoding="utf-8") == SOURCE
    assert path.name == source_path(path.stem).name
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert write_source(SOURCE) == path
    assert write_source(SOURCE + "\n").parent == path.parent


@pytest.mark.usefixtures("unusable")
def test_the_private_folder_goes_with_its_process() -> None:
    script = (
        'cache_folder._warned.add(None)\npath = cache_folder.write_source("")\nassert path.exists()\nprint(path.parent)'
    )
    (output,) = outputs(start(script))
    assert Path(output.strip()).name.startswith("insum_ops-")
    assert not Path(output.strip()).exists()


def test_sources_do_not_fill_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache_folder, "MOST_SOURCES", 20)
    monkeypatch.setattr(cache_folder, "SOURCES_BETWEEN_LOOKS", 5)
    for number in range(60):
        path = write_source(f"# {number}\n")
        os.utime(path, (number, number))
        assert len(list(path.parent.glob("*.py"))) <= 25
    assert path.is_file()  # the newest stays
