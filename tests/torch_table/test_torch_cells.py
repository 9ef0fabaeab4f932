"""The table of torch's tools: each entry point in each of them, every cell a process of its own.

`make test-torch` runs all cells; other runs a few of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.exc
from entry_cases import CASES
from entry_columns import COLUMNS

from insum_ops import insum, spmm

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")]

HERE = Path(__file__).parent
IS_WHOLE = os.environ.get("INSUM_TESTS") == "torch"
CHEAP = {"training": "nn.BlockSparseLinear", "sizes": "spmm of edges"}  # of each column that is worth its seconds
SECONDS = 600

SPARSE = "torch.compile takes no sparse tensor as an input"
PACKAGED = "a package takes tensors; a SparseConvTensor can't be there without insum_ops"
BMM = "Inductor has no bmm of a size that depends on data"
NOT_RUN = {
    **{f"{op} of a {layout} tensor": SPARSE for op in ("spmm", "sddmm") for layout in ("coo", "csr")},
    **{(f"nn.{kind}, given cloud", "aoti"): PACKAGED for kind in ("SubMConv3d", "SparseConv3d")},
    ("nn.SparseConv3d, given voxels", "aoti"): BMM,
}


def _cells() -> list[object]:
    names = [(name, column) for column in COLUMNS for name in CASES] if IS_WHOLE else [(n, c) for c, n in CHEAP.items()]
    return [pytest.param(name, column, id=f"{name}-{column}") for name, column in names]


@pytest.mark.parametrize(("name", "column"), _cells())
def test_a_cold_call_goes_through(name, column):
    reason = NOT_RUN.get((name, column)) or (NOT_RUN.get(name) if column != "functorch" else None)
    if reason is not None:
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, str(HERE / "entry_columns.py"), name, column]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.xfail(strict=True, raises=torch._dynamo.exc.Unsupported, reason=SPARSE)
def test_torch_itself_compiles_no_sparse_input():
    A = torch.eye(3).to_sparse()
    torch.compile(lambda x: A @ x, fullgraph=True, backend="eager")(torch.ones(3, 2))


@pytest.mark.skipif(not IS_WHOLE, reason="seconds of Inductor; `make test-torch` runs it")
@pytest.mark.xfail(strict=True, raises=torch._inductor.exc.InductorError, reason=BMM)
def test_inductor_itself_has_no_bmm_of_a_size_that_depends_on_data():
    def product(x, table, w):
        return torch.einsum("xzc,zcm->xm", x[table[table[:, 0] > 0]], w.permute(1, 2, 0))

    given = torch.randn(9, 4), torch.randint(9, (7, 5)), torch.randn(3, 5, 4)
    torch.compile(product, fullgraph=True)(*given)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_breaks_the_graph(layout):
    A, B = torch.tensor([[0.0, 5.0], [6.0, 7.0]]).to_sparse(layout=layout), torch.randn(2, 3)
    C = torch.compile(lambda B: spmm(A, 2 * B) + 1, backend="eager")(B)
    torch.testing.assert_close(C, A.to_dense() @ (2 * B) + 1)


def test_an_edge_out_of_range_is_refused_in_a_compiled_call():
    edges = torch.tensor([[0, 7], [1, 1]])
    compiled = torch.compile(lambda x, edges: spmm((edges, None), x), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"^edge_index\[0, 1\] is 7 but there are 2 sources; "):
        compiled(torch.ones(2, 3), edges)


def test_an_index_out_of_range_is_refused_in_a_compiled_call():
    gather = torch.compile(lambda X, at: insum("Y[i] += X[AT[i]]", X=X, AT=at), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match="AT"):
        gather(torch.ones(2), torch.tensor([0, 5]))


class _Gather(torch.nn.Module):
    def forward(self, X: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return insum("Y[i] += X[AT[i]]", X=X, AT=at)


def test_an_exported_program_holds_torch_operators_alone_and_refuses_an_index_out_of_range():
    lengths = {0: torch.export.Dim.AUTO}
    program = torch.export.export(_Gather(), (torch.ones(3), torch.tensor([0, 2])), dynamic_shapes=(lengths, lengths))
    assert not [node for node in program.graph.nodes if "insum_ops" in str(node.target)]
    X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert program.module()(X, torch.tensor([4, -1, 0])).tolist() == [5.0, 0.0, 1.0]
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        program.module()(X, torch.tensor([4, 5, 0]))


def test_a_compiled_statement_has_gradients_of_gradients():
    X, W = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    index = torch.tensor([[0, 2], [1, -1], [2, 2]])
    product = lambda X, W: insum("Y[i,c] += X[I[i,k],c] * W[k,i]", X=X, W=W[:2], I=index)
    assert torch.autograd.gradgradcheck(torch.compile(product, fullgraph=True, backend="eager"), (X, W))
