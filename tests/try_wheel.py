"""Builds the wheel and tries it under other Pythons: `python tests/try_wheel.py python3.10 python3.12`.

Each of them needs torch and what else setup.cfg asks for. The wheel is unpacked where that Python finds it and no
checkout, byte-compiled, imported, and asked for a product, its gradient, a format and the Triton kernel of a statement.
Prints a line for each; the exit status is 1 if one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = """
import platform, sys, torch
import insum_ops
from insum_ops import explain, insum
from insum_ops.formats import GroupCOO
assert insum_ops.__file__.startswith(sys.argv[1]), insum_ops.__file__
A = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
B = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
C = insum("C[m,n] += A[m,k] * B[k,n]", A=GroupCOO.from_dense(A), B=B)
C.sum().backward()
assert torch.equal(C, A @ B) and torch.equal(B.grad, A.sum(0)[:, None].expand(3, 2)), (C, B.grad)
assert "@triton.jit" in explain("C[m,n] += A[m,k] * B[k,n]", A=GroupCOO.from_dense(A), B=B).source
print(f"Python {platform.python_version()}, torch {torch.__version__}, insum_ops {insum_ops.__version__}: works")
"""


def build(folder: Path) -> Path:
    """Build the wheel of this tree, in a copy of what it is made of, and return its path."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "bench", "docs", "tests")
    copy = shutil.copytree(ROOT, folder / "tree", ignore=ignored)  # building leaves files behind
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    (path,) = folder.glob("*.whl")
    return path


def try_under(python: str, wheel: Path) -> bool:
    """Unpack, byte-compile and run the wheel under one Python; print what came of it."""
    python = os.path.abspath(python) if os.sep in python else python
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        environment = {**os.environ, "PYTHONPATH": folder, "INSUM_CACHE_DIR": str(Path(folder, "cache"))}
        for arguments in (
            ["-m", "compileall", "-q", str(Path(folder, "insum_ops"))],
            ["-c", SCRIPT, folder],
            ["-m", "insum_ops", "doctor", "--probe", "cpu"],
        ):
            command = [
                os.path.abspath(python) if os.sep in python else python,
                "-W",
                "error::SyntaxWarning",
                *arguments,
            ]
            answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            print(answer.stdout, end="", flush=True)
            if answer.returncode != 0:
                print(f"{python}: fails\n{answer.stdout}{answer.stderr}", flush=True)
                return False
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as built:
        wheel = build(Path(built))
        results = [try_under(python, wheel) for python in sys.argv[1:] or [sys.executable]]
    sys.exit(0 if all(results) else 1)
