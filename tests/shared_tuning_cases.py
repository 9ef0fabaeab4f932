"""What tests/distributed/test_shared_tuning.py runs on several ranks, each of which has tuned for itself before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dtensor_cases import message
from torch import distributed

from insum_ops.compiler import TRITON_VERSION, Key, cache_dir, generator_version, tuning_mode
from insum_ops.compiler.tuning.tuning_cache import Entry, TuningCache
from insum_ops.distributed import share_tuning


def key(statement: str) -> Key:
    return Key(statement, f"{generator_version()} 0", ("float32",), (), "", "a GPU", TRITON_VERSION, "ieee", False)


def tune(statement: str, config: int) -> None:
    """As a rank's own measurement would leave it."""
    TuningCache(cache_dir()).put(key(statement), Entry({"BLOCK": config}, (({"BLOCK": config}, 1.0),)))


def chosen(statement: str) -> int | None:
    entry = TuningCache(cache_dir()).get(key(statement))
    return None if entry is None else int(entry.config["BLOCK"])


def ranks_take_what_the_first_has() -> list[object]:
    rank = distributed.get_rank()
    with tempfile.TemporaryDirectory() as own:
        os.environ["INSUM_CACHE_DIR"] = own
        tune("C[i] += A[i]", 16 * (rank + 1))  # each another
        if rank:
            tune("D[i] += A[i]", 64)  # which the first rank lacks
        count = share_tuning(lambda: tune("E[i] += A[i]", 32))
        folder = os.environ["INSUM_CACHE_DIR"]
        assert folder != own
        assert Path(folder).is_dir()
    found = [chosen(statement) for statement in ("C[i] += A[i]", "D[i] += A[i]", "E[i] += A[i]")]
    return [count, *found, tuning_mode()]


def nothing_is_shared_where_nothing_was_tuned() -> int:
    with tempfile.TemporaryDirectory() as own:
        os.environ["INSUM_CACHE_DIR"] = own
        return share_tuning()


def a_warm_up_that_fails() -> str:
    def fail() -> None:
        raise ArithmeticError("out of luck")

    if distributed.get_rank():
        return message(lambda: share_tuning(fail))
    try:
        share_tuning(fail)
    except ArithmeticError as error:
        return str(error)
    raise AssertionError("nothing was raised")


NAMES = ["ranks_take_what_the_first_has", "nothing_is_shared_where_nothing_was_tuned", "a_warm_up_that_fails"]
