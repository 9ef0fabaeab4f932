"""What may befall a cache folder: many processes, one killed, a full disk, other users, other versions, a fork."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from children import as_another_user, foreign, in_child
from test_tuning_cache import ENTRY, KEY, SOURCE, folder, is_damaged, is_unusable, outputs, path_of, raise_, start, tune

from insum_ops import insum
from insum_ops.compiler.runtime import cache_folder, launch
from insum_ops.compiler.runtime.cache_folder import cache_dir, cache_size, source_path, write_source
from insum_ops.compiler.tuning import tuning_cache as cache
from insum_ops.compiler.tuning.tuning_cache import TuningCache

__all__ = ["folder"]  # a fixture for every test here
KERNEL = "import triton\n\n\n@triton.jit\ndef tampered(x_ptr):\n    pass\n"
OTHER = replace(KEY, layout="strided")


def warned(*use: object) -> list[str]:
    """The texts of this process' warnings while functions are called in turn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in use:
            one()  # type: ignore[operator]
    return [str(one.message) for one in caught]


def unusable(folder: Path, reason: str) -> str:
    problem = f"can't use the cache folder {folder} ({reason}), so tuned configs and kernels may be lost"
    return f"{problem} with this process; set INSUM_CACHE_DIR to a folder that can be written"


def test_sixteen_processes_share_one_empty_folder(folder: Path) -> None:
    """Each key is tuned once, every file is whole, and nobody warns, though sources are thinned out all the while."""
    script = """
import hashlib, os, random
from dataclasses import replace
cache_folder.MOST_SOURCES, cache_folder.SOURCES_BETWEEN_LOOKS = 12, 4
keys = [replace(key, layout=f"shared {number}") for number in range(6)]
print(flush=True)  # nothing is left in the buffer that each child would write
children = []
gate, opened = os.pipe()
for number in range(16):
    child = os.fork()
    if child:
        children.append(child)
        continue
    os.close(opened)
    os.read(gate, 1)  # until all are there
    draw = random.Random(number)
    tuning = TuningCache()
    for one in draw.sample([*keys, replace(key, layout=f"own {number}")], 7):
        with tuning.lock(one):
            if tuning.get(one) is None:
                os.write(1, f"{one.layout}\\n".encode())
                tuning.put(one, entry)
    for at in draw.sample(range(20), 20):
        text = f"# source {at}\\n" * 50
        path = cache_folder.write_source(text)
        assert path.parent == cache_folder.cache_dir() / "kernels", path
    assert all(TuningCache().get(one) == entry for one in keys)
    os._exit(0)
os.close(opened)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 16
"""
    (said,) = outputs(start(script))
    tuned = Counter(said.split("\n")[1:-1])
    assert tuned == Counter([f"shared {n}" for n in range(6)] + [f"own {n}" for n in range(16)])
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".lock", ".py"}
    for file in files:
        if file.suffix == ".json":
            assert json.loads(file.read_bytes())["config"] == ENTRY.config
        elif file.suffix == ".py":
            assert write_source(file.read_text()) == file  # its name is the hash of all of it


@pytest.mark.parametrize("is_known", [False, True])
def test_a_process_killed_in_mid_write_leaves_the_entry_as_it_was(
    is_known: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_known:
        TuningCache().put(KEY, ENTRY)
    script = """
import os, signal
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
with TuningCache().lock(key):
    TuningCache().put(key, Entry({"num_warps": 1}))
"""
    process = start(script)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    with TuningCache().lock(KEY):  # which would warn if it were held
        assert TuningCache().get(KEY) == (ENTRY if is_known else None)
    (left,) = folder.rglob("*.tmp")
    TuningCache().put(OTHER, ENTRY)
    assert left.exists()  # for all we know it is being written
    os.utime(left, (1, 1))
    TuningCache().put(OTHER, ENTRY)
    assert not left.exists()


def test_half_a_source_of_a_killed_process_goes_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if no process writes many: each looks once when it begins to write."""
    left = folder / "kernels" / "0123.py.4567.tmp"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    os.utime(left, (1, 1))
    outputs(start(f"cache_folder.write_source({SOURCE!r})"))
    assert not left.exists()


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process can grow beyond a few bytes: each write goes half-way, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_warning_and_nothing_half_written_stays(folder: Path) -> None:
    def use() -> None:
        tuning = TuningCache()
        assert [tune(tuning), tune(tuning)] == [[KEY], []]
        assert "def tampered" in launch.load(f"# {'a long line ' * 20}\n{KERNEL}", "tampered").src

    with small_files():  # and not around the test: what pytest prints may go to a file too
        told = warned(use)
    assert told == [unusable(folder, os.strerror(errno.EFBIG))]
    assert TuningCache().get(KEY) is None
    assert [file for file in folder.rglob("*") if file.suffix not in (".lock", "")] == []


def test_with_no_temporary_folder_either_kernels_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", raise_(OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr(tempfile, "mkdtemp", raise_(FileNotFoundError(errno.ENOENT, "No usable temporary directory")))
    monkeypatch.setattr(cache_folder, "_private_folder", cache_folder._private_folder.__wrapped__)
    with pytest.warns(RuntimeWarning, match=is_unusable(folder, "No space left on device")):
        kernel = launch.load(f"# nowhere\n{KERNEL}", "tampered")
    assert "def tampered" in kernel.src


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder with an entry and a source, where any user may look."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    monkeypatch.setenv("INSUM_CACHE_DIR", str(parent / "cache"))
    TuningCache().put(KEY, ENTRY)
    write_source(SOURCE)
    with TuningCache().lock(KEY):
        pass
    yield parent / "cache"
    for path in [parent / "cache", *(parent / "cache").iterdir()]:
        path.chmod(0o755)
    shutil.rmtree(parent)


def test_a_folder_of_another_user_is_read(shared: Path) -> None:
    """What is in it is used without a word; what is not costs one warning and stays in memory."""
    for path in shared.iterdir():
        foreign(path, 0o755)

    def use() -> None:
        assert TuningCache().get(KEY) == ENTRY
        assert write_source(SOURCE) == source_path(write_source(SOURCE).stem)
        tuning = TuningCache()
        assert [tune(tuning, OTHER), tune(tuning, OTHER)] == [[OTHER], []]
        assert write_source("# another\n").read_text() == "# another\n"

    def run() -> None:
        assert warned(use) == [unusable(shared, "Permission denied")]

    as_another_user(run)
    assert TuningCache().get(OTHER) is None


def test_a_folder_that_can_not_be_read_costs_one_warning(shared: Path) -> None:
    foreign(shared, 0o700)

    def use() -> None:
        tuning = TuningCache()
        assert tuning.get(KEY) is None
        assert [tune(tuning), tune(tuning)] == [[KEY], []]
        assert write_source(SOURCE).read_text() == SOURCE

    def run() -> None:
        assert warned(use) == [unusable(shared, "Permission denied")]

    as_another_user(run)


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of two users")
def test_a_folder_that_all_users_may_write_to_takes_entries_of_each(shared: Path) -> None:
    """Where each may replace only what is theirs: another's lock and another's damaged file are worked around."""
    for path in shared.iterdir():
        path.chmod(0o1777)
    path_of(KEY).write_text("damaged")

    def own() -> None:
        assert tune(TuningCache(), OTHER) == [OTHER]
        assert TuningCache().get(OTHER) == ENTRY

    def others() -> None:
        tuning = TuningCache()
        assert [tune(tuning), tune(tuning)] == [[KEY], []]

    def run() -> None:
        assert warned(own) == []
        damaged = f"the cache file {path_of(KEY)} is damaged or of another version, so it is written anew"
        assert set(warned(others)) == {damaged, unusable(shared, "Permission denied")}

    as_another_user(run)
    assert TuningCache().get(OTHER) == ENTRY


def test_a_source_that_somebody_changed_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A file of the cache is for those who read it; what runs is the text that was emitted."""
    source = f"# tampered with\n{KERNEL}"
    path = write_source(source)
    path.write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n{source}")
    with pytest.warns(RuntimeWarning, match=is_damaged(path)):
        assert "def tampered" in launch.load(source, "tampered").src
    assert not (tmp_path / "run").exists()
    assert path.read_text() == source


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    for path, use in ((path_of(KEY), lambda: TuningCache().put(KEY, ENTRY)), (write_source(SOURCE), None)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        if use is not None:
            use()
        else:
            with pytest.warns(RuntimeWarning, match=is_damaged(path)):
                write_source(SOURCE)
        assert not path.is_symlink()
    assert target.read_text() == "kept"


def test_two_versions_share_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TuningCache().put(KEY, ENTRY)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "SCHEMA", 2)
        assert TuningCache().get(KEY) is None
        TuningCache().put(KEY, cache.Entry({"of": "version 2"}))
    assert TuningCache().get(KEY) == ENTRY
    assert cache_size(cache_dir())[0] == 2


@pytest.mark.cpu
def test_a_forked_child_computes_what_its_parent_does(folder: Path) -> None:
    E, X = torch.tensor([1, 0, 1]), torch.randn(3, 4)
    expected = torch.stack([X[1], X[0] + X[2]])

    def run() -> None:
        torch.testing.assert_close(insum("C[E[p],n] += X[p,n]", E=E, X=X, size=(2, 4)), expected)
        torch.testing.assert_close(insum("D[E[p]] += X[p,n]", E=E, X=X, size=(2,)), expected.sum(1))

    torch.testing.assert_close(insum("C[E[p],n] += X[p,n]", E=E, X=X, size=(2, 4)), expected)
    in_child(run)
    run()


def test_a_child_does_not_wait_for_a_thread_that_it_lacks(folder: Path) -> None:
    """Forked while another thread tunes: its turn never ends in the child, and its file lock is the parent's."""
    tuning = TuningCache()
    is_locked, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with tuning.lock(KEY):
            is_locked.set()
            is_over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    is_locked.wait(60)

    def run() -> None:
        signal.alarm(5)
        assert tune(tuning, OTHER) == [OTHER]

    try:
        in_child(run)
    finally:
        is_over.set()
        thread.join()
    in_child(lambda: tune(tuning))
    assert TuningCache().get(KEY) == TuningCache().get(OTHER) == ENTRY


def test_a_child_leaves_its_parents_private_folder(folder: Path) -> None:
    script = """
import os
cache_folder._warned.add(None)
first = cache_folder.write_source("# 1")
child = os.fork()
if not child:
    path = cache_folder.write_source("# 2")
    assert path.exists() and path.parent != first.parent
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert first.exists()
print(first.parent)
"""
    folder.write_text("a file in its place")
    (said,) = outputs(start(script))
    assert not Path(said.strip()).exists()
