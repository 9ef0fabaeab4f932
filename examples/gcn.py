"""A two-layer graph convolutional network on a citation graph: `python examples/gcn.py --steps 50`.

The graph is generated, with as many nodes and edges as pubmed's. Its labels are smooth over the graph, so that
neighbours tend to agree, and only faintly visible in a node's own features. The network sees the labels of one node in
twenty and is judged by the others. On a GPU it is timed beside the same network with torch.sparse.mm.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot
from torch.utils.benchmark import Timer

from insum_ops import spmm
from insum_ops.nn import SpMM

Graph = tuple[Tensor, Tensor, int]  # edge_index [2, E], edge_weight [E], nodes

CLASSES, FEATURES, HIDDEN = 3, 64, 32
NODES, DEGREE = 19_717, 4.5  # pubmed's nodes, and neighbours of each
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class GCN(nn.Module):
    """Z = A relu(A X W + b) W' + b', where `product` multiplies by A, the normalised adjacency."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.A = product
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        hidden = self.A(self.first(X)).relu()
        return self.A(self.second(dropout(hidden, training=self.training)))


def plain_product(A: Graph) -> Callable[[Tensor], Tensor]:
    """The same product as torch has it: a CSR matrix and torch.sparse.mm."""
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
    csr = torch.sparse_coo_tensor(A[0].flip(0), A[1], (A[2], A[2]), check_invariants=True).to_sparse_csr()
    return lambda X: torch.sparse.mm(csr, X)


def normalised(edge_index: Tensor, nodes: int) -> Graph:
    """D^-1/2 (A + I) D^-1/2: every node is its own neighbour, every edge weighs 1 / sqrt(the degrees of its ends)."""
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    edge_index = torch.cat([edge_index, loops], 1)
    scale = edge_index[1].bincount(minlength=nodes).float().rsqrt()
    return edge_index, scale[edge_index[0]] * scale[edge_index[1]], nodes


def citation_graph(nodes: int, degree: float) -> Tensor:
    """Random edges in both directions, edge_index [2, E]; a few nodes have very many neighbours."""
    popularity = torch.rand(nodes).pow(-0.5)
    ends = popularity.multinomial(int(nodes * degree / 2), replacement=True)
    edges = torch.stack([ends, torch.randint(nodes, ends.shape)])
    return torch.cat([edges, edges.flip(0)], 1).unique(dim=1)


def planted(A: Graph) -> tuple[Tensor, Tensor]:
    """Features [nodes, FEATURES] and labels [nodes]: random scores, smoothed over the graph, name the class."""
    scores = torch.randn(A[2], CLASSES, device=A[0].device)
    for _ in range(6):
        scores = spmm(A, scores)
    labels = (scores / scores.std(0)).argmax(1)
    signal = one_hot(labels, CLASSES).float() @ torch.randn(CLASSES, FEATURES, device=labels.device)
    return 0.2 * signal + torch.randn(A[2], FEATURES, device=labels.device), labels


def training_step(model: nn.Module, X: Tensor, labels: Tensor, is_seen: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model.train()(X)[is_seen], labels[is_seen]).backward()
        optimizer.step()

    return step


def speed(step: Callable[[], None]) -> float:
    """Steps per second: the median of several runs, after a first one that is not counted."""
    step()
    return 1 / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    edge_index = citation_graph(options.nodes, DEGREE).to(options.device)
    A = normalised(edge_index, options.nodes)
    X, labels = planted(A)
    is_seen = torch.rand(len(X), device=options.device) < 0.05
    print(f"{len(X)} nodes, {edge_index.shape[1]} edges, {int(is_seen.sum())} labels seen, on {options.device}")
    model = GCN(SpMM(A)).to(options.device)
    step = training_step(model, X, labels, is_seen)
    for _ in range(options.steps):
        step()
    with torch.no_grad():
        accuracy = float((model.eval()(X).argmax(1) == labels)[~is_seen].float().mean())
    guess = float((labels == labels.bincount().argmax()).float().mean())
    print(f"accuracy on unseen labels: {accuracy:.1%} (always guessing the largest class: {guess:.1%})")
    if options.device == "cuda":
        plain = training_step(GCN(plain_product(A)).to(options.device), X, labels, is_seen)
        print(f"{speed(step):.0f} training steps per second; with torch.sparse {speed(plain):.0f}")
    return accuracy


if __name__ == "__main__":
    main()
