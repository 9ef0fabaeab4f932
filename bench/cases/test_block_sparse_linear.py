"""BlockSparseLinear on as many tokens as features beside nn.Linear and TorchBSR: forward, and forward with backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from insum_ops.nn import BlockSparseLinear

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..harness import peak_mib
from ..peers import torch_bsr

DENSE = "dense"
SIZE = on(4096, 512)
DENSITIES = on((1.0, 0.5, 0.3, 0.1, 0.05, 0.01), (0.5, 0.1))
KINDS = on(list(product((torch.float16, torch.bfloat16), (32, 64, 128))), [(torch.float32, 32)])


@dataclass(frozen=True)
class Operands:
    name: str
    layer: BlockSparseLinear
    twin: nn.Linear
    x: Tensor
    upstream: Tensor
    facts: dict[str, float | int | str]

    def stored(self, weight: Tensor) -> Tensor:
        """The blocks of a dense weight, or of its gradient, that the layer stores: [blocks, edge, edge]."""
        height, width = self.layer.block_size
        rows, columns = self.layer.coords.long()
        blocks: Tensor = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2)
        return blocks[rows, columns]


@held
def operands(dtype: torch.dtype, edge: int, density: float) -> Operands:
    layer = BlockSparseLinear(SIZE, SIZE, edge, density, device=DEVICE, dtype=dtype)
    x = torch.randn(SIZE, SIZE, device=DEVICE, dtype=dtype, requires_grad=True)
    upstream = torch.randn(SIZE, SIZE, device=DEVICE, dtype=dtype)
    name = f"{str(dtype)[6:]}, {edge}x{edge}, {density:.0%} dense"
    series = f"{edge}x{edge}" if dtype == KINDS[0][0] else f"{edge}x{edge}, {str(dtype)[6:]}"
    facts: dict[str, float | int | str] = {"series": series, "size": SIZE, "dtype": str(dtype)[6:]}
    return Operands(name, layer, layer.to_linear(), x, upstream, facts)


@held
def forward_case(dtype: torch.dtype, edge: int, density: float) -> Case:
    given = operands(dtype, edge, density)
    twin = given.twin
    with torch.no_grad():
        expected = nn.functional.linear(given.x.double(), twin.weight.double(), twin.bias.double())
    traffic = float(dtype.itemsize * (given.layer.weight.numel() + 2 * SIZE * SIZE))
    flops = 2.0 * given.layer.weight.numel() * SIZE
    return Case("linear", given.name, expected, LIMIT[dtype], density, flops, traffic, given.facts)


def forward(provider: str, given: Operands, edge: int) -> Call:
    x = given.x.detach()
    if provider == "TorchBSR":
        bsr = torch_bsr(given.twin.weight.detach(), x.T, edge)  # W @ x.T; it has no bias
        bias = given.twin.bias.detach()
        return Call(bsr.run, result=lambda: bsr.run().T + bias, facts=bsr.facts)  # type: ignore[attr-defined]
    layer = given.layer if provider == OURS else given.twin

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x)  # type: ignore[no-any-return]

    return Call(run)


@pytest.mark.parametrize("provider", [OURS, DENSE, "TorchBSR"])
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("dtype", "edge"), KINDS)
def test_forward(dtype: torch.dtype, edge: int, density: float, provider: str, measure: Measure) -> None:
    given = operands(dtype, edge, density)
    measure(forward_case(dtype, edge, density), provider, lambda: forward(provider, given, edge))


@held
def training_case(dtype: torch.dtype, edge: int, density: float) -> Case:
    """The gradients of x, of the stored blocks and of the bias."""
    given = operands(dtype, edge, density)
    upstream, x, weight = (own.detach().double() for own in (given.upstream, given.x, given.twin.weight))
    expected = upstream @ weight, given.stored(upstream.T @ x), upstream.sum(0)
    return Case("linear_training", given.name, expected, LIMIT[dtype], density, facts=given.facts)


def training(provider: str, given: Operands) -> Call:
    """The gradients of x, weight and bias."""
    layer = given.layer if provider == OURS else given.twin
    leaves = [own for own in (given.x, layer.weight, layer.bias) if own is not None]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(given.x), leaves, given.upstream)

    def result() -> tuple[Tensor, ...]:
        dx, dweight, dbias = run()
        return dx, dweight if provider == OURS else given.stored(dweight), dbias

    facts = {"peak MiB": round(peak_mib(run))} if DEVICE == "cuda" else {}
    return Call(run, result=result, facts=facts)


@pytest.mark.parametrize("provider", [OURS, DENSE])
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("dtype", "edge"), KINDS)
def test_training(dtype: torch.dtype, edge: int, density: float, provider: str, measure: Measure) -> None:
    given = operands(dtype, edge, density)
    measure(training_case(dtype, edge, density), provider, lambda: training(provider, given))
