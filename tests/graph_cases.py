"""What tests/distributed/test_graphs.py runs on several ranks: products with, and training over, a split matrix."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from dtensor_cases import message
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from insum_ops.distributed import SplitSpMM, graph_cost, load_whole_state_dict, rows

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


def split_layer(partition: str, trainable: bool = False) -> tuple[SplitSpMM, Tensor, Tensor, Tensor]:
    gcn, ranks = example(), distributed.get_world_size()
    A, X, labels = (part.to(device()) for part in gcn.community_graph(NODES, 6))
    owner, mesh = gcn.owners(NODES, ranks, partition).to(device()), init_device_mesh(device(), (ranks,))
    return SplitSpMM.from_graph(A.double(), owner, mesh, trainable=trainable), A.double(), X, labels


def bound(A: Tensor, owner: Tensor, rank: int) -> int:
    """The rows that a rank can't do without, by looking at each entry."""
    pairs = {(int(owner[m]), int(k)) for m, k in A.indices().T.tolist() if owner[m] != owner[k]}
    return sum(reader == rank for reader, _ in pairs)


def products_equal_the_whole_one() -> dict[str, list[int]]:
    found = {}
    for partition in ("good", "random"):
        layer, A, *_ = split_layer(partition)
        B = torch.randn(NODES, WIDTH, dtype=torch.float64, device=device())
        upstream = torch.randn(NODES, WIDTH, dtype=torch.float64, device=device())
        own = B[layer.nodes].requires_grad_()
        with Counter() as counter:
            C = layer(own)
            (grad,) = torch.autograd.grad(C, own, upstream[layer.nodes], create_graph=True)
        dense = A.to_dense()
        torch.testing.assert_close(C, (dense @ B)[layer.nodes], **TOLERANCE[torch.float64])
        torch.testing.assert_close(grad, (dense.T @ upstream)[layer.nodes], **TOLERANCE[torch.float64])
        owner = example().owners(NODES, distributed.get_world_size(), partition).to(device())
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
    x = torch.randn(layer.rows, 2, dtype=torch.float64, device=device(), requires_grad=True)
    y = torch.randn(layer.rows, 2, dtype=torch.float64, device=device(), requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x.square()), x, y, create_graph=True)
    (again,) = torch.autograd.grad((grad * grad).sum(), y)  # d/dy |2x A^T y|^2 = 2 A (4 x^2 A^T y)
    with torch.no_grad():
        back = rows._Product.apply(y, None, layer, True)
        torch.testing.assert_close(again, layer(8 * x.square() * back))


class Whole(torch.nn.Module):
    def __init__(self, dense: Tensor) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, B: Tensor) -> Tensor:
        return self.dense @ B


def losses() -> dict[str, list[float]]:
    """Of the split network, with all parameters as on one rank, for two partitions; and of the whole one."""
    gcn, found = example(), {}
    for partition in ("good", "random", "whole"):
        layer, A, X, labels = split_layer("good" if partition == "whole" else partition)
        nodes = torch.arange(NODES, device=device()) if partition == "whole" else layer.nodes
        torch.manual_seed(0)
        model = gcn.GCN(Whole(A.to_dense()) if partition == "whole" else layer).double().to(device())
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
    return found


def the_example_learns() -> list[Tensor]:
    options = {"device": device(), "nodes": 120, "steps": 12}
    return [
        torch.tensor(example().train(Namespace(partition=partition, **options))) for partition in ("good", "random")
    ]


def trained_values_equal_the_whole() -> None:
    """Values and their gradients of two products in a row, gradients of gradients, and steps of Adam."""
    for partition in ("good", "random"):
        gcn, ranks = example(), distributed.get_world_size()
        A = gcn.community_graph(NODES, 6)[0].double().to(device())
        owner = gcn.owners(NODES, ranks, partition).to(device())
        layer = SplitSpMM.from_graph(A, owner, init_device_mesh(device(), (ranks,)), trainable=True)
        assert not list(layer.parameters())
        (m, k), own = A.indices(), owner[A.indices()[0]] == distributed.get_rank()
        dense = A.to_dense().requires_grad_()
        B, upstream = (torch.randn(NODES, WIDTH, dtype=torch.float64, device=device()) for _ in range(2))
        rows = B[layer.nodes].requires_grad_()
        B.requires_grad_()
        optimizers = [torch.optim.Adam([values], lr=0.1) for values in (layer.values, dense)]
        for _ in range(2):
            C, expected = layer(layer(rows).tanh()), dense @ (dense @ B).tanh()
            torch.testing.assert_close(C, expected[layer.nodes], **TOLERANCE[torch.float64])
            grads = torch.autograd.grad(C, [rows, layer.values], upstream[layer.nodes], create_graph=True)
            whole = torch.autograd.grad(expected, [B, dense], upstream, create_graph=True)
            again = torch.autograd.grad(grads[0].square().sum() + grads[1].square().sum(), [rows, layer.values])
            at_entries = torch.zeros_like(dense)
            at_entries[m, k] = 1
            whole_again = torch.autograd.grad(
                whole[0].square().sum() + (whole[1] * at_entries).square().sum(), [B, dense]
            )
            m_own, k_own = layer.graph_entries
            for found, reference in zip((grads, again), (whole, whole_again)):
                torch.testing.assert_close(found[0], reference[0][layer.nodes], **TOLERANCE[torch.float64])
                torch.testing.assert_close(found[1], reference[1][m_own, k_own], **TOLERANCE[torch.float64])
            layer.values.grad, dense.grad = grads[1].detach(), (whole[1] * at_entries).detach()
            for optimizer in optimizers:
                optimizer.step()
        assert len(m_own) == int(own.sum())


def values_are_trained_under_autocast() -> None:
    """And where a rank has a single row of A, as all have."""
    ranks = distributed.get_world_size()
    A = torch.ones(1, 2 * ranks, device=device()).to_sparse()
    layer = SplitSpMM(A, init_device_mesh(device(), (ranks,)), rows=2, trainable=True)
    with torch.autocast(device(), torch.bfloat16):
        C = layer(torch.ones(2, 3, device=device()))
    C.sum().backward()
    assert layer.values.grad.tolist() == [3.0] * (2 * ranks)


def a_layer_of_trained_values_converts() -> str:
    layer, A, *_ = split_layer("random", trainable=True)
    layer.float()
    B = torch.randn(NODES, 2)
    own = B.to(device())[layer.nodes]
    torch.testing.assert_close(layer(own).cpu(), (A.cpu().to_dense().float() @ B)[layer.nodes.cpu()])
    return str(layer.values.dtype)


def mistakes() -> dict[str, str]:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh, is_odd = init_device_mesh("cpu", (ranks,)), rank == 1
    A = torch.eye(8).to_sparse()
    owner = torch.arange(8) % ranks
    layer = SplitSpMM(torch.ones(2, 2 * ranks).to_sparse(), mesh)
    B = torch.ones(2, 3)
    state = {"entries": torch.zeros(2, 5, dtype=torch.int64), "values": torch.zeros(5)}
    trained = SplitSpMM(torch.ones(2, 2 * ranks).to_sparse(), mesh, trainable=True)
    found = {
        "owners that differ": message(lambda: SplitSpMM.from_graph(A, (owner + is_odd) % ranks, mesh)),
        "a rank that is not there": message(lambda: SplitSpMM.from_graph(A, owner + is_odd, mesh)),
        "a graph that differs": message(lambda: SplitSpMM.from_graph(A * (1 + is_odd), owner, mesh)),
        "no graph": message(lambda: SplitSpMM.from_graph("A" if is_odd else A, owner, mesh)),
        "columns": message(lambda: SplitSpMM(torch.ones(2, 8 if rank else 7).to_sparse(), mesh)),
        "two dimensions": message(lambda: SplitSpMM(A, init_device_mesh("cpu", (1, ranks)))),
        "a length": message(lambda: SplitSpMM.from_graph(A, owner[is_odd:], mesh)),
        "no matrix": message(lambda: SplitSpMM(3 if is_odd else A, mesh)),
        "rows": message(lambda: SplitSpMM(A, mesh, rows=-1 if is_odd else 2)),
        "dtypes of A": message(lambda: SplitSpMM(A.double() if is_odd else A, mesh)),
        "trained on one rank": message(lambda: SplitSpMM(A, mesh, trainable=is_odd)),
        "rows of B": message(lambda: layer(torch.ones(2 + is_odd, 3))),
        "columns of B": message(lambda: layer(torch.ones(2, 3 + is_odd))),
        "a dtype of B": message(lambda: layer(B.double() if is_odd else B)),
        "a transform": message(lambda: torch.func.grad(lambda rows: layer(rows).sum())(B)),
        "fractions": message(lambda: SplitSpMM.from_graph(A, owner.float() if is_odd else owner, mesh)),
        "a list": message(lambda: SplitSpMM.from_graph(A, owner.tolist(), mesh)),
        "a DTensor": message(lambda: layer(distribute_tensor(torch.ones(2 * ranks, 3), mesh, [Shard(0)]))),
        "no B": message(lambda: layer(None if is_odd else B)),
        "other entries": message(lambda: load_whole_state_dict(trained, state)),
    }
    trained.values.requires_grad_(not is_odd)
    found["values that one rank holds fixed"] = message(lambda: trained(B))
    layer(B)  # all ranks have come to the same place
    return found


NAMES = [
    "products_equal_the_whole_one",
    "gradients_of_gradients",
    "trained_values_equal_the_whole",
    "values_are_trained_under_autocast",
    "a_layer_of_trained_values_converts",
    "losses",
    "the_example_learns",
    "mistakes",
]
