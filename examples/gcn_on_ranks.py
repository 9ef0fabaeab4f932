"""A graph convolutional network over a graph whose nodes are split over processes, all of them in every step:

`python examples/gcn_on_ranks.py --ranks 4 --partition good`, or under torchrun with a GPU for each process.

Each process holds some nodes with their features, labels and rows of A. Of other nodes it receives only those that its
own have an edge from. The graph has communities, which a good partition keeps together and a random one tears apart.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from insum_ops.distributed import SplitSpMM

CLASSES, FEATURES, HIDDEN, COMMUNITIES = 3, 16, 8, 8
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class GCN(nn.Module):
    """Z = A relu(A X W + b) W' + b', where `product` multiplies by A; the parameters are the same on all ranks."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.A = product
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        return self.A(self.second(self.A(self.first(X)).relu()))


def community_graph(nodes: int, degree: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A [nodes, nodes], sparse and normalised by rows, features and labels: nine edges in ten stay in a community."""
    draw = torch.Generator().manual_seed(seed)
    community = torch.arange(nodes) * COMMUNITIES // nodes
    to = torch.arange(nodes).repeat_interleave(degree)
    size = -(-nodes // COMMUNITIES)
    near = (community[to] * size + torch.randint(size, to.shape, generator=draw)).clamp(max=nodes - 1)
    far = torch.randint(nodes, to.shape, generator=draw)
    source = torch.where(torch.rand(to.shape, generator=draw) < 0.9, near, far)
    edges, weights = torch.stack([to, source]), torch.full(to.shape, 1 / degree)
    A = torch.sparse_coo_tensor(edges, weights, (nodes, nodes), check_invariants=True).coalesce()
    labels = community % CLASSES
    X = torch.randn(nodes, FEATURES, generator=draw)
    X[:, :CLASSES] += 2.0 * nn.functional.one_hot(labels, CLASSES)
    return A, X, labels


def owners(nodes: int, ranks: int, partition: str) -> Tensor:
    """The rank of each node [nodes]: communities stay together, or nodes are dealt out at random."""
    owner = torch.arange(nodes) * ranks // nodes
    return owner if partition == "good" else owner[torch.randperm(nodes, generator=torch.Generator().manual_seed(1))]


def train(options: argparse.Namespace) -> list[float]:
    """One process's part of all steps; the losses are those of the whole graph."""
    ranks = distributed.get_world_size()
    A, X, labels = (part.to(options.device) for part in community_graph(options.nodes, 8))
    owner = owners(options.nodes, ranks, options.partition).to(options.device)
    layer = SplitSpMM.from_graph(A, owner, init_device_mesh(options.device, (ranks,)))
    X, labels = X[layer.nodes], labels[layer.nodes]
    torch.manual_seed(0)
    model = DistributedDataParallel(GCN(layer).to(options.device))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(options.steps):
        # the mean over all nodes: DDP averages gradients over ranks, which may hold unequal numbers of them
        loss = cross_entropy(model(X), labels, reduction="sum") * ranks / options.nodes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / ranks
        distributed.all_reduce(total)
        losses.append(float(total))
    print(f"rank {distributed.get_rank()} of {ranks}, {options.partition} partition: {layer.rows} nodes, "
          f"{layer.rows_received} rows received at each product, loss {losses[0]:.3f} to {losses[-1]:.3f}")  # fmt: skip
    return losses


def start(rank: int, options: argparse.Namespace, store: str | None = None) -> None:
    """Join the other processes, train and leave."""
    backend, shared = ("nccl" if options.device == "cuda" else "gloo"), {}
    if store is not None:
        store_file = distributed.FileStore(store, options.ranks)
        shared = {"store": store_file, "rank": rank, "world_size": options.ranks}
    if options.device == "cuda":  # first: NCCL takes the current GPU for the process's own
        torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(backend, **shared)
    train(options)
    distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--partition", choices=["good", "random"], default="good")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:  # torchrun has started the processes
        start(int(os.environ["RANK"]), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(start, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
