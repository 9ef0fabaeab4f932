"""Ranks of one job that take the same configs: one decides, and none is timed afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from ..compiler import UnsupportedError, export_tuned, import_tuned, tuned

__all__ = ["share_tuning"]

PATIENCE = timedelta(days=1)  # of ranks that wait for the one that tunes; the job's own groups keep their timeouts

_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def share_tuning(warm_up: Callable[[], object] | None = None) -> int:
    """Make all ranks take the configs of the first one; from then on no rank times anything.

    Ranks that tune for themselves may choose different kernels, whose sums differ in the last digits, and one that
    tunes keeps the others waiting in their next collective. Call this on all ranks before the first step. The first
    rank calls `warm_up`, while the others wait in a group of their own, so that no timeout of the job counts. What the
    first rank has tuned, then or earlier, goes to all. Each rank keeps it in a folder of its own, as INSUM_CACHE_DIR,
    and INSUM_TUNE is off from then on: a statement that was not tuned takes the config that comes first, on all ranks
    alike. To ship tuned configs, use `python -m insum_ops cache export` and `import`.

    Args:
        warm_up: calls what is to be tuned, with tensors of the sizes to come; it must not communicate. None shares what
            the first rank has in its cache.

    Returns:
        How many tuned statements are shared.

    Raises:
        UnsupportedError: on the other ranks, if `warm_up` raised on the first one.

    Example:
        >>> from torch import distributed
        >>> from insum_ops.distributed import share_tuning
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> share_tuning(lambda: None)  # doctest: +SKIP
        12
        >>> distributed.destroy_process_group()
    """
    patient = dist.new_group(timeout=PATIENCE, backend="gloo")
    content: list[Any] = [None]
    try:
        if dist.get_rank() == 0:
            if warm_up is not None:
                warm_up()
            content = [_exported()]
    finally:  # so that the others go on, whatever happened
        dist.broadcast_object_list(content, 0, group=patient)
        dist.destroy_process_group(patient)
    if content[0] is None:
        raise UnsupportedError(
            f"warm_up failed on rank 0, whose own error says why, so rank {dist.get_rank()} has nothing to take over"
        )
    folder = tempfile.TemporaryDirectory(prefix="insum_ops-")
    _folders.append(folder)
    os.environ.update(INSUM_CACHE_DIR=folder.name, INSUM_TUNE="off")
    if not content[0]:
        return 0
    file = Path(folder.name) / "shared.json"
    file.write_bytes(content[0])
    return import_tuned(file).added


def _exported() -> bytes:
    """Return what this process's cache holds for this version, as a file; nothing if it holds nothing."""
    if not any(statement.is_usable for statement in tuned()):
        return b""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.json"
        export_tuned(file)
        return file.read_bytes()
