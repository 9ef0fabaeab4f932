"""Kernels of exported programs: chosen for symbols, right at every length, and seen by compilers as kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import LoopNest
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from insum_ops.compiler.exported import plan_for, run_exported
from insum_ops.compiler.planning.device import H200, described_as

pytestmark = pytest.mark.cpu

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
        lambda n: dict(X=torch.randn(n, 2, 8), O=_indices(3, 4), I=_indices(2, 4), V=torch.randn(4, 8, 8)),
        lambda n: (n, 3, 8),
    ),
    "Y[i,c] = max(X[I[i,k],c])": (lambda n: dict(X=torch.randn(n, 4), I=_indices(n, n, 3)), None),
}
LENGTHS = (1, 2, 5, 33, 130)
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
