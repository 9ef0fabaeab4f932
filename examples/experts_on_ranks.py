"""A mixture of experts, split over processes: `python examples/experts_on_ranks.py --ranks 4`, or under torchrun.

Each process holds some of the experts and its own tokens. A router, the same everywhere, sends every token to two of
16 experts: one all-to-all takes the tokens there, each process multiplies by its own experts, another brings the
results back. Gradients take the same ways.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from insum_ops import insum
from insum_ops.formats import GroupCOO

CLUSTERS, EXPERTS, CHOSEN, GROUP = 16, 16, 2, 16
INPUTS, HIDDEN, OUTPUTS = 32, 64, 16
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class Experts(nn.Module):
    """Y[t] = sum of G[t,e] * (W2[e] relu(W1[e] X[t])) over the experts e that the router chose for token t."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks, self.own = distributed.get_world_size(), EXPERTS // distributed.get_world_size()
        self.router = nn.Linear(INPUTS, EXPERTS)
        W1 = torch.randn(EXPERTS, INPUTS, HIDDEN) * (2 / INPUTS) ** 0.5  # all of them, as one process draws them
        W2 = torch.randn(EXPERTS, HIDDEN, OUTPUTS) * (1 / HIDDEN) ** 0.5
        self.W1, self.W2 = (nn.Parameter(W.chunk(self.ranks)[distributed.get_rank()].clone()) for W in (W1, W2))

    def forward(self, X: Tensor) -> Tensor:
        scores, experts = self.router(X).topk(CHOSEN, 1)
        order = experts.flatten().argsort(stable=True)  # by expert, so by the rank that has it
        tokens, gates, experts = order // CHOSEN, scores.softmax(1).flatten()[order], experts.flatten()[order]
        counts = (experts // self.own).bincount(minlength=self.ranks)
        sends, receives = counts.tolist(), exchanged(counts).tolist()
        came = exchanged(X[tokens], receives, sends)
        theirs = exchanged(experts % self.own, receives, sends)
        # TOK [P, GROUP] holds the tokens of a group, -1 for none, EXP [P] the group's expert
        pairs, size = torch.stack([torch.arange(len(theirs), device=X.device), theirs]), (len(theirs), self.own)
        TOK, EXP = GroupCOO.from_coo(pairs, came[:, 0].detach(), size, group_dim=1, group_size=GROUP).coords
        H = insum("H[p,q,h] += X[TOK[p,q],i] * W1[EXP[p],i,h]", X=came, TOK=TOK, EXP=EXP, W1=self.W1).relu()
        text, size = "Z[TOK[p,q],o] += H[p,q,h] * W2[EXP[p],h,o]", (len(theirs), OUTPUTS)
        Z = exchanged(insum(text, H=H, TOK=TOK, EXP=EXP, W2=self.W2, size=size), sends, receives)
        return insum("Y[T[s],o] += G[s] * Z[s,o]", T=tokens, G=gates, Z=Z, size=(len(X), OUTPUTS))


def exchanged(rows: Tensor, receives: list[int] | None = None, sends: list[int] | None = None) -> Tensor:
    """Send rows to each rank, and return those that come; what is done with them waits for them."""
    travel = all_to_all_single_autograd if rows.requires_grad else all_to_all_single
    return travel(rows, receives, sends, distributed.group.WORLD) + 0


def clusters(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [tokens, INPUTS] around CLUSTERS centres, and what each cluster's own linear map makes of them."""
    draw = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(CLUSTERS, INPUTS, generator=draw)
    maps = torch.randn(CLUSTERS, INPUTS, OUTPUTS, generator=draw) / INPUTS**0.5
    own = torch.randint(CLUSTERS, (tokens,), generator=draw)
    offset = torch.randn(tokens, INPUTS, generator=draw)
    return centres[own] + offset, insum("Y[t,o] += X[t,i] * W[I[t],i,o]", X=offset, W=maps, I=own)


def train(options: argparse.Namespace) -> list[float]:
    """One process's part of all steps; the errors are those of all tokens."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    X, Y = (part.to(options.device).chunk(ranks)[rank] for part in clusters(options.tokens))
    torch.manual_seed(0)
    model = Experts().to(options.device)
    optimizer, errors = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(options.steps):
        optimizer.zero_grad()
        error = (model(X) - Y).square().sum() / (options.tokens * OUTPUTS)
        error.backward()
        for parameter in model.router.parameters():  # an expert's gradient is whole on the rank that has it
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        total = error.detach().clone()
        distributed.all_reduce(total)
        errors.append(float(total))
    print(f"rank {rank} of {ranks}: {model.own} experts, error {errors[0]:.3f} to {errors[-1]:.3f}")
    return errors


def start(rank: int, options: argparse.Namespace, store: str | None = None) -> None:
    """Join the other processes, train and leave."""
    backend, shared = ("nccl" if options.device == "cuda" else "gloo"), {}
    if store is not None:
        store_file = distributed.FileStore(store, options.ranks)
        shared = {"store": store_file, "rank": rank, "world_size": options.ranks}
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(backend, **shared)
    train(options)
    distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4, 8, 16], default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:  # torchrun has started the processes
        return start(int(os.environ["RANK"]), options)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(start, (options, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
