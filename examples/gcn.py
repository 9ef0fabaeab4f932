"""A two-layer graph convolutional network on a citation graph: `python examples/gcn.py --steps 100`.

The graph is pubmed's where the folder INSUM_DATA holds graphs/pubmed.npz, else one generated with its statistics. The
labels are planted: smooth over the graph, so that neighbours tend to agree, and only faintly visible in a node's
own features. The network sees the labels of one node in twenty and is judged by the others.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, one_hot
from tqdm import tqdm

from insum_ops import spmm
from insum_ops.nn import SpMM

Graph = tuple[Tensor, Tensor | None, int]  # edge_index [2, E], edge_weight [E], nodes

PUBMED = (19_717, 4.5)  # nodes, neighbours of each
CLASSES, FEATURES, HIDDEN = 3, 64, 32


class GCN(nn.Module):
    """Z = A relu(A X W + b) W' + b', with A the normalised adjacency."""

    def __init__(self, A: Graph) -> None:
        super().__init__()
        self.A = SpMM(A)
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, X: Tensor) -> Tensor:
        hidden = self.A(self.first(X)).relu()
        return self.A(self.second(dropout(hidden, training=self.training)))


def normalised(edge_index: Tensor, nodes: int) -> Graph:
    """D^-1/2 (A + I) D^-1/2: every node is its own neighbour, every edge weighs 1 / sqrt(the degrees of its ends)."""
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    edge_index = torch.cat([edge_index, loops], 1)
    scale = edge_index[1].bincount(minlength=nodes).float().rsqrt()
    return edge_index, scale[edge_index[0]] * scale[edge_index[1]], nodes


def citation_graph() -> tuple[str, Tensor, int]:
    """The graph's name, its edges in both directions [2, E] and the number of nodes."""
    folder = os.environ.get("INSUM_DATA")
    file = Path(folder) / "graphs" / "pubmed.npz" if folder else None
    if file is not None and file.is_file():
        with numpy.load(file) as data:
            counts = torch.from_numpy(numpy.diff(data["indptr"]).astype(numpy.int64))
            columns = torch.from_numpy(data["indices"].astype(numpy.int64))
        return "pubmed", torch.stack([columns, torch.arange(len(counts)).repeat_interleave(counts)]), len(counts)
    nodes, degree = PUBMED
    popularity = torch.rand(nodes).pow(-0.5)  # a few nodes have very many neighbours
    ends = popularity.multinomial(int(nodes * degree / 2), replacement=True)
    edges = torch.stack([ends, torch.randint(nodes, ends.shape)])
    return "a generated graph", torch.cat([edges, edges.flip(0)], 1).unique(dim=1), nodes


def planted(A: Graph) -> tuple[Tensor, Tensor]:
    """Features [nodes, FEATURES] and labels [nodes]: random scores, smoothed over the graph, name the class."""
    nodes = A[2]
    scores = torch.randn(nodes, CLASSES, device=A[0].device)
    for _ in range(6):
        scores = spmm(A, scores)
    labels = (scores / scores.std(0)).argmax(1)
    signal = one_hot(labels, CLASSES).float() @ torch.randn(CLASSES, FEATURES, device=labels.device)
    return 0.2 * signal + torch.randn(nodes, FEATURES, device=labels.device), labels


def train(model: nn.Module, X: Tensor, labels: Tensor, is_seen: Tensor, steps: int) -> float:
    """The share of unseen labels that the trained model gets right."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in tqdm(range(steps), desc="training"):
        optimizer.zero_grad()
        cross_entropy(model(X)[is_seen], labels[is_seen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        is_right = model(X).argmax(1) == labels
    return float(is_right[~is_seen].float().mean())


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    name, edge_index, nodes = citation_graph()
    A = normalised(edge_index.to(options.device), nodes)
    X, labels = planted(A)
    is_seen = torch.rand(nodes, device=options.device) < 0.05

    model = GCN(A).to(options.device)
    print(f"{name}: {nodes} nodes, {edge_index.shape[1]} edges, {int(is_seen.sum())} labels seen, on {options.device}")
    print(model)
    accuracy = train(model, X, labels, is_seen, options.steps)
    guess = float((labels == labels.bincount().argmax()).float().mean())
    print(f"accuracy on unseen labels: {accuracy:.1%} (always guessing the largest class: {guess:.1%})")
    return accuracy


if __name__ == "__main__":
    main()
