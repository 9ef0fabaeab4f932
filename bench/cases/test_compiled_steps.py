"""Training steps of each family of layers, ordinary and by torch.compile: forward, loss, backward and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from insum_ops import insum
from insum_ops import nn as layers

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..equivariant import natural
from ..generate import room
from ..inputs import voxels

pytestmark = pytest.mark.alone
COMPILED = f"{OURS}, compiled"
GRAPHS = f"{OURS}, compiled, CUDA graphs"  # mode="reduce-overhead": the kernels of a pass are launched at once
PROVIDERS = on((OURS, COMPILED, GRAPHS), (OURS, COMPILED))
# On a GPU the device holds a large step up for milliseconds, and the host a small one: what a compiled call costs
# beside its kernels is all that the latter shows. One of middle size takes the host about as long as the device.
SIZES = on(("large", "middle", "small"), ("small",))


class Graph(nn.Module):
    """Two layers that spread features along a graph."""

    def __init__(self, nodes: int, features: int) -> None:
        super().__init__()
        place = torch.randint(nodes, (2, 16 * nodes))
        A = torch.sparse_coo_tensor(place, torch.rand(16 * nodes) / 16, (nodes, nodes)).coalesce()
        self.spmm = layers.SpMM(A)
        self.first, self.last = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.spmm(self.last(self.spmm(self.first(x)).tanh()))  # type: ignore[no-any-return]


class Voxels(nn.Module):
    """Convolutions at two resolutions of one cloud, whose maps are made once."""

    def __init__(self, size: float, channels: int) -> None:
        super().__init__()
        place = voxels(room(), size, "cpu")
        place -= place.amin(0)
        self.cloud: Any = None
        self.place = nn.functional.pad(place.int(), (1, 0))
        self.shape = [int(length) // 2 * 2 + 2 for length in place.amax(0)]
        self.layers = layers.SparseSequential(
            layers.SubMConv3d(channels, channels, 3),
            nn.Tanh(),
            layers.SparseConv3d(channels, 2 * channels, 2, 2, indice_key="down"),
            nn.Tanh(),
            layers.SubMConv3d(2 * channels, 2 * channels, 3),
            nn.Tanh(),
            layers.SparseInverseConv3d(2 * channels, channels, 2, "down"),
        )

    def to_device(self, dtype: torch.dtype) -> None:
        features = torch.zeros(len(self.place), 1, device=DEVICE, dtype=dtype)
        self.cloud = layers.SparseConvTensor(features, self.place.to(DEVICE), self.shape, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.cloud.replace_feature(x)).features  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """A model, its inputs and what its output is compared with."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor

    def losses(self, model: nn.Module, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        inputs, target = [x if dtype is None else x.to(dtype) for x in self.inputs], self.target
        target = target if dtype is None else target.to(dtype)
        # not the mean over all numbers, nor over all rows: of those the gradients would vanish in float16
        value = (lambda: model(*inputs).float()) if dtype is None else (lambda: model(*inputs))
        return lambda: mse_loss(value(), target, reduction="sum") / len(target) ** 0.5

    def gradients(self, model: nn.Module, losses: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        model.zero_grad()
        loss = losses()
        loss.backward()
        found = [parameter.grad for parameter in model.parameters()]
        return loss.detach(), *[grad for grad in found if grad is not None]

    def case(self) -> Case:
        double = copy.deepcopy(self.model).double()
        if isinstance(double, Voxels):
            double.to_device(torch.float64)
        expected = self.gradients(double, self.losses(double, torch.float64))
        dtype = next(self.model.parameters()).dtype
        return Case("compiled_steps", self.name, expected, 4 * LIMIT[dtype], facts={"series": self.name.split(",")[0]})

    def call(self, provider: str) -> Call:
        model = copy.deepcopy(self.model)
        before = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        losses = self.losses(model)
        if provider != OURS:
            torch._dynamo.reset()
            losses = torch.compile(losses, fullgraph=True, mode="reduce-overhead" if provider == GRAPHS else None)

        def step() -> Tensor:
            if provider == GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss = losses()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def result() -> tuple[Tensor, ...]:
            model.load_state_dict(before)
            return self.gradients(model, losses)

        return Call(step, result=result, is_capturable=False)


def spmm(size: str) -> Training:
    nodes, features = {"large": (400_000, 128), "middle": (50_000, 128), "small": (500, 16)}[size]
    model = Graph(nodes, features).to(DEVICE)
    x, target = (torch.randn(nodes, features, device=DEVICE) for _ in range(2))
    return Training("SpMM", model, (x,), target)


def linear(size: str) -> Training:
    width, tokens = {"large": (2048, 16_384), "middle": (1024, 8192), "small": (64, 64)}[size]
    dtype = on(torch.float16, torch.float32)
    first = layers.BlockSparseLinear(width, 4 * width, 32, 0.2)
    model = nn.Sequential(first, nn.GELU(), layers.BlockSparseLinear(4 * width, width, 32, 0.2)).to(DEVICE, dtype)
    x, target = (torch.randn(tokens, width, device=DEVICE) for _ in range(2))
    return Training("BlockSparseLinear", model, (x.to(dtype),), target)


def convolutions(size: str) -> Training:
    edge, channels = {"large": (0.025, 128), "middle": (0.05, 64), "small": (0.5, 8)}[size]
    dtype = on(torch.float16, torch.float32)
    model = Voxels(edge, channels).to(DEVICE, dtype)
    model.to_device(dtype)
    x = torch.randn(len(model.place), channels, device=DEVICE, dtype=dtype)
    return Training("convolutions", model, (x,), torch.randn(x.shape, device=DEVICE))


def product(size: str) -> Training:
    lmax, channels, batch = {"large": (2, 64, 60_000), "middle": (2, 32, 10_000), "small": (1, 4, 100)}[size]
    irreps = natural(lmax, channels)
    model = layers.FullyConnectedTensorProduct(irreps, natural(lmax, 1), irreps).to(DEVICE)
    x, y = (torch.randn(batch, width * (lmax + 1) ** 2, device=DEVICE) for width in (channels, 1))
    return Training("FullyConnectedTensorProduct", model, (x, y), torch.randn_like(x))


class Messages(nn.Module):
    """A tensor product along edges, with the weights of each edge computed from its length."""

    def __init__(self, lmax: int, channels: int, nodes: int, degree: int) -> None:
        super().__init__()
        irreps = natural(lmax, channels)
        self.product = layers.FullyConnectedTensorProduct(
            irreps, natural(lmax, 1), irreps, internal_weights=False, shared_weights=False
        )
        self.weights = nn.Linear(8, self.product.weight_numel)
        edges = degree * nodes
        self.register_buffer("src", torch.randint(nodes, (edges,)))
        self.register_buffer("dst", torch.randint(nodes, (edges,)).sort().values)

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        return self.product(x, y, self.weights(lengths), src=self.src, dst=self.dst, num_nodes=x.shape[0])  # type: ignore[no-any-return]


def edges(size: str) -> Training:
    lmax, channels, nodes, degree = {"large": (2, 32, 2_000, 16), "middle": (2, 16, 1_000, 16), "small": (1, 4, 20, 4)}[
        size
    ]
    model = Messages(lmax, channels, nodes, degree).to(DEVICE)
    x, target = (torch.randn(nodes, channels * (lmax + 1) ** 2, device=DEVICE) for _ in range(2))
    y, lengths = (torch.randn(degree * nodes, width, device=DEVICE) for width in ((lmax + 1) ** 2, 8))
    return Training("products along edges", model, (x, y, lengths), target)


class Statement(nn.Module):
    """Rows gathered, weighted by edge and channel, and added up, as one statement that learns all of its factors."""

    def __init__(self, rows: int, features: int, degree: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(degree * rows, features) / degree)
        self.rows = nn.Parameter(torch.randn(rows, features))
        for name in ("AM", "AK"):
            self.register_buffer(name, torch.randint(rows, (degree * rows,)).sort().values)

    def forward(self, x: Tensor) -> Tensor:
        B, size = self.rows * x, tuple(x.shape)
        return insum("C[AM[p],n] += AV[p,n] * B[AK[p],n]", AM=self.AM, AV=self.weight, AK=self.AK, B=B, size=size)


def statement(size: str) -> Training:
    rows, features, degree = {"large": (100_000, 64, 16), "middle": (20_000, 64, 16), "small": (100, 16, 4)}[size]
    x, target = (torch.randn(rows, features, device=DEVICE) for _ in range(2))
    return Training("one statement", Statement(rows, features, degree).to(DEVICE), (x,), target)


class Scaled(nn.Module):
    """Rows times x: of torch what `Statement` has beside its statement."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, features))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows * x


def scaled(size: str) -> Training:
    """Nothing of ours, and next to nothing to fuse: what a step costs that torch.compile can't make faster."""
    rows, features = {"large": (1_000_000, 64), "middle": (20_000, 64), "small": (100, 16)}[size]
    x, target = (torch.randn(rows, features, device=DEVICE) for _ in range(2))
    return Training("a product of torch", Scaled(rows, features).to(DEVICE), (x,), target)


def dense(size: str) -> Training:
    """Nothing of ours: what torch.compile does to a step by itself."""
    width, tokens = {"large": (2048, 16_384), "middle": (1024, 8192), "small": (64, 64)}[size]
    dtype = on(torch.float16, torch.float32)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(DEVICE, dtype)
    x, target = (torch.randn(tokens, width, device=DEVICE) for _ in range(2))
    return Training("nn.Linear of torch", model, (x.to(dtype),), target)


TRAININGS = {make.__name__: make for make in (spmm, linear, convolutions, product, edges, statement, scaled, dense)}


@held
def training(name: str, size: str) -> tuple[Training, Case]:
    given = TRAININGS[name](size)
    given = Training(f"{given.name}, {size}", given.model, given.inputs, given.target)
    return given, given.case()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own, while it traces an autograd.Function
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(TRAININGS))
def test_compiled_step(name: str, size: str, provider: str, measure: Measure) -> None:
    given, case = training(name, size)
    measure(case, provider, lambda: given.call(provider))
