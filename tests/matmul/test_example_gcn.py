"""The example of a graph convolutional network: its matrix, its output and gradients, and that it learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from statements import DEVICE
from tolerances import assert_matches

pytestmark = pytest.mark.cpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "gcn.py"


@pytest.fixture
def gcn(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gcn", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("INSUM_DATA", raising=False)
    monkeypatch.setattr(module, "PUBMED", (2000, 4.5))
    return module


def dense_adjacency(edge_index: torch.Tensor, nodes: int) -> torch.Tensor:
    A = torch.eye(nodes, dtype=torch.float64)
    A.index_put_(tuple(edge_index.flip(0)), torch.ones(edge_index.shape[1], dtype=torch.float64), accumulate=True)
    scale = A.sum(1).rsqrt()
    return scale[:, None] * A * scale


def test_the_matrix_is_normalised_symmetrically(gcn):
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 0, 1, 0]])
    indices, weight, nodes = gcn.normalised(edge_index, 4)
    A = torch.zeros(4, 4).index_put((indices[1], indices[0]), weight, accumulate=True)
    assert_matches(A, dense_adjacency(edge_index, 4))
    assert nodes == 4


def test_the_network_equals_its_dense_twin(gcn):
    edge_index = torch.randint(12, (2, 30))
    model = gcn.GCN(gcn.normalised(edge_index, 12)).double().eval()
    X = torch.randn(12, gcn.FEATURES, dtype=torch.float64)
    A = model.A.A.to_dense()
    expected = A @ model.second((A @ model.first(X)).relu())
    assert_matches(model(X), expected)
    parameters = list(model.parameters())
    got, known = (torch.autograd.grad(Z.pow(2).sum(), parameters) for Z in (model(X), expected))
    for one, other in zip(got, known):
        torch.testing.assert_close(one, other)


def test_it_learns(gcn, capsys):
    accuracy = gcn.main(["--steps", "60", "--device", DEVICE])
    assert accuracy > 0.7
    assert "accuracy on unseen labels: " in capsys.readouterr().out


def test_it_reads_a_real_graph(gcn, monkeypatch, tmp_path):
    (tmp_path / "graphs").mkdir()
    parts = {"indptr": [0, 2, 3, 3], "indices": [1, 2, 0], "shape": [3, 3]}
    numpy.savez(tmp_path / "graphs" / "pubmed.npz", **{name: numpy.array(part) for name, part in parts.items()})
    monkeypatch.setenv("INSUM_DATA", str(tmp_path))
    name, edge_index, nodes = gcn.citation_graph()
    assert (name, edge_index.tolist(), nodes) == ("pubmed", [[1, 2, 0], [0, 0, 1]], 3)
