"""An index out of range in a compiled call, an exported program and a package: refused, never read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from insum_ops import insum, spmm

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")]

WHOLE = pytest.mark.skipif(os.environ.get("INSUM_TESTS") != "torch", reason="part of make test-torch")
LENGTHS = {0: torch.export.Dim.AUTO}
X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
RIGHT, WRONG = torch.tensor([4, -1, 0]), torch.tensor([4, 5, 0])


class Gather(torch.nn.Module):
    def forward(self, X: Tensor, at: Tensor) -> Tensor:
        return insum("Y[i] += X[AT[i]]", X=X, AT=at)


class Scatter(torch.nn.Module):
    def forward(self, X: Tensor, at: Tensor) -> Tensor:
        return insum("Y[AT[i]] += X[i]", X=X[: len(at)], AT=at, size=X.shape)


def _program(module: torch.nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, (torch.ones(4), torch.tensor([0, 2, 1])), dynamic_shapes=(LENGTHS, LENGTHS))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=WHOLE)])
@pytest.mark.parametrize("module", [Gather, Scatter])
def test_a_compiled_call_refuses_it(module, backend):
    compiled = torch.compile(module(), fullgraph=True, backend=backend)
    with pytest.raises(IndexError, match=r"^AT\[1\] is 5, outside . dimension 0, which has size 5; "):
        compiled(X, WRONG)


def test_a_compiled_call_refuses_an_edge():
    edges = torch.tensor([[0, 7], [1, 1]])
    compiled = torch.compile(lambda x, edges: spmm((edges, None), x), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"^edge_index\[0, 1\] is 7 but there are 2 sources; "):
        compiled(torch.ones(2, 3), edges)


@pytest.mark.parametrize("module", [Gather, Scatter])
def test_an_exported_program_refuses_it(module):
    program = _program(module())
    assert not [node for node in program.graph.nodes if "insum_ops" in str(node.target)]
    torch.testing.assert_close(program.module()(X, RIGHT), module()(X, RIGHT))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        program.module()(X, WRONG)


class Statement(torch.nn.Module):
    def __init__(self, expr: str) -> None:
        super().__init__()
        self.expr = expr

    def forward(self, X: Tensor, R: Tensor, C: Tensor) -> Tensor:
        operands = {name: tensor for name, tensor in dict(X=X, R=R, C=C).items() if f"{name}[" in self.expr}
        return insum(self.expr, **operands, size=None if "Y[e" in self.expr else (3, 4) if "C" in self.expr else (3,))


@pytest.mark.parametrize(
    ("expr", "rows", "columns"),
    [
        ("Y[e,c] += X[R[e],c]", 40, 9),  # of so many that a row of zeros stands for -1
        ("Y[R[e],C[e]] += X[e,0]", 3, 4),  # whose elements are numbered through
        ("Y[R[e],C[e]] = max(X[e,0])", 3, 4),
        ("Y[R[e]] = max(X[e,0])", 3, 4),
    ],
)
def test_an_exported_program_refuses_the_first_position_beyond(expr, rows, columns):
    X = torch.randn(40, 9)
    right = (X, torch.arange(40) % rows, torch.arange(40) % columns)
    with torch.no_grad():
        program = torch.export.export(Statement(expr), right, dynamic_shapes=({}, LENGTHS, LENGTHS)).module()
    torch.testing.assert_close(program(*right), Statement(expr)(*right))
    for at, extent in ((1, rows), (2, columns)):
        if "RC"[at - 1] in expr:
            wrong = [tensor.clone() for tensor in right]
            wrong[at][5] = extent
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                program(*wrong)


RUN = """
import sys, torch
package, *inputs = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
print(loaded(X, torch.tensor([4, -1, 0])).tolist(), flush=True)
loaded(X, torch.tensor([4, 5, 0]))
print("read")
"""


@WHOLE
@pytest.mark.parametrize("module", [Gather, Scatter])
def test_a_package_refuses_it(module, tmp_path):
    """Its process ends: compiled code has no other way to say so."""
    path = str(tmp_path / "package.pt2")
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(_program(module()), package_path=path)
    done = subprocess.run([sys.executable, "-c", RUN, path], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(module()(X, RIGHT).tolist()), done.stderr[-2000:]
    assert done.returncode != 0
    assert "out of bounds" in done.stderr
