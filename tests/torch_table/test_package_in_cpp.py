"""A C++ program that links no Python and registers nothing of ours runs a package that torch made of a statement."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from insum_ops import insum

SOURCE = Path(__file__).with_name("run_package.cpp")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SIZES = (7, 13, 2)
SECONDS = 600  # for the compiler: torch's headers take a minute on a busy machine

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(os.environ.get("INSUM_TESTS") != "torch", reason="part of make test-torch"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the program makes its tensors on a CPU"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]


class Scatter(torch.nn.Module):
    def forward(self, X: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return insum("Y[I[e,0],c] += X[I[e,1],c] * W[e]", X=X, I=index, W=weight, size=X.shape)


def _built(path: Path) -> None:
    folders = library_paths()
    command = [str(COMPILER), "-std=c++20", "-O0", str(SOURCE), "-o", str(path)]
    command += [f"-I{folder}" for folder in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [option for folder in folders for option in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    done = subprocess.run(
        [*command, "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _expected(n: int) -> list[float]:
    Y, X = torch.zeros(n, 2, dtype=torch.float64), torch.arange(2.0 * n, dtype=torch.float64).view(n, 2)
    for edge in range(3 * n):
        Y[edge % n] += X[7 * edge % n] * (edge + 1)
    return Y.flatten().tolist()


def test_a_program_without_python_runs_a_package(tmp_path):
    given = torch.ones(4, 2), torch.ones(12), torch.zeros(12, 2, dtype=torch.int64)
    lengths = {0: torch.export.Dim.AUTO}
    with torch.no_grad():
        program = torch.export.export(Scatter(), given, dynamic_shapes=(lengths,) * 3)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    _built(tmp_path / "program")
    linked = subprocess.run(["ldd", tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked
    command = [tmp_path / "program", tmp_path / "package.pt2", *map(str, SIZES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    for n, line in zip(SIZES, done.stdout.splitlines(), strict=True):
        assert [float(number) for number in line.split()] == pytest.approx(_expected(n))
