"""Kernels of exported programs: chosen for symbols, right at every length, and seen by compilers as kernels."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from reference import LoopNest
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from insum_ops import insum
from insum_ops.compiler.autograd import operators
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.compiler.planning.device import H200, described_as
from insum_ops.compiler.routes import exported
from insum_ops.compiler.routes.exported import plan_for, run_exported

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")]

Operands = dict[str, Tensor]


def _indices(most: int, *shape: int) -> Tensor:
    return torch.randint(-1, most, shape)


# each with its operands at a length, and the output's size where it does not follow
STATEMENTS: dict[str, tuple[Callable[[int], Operands], Callable[[int], tuple[int, ...]] | None]] = {
    "Y[b,o] += X[b,i] * W[i,o]": (lambda n: dict(X=torch.randn(n, 20), W=torch.randn(20, 17)), None),
    "Y[o,b] += W[o,i] * X[i,b]": (lambda n: dict(W=torch.randn(5, 20), X=torch.randn(20, n)), None),
    "Y[i,o] += X[b,i] * Z[b,o]": (lambda n: dict(X=torch.randn(n, 20), Z=torch.randn(n, 3)), None),
    "Y[I[e,0],c] += X[I[e,1],c] * W[e]": (
        lambda n: dict(I=_indices(n, 3 * n, 2), X=torch.randn(n, 4), W=torch.randn(3 * n)),
        lambda n: (n, 4),
    ),
    "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]": (
        lambda n: dict(AM=_indices(5, 7), AV=torch.randn(7, 2), AK=_indices(6, 7, 2), B=torch.randn(6, n)),
        lambda n: (5, n),
    ),
    "Y[t,O[p],x] += X[t,I[p],y] * V[p,x,y]": (
        lambda n: dict(X=torch.randn(n, 2, 8), O=_indices(3, 2), I=_indices(2, 2), V=torch.randn(2, 8, 8)),
        lambda n: (n, 3, 8),
    ),
    "Y[i,c] = max(X[I[i,k],c])": (lambda n: dict(X=torch.randn(n, 4), I=_indices(n, n, 3)), None),
}
LENGTHS = (1, 5, 130)
EXAMPLE = 7


def _traced(tensors: list[Tensor], size: tuple[int, ...]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The tensors as a tracer has them, with a symbol for each length that follows the example's."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    follows = lambda n: n % EXAMPLE == 0
    fakes = [
        mode.from_tensor(
            tensor,
            symbolic_context=StatelessSymbolicContext(
                [DimDynamic.DYNAMIC if follows(n) else DimDynamic.STATIC for n in tensor.shape]
            ),
        )
        for tensor in tensors
    ]
    symbols = {n.node.hint: n for fake in fakes for n in fake.shape if isinstance(n, torch.SymInt)}
    return fakes, tuple(symbols.get(n, n) for n in size)


@pytest.mark.kernels
@pytest.mark.parametrize("expr", [*STATEMENTS])
def test_a_kernel_for_symbols_is_right_at_every_length(expr):
    make, size_of = STATEMENTS[expr]
    example = make(EXAMPLE)
    size = tuple(LoopNest(expr, example, None if size_of is None else size_of(EXAMPLE)).shape)
    names = ",".join(example)
    with described_as(H200):
        plan = plan_for(expr, names, *reversed(_traced([*example.values()], size)))
    assert plan is not None
    for n in LENGTHS:
        operands = make(n)
        expected = LoopNest(expr, operands, None if size_of is None else size_of(n)).result().value
        value = run_exported(expr, names, tuple(expected.shape), [*operands.values()], plan)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


SCATTER = "Y[I[e,0],c] += X[I[e,1],c] * W[e]"


class Scatter(torch.nn.Module):
    def forward(self, X: Tensor, W: Tensor, index: Tensor) -> Tensor:
        return insum(SCATTER, X=X, I=index, W=W, size=X.shape)


class Forces(torch.nn.Module):
    """A value and its gradient, as potentials export them."""

    def forward(self, X: Tensor, W: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        X = X.detach().requires_grad_()
        with torch.enable_grad():
            value = insum(SCATTER, X=X, I=index, W=W, size=X.shape)
            (grad,) = torch.autograd.grad(value.square().sum(), X)
        return value.detach(), grad


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs are exported as on a GPU, whose kernels nothing here builds or runs."""
    monkeypatch.setattr(operators, "_exports_kernels", lambda device: True)
    monkeypatch.setattr(exported, "_can_be_built", lambda launcher, tensors: True)
    with described_as(H200):
        yield


def _program(module: torch.nn.Module) -> torch.export.ExportedProgram:
    given = torch.randn(7, 4), torch.randn(21), torch.randint(7, (21, 2))
    lengths = {0: torch.export.Dim.AUTO}
    return torch.export.export(module, given, dynamic_shapes=(lengths,) * 3)


def _targets(program: torch.export.ExportedProgram) -> list[str]:
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [str(node.target) for part in parts for node in part.graph.nodes if node.op == "call_function"]


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_program_holds_the_config_and_is_saved_with_it():
    program, file = _program(Scatter()), io.BytesIO()
    (kernel,) = [node for node in program.graph.nodes if node.target is torch.ops.insum_ops.kernel.default]
    assert json.loads(kernel.args[-1])[-1]["strategy"] == "atomic"
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert [node.args[-1] for node in loaded.graph.nodes if node.name == kernel.name] == [kernel.args[-1]]


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_positions_stay_64_bits_wide_where_no_length_is_known():
    example = dict(X=torch.randn(7, 4), I=torch.randint(7, (21, 2)), W=torch.randn(21))
    names, tensors = ",".join(example), [*example.values()]
    plan = plan_for(SCATTER, names, *reversed(_traced(tensors, (7, 4))))
    assert "tl.int32" not in exported._launcher(SCATTER, names, tensors, plan).kernel.source


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize(("module", "count"), [(Scatter, 1), (Forces, 2)])
def test_a_compiler_sees_the_kernels(module, count):
    program = _program(module())
    assert sum("insum_ops.kernel" in target for target in _targets(program)) == count
    shown = _targets(program.run_decompositions({}, decompose_custom_triton_ops=True))
    assert sum("triton_kernel_wrapper" in target for target in shown) == count
    assert sum("_assert_async" in target for target in shown) == count  # that no index is out of range
    assert not [target for target in shown if "insum_ops" in target]


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_config_that_is_no_longer_offered_is_refused():
    (kernel,) = [node for node in _program(Scatter()).graph.nodes if "insum_ops" in str(node.target)]
    *example, choices = json.loads(kernel.args[-1])
    plan = json.dumps([*example, {**choices, "num_warps": 3}])
    operands = [torch.randn(7, 4), torch.randint(7, (21, 2)), torch.randn(21)]
    with pytest.raises(UnsupportedError) as caught:
        run_exported(SCATTER, "X,I,W", (7, 4), operands, plan)
    assert str(caught.value) == (
        f"the kernel of {SCATTER!r} in this program was chosen by another version of insum_ops; export it again"
    )
