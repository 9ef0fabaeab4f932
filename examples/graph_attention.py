"""Attention along the edges of a graph, written as four statements: `python examples/graph_attention.py --steps 60`.

Every node holds a key, a value and a question, all of them random: its label is the value of that neighbour whose key
is the answer to its question. An average over neighbours can't tell them apart, attention learns which one to ask. On
a GPU it is timed beside the same attention in gathers and index_add.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.benchmark import Timer

from insum_ops import insum

NEIGHBOURS, KEYS, VALUES = 6, 12, 4  # neighbours of each node; kinds of keys and of values
HEADS, CHANNELS = 4, 16
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


def attend(Q: Tensor, K: Tensor, V: Tensor, SRC: Tensor, DST: Tensor) -> Tensor:
    """Out[t] = the values of t's neighbours, weighted by the softmax of Q[t] . K[s]; all [nodes, heads, channels].

    Edge e leads from node SRC[e] to node DST[e].
    """
    nodes, heads, channels = V.shape
    S = insum("S[e,h] += Q[DST[e],h,c] * K[SRC[e],h,c]", Q=Q, K=K, SRC=SRC, DST=DST) / channels**0.5
    P = (S - S.detach().amax(0)).exp()  # a shift for each head, which cancels out, keeps exp in range
    Z = insum("Z[DST[e],h] += P[e,h]", P=P, DST=DST, size=(nodes, heads))
    Out = insum("Out[DST[e],h,c] += P[e,h] * V[SRC[e],h,c]", P=P, V=V, SRC=SRC, DST=DST, size=V.shape)
    return insum("Mean[t,h,c] += R[t,h] * Out[t,h,c]", R=1 / Z.clamp(min=1e-20), Out=Out)


def plain_attend(Q: Tensor, K: Tensor, V: Tensor, SRC: Tensor, DST: Tensor) -> Tensor:
    """The same, with every message in memory."""
    S = (Q[DST] * K[SRC]).sum(-1) / V.shape[-1] ** 0.5
    P = (S - S.detach().amax(0)).exp()
    Z = P.new_zeros(V.shape[:2]).index_add(0, DST, P)
    Out = torch.zeros_like(V).index_add(0, DST, P.unsqueeze(-1) * V[SRC])
    return Out / Z.clamp(min=1e-20).unsqueeze(-1)


class Network(nn.Module):
    """Queries, keys and values of every head by one linear layer, attention, and scores for each label by another."""

    def __init__(self, features: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.project = nn.Linear(features, 3 * HEADS * CHANNELS)
        self.head = nn.Linear(HEADS * CHANNELS, VALUES)

    def forward(self, X: Tensor, SRC: Tensor, DST: Tensor) -> Tensor:
        Q, K, V = self.project(X).unflatten(1, (3, HEADS, CHANNELS)).unbind(1)
        return self.head(self.attention(Q, K, V, SRC, DST).flatten(1))


def questions(nodes: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features [nodes, 2 * KEYS + VALUES], labels [nodes], SRC and DST [nodes * NEIGHBOURS]."""
    key, value = torch.randint(KEYS, (nodes,), device=device), torch.randint(VALUES, (nodes,), device=device)
    neighbours = torch.randint(nodes, (nodes, NEIGHBOURS), device=device)
    asked = neighbours[:, 0]  # of several neighbours with its key the label is that of one
    X = torch.cat([one_hot(key, KEYS), one_hot((key[asked] + 1) % KEYS, KEYS), one_hot(value, VALUES)], 1).float()
    return X, value[asked], neighbours.flatten(), torch.arange(nodes, device=device).repeat_interleave(NEIGHBOURS)


def training_step(model: nn.Module, X: Tensor, labels: Tensor, *edges: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(X, *edges), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def speed(step: Callable[[], Tensor]) -> float:
    """Steps per second: the median of several runs, after a first one that is not counted."""
    step()
    return 1 / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nodes", type=int, help="3,000, and 200,000 on a GPU")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    nodes = options.nodes or (200_000 if options.device == "cuda" else 3000)
    torch.manual_seed(0)
    seen, unseen = questions(nodes, options.device), questions(nodes, options.device)
    average = lambda Q, K, V, SRC, DST: attend(torch.zeros_like(Q), K, V, SRC, DST)
    right = {}
    for name, attention in (("average over neighbours", average), ("attention", attend)):
        torch.manual_seed(1)
        model = Network(seen[0].shape[1], attention).to(options.device)
        step = training_step(model, *seen)
        for _ in range(options.steps):
            step()
        with torch.no_grad():
            scores = model(unseen[0], *unseen[2:])
        right[name] = float((scores.argmax(1) == unseen[1]).float().mean())
    print("right on a graph not seen before: " + ", ".join(f"{name} {share:.1%}" for name, share in right.items()))
    if options.device == "cuda":
        model.attention, ours = plain_attend, speed(step)
        print(f"{ours:.0f} training steps per second; in gathers and index_add {speed(step):.0f}")
    return right


if __name__ == "__main__":
    main()
