"""Packages that torch made of entry points, run by a process without this library, and by one without Python.

On a CPU the table has them in Python, and here is one for C++; on a GPU all of it is here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from entry_cases import CASES, DEVICE
from entry_columns import NO_PACKAGES
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SIZES = (7, 13, 2, 200)
SECONDS = 600  # for a compiler: torch's headers take a minute on a busy machine
CLOSE = dict(rtol=1e-4, atol=1e-4)
NAMES = ["insum, scatter"]
if DEVICE == "cuda":
    NAMES += [
        "nn.SpMM",
        "nn.BlockSparseLinear",
        "nn.FullyConnectedTensorProduct, shared",
        "nn.SubMConv3d, given voxels",
    ]

pytestmark = [
    pytest.mark.skipif(DEVICE != "cuda" and os.environ.get("INSUM_TESTS") != "torch", reason="part of make test-torch"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
]

# Each in a process of its own: what a package is built of is not to hold what the tests do to torch, and an assertion
# that fails on a GPU ends the process.
BUILD = """
import sys
from entry_columns import CASES, packaged
name, package = sys.argv[1:]
packaged(CASES[name], package)
"""
SAVE = """
import sys, torch
from entry_columns import CASES, exported
name, program = sys.argv[1:]
torch.export.save(exported(CASES[name])[1], program)
"""
CONTROL = """
import sys
from entry_columns import runs_packages
sys.exit(not runs_packages())
"""
RUN = """
import sys, torch
package, device, inputs, outputs = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
torch.save([[loaded(*[x.to(device) for x in given]).cpu()] for given in torch.load(inputs)], outputs)
assert "insum_ops" not in sys.modules
"""


OUT_OF_RANGE = """
import sys, torch
kind, path, inputs, column = sys.argv[1:]
X, W, index = (x.cuda() for x in torch.load(inputs)[0])
if kind == "package":
    loaded = torch._inductor.aoti_load_package(path)
else:
    import insum_ops
    loaded = torch.export.load(path).module()
with torch.no_grad():
    print(float(loaded(X, W, index).sum()), flush=True)
    index[5, int(column)] = 10**9
    loaded(X, W, index)
    torch.cuda.synchronize()
    print("read")
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def _done(*command: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=_environment())


def _ran(*command: Any) -> str:
    done = _done(*command)
    _skip_if_none_runs(done)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def _skip_if_none_runs(done: subprocess.CompletedProcess[str]) -> None:
    """A signal has ended a package's process: is it torch's own fault on this machine?"""
    if done.returncode < 0 and _done(sys.executable, "-c", CONTROL).returncode == 1:
        pytest.skip(f"{NO_PACKAGES}: its process was ended by signal {-done.returncode}")


def _program(path: Path) -> subprocess.Popen[bytes]:
    """Begin to build the C++ program, with the libraries of a GPU where there is one."""
    folders = library_paths()
    command = [str(COMPILER), "-std=c++20", "-O0", str(HERE / "run_package.cpp"), "-o", str(path)]
    command += [f"-I{folder}" for folder in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [option for folder in folders for option in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    of_gpu = ["-Wl,--no-as-needed", "-ltorch_cuda", "-lc10_cuda"] if DEVICE == "cuda" else []
    return subprocess.Popen([*command, "-ltorch", "-ltorch_cpu", "-lc10", *of_gpu])


@pytest.mark.parametrize("name", NAMES)
def test_a_package_runs_without_this_library_and_without_python(name, tmp_path):
    case, package, program = CASES[name], tmp_path / "package.pt2", tmp_path / "program"
    building = _program(program)
    try:
        _ran(sys.executable, "-c", BUILD, name, package)
    finally:
        code = building.wait(SECONDS)
    assert code == 0
    linked = _ran("ldd", program)
    assert "libtorch_cpu" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked
    torch.manual_seed(0)
    whole, inputs, expected = case.module().double(), [], []
    for n in SIZES:
        torch.manual_seed(n)
        inputs.append([*case.inputs(n)])
        with torch.no_grad():
            expected.append(whole(*[x.double() if x.is_floating_point() else x for x in inputs[-1]]))
    torch.save(inputs, tmp_path / "inputs")
    for run in ([sys.executable, "-c", RUN], [program]):
        _ran(*run, package, DEVICE, tmp_path / "inputs", tmp_path / "outputs")
        found = torch.load(tmp_path / "outputs", weights_only=False)
        for (value,), reference in zip(found, expected, strict=True):
            torch.testing.assert_close(value.double(), reference, **CLOSE)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU; for a CPU test_index_ranges.py has it")
@pytest.mark.parametrize("kind", ["program", "package"])
def test_an_index_out_of_range_fails_an_assertion_on_the_gpu(kind, tmp_path):
    """Its process ends. The position is so far outside that reading there would be another error."""
    name = "insum, scatter"
    path = tmp_path / f"{kind}.pt2"
    _ran(sys.executable, "-c", BUILD if kind == "package" else SAVE, name, path)
    torch.save([[*CASES[name].inputs(SIZES[0])]], tmp_path / "inputs")
    for column in ("0", "1"):  # what is written to, and what is read
        done = _done(sys.executable, "-c", OUT_OF_RANGE, kind, path, tmp_path / "inputs", column)
        if not done.stdout:
            _skip_if_none_runs(done)
        assert done.stdout.split(), done.stderr[-6000:]  # a call with positions inside came first
        assert "read" not in done.stdout
        assert done.returncode != 0
        assert "device-side assert" in done.stderr
        assert "holds a position outside of what it points into" in done.stdout + done.stderr
