"""Forward and backward, gradients checked in float64: SpMM, convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_ops import nn as layers
from insum_ops import spmm

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..convolutions import (
    LOADERS,
    OFTEN,
    PLAIN,
    SPCONV,
    Scene,
    centimetres,
    fastest,
    new_layer,
    new_tensor,
    scene,
    weight_for,
    with_map,
)
from ..inputs import csr, graph_loaders

DTYPE = on(torch.float16, torch.float32)
GRAPHS = graph_loaders(is_small=DEVICE == "cpu")
COLUMNS = on(128, 32)
MOST_ROWS = 5_000
SEPARATE = "gather, multiply, scatter"
PLAIN_CHANNELS = on(64, 16)
# channels, by the size of a voxel in metres
CHANNELS: dict[float, tuple[int, ...]] = on({0.05: (16, 32, 64, 128, 256), 0.02: (32, 128)}, {0.25: (16,)})


@dataclass(frozen=True)
class Product:
    """spmm whose result is the gradients of A's values and of B."""

    case: Case
    A: Tensor  # CSR
    rows: Tensor  # of every entry
    B: Tensor
    upstream: Tensor

    def call(self, provider: str) -> Call:
        if provider == SEPARATE:
            values, B = (leaf.clone().requires_grad_() for leaf in (self.A.values(), self.B))
            run = lambda: torch.autograd.grad(separate(self.A, self.rows, values, B), (values, B), self.upstream)
            return Call(run)
        multiply = spmm if provider == OURS else torch.sparse.mm
        A, B = self.A.clone().requires_grad_(), self.B.clone().requires_grad_()

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(multiply(A, B), (A, B), self.upstream)

        def result() -> tuple[Tensor, ...]:
            dA, dB = gradients()
            return dA.values(), dB

        return Call(gradients, result=result)


def separate(A: Tensor, rows: Tensor, values: Tensor, B: Tensor) -> Tensor:
    """Gather, multiply and scatter-add, as one writes it without a library."""
    products = B[A.col_indices().long()] * values[:, None]
    return torch.zeros(len(A), B.shape[1], device=B.device, dtype=B.dtype).index_add(0, rows, products)


@held
def product(name: str) -> Product:
    A = csr(GRAPHS[name](), DEVICE)
    B = torch.randn(A.shape[1], COLUMNS, device=DEVICE)
    upstream = torch.randn(len(A), COLUMNS, device=DEVICE)
    rows = torch.repeat_interleave(torch.arange(len(A), device=DEVICE), A.crow_indices().diff())
    doubles = A.values().double().requires_grad_(), B.double().requires_grad_()
    expected = torch.autograd.grad(separate(A, rows, *doubles), doubles, upstream.double())
    case = Case("backward", f"spmm, {name}", expected, 4 * LIMIT[torch.float32], facts={"series": "spmm"})
    return Product(case, A, rows, B, upstream)


@pytest.mark.parametrize("provider", [OURS, "torch.sparse", SEPARATE])
@pytest.mark.parametrize("name", GRAPHS)
def test_spmm(name: str, provider: str, measure: Measure) -> None:
    given = product(name)
    rows = len(given.upstream)
    if provider == "torch.sparse" and DEVICE == "cpu" and rows > MOST_ROWS:
        pytest.skip(f"torch's gradient of A is a dense matrix on a CPU, {rows} x {rows} here")
    measure(given.case, provider, lambda: given.call(provider))


@dataclass(frozen=True)
class Convolution:
    case: Case
    scene: Scene
    In: Tensor
    Weight: Tensor
    upstream: Tensor

    def call(self, provider: str) -> Call:
        if provider == SPCONV:
            return fastest(lambda spconv, algorithm: self.layer_call(spconv, algo=algorithm))
        return self.tap_by_tap() if provider == PLAIN else self.layer_call(layers)

    def layer_call(self, library: Any, **options: object) -> Call:
        """A layer that trains on a cloud whose map it has; ours can be captured."""
        In, layer = self.In.clone().requires_grad_(), new_layer(library, self.Weight, **options)
        x = with_map(layer, new_tensor(library, self.scene, In))
        call = self.gradients(lambda: layer(x).features, In, layer.weight)
        for _ in range(OFTEN):
            call.run()
        return call

    def tap_by_tap(self) -> Call:
        In, Weight = (given.clone().requires_grad_() for given in (self.In, self.Weight))

        def forward() -> Tensor:
            Out = torch.zeros_like(In)
            for matrix, (source, target) in zip(Weight.flatten(1, 3).permute(1, 2, 0), self.scene.by_tap):
                Out = Out.index_add(0, target, In[source] @ matrix)
            return Out

        return self.gradients(forward, In, Weight)

    def gradients(self, forward: Callable[[], Tensor], In: Tensor, Weight: Tensor) -> Call:
        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), (In, Weight), self.upstream)

        def result() -> tuple[Tensor, ...]:
            dIn, dWeight = run()
            return dIn[self.scene.rows], dWeight

        return Call(run, result=result)


@held
def convolution(name: str, size: float, channels: int) -> Convolution:
    given = scene(name, size)
    In, upstream = (given.features(channels, DTYPE) for _ in range(2))
    Weight = weight_for(channels, DTYPE)
    expected = given.gradients(In, Weight, upstream)
    facts: dict[str, float | int | str] = {"series": "convolution", "voxels": len(In), "pairs": given.pairs}
    words = f"convolution, {name}, {centimetres(size)}, {channels} channels"
    case = Case("backward", words, expected, 4 * LIMIT[DTYPE], flops=6.0 * given.pairs * channels**2, facts=facts)
    return Convolution(case, given, In, Weight, upstream)


def convolutions() -> Iterator[Any]:
    first, largest = next(iter(LOADERS)), max(CHANNELS)
    for name, size in [(name, size) for name in LOADERS for size in CHANNELS]:
        for channels in CHANNELS[size]:
            with_plain = (name, size, channels) == (first, largest, PLAIN_CHANNELS)
            for provider in (OURS, SPCONV, *([PLAIN] if with_plain else [])):
                words = (name, centimetres(size), channels, provider)
                yield pytest.param(name, size, channels, provider, id="-".join(map(str, words)))


@pytest.mark.parametrize(("name", "size", "channels", "provider"), list(convolutions()))
def test_convolution(name: str, size: float, channels: int, provider: str, measure: Measure) -> None:
    given = convolution(name, size, channels)
    measure(given.case, provider, lambda: given.call(provider))
