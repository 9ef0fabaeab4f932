"""The cache of tuned configs and kernel sources: shown, cleared, written to one file and read from one."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import torch

from insum_ops.cli.errors import CommandError
from insum_ops.cli.progress import progress
from insum_ops.compiler import (
    Tuned,
    cache_dir,
    cache_size,
    clear_cache,
    device_name,
    export_tuned,
    import_tuned,
    tuned,
)

__all__ = ["clear", "export_file", "import_file", "show"]

reading = partial(progress, title="reading tuned configs")


def show() -> int:
    """Print where the cache lies, how large it is, and each tuned statement with its GPU and its best time."""
    folder = cache_dir()
    files, size = cache_size(folder)
    statements = list(tuned(watch=reading))
    usable = [each for each in statements if each.is_usable]
    print(f"folder   {folder}\nholds    {files:,} files, {size / 2**20:.1f} MiB")
    print(f"tuned    {_statements(len(usable))} that this version can use")
    if len(statements) > len(usable):
        others = len(statements) - len(usable)
        print(f"         {_statements(others)} of another Triton or another version of the code generator")
    for gpu in sorted({each.key.device for each in usable}):
        print(f"\n{gpu}")
        for line in sorted(map(_line, (each for each in usable if each.key.device == gpu))):
            print(f"  {line}")
    return 0


def clear() -> int:
    """Remove tuned configs and kernel sources; they are made anew when they are needed."""
    folder = cache_dir()
    try:
        count = clear_cache()
    except OSError as error:
        raise CommandError(f"can't clear {folder} ({error.strerror})") from None
    print(f"removed {count:,} files from {folder}; the kernels that Triton has compiled are in its own cache")
    return 0


def export_file(path: Path) -> int:
    """Write all tuned configs of this version to one file, for machines with the same GPU."""
    try:
        count = export_tuned(path, reading)
    except OSError as error:
        raise CommandError(f"can't write {path} ({error.strerror})") from None
    gpus = Counter(each.key.device for each in tuned(watch=reading) if each.is_usable)
    print(f"wrote {_statements(count)} to {path}, measured on {', '.join(sorted(gpus))}")
    return 0


def import_file(path: Path) -> int:
    """Take over the tuned configs of a file that `export` wrote; those that were measured here stay."""
    try:
        taken = import_tuned(path, partial(progress, title="writing tuned configs"))
    except OSError as error:
        raise CommandError(f"can't write to {cache_dir()} ({error.strerror})") from None
    print(f"added {_statements(taken.added)} to {cache_dir()}")
    if taken.present:
        print(f"kept {_statements(taken.present)} as they were, since this folder had them")
    if taken.unusable:
        print(f"left out {_statements(taken.unusable)} of another Triton or another version of the code generator")
    here = {device_name(torch.device("cuda", number)) for number in range(torch.cuda.device_count())}
    others = sorted({each.key.device for each in tuned(watch=reading) if each.is_usable} - here)
    if others:
        print(f"configs of {', '.join(others)} are used on such a GPU alone, and there is none here")
    return 0


def _line(each: Tuned) -> str:
    """`0.0123 ms  of 14 tried  C[...] += ...  float16`; a statement that was chosen between ways is named by them."""
    statement = each.key.statement.partition(" seeded=")[0]
    best = next((ms for config, ms in each.entry.times if config == each.entry.config), None)
    time = "   not timed" if best is None else f"{best:9.4f} ms"
    values = dict.fromkeys(dtype.rpartition("=")[2].removeprefix("torch.") for dtype in each.key.dtypes)
    extents = " ".join(f"{name}={extent}" for name, extent in each.key.extents if name.isidentifier())
    return f"{time}  of {len(each.entry.times):2} tried  {statement}  {extents}  {', '.join(values)}"


def _statements(count: int) -> str:
    return f"{count:,} tuned statement{'' if count == 1 else 's'}"
