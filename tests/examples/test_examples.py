"""The examples: each runs, learns more than a trivial answer, and equals the plain torch that it is timed beside."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from tolerances import assert_matches

pytestmark = pytest.mark.cpu

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(model: torch.nn.Module, output: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output.pow(2).sum(), list(model.parameters())))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_short_file(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 120


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_not_there_is_refused_in_words(name, capsys):
    with pytest.raises(SystemExit) as exit:
        example(name).main(["--device", "tpu"])
    assert exit.value.code == 2
    assert "argument --device: invalid choice: 'tpu' (choose from " in capsys.readouterr().err


def test_the_graph_network_learns(capsys):
    assert example("gcn").main(["--steps", "25", "--nodes", "2000", "--device", "cpu"]) > 0.7
    assert "accuracy on unseen labels: " in capsys.readouterr().out


def test_the_matrix_is_normalised_symmetrically():
    gcn, edge_index = example("gcn"), torch.tensor([[0, 1, 2, 3], [1, 0, 1, 0]])
    indices, weight, nodes = gcn.normalised(edge_index, 4)
    dense = torch.eye(4, dtype=torch.float64)
    dense[edge_index[1], edge_index[0]] += 1
    scale = dense.sum(1).rsqrt()
    A = torch.zeros(4, 4).index_put((indices[1], indices[0]), weight, accumulate=True)
    assert_matches(A, scale[:, None] * dense * scale)
    assert nodes == 4


@SPARSE_WARNINGS
def test_the_graph_network_equals_its_dense_and_its_plain_twin():
    gcn = example("gcn")
    edge_index, weight, nodes = A = gcn.normalised(torch.randint(12, (2, 30)), 12)
    dense = torch.zeros(12, 12).index_put((edge_index[1], edge_index[0]), weight, accumulate=True).double()
    model, X = gcn.GCN(gcn.SpMM((edge_index, weight.double(), nodes))).double().eval(), torch.randn(12, gcn.FEATURES)
    expected = dense @ model.second((dense @ model.first(X.double())).relu())
    assert_matches(model(X.double()), expected)
    for one, other in zip(gradients(model, model(X.double())), gradients(model, expected)):
        torch.testing.assert_close(one, other)
    plain = gcn.plain_product(A)
    torch.testing.assert_close(plain(X), dense.float() @ X)


def test_the_perceptron_learns_and_keeps_what_it_learned_when_pruned(capsys):
    main = example("block_sparse_mlp").main
    right = main(["--steps", "40", "--hidden", "128", "--batch", "128", "--device", "cpu"])
    assert right["pruned, then trained"] > right["largest class"] + 0.15
    assert "right on unseen samples: " in capsys.readouterr().out


def test_attention_learns_which_neighbour_to_ask(capsys):
    right = example("graph_attention").main(["--steps", "30", "--nodes", "600", "--device", "cpu"])
    assert right["attention"] > right["average over neighbours"] + 0.1
    assert "right on a graph not seen before: " in capsys.readouterr().out


def test_attention_equals_its_plain_twin():
    attention = example("graph_attention")
    Q, K, V = torch.randn(3, 9, 2, 5, dtype=torch.float64).requires_grad_()
    edges = torch.randint(9, (2, 40))
    ours, plain = (attend(Q, K, V, *edges) for attend in (attention.attend, attention.plain_attend))
    torch.testing.assert_close(ours, plain)
    for one, other in zip(*(torch.autograd.grad(out.pow(2).sum(), (Q, K, V)) for out in (ours, plain))):
        torch.testing.assert_close(one, other)


def test_the_mixture_learns_what_a_dense_network_cannot(capsys):
    errors = example("mixture_of_experts").main(["--steps", "60", "--batch", "256", "--device", "cpu"])
    assert errors["mixture of experts"] < 0.8 * errors["dense"] < 0.8 * errors["always the mean"]
    assert "mean squared error, unseen tokens: " in capsys.readouterr().out


def test_the_mixture_equals_a_loop_over_its_experts():
    experts = example("mixture_of_experts")
    ours, looped = experts.Experts(8).double(), experts.LoopedExperts(8).double()
    looped.load_state_dict(ours.state_dict())
    X = torch.randn(50, experts.INPUTS, dtype=torch.float64)
    torch.testing.assert_close(ours(X), looped(X))
    for one, other in zip(gradients(ours, ours(X)), gradients(looped, looped(X))):
        torch.testing.assert_close(one, other)


def test_the_potential_learns_forces(capsys):
    error, zero = example("potential").main(["--steps", "10", "--device", "cpu"])
    assert error < 0.8 * zero
    assert "mean error of unseen forces: " in capsys.readouterr().out


def test_the_potential_equals_its_plain_twin():
    potential = example("potential")
    kind, position, _, _ = potential.molecules(2, "cpu")
    ours, plain = potential.Potential(), potential.Potential(potential.PlainProduct)
    plain.load_state_dict(ours.state_dict(), strict=False)
    for one, other in zip(ours(kind, position), plain(kind, position)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_forces_of_the_true_potential_are_its_gradient():
    potential = example("potential")
    kind, position, _, force = potential.molecules(1, "cpu")
    step = torch.zeros_like(position, dtype=torch.float64)
    step[0, 2, 1] = 1e-4
    above, below = (potential.true_energy(kind, position.double() + sign * step) for sign in (1, -1))
    torch.testing.assert_close(-((above - below) / 2e-4).float(), force[0, 2, 1:2], rtol=1e-3, atol=1e-3)


def test_the_unet_learns_and_draws_a_room(capsys, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    options = ["--steps", "8", "--voxel", "0.4", "--width", "4", "--device", "cpu"]
    right, guess = example("unet").main([*options, "--picture", str(tmp_path / "room.png")])
    assert right > guess + 0.15
    assert "voxels of a room not seen before: " in capsys.readouterr().out
    pixels = image.imread(tmp_path / "room.png")[..., :3]
    assert 0.01 < (pixels != 1).any(axis=2).mean() < 0.9
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 0.3).any(), "no label has its colour"
