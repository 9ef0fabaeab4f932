"""Functions run by several processes: one server imports all that they need, once, and forks the ranks of each call.

`results = on_ranks("dtensor_cases", 4, names)` calls each of these functions of tests/dtensor_cases.py on 4 ranks, in
turn, and returns what each rank returned, or the text of what it raised, as `results[name][rank]`. Ranks talk over gloo
on CPUs; with `backend="nccl"` they have a GPU each, and `device()` is then "cuda". What lasts too long is killed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
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

TIMEOUT = 1800 if os.environ.get("INSUM_TESTS") == "thorough" else 240  # seconds for all functions of a call
PATIENCE = timedelta(seconds=30)  # of a rank that waits for another

_servers: dict[str, subprocess.Popen[bytes]] = {}


def on_ranks(
    module: str, world: int, names: Sequence[str], backend: str = "gloo", **environment: str
) -> dict[str, list[Any]]:
    """Call functions of a module of this folder on `world` ranks, in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        server = _server(backend)
        assert server.stdin is not None
        request = {"module": module, "world": world, "folder": folder, "names": list(names), "backend": backend}
        request["environment"] = environment
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        is_done, *_ = select.select([server.stdout], [], [], TIMEOUT)
        answer = server.stdout.readline() if is_done and server.stdout is not None else b"it took too long"
        if answer != b"done\n":
            os.killpg(server.pid, signal.SIGKILL)
            del _servers[backend]
            errors = [path.read_text(errors="replace")[-2000:] for path in sorted(Path(folder).glob("*.txt"))]
            raise AssertionError("\n".join([answer.decode(), *errors]))
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


def device() -> str:
    """Where the tensors of a rank lie."""
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"


def _server(backend: str) -> subprocess.Popen[bytes]:
    """A process that has imported torch and forks ranks; it lives as long as this one."""
    server = _servers.get(backend)
    if server is None or server.poll() is not None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = _servers[backend] = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    return server


@atexit.register
def _stop() -> None:
    for server in _servers.values():
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def _be_rank(rank: int, module: str, world: int, folder: str, names: Sequence[str], backend: str) -> None:
    store = distributed.FileStore(f"{folder}/store", world)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    functions, found = importlib.import_module(module), {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(functions, name)()
        except Exception:
            found[name] = traceback.format_exc()
        torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def _fork(rank: int, request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        output = os.open(f"{request['folder']}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request.pop("environment"))
        try:
            _be_rank(rank, **request)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


def _start(rank: int, request: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(rank), json.dumps(request)]
    with open(f"{request['folder']}/{rank}.txt", "wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def serve() -> None:
    """Fork ranks for each line of stdin; say "done" when they have ended well."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which every rank would import by its first DTensor
    for line in sys.stdin:
        request = json.loads(line)
        if request["backend"] == "nccl":  # CUDA does not survive a fork
            runs = [_start(rank, request) for rank in range(request["world"])]
            codes = [run.wait() for run in runs]
        else:
            importlib.import_module(request["module"])
            children = [_fork(rank, request) for rank in range(request["world"])]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print("done" if not any(codes) else f"ranks ended with {codes}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        os.environ.update((own := json.loads(sys.argv[2])).pop("environment"))
        _be_rank(int(sys.argv[1]), **own)
    else:
        serve()
