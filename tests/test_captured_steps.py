"""Whole training steps as CUDA graphs: forward, loss, backward and optimizer, for each family of layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import IS_THOROUGH
from torch import Tensor
from torch.nn.functional import mse_loss

from insum_ops import nn, spmm

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    SPARSE_WARNINGS,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # torch's own, of a graph's first part
]

WARM, REPLAYS = 3, 4
Inputs = tuple[Tensor, ...]  # the last one is what the output is compared with
CLOSE = dict(rtol=1e-3, atol=1e-4)  # of float32, after sums whose order differs from step to step


class Graph(torch.nn.Module):
    """Features spread along a graph whose weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        A = torch.randn(300, 300, device="cuda") * (torch.rand(300, 300, device="cuda") < 0.05) / 4
        self.spmm = nn.SpMM(A.to_sparse(), True)
        self.first, self.last = torch.nn.Linear(24, 32), torch.nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spmm(self.first(x)).relu())


class Blocks(torch.nn.Sequential):
    """A perceptron of block-sparse layers."""

    def __init__(self) -> None:
        layers = [nn.BlockSparseLinear(128, 128, 16, 0.3), torch.nn.GELU(), nn.BlockSparseLinear(128, 64, 16, 0.5)]
        super().__init__(*layers)


class Voxels(torch.nn.Module):
    """Convolutions at two resolutions of one cloud."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.nn.functional.pad((torch.rand(12, 12, 12, device="cuda") < 0.2).nonzero().int(), (1, 0))
        self.cloud = nn.SparseConvTensor(torch.zeros(len(places), 8, device="cuda"), places, [12, 12, 12], 1)
        self.layers = nn.SparseSequential(
            nn.SubMConv3d(8, 16, 3),
            torch.nn.ReLU(),
            nn.SparseConv3d(16, 24, 2, 2, indice_key="down"),
            torch.nn.ReLU(),
            nn.SubMConv3d(24, 24, 3),
            nn.SparseInverseConv3d(24, 16, 2, "down"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.cloud.replace_feature(x)).features


class Products(torch.nn.Module):
    """A fully connected tensor product of irreps."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.FullyConnectedTensorProduct("8x0e+8x1o", "1x0e+1x1o", "8x0e+8x1o")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.product(x, y)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.nn.Module], Inputs]]] = {
    "SpMM": (Graph, lambda model: (_random(300, 24), _random(300, 8))),
    "BlockSparseLinear": (Blocks, lambda model: (_random(200, 128), _random(200, 64))),
    "convolutions": (
        Voxels,
        lambda model: (_random(len(model.cloud.features), 8), _random(len(model.cloud.features), 16)),
    ),
    "FullyConnectedTensorProduct": (Products, lambda model: (_random(250, 32), _random(250, 4), _random(250, 32))),
}
OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-2, capturable=True),
}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: Inputs) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    *inputs, target = given
    loss = mse_loss(model(*inputs), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _ordinary(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Inputs]) -> list[float]:
    return [float(_step(model, optimizer, batch)) for batch in batches]


def _captured(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Inputs]) -> list[float]:
    """Steps by torch's recipe: the first on a side stream, one into a graph, and replays of it with new numbers."""
    given, losses = tuple(tensor.clone() for tensor in batches[0]), []

    def fill(batch: Inputs) -> None:
        for tensor, new in zip(given, batch):
            tensor.copy_(new)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches[:WARM]:
            fill(batch)
            losses.append(float(_step(model, optimizer, given)))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = _step(model, optimizer, given)
    for batch in batches[WARM:]:
        fill(batch)
        graph.replay()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("name", list(MODELS))
def test_a_captured_step_trains_as_ordinary_ones(name, optimizer, is_tuned, monkeypatch, tmp_path):
    monkeypatch.setenv("INSUM_TUNE", "default" if is_tuned else "off")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    make, draw = MODELS[name]
    found = []
    for train in (_ordinary, _captured):
        torch.manual_seed(0)
        model = make().cuda()
        batches = [draw(model) for _ in range(WARM + REPLAYS)]
        losses = train(model, OPTIMIZERS[optimizer](model), batches)
        found.append((losses, [parameter.detach() for parameter in model.parameters()]))
    (losses, parameters), (captured_losses, captured_parameters) = found
    torch.testing.assert_close(captured_losses, losses, **CLOSE)
    assert len(set(losses)) == len(losses)  # each step had numbers of its own
    for parameter, expected in zip(captured_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch.compile's advice, once a process
@pytest.mark.skipif(not IS_THOROUGH, reason="half a minute")
@pytest.mark.parametrize("name", [name for name in MODELS if "CSR" not in name])  # torch.compile takes no CSR tensor
def test_steps_compiled_into_cuda_graphs_train_as_ordinary_ones(name, monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    make, draw = MODELS[name]
    found = []
    for mode in (None, "reduce-overhead"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = make().cuda()
        batches = [draw(model) for _ in range(WARM + REPLAYS)]
        called = model if mode is None else torch.compile(model, fullgraph=True, mode=mode)
        optimizer = OPTIMIZERS["SGD"](model)
        losses = []
        for batch in batches:
            torch.compiler.cudagraph_mark_step_begin()
            losses.append(float(_step(called, optimizer, batch)))
        found.append((losses, [parameter.detach() for parameter in model.parameters()]))
    (losses, parameters), (compiled_losses, compiled_parameters) = found
    torch.testing.assert_close(compiled_losses, losses, **CLOSE)
    for parameter, expected in zip(compiled_parameters, parameters, strict=True):
        torch.testing.assert_close(parameter, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch.compile's advice, once a process
@pytest.mark.skipif(not IS_THOROUGH, reason="compiles for some seconds")
def test_coordinates_outside_a_module_may_change_between_replays_of_a_compiled_step():
    run = torch.compile(lambda x, weight, edges: spmm((edges, weight, (30, 20)), x), mode="reduce-overhead")
    for seed in range(5):
        torch.manual_seed(seed)
        torch.compiler.cudagraph_mark_step_begin()
        x, weight = _random(30, 8).requires_grad_(), _random(90).requires_grad_()
        edges = torch.stack([torch.randint(30, (90,), device="cuda"), torch.randint(20, (90,), device="cuda")])
        dense = torch.zeros(20, 30, device="cuda").index_put((edges[1], edges[0]), weight, accumulate=True)
        expected = torch.autograd.grad((dense @ x).square().sum(), [x, weight])
        actual = torch.autograd.grad(run(x, weight, edges).square().sum(), [x, weight])
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other, **CLOSE)
