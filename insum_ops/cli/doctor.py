"""What matters for a bug report: versions, GPU, cache, settings, and which routes work on this machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

import torch

from insum_ops.cli.progress import progress
from insum_ops.compiler import TRITON_VERSION, cache_dir, cache_size
from insum_ops.formats.torch_state import is_deterministic, may_round_sums, rounds_float32
from insum_ops.functional import insum

__all__ = ["doctor", "probe"]

PACKAGES = ("insum_ops", "torch", "triton", "numpy", "opt_einsum", "filelock", "platformdirs")
VARIABLES = ("INSUM_", "TRITON_", "TORCH_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS")
TIMEOUT = 300  # seconds; a first kernel takes well under ten


def doctor() -> int:
    """Print the report; the exit status is 1 if a route that this machine should have does not work."""
    for title, facts in (
        ("versions", _versions()),
        ("machine", _machine()),
        ("cache", _cache()),
        ("settings", _settings()),
    ):
        _print_section(title, facts)
    routes = dict(progress(_routes(), "trying routes", 3))
    _print_section("routes", routes.items())
    return 1 if any(state.startswith("fails") for state in routes.values()) else 0


def probe(device: torch.device) -> int:
    """Run one small statement on a device; 1 if its result is wrong, and errors are left to be seen."""
    C = insum(
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        AM=torch.tensor([0, 2], device=device),
        AK=torch.tensor([[0, 1], [1, -1]], device=device),
        AV=torch.tensor([[1.0, 2.0], [3.0, 0.0]], device=device),
        B=torch.tensor([[1.0, 10.0], [2.0, 20.0]], device=device),
        size=(3, 2),
    )
    expected = [[5.0, 50.0], [0.0, 0.0], [6.0, 60.0]]
    if C.tolist() != expected:
        print(f"got {C.tolist()} instead of {expected}", file=sys.stderr)
        return 1
    return 0


def _print_section(title: str, facts: Iterable[tuple[str, str]]) -> None:
    print(title)
    for name, fact in facts:
        print(f"  {name:<24}{fact}")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    installed = {name: _version(name) for name in PACKAGES}
    installed["torch"] = torch.__version__  # which also tells the build
    installed["triton"] = _triton()
    yield from installed.items()


def _triton() -> str:
    """The version that is imported: with a ROCm build of torch the package has another name."""
    return "not installed" if TRITON_VERSION == "none" else TRITON_VERSION


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield (
        "processor",
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
    )
    built = torch.version.cuda, torch.version.hip and f"ROCm {torch.version.hip}"
    yield "CUDA of torch", next(filter(None, built), "none, a CPU build")
    yield "NVIDIA driver", _driver()
    if not torch.cuda.is_available():
        yield "GPU", "none"
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "none found"
    return answer.stdout.split("\n")[0] if answer.returncode == 0 else "none found"


def _cache() -> Iterator[tuple[str, str]]:
    folder = cache_dir()
    files, size = cache_size(folder)
    yield "folder", str(folder)
    yield "holds", f"{files} files, {size / 2**20:.1f} MiB"


def _settings() -> Iterator[tuple[str, str]]:
    yield "float32 matmul", "tf32" if rounds_float32() else "ieee"
    yield "fp16 sums reduced", str(may_round_sums(torch.float16))
    yield "bf16 sums reduced", str(may_round_sums(torch.bfloat16))
    yield "deterministic", str(is_deterministic())
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield name, os.environ[name]


def _routes() -> Iterator[tuple[str, str]]:
    """Each route in a process of its own: a crash is an answer, and the interpreter is chosen at start."""
    yield "torch.fx on CPU", _try("cpu", {"TRITON_INTERPRET": "0"})
    if _triton() == "not installed":
        yield "triton", "not installed"
        return
    yield "triton interpreter", _try("cpu", {"TRITON_INTERPRET": "1"})
    yield "triton on GPU", _try("cuda", {"TRITON_INTERPRET": "0"}) if torch.cuda.is_available() else "no GPU"


def _try(device: str, variables: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "insum_ops", "doctor", "--probe", device]
    try:
        answer = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"fails: no result after {TIMEOUT} s"
    if answer.returncode == 0:
        return "works"
    lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    return f"fails: {lines[-1]}"
