"""A mixture of experts, two for each token, in two statements: `python examples/mixture_of_experts.py --steps 150`.

The data come from 16 clusters, each with a function of its own. A router sends every token to two of 16 experts; tokens
of one expert stand in groups, so that a group meets its expert's weights in one matrix product. Beside it learns a
dense network with as many multiplications a token. On a GPU it is timed beside a loop over the experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.benchmark import Timer

from insum_ops import insum
from insum_ops.formats import GroupCOO

CLUSTERS, EXPERTS, CHOSEN, GROUP = 16, 16, 2, 16
INPUTS, OUTPUTS = 32, 16
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class Experts(nn.Module):
    """Y[t] = sum of G[t,e] * (W2[e] relu(W1[e] X[t])) over the experts e that the router chose for token t."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(INPUTS, EXPERTS)
        self.W1 = nn.Parameter(torch.randn(EXPERTS, INPUTS, hidden) * (2 / INPUTS) ** 0.5)
        self.W2 = nn.Parameter(torch.randn(EXPERTS, hidden, OUTPUTS) * (1 / hidden) ** 0.5)

    def route(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and experts of each token, both [tokens, CHOSEN]."""
        scores, experts = self.router(X).topk(CHOSEN, 1)
        return scores.softmax(1), experts

    def forward(self, X: Tensor) -> Tensor:
        gates, experts = self.route(X)
        tokens = torch.arange(len(X), device=X.device).repeat_interleave(CHOSEN)
        pairs = torch.stack([tokens, experts.flatten()])
        # TOK [P, GROUP] holds the tokens of a group, -1 for none, G [P, GROUP] their gates, EXP [P] the group's expert
        routing = GroupCOO.from_coo(pairs, gates.flatten(), (len(X), EXPERTS), group_dim=1, group_size=GROUP)
        (TOK, EXP), G = routing.coords, routing.values
        H = insum("H[p,q,h] += X[TOK[p,q],i] * W1[EXP[p],i,h]", X=X, TOK=TOK, EXP=EXP, W1=self.W1).relu()
        text = "Y[TOK[p,q],o] += G[p,q] * H[p,q,h] * W2[EXP[p],h,o]"
        return insum(text, G=G, H=H, TOK=TOK, EXP=EXP, W2=self.W2, size=(len(X), OUTPUTS))


class LoopedExperts(Experts):
    """The same in plain torch: a loop over the experts, each of which takes its tokens out of all."""

    def forward(self, X: Tensor) -> Tensor:
        gates, experts = self.route(X)
        Y = X.new_zeros(len(X), OUTPUTS)
        for expert in range(EXPERTS):
            tokens, place = (experts == expert).nonzero(as_tuple=True)
            out = (X[tokens] @ self.W1[expert]).relu() @ self.W2[expert]
            Y = Y.index_add(0, tokens, gates[tokens, place, None] * out)
        return Y


def clusters(tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens [tokens, INPUTS] around CLUSTERS centres, and what each cluster's own linear map makes of them."""
    centres = 1.5 * torch.randn(CLUSTERS, INPUTS, device=device)
    maps = torch.randn(CLUSTERS, INPUTS, OUTPUTS, device=device) / INPUTS**0.5
    own = torch.randint(CLUSTERS, (tokens,), device=device)
    offset = torch.randn(tokens, INPUTS, device=device)
    return centres[own] + offset, insum("Y[t,o] += X[t,i] * W[I[t],i,o]", X=offset, W=maps, I=own)


def training_step(model: nn.Module, X: Tensor, Y: Tensor, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        drawn = torch.randint(len(X), (batch,), device=X.device)
        optimizer.zero_grad()
        mse_loss(model(X[drawn]), Y[drawn]).backward()
        optimizer.step()

    return step


def speed(step: Callable[[], None]) -> float:
    """Steps per second: the median of several runs, after a first one that is not counted."""
    step()
    return 1 / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, help="tokens of a step; 512, and 16,384 on a GPU")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units of an expert")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    batch, wide = options.batch or (16_384 if options.device == "cuda" else 512), CHOSEN * options.hidden
    torch.manual_seed(0)
    X, Y = clusters(20_000, options.device)
    dense = nn.Sequential(nn.Linear(INPUTS, wide), nn.ReLU(), nn.Linear(wide, OUTPUTS))
    errors = {"always the mean": float(Y[:4000].var())}
    for name, model in (("dense", dense), ("mixture of experts", Experts(options.hidden))):
        step = training_step(model.to(options.device), X[4000:], Y[4000:], batch)
        for _ in range(options.steps):
            step()
        with torch.no_grad():
            errors[name] = float(mse_loss(model(X[:4000]), Y[:4000]))
    print("mean squared error, unseen tokens: " + ", ".join(f"{name} {error:.3f}" for name, error in errors.items()))
    if options.device == "cuda":
        plain = training_step(LoopedExperts(options.hidden).to(options.device), X[4000:], Y[4000:], batch)
        print(f"{speed(step):.0f} training steps per second; in a loop over the experts {speed(plain):.0f}")
    return errors


if __name__ == "__main__":
    main()
