"""What tests/distributed/test_experts.py runs on several ranks: the example whose experts are split over them."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from ranks import device
from tolerances import TOLERANCE
from torch import Tensor, distributed


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "experts_on_ranks.py"
    spec = importlib.util.spec_from_file_location("experts_on_ranks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_a_loop(model: Any, W1: Tensor, W2: Tensor, X: Tensor, chosen: int) -> Tensor:
    """The same in one process, one expert at a time."""
    scores, experts = model.router(X).topk(chosen, 1)
    gates, Y = scores.softmax(1), X.new_zeros(len(X), W2.shape[2])
    for expert in range(len(W1)):
        tokens, place = (experts == expert).nonzero(as_tuple=True)
        out = (X[tokens] @ W1[expert]).relu() @ W2[expert]
        Y = Y.index_add(0, tokens, gates[tokens, place, None] * out)
    return Y


def experts_equal_one_process() -> None:
    experts, rank, ranks = example(), distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = experts.Experts().double().to(device())
    with torch.no_grad():
        model.router.bias[1] += 2.0  # a favourite, and some that few tokens choose
    whole = []
    for W in (model.W1, model.W2):
        parts = [torch.empty_like(W) for _ in range(ranks)]
        distributed.all_gather(parts, W.detach())
        whole.append(torch.cat(parts).requires_grad_())
    X = experts.clusters(21)[0].double().to(device())
    shares = X.tensor_split(ranks)  # unequal
    own = shares[rank].clone().requires_grad_()
    X.requires_grad_()
    Y, expected = model(own), in_a_loop(model, *whole, X, experts.CHOSEN)
    torch.testing.assert_close(Y, expected.tensor_split(ranks)[rank], **TOLERANCE[torch.float64])
    upstream = torch.randn(expected.shape, dtype=torch.float64).to(device())
    router = model.router.weight
    grads = torch.autograd.grad(Y, [own, model.W1, model.W2, router], upstream.tensor_split(ranks)[rank])
    wanted = torch.autograd.grad(expected, [X, *whole, router], upstream)
    total = grads[3].clone()
    distributed.all_reduce(total)
    torch.testing.assert_close(total, wanted[3], **TOLERANCE[torch.float64])
    torch.testing.assert_close(grads[0], wanted[0].tensor_split(ranks)[rank], **TOLERANCE[torch.float64])
    for grad, reference in zip(grads[1:3], wanted[1:3]):
        torch.testing.assert_close(grad, reference.chunk(ranks)[rank], **TOLERANCE[torch.float64])


def the_example_learns() -> list[float]:
    return example().train(Namespace(device=device(), tokens=512, steps=10))


NAMES = ["experts_equal_one_process", "the_example_learns"]
