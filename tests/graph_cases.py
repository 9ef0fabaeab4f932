"""What tests/distributed/test_graphs.py runs on several ranks: products with, and training over, a split matrix."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from dtensor_cases import message
from tolerances import TOLERANCE
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from insum_ops.distributed import SplitSpMM, graph_cost, rows

STEPS, NODES, WIDTH = 4, 203, 5


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "gcn_on_ranks.py"
    spec = importlib.util.spec_from_file_location("gcn_on_ranks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counter:
    """Counts what `all_to_all_single` takes to other ranks, in bytes."""

    def __init__(self) -> None:
        self.bytes, self.inner = 0, rows.all_to_all_single
        self.buffers: list[int] = []  # of each exchange: what it takes and what it brings

    def __call__(self, sent: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        own = sends[distributed.get_rank()]
        self.bytes += (len(sent) - own) * sent[:1].numel() * sent.element_size()
        received = self.inner(sent, receives, sends, group)
        self.buffers.append(sent.nbytes + received.nbytes)
        return received

    def __enter__(self) -> Counter:
        rows.all_to_all_single = self
        return self

    def __exit__(self, *_: object) -> None:
        rows.all_to_all_single = self.inner


def split_layer(partition: str) -> tuple[SplitSpMM, Tensor, Tensor, Tensor]:
    gcn, ranks = example(), distributed.get_world_size()
    A, X, labels = gcn.community_graph(NODES, 6)
    owner = gcn.owners(NODES, ranks, partition)
    return SplitSpMM.from_graph(A.double(), owner, init_device_mesh("cpu", (ranks,))), A.double(), X, labels


def bound(A: Tensor, owner: Tensor, rank: int) -> int:
    """The rows that a rank can't do without, by looking at each entry."""
    pairs = {(int(owner[m]), int(k)) for m, k in A.indices().T.tolist() if owner[m] != owner[k]}
    return sum(reader == rank for reader, _ in pairs)


def products_equal_the_whole_one() -> dict[str, list[int]]:
    found = {}
    for partition in ("good", "random"):
        layer, A, *_ = split_layer(partition)
        B = torch.randn(NODES, WIDTH, dtype=torch.float64)
        upstream = torch.randn(NODES, WIDTH, dtype=torch.float64)
        own = B[layer.nodes].requires_grad_()
        with Counter() as counter:
            C = layer(own)
            (grad,) = torch.autograd.grad(C, own, upstream[layer.nodes], create_graph=True)
        dense = A.to_dense()
        torch.testing.assert_close(C, (dense @ B)[layer.nodes], **TOLERANCE[torch.float64])
        torch.testing.assert_close(grad, (dense.T @ upstream)[layer.nodes], **TOLERANCE[torch.float64])
        owner = example().owners(NODES, distributed.get_world_size(), partition)
        needed = bound(A, owner, distributed.get_rank())
        assert layer.rows_received == needed
        assert layer.own.A.nnz + layer.remote.A.nnz == int((owner[A.indices()[0]] == distributed.get_rank()).sum())
        formats, counts = (layer.own.A, layer.remote.A), (layer.rows, layer.rows_received, layer.rows_sent)
        entries = sum(form.values.numel() for form in formats)
        groups = sum(form.num_groups for form in formats)
        cost = graph_cost(*counts, entries, [WIDTH], groups=groups, itemsize=8)
        held = sum(part.nbytes for form in formats for part in (*form.coords, form.values)) + layer.send.nbytes
        assert cost.memory == held + own.nbytes + C.nbytes + counter.buffers[0]
        assert cost.bytes_sent == counter.bytes
        found[partition] = [counter.bytes, layer.rows_sent, layer.rows_received]
    return found


def gradients_of_gradients() -> None:
    layer, *_ = split_layer("random")
    x = torch.randn(layer.rows, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(layer.rows, 2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x.square()), x, y, create_graph=True)
    (again,) = torch.autograd.grad((grad * grad).sum(), y)  # d/dy |2x A^T y|^2 = 2 A (4 x^2 A^T y)
    with torch.no_grad():
        back = rows._Product.apply(y, layer, True)
        torch.testing.assert_close(again, layer(8 * x.square() * back))


class Whole(torch.nn.Module):
    def __init__(self, dense: Tensor) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, B: Tensor) -> Tensor:
        return self.dense @ B


def losses() -> dict[str, list[float]]:
    """Of the split network, with all parameters as on one rank, for two partitions; and of the whole one."""
    gcn, ranks, found = example(), distributed.get_world_size(), {}
    for partition in ("good", "random", "whole"):
        layer, A, X, labels = split_layer("good" if partition == "whole" else partition)
        nodes = torch.arange(NODES) if partition == "whole" else layer.nodes
        torch.manual_seed(0)
        model = gcn.GCN(Whole(A.to_dense()) if partition == "whole" else layer).double()
        X, labels = X.double()[nodes], labels[nodes]
        optimizer, found[partition] = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(model(X), labels, reduction="sum") / NODES
            loss.backward()
            total = loss.detach().clone()
            if partition != "whole":
                distributed.all_reduce(total)
                for parameter in model.parameters():
                    distributed.all_reduce(parameter.grad)
            optimizer.step()
            found[partition].append(float(total))
    assert ranks > 1
    return found


def the_example_learns() -> list[Tensor]:
    options = {"device": "cpu", "nodes": 120, "steps": 12}
    return [
        torch.tensor(example().train(Namespace(partition=partition, **options))) for partition in ("good", "random")
    ]


def mistakes() -> dict[str, str]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    A = torch.eye(8).to_sparse()
    owner = torch.arange(8) % ranks
    return {
        "owners that differ": message(lambda: SplitSpMM.from_graph(A, (owner + (rank == 1)) % ranks, mesh)),
        "a rank that is not there": message(lambda: SplitSpMM.from_graph(A, owner + 1, mesh)),
        "columns": message(lambda: SplitSpMM(torch.ones(2, 8 if rank else 7).to_sparse(), mesh)),
        "two dimensions": message(lambda: SplitSpMM(A, init_device_mesh("cpu", (1, ranks)))),
        "a length": message(lambda: SplitSpMM.from_graph(A, owner[1:], mesh)),
        "rows of B": message(lambda: SplitSpMM(torch.ones(2, 2 * ranks).to_sparse(), mesh)(torch.ones(3, 1))),
    }


NAMES = ["products_equal_the_whole_one", "gradients_of_gradients", "losses", "the_example_learns", "mistakes"]
