"""What torch alone can't do: each limit that a cell of the table names, without anything of ours."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from entry_cases import DEVICE
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx

from insum_ops import insum, sddmm, spmm
from insum_ops.compiler import UnsupportedError

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")]

WHOLE = pytest.mark.skipif(os.environ.get("INSUM_TESTS") != "torch", reason="part of make test-torch")
LAYOUTS = [torch.sparse_coo, torch.sparse_csr]


class Times(torch.nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.A = torch.eye(3).to_sparse(layout=layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.A @ x


@WHOLE
@pytest.mark.xfail(strict=True, raises=torch._dynamo.exc.Unsupported, reason="torch traces no sparse tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_compiles_a_sparse_tensor(layout):
    torch.compile(Times(layout), fullgraph=True, backend="eager")(torch.ones(3, 2))


@WHOLE
@pytest.mark.xfail(strict=True, raises=(RuntimeError, NotImplementedError), reason="torch saves no sparse tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_exports_and_saves_a_sparse_tensor(layout, tmp_path):
    torch.export.save(torch.export.export(Times(layout), (torch.ones(3, 2),)), tmp_path / "program.pt2")


@WHOLE
@pytest.mark.xfail(strict=True, reason="torch packages no sparse tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_packages_a_sparse_tensor(layout, tmp_path):
    program = torch.export.export(Times(layout), (torch.ones(3, 2),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))


@WHOLE
@pytest.mark.xfail(strict=True, raises=NotImplementedError, reason="torch copies no CSR tensor")
def test_torch_copies_a_csr_tensor():
    copy.deepcopy(torch.eye(3).to_sparse_csr())


def _coo(values: torch.Tensor) -> torch.Tensor:
    indices = torch.arange(3).expand(2, 3)
    return torch.sparse_coo_tensor(indices, values, (3, 3), check_invariants=False).to_dense()


def _csr(values: torch.Tensor) -> torch.Tensor:
    parts = torch.arange(4), torch.arange(3)
    return torch.sparse_csr_tensor(*parts, values, (3, 3), check_invariants=False).to_dense()


def _gradient(values: torch.Tensor, made: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    values = values.requires_grad_()
    return torch.autograd.grad(made(values).square().sum(), values)[0]


@WHOLE
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="make_fx has no gradient through a sparse tensor")
@pytest.mark.parametrize("made", [_coo, _csr])
def test_torch_traces_a_gradient_through_a_sparse_tensor(made):
    trace = make_fx(partial(_gradient, made=made), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    trace(torch.ones(3))


def _captured(given: str) -> None:
    """Capture `run` in a process of its own: a failure leaves torch's random numbers as they are inside a capture."""
    script = f"import torch\n{given}\nrun()\nwith torch.cuda.graph(torch.cuda.CUDAGraph()):\n    run()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    if "capturing" in done.stderr:
        raise RuntimeError(done.stderr[-2000:])
    assert done.returncode == 0, done.stderr[-2000:]


GRADIENT_THROUGH_CSR = """
rows, columns, values = torch.arange(4).cuda(), torch.arange(3).cuda(), torch.ones(3).cuda().requires_grad_()
made = lambda: torch.sparse_csr_tensor(rows, columns, values, (3, 3), check_invariants=False).to_dense()
run = lambda: torch.autograd.grad(made().square().sum(), values)
"""


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@WHOLE
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="a CUDA graph holds no gradient through a CSR tensor")
def test_torch_captures_a_gradient_through_a_csr_tensor():
    _captured(GRADIENT_THROUGH_CSR)


@WHOLE
@pytest.mark.xfail(strict=True, raises=(RuntimeError, NotImplementedError), reason="torch.vmap makes no sparse tensor")
@pytest.mark.parametrize("made", [_coo, _csr])
def test_torch_makes_sparse_tensors_under_vmap(made):
    torch.func.vmap(made)(torch.ones(2, 3))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@WHOLE
@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="a CUDA graph reads no size back")
def test_torch_captures_a_size_that_depends_on_values():
    _captured("run = torch.ones(3, device='cuda').nonzero")


@WHOLE
@pytest.mark.xfail(strict=True, raises=(RuntimeError, NotImplementedError), reason="a DTensor is never sparse")
@pytest.mark.parametrize("made", [_coo, _csr])
def test_torch_makes_sparse_tensors_of_dtensors(made):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        values = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])
        with implicit_replication():
            made(values)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_tensor_breaks_the_graph(layout):
    A, B = torch.tensor([[0.0, 5.0], [6.0, 7.0]]).to_sparse(layout=layout), torch.randn(2, 3)
    C = torch.compile(lambda B: spmm(A, 2 * B) + 1, backend="eager")(B)
    torch.testing.assert_close(C, A.to_dense() @ (2 * B) + 1)


def test_a_sampled_csr_tensor_is_refused_inside_a_graph():
    pattern = torch.eye(2).to_sparse_csr()
    with pytest.raises(UnsupportedError) as caught:
        make_fx(lambda X: sddmm(pattern, X, X).to_dense(), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            torch.ones(2, 3)
        )
    assert str(caught.value) == (
        "pattern is a torch.sparse_csr tensor, and torch makes none inside a graph; pass "
        "insum_ops.formats.GroupCOO.from_torch(pattern), whose result holds its values as a dense tensor"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_tensor_that_a_graph_holds_is_laid_out_while_it_is_traced(layout):
    A, B = torch.tensor([[0.0, 5.0, 0.0], [6.0, 0.0, 7.0]]), torch.randn(3, 5)
    trace = make_fx(partial(spmm, A.to_sparse(layout=layout)), tracing_mode="symbolic", _allow_non_fake_inputs=True)
    torch.testing.assert_close(trace(torch.ones(3, 4))(B), A @ B)


def test_a_compiled_statement_has_gradients_of_gradients():
    X, W = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    index = torch.tensor([[0, 2], [1, -1], [2, 2]])
    product = lambda X, W: insum("Y[i,c] += X[I[i,k],c] * W[k,i]", X=X, W=W[:2], I=index)
    assert torch.autograd.gradgradcheck(torch.compile(product, fullgraph=True, backend="eager"), (X, W))


def test_sampling_a_csr_tensor_breaks_the_graph():
    """Where a graph may break nothing is refused: the product runs uncompiled."""
    pattern, X = torch.tensor([[0.0, 5.0], [6.0, 7.0]]).to_sparse_csr(), torch.randn(2, 3)
    sampled = torch.compile(lambda X: sddmm(pattern, X, 2 * X), backend="eager")(X)
    torch.testing.assert_close(sampled.to_dense(), (X @ (2 * X).T) * (pattern.to_dense() != 0))
