"""The cache on the command line: what is exported comes back on another machine, and nothing else is trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from insum_ops.__main__ import main
from insum_ops.compiler import TRITON_VERSION, generator_version
from insum_ops.compiler.tuning import tuning_file
from insum_ops.compiler.tuning.tuning_cache import Entry, Key, TuningCache
from insum_ops.compiler.tuning.tuning_file import Tuned, tuned

pytestmark = pytest.mark.cpu

KEY = Key(
    statement="C[AM[p],n] += AV[p,q] * B[AK[p,q],n] seeded=False fact=",
    codegen=f"{generator_version()} 5f1d",
    dtypes=("AM=torch.int32", "AV=torch.float16"),
    extents=(("n", 128), ("p", 1024), (" rows", 7)),
    layout="contiguous",
    device="NVIDIA H200 sm_90 132 SMs",
    triton=TRITON_VERSION,
    precision="ieee",
    deterministic=False,
)
BEST = {"block_n": 128, "num_warps": 4, "strategy": "owner", "swap": True}
ENTRY = Entry(BEST, ((BEST, 0.125), ({**BEST, "num_warps": 8}, 0.25)), (({"num_warps": 16}, "too large"),))
OTHER = replace(KEY, statement="C[i] += A[i,k] * B[k] seeded=False fact=")
OLD = replace(KEY, codegen="0123 5f1d")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The cache folder of this machine."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "here"))
    return tmp_path / "here"


@pytest.fixture
def exported(folder, tmp_path, monkeypatch, capsys) -> Path:
    """A file that a machine with three tuned statements wrote, one of them by an older version; this one has none."""
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path / "there"))
    for key in (KEY, OTHER, OLD):
        TuningCache().put(key, ENTRY)
    path = tmp_path / "tuned.json"
    assert main(["cache", "export", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote 2 tuned statements to {path}, measured on NVIDIA H200 sm_90 132 SMs\n"
    monkeypatch.setenv("INSUM_CACHE_DIR", str(folder))
    return path


def refusal(capsys, *arguments: object) -> str:
    """What a command says that exits with 2."""
    assert main(["cache", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.removeprefix("insum_ops cache: error: ").rstrip("\n")


def test_what_is_exported_is_found_where_it_is_imported(exported, folder, capsys):
    assert TuningCache().get(KEY) is None
    assert main(["cache", "import", str(exported)]) == 0
    assert capsys.readouterr().out == (
        f"added 2 tuned statements to {folder}\n"
        "configs of NVIDIA H200 sm_90 132 SMs are used on such a GPU alone, and there is none here\n"
    )
    assert TuningCache().get(KEY) == ENTRY
    assert TuningCache().get(OTHER) == ENTRY
    assert TuningCache().get(OLD) is None


def test_what_was_measured_here_stays(exported, folder, capsys):
    own = Entry(BEST, ((BEST, 0.1),))
    TuningCache().put(KEY, own)
    assert main(["cache", "import", str(exported)]) == 0
    assert capsys.readouterr().out.startswith(
        f"added 1 tuned statement to {folder}\nkept 1 tuned statement as they were, since this folder had them\n"
    )
    assert TuningCache().get(KEY) == own


def changed(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_foreign_file_is_refused(folder, tmp_path, capsys):
    path = tmp_path / "other.json"
    assert refusal(capsys, "import", path) == f"can't read {path} (No such file or directory)"
    path.write_bytes(b"\x80\x04not JSON")
    assert refusal(capsys, "import", path) == (
        f"{path} is no file of tuned configs, or only a part of one: it is not JSON"
    )
    for content in ("[]", "{}", '{"title": "another"}', "3"):
        path.write_text(content)
        assert refusal(capsys, "import", path) == (
            f"{path} is no file of tuned configs, as `python -m insum_ops cache export` writes them"
        )
    assert not folder.exists()


def test_a_damaged_file_is_refused(exported, folder, capsys):
    whole = exported.read_text()
    exported.write_text(whole[: len(whole) // 2])
    assert "only a part of one: it is not JSON" in refusal(capsys, "import", exported)
    exported.write_text(whole.replace("0.125", "0.015"))
    assert refusal(capsys, "import", exported) == (
        f"{exported} is damaged: its content is not what was written; copy or export it again"
    )
    exported.write_text(whole)
    assert refusal(capsys, "import", changed(exported, entries={})) == (
        f"{exported} is damaged: its content is not what was written; copy or export it again"
    )
    exported.write_text(whole)
    assert refusal(capsys, "import", changed(exported, schema=99)) == (
        f"{exported} was written by another version of insum_ops (layout 99, here 1); export it again with this version"
    )
    assert not folder.exists()


def made_up() -> list[object]:
    """What could stand in the place of an entry, each wrong in one way."""
    whole = json.loads(TuningCache.encode(KEY, ENTRY))
    parts = [
        {"key": 3},
        {"key": {}},
        {"config": {"num_warps": [1]}},
        {"times": [[{}, "fast"]]},
        {"times": [[{}, -1.0]]},
    ]
    keys = [{"statement": 3}, {"extents": 3}, {"extents": [["n", "x"]]}, {"deterministic": "no"}, {"more": 1}]
    return [3, {}, *({**whole, **part} for part in parts), *({**whole, "key": {**whole["key"], **k}} for k in keys)]


@pytest.mark.parametrize("entry", made_up(), ids=range(len(made_up())))
def test_entries_that_somebody_made_up_are_refused(entry, exported, folder, capsys):
    """With the digest that belongs to them: their types are checked all the same."""
    changed(exported, entries=[entry], sha256=tuning_file._digest([entry]))
    assert refusal(capsys, "import", exported).startswith(f"{exported} is damaged: ")
    assert not folder.exists()


def test_configs_of_another_version_are_refused(folder, tmp_path, capsys, exported):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("insum_ops.compiler.tuning.tuning_file.generator_version", lambda: "feed")
        assert refusal(capsys, "import", exported) == (
            f"{exported} holds nothing for this version: its configs were measured with Triton {TRITON_VERSION} and "
            f"code generator {generator_version()}, and here are Triton {TRITON_VERSION} and code generator feed"
        )


def test_an_empty_cache_is_not_exported(folder, tmp_path, capsys):
    assert refusal(capsys, "export", tmp_path / "tuned.json") == (
        f"{folder} holds no tuned config of this version, so there is nothing to export; run statements on a GPU "
        "first, or tune them"
    )
    assert not (tmp_path / "tuned.json").exists()


def test_a_folder_that_can_not_be_written_is_told(folder, tmp_path, capsys):
    TuningCache().put(KEY, ENTRY)
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "tuned.json"
    assert refusal(capsys, "export", target) == f"can't write {target} (File exists)"
    assert refusal(capsys, "export", tmp_path) == f"{tmp_path} is a folder; name a file to write"


def test_show_lists_each_statement_with_its_time(folder, capsys):
    for key in (KEY, OTHER, OLD):
        TuningCache().put(key, ENTRY)
    (folder / "tuning" / f"{'0' * 32}.json").write_text("damaged")
    assert main(["cache", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"folder   {folder}"
    assert lines[1].startswith("holds    4 files, 0.0 MiB")
    assert lines[2:] == [
        "tuned    2 tuned statements that this version can use",
        "         1 tuned statement of another Triton or another version of the code generator",
        "",
        "NVIDIA H200 sm_90 132 SMs",
        "     0.1250 ms  of  2 tried  C[AM[p],n] += AV[p,q] * B[AK[p,q],n]  n=128 p=1024  int32, float16",
        "     0.1250 ms  of  2 tried  C[i] += A[i,k] * B[k]  n=128 p=1024  int32, float16",
    ]


def test_show_of_no_cache(folder, capsys):
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out == (
        f"folder   {folder}\nholds    0 files, 0.0 MiB\ntuned    0 tuned statements that this version can use\n"
    )


def test_clear_removes_what_is_ours_and_nothing_else(folder, capsys):
    cache = TuningCache()
    with cache.lock(KEY):
        cache.put(KEY, ENTRY)
    (folder / "kernels").mkdir()
    (folder / "kernels" / f"{'a' * 32}.py").write_text("x = 1\n")
    others = [folder / "notes.txt", folder / "tuning" / "mine.json", folder / "kernels" / "setup.py"]
    for path in others:
        path.write_text("")
    held = FileLock(folder / "tuning" / f"{'b' * 32}.lock")
    with held:
        assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 3 files from ")
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert left - {Path(held.lock_file)} == set(others)
    assert list(tuned()) == []


def test_a_file_under_the_name_of_another_key_is_left_out(folder):
    TuningCache().put(KEY, ENTRY)
    (path,) = (folder / "tuning").glob("*.json")
    path.rename(path.with_stem("0" * 32))
    assert list(tuned()) == []
    path.with_stem("0" * 32).rename(path)
    assert list(tuned()) == [Tuned(KEY, ENTRY)]
