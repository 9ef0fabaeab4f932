"""Forward and backward, gradients checked in float64: SpMM, block-sparse linear, convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from insum_ops import sparse_conv3d, spmm
from insum_ops.formats import kernel_map
from insum_ops.nn import BlockSparseLinear

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..inputs import cloud_loaders, csr, graph_loaders, submanifold_map, voxels

DTYPE = on(torch.float16, torch.float32)
GRAPHS = graph_loaders(is_small=DEVICE == "cpu")
COLUMNS = on(128, 32)
SIZE, EDGE, DENSITIES = on(4096, 256), 32, (0.5, 0.1, 0.05)
MOST_ROWS = 5_000
CHANNELS, VOXEL = on(64, 16), on(0.05, 0.25)


@dataclass(frozen=True)
class Training:
    """A case whose result is the gradients, one after another; `forwards` has each provider's function of `leaves`."""

    case: Case
    leaves: tuple[Tensor, ...]
    upstream: Tensor
    forwards: dict[str, Callable[..., Tensor]]
    weights: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)  # that learn too, each provider's own

    def call(self, provider: str) -> Call:
        forward = self.forwards[provider]
        leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in self.leaves)

        weights = self.weights.get(provider, ())

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(*leaves), (*leaves, *weights), self.upstream)

        return Call(run, result=lambda: joined(run()[: len(leaves)]), is_capturable=False)


def joined(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten().double() / (gradient.double().norm() + 1e-30) for gradient in gradients])


def training(
    name: str,
    leaves: tuple[Tensor, ...],
    upstream: Tensor,
    exact: Callable[..., Tensor],
    forwards: dict[str, Callable[..., Tensor]],
) -> Training:
    """`exact` computes the forward in float64 from float64 leaves."""
    doubles = tuple(leaf.double().requires_grad_() for leaf in leaves)
    expected = joined(torch.autograd.grad(exact(*doubles), doubles, upstream.double()))
    facts = {"series": name.partition(",")[0]}
    case = Case("backward", name, expected, 4 * LIMIT[upstream.dtype], facts=facts)
    return Training(case, leaves, upstream, forwards)


@held
def product(name: str) -> Training:
    A = csr(GRAPHS[name](), DEVICE)
    B = torch.randn(A.shape[1], COLUMNS, device=DEVICE)
    upstream = torch.randn(len(A), COLUMNS, device=DEVICE)
    rows = torch.repeat_interleave(torch.arange(len(A), device=DEVICE), A.crow_indices().diff())

    def exact(values: Tensor, B: Tensor) -> Tensor:
        products = B[A.col_indices().long()] * values[:, None]
        return torch.zeros(len(A), COLUMNS, device=DEVICE, dtype=B.dtype).index_add(0, rows, products)

    matrix = lambda values: torch.sparse_csr_tensor(A.crow_indices(), A.col_indices(), values, A.shape)
    edges = torch.stack([A.col_indices().long(), rows])
    forwards = {
        OURS: lambda values, B: spmm((edges, values, (A.shape[1], len(A))), B),
        "torch.sparse": lambda values, B: torch.sparse.mm(matrix(values), B),
        "gather, multiply, scatter": exact,
    }
    return training(f"spmm, {name}", (A.values(), B), upstream, exact, forwards)


@pytest.mark.parametrize("provider", [OURS, "torch.sparse", "gather, multiply, scatter"])
@pytest.mark.parametrize("name", GRAPHS)
def test_spmm(name: str, provider: str, measure: Measure) -> None:
    given = product(name)
    rows = len(given.upstream)
    if provider == "torch.sparse" and DEVICE == "cpu" and rows > MOST_ROWS:
        pytest.skip(f"torch's gradient of A is a dense matrix on a CPU, {rows} x {rows} here")
    measure(given.case, provider, lambda: given.call(provider))


@held
def linear(density: float) -> Training:
    layer = BlockSparseLinear(SIZE, SIZE, EDGE, density, bias=False, device=DEVICE, dtype=DTYPE)
    x, upstream = (torch.randn(SIZE, SIZE, device=DEVICE, dtype=DTYPE) for _ in range(2))
    dense = layer.to_dense().detach()
    exact = lambda x: x @ dense.to(x.dtype).T
    weight = dense.clone().requires_grad_()
    forwards: dict[str, Callable[..., Tensor]] = {OURS: layer, "dense": lambda x: nn.functional.linear(x, weight)}
    given = training(f"block-sparse linear, {density:.0%} of {SIZE} x {SIZE}", (x,), upstream, exact, forwards)
    return replace(given, weights={OURS: (layer.weight,), "dense": (weight,)})


@pytest.mark.parametrize("provider", [OURS, "dense"])
@pytest.mark.parametrize("density", DENSITIES)
def test_linear(density: float, provider: str, measure: Measure) -> None:
    given = linear(density)
    measure(given.case, provider, lambda: given.call(provider))


@held
def convolution() -> Training:
    name, load = next(iter(cloud_loaders().items()))
    points = voxels(load(), VOXEL, DEVICE)
    points = points - points.amin(0)
    indices = torch.cat([torch.zeros_like(points[:, :1]), points], 1).int()
    pairs = kernel_map(indices, (points.amax(0) + 1).tolist(), 1, kernel_size=3)
    triples = submanifold_map(points)
    taps = [triples[1:, triples[0] == tap] for tap in range(27)]
    In, upstream = (torch.randn(len(points), CHANNELS, device=DEVICE, dtype=DTYPE) for _ in range(2))
    Weight = torch.randn(CHANNELS, 3, 3, 3, CHANNELS, device=DEVICE, dtype=DTYPE) * CHANNELS**-0.5

    def tap_by_tap(In: Tensor, Weight: Tensor) -> Tensor:
        flat = Weight.flatten(1, 3).permute(1, 2, 0)
        Out = torch.zeros_like(In)
        for W, (source, target) in zip(flat, taps):
            Out = Out.index_add(0, target, In[source] @ W)
        return Out

    forwards = {OURS: lambda In, Weight: sparse_conv3d(In, Weight, pairs), "torch, one matmul a tap": tap_by_tap}
    return training(f"convolution, {name}, {CHANNELS} channels", (In, Weight), upstream, tap_by_tap, forwards)


@pytest.mark.parametrize("provider", [OURS, "torch, one matmul a tap"])
def test_convolution(provider: str, measure: Measure) -> None:
    given = convolution()
    measure(given.case, provider, lambda: given.call(provider))
