"""Functions run by several processes over gloo: one process imports all that they need, once, and forks the ranks.

`results = on_ranks("dtensor_cases", 4, names)` calls each of these functions of tests/dtensor_cases.py on 4 ranks, in
turn, and returns what each rank returned, or the text of what it raised, as `results[name][rank]`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

HERE = Path(__file__).parent
TIMEOUT = 240  # seconds for all functions of a call
PATIENCE = timedelta(seconds=30)  # of a rank that waits for another


def on_ranks(module: str, world: int, names: Sequence[str]) -> dict[str, list[Any]]:
    """Call functions of a module of this folder on `world` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, module, str(world), folder, *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE) as run:
            try:
                _, errors = run.communicate(timeout=TIMEOUT)
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
        assert run.returncode == 0, errors.decode()[-4000:]
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    return {name: [own[name] for own in found] for name in names}


def failures(results: dict[str, list[Any]]) -> str:
    """What the ranks raised, as text; "" if none did."""
    return "\n".join(
        f"{name}, rank {rank}: {value}"
        for name, values in results.items()
        for rank, value in enumerate(values)
        if isinstance(value, str) and value.startswith("Traceback")
    )


def _be_rank(rank: int, module: str, world: int, folder: str, names: Sequence[str]) -> None:
    store = distributed.FileStore(f"{folder}/store", world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    functions, found = importlib.import_module(module), {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(functions, name)()
        except Exception:
            found[name] = traceback.format_exc()
        torch.save(found, f"{folder}/{rank}.pt")

    distributed.destroy_process_group()


def main(module: str, world: str, folder: str, *names: str) -> int:
    torch.set_num_threads(1)
    importlib.import_module(module)
    children = []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            try:
                _be_rank(rank, module, int(world), folder, names)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
