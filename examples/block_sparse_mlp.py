"""A multilayer perceptron from dense to block-sparse: `python examples/block_sparse_mlp.py --steps 100`.

The inputs come in 32 groups of 16 numbers and only four of the groups matter, which nobody tells the network. It is
trained dense, its linear layers then keep the tenth of their blocks that is largest by norm, and what is left is
trained for half as many steps again. On a GPU a step of the sparse network is timed beside one of the dense network.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import Timer

from insum_ops.nn import sparsify

GROUPS, WIDTH, CLASSES = 32, 16, 8  # groups of inputs, numbers in each, classes
RELEVANT = 4  # groups that the labels depend on
BLOCK, DENSITY = (32, 16), 0.1  # outputs and inputs of a block, share of blocks that stay
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


def perceptron(hidden: int) -> nn.Sequential:
    """[b, GROUPS * WIDTH] -> [b, CLASSES], by two layers of `hidden` units."""
    first, second, last = nn.Linear(GROUPS * WIDTH, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, CLASSES)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def planted(samples: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs [samples, GROUPS * WIDTH] and labels [samples]: the class that scores best over the relevant groups."""
    X = torch.randn(samples, GROUPS, WIDTH, device=device)
    groups = torch.randperm(GROUPS)[:RELEVANT].to(device)
    teacher = torch.randn(RELEVANT * WIDTH, CLASSES, device=device)
    return X.flatten(1), (X[:, groups].flatten(1) @ teacher).argmax(1)


def training_step(model: nn.Module, X: Tensor, labels: Tensor, batch: int) -> Callable[[], None]:
    """A function that makes one step of training, on samples drawn at random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)

    def step() -> None:
        drawn = torch.randint(len(X), (batch,), device=X.device)
        optimizer.zero_grad()
        cross_entropy(model(X[drawn]), labels[drawn]).backward()
        optimizer.step()

    return step


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, labels: Tensor) -> float:
    return float((model(X).argmax(1) == labels).float().mean())


def speed(step: Callable[[], None]) -> float:
    """Steps per second: the median of several runs, after a first one that is not counted."""
    step()
    return 1 / Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, help="units of a layer; 512, and 8192 on a GPU")
    parser.add_argument("--batch", type=int, help="samples of a step; 256, and 4096 on a GPU")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    hidden, batch = options.hidden or (8192 if on_gpu else 512), options.batch or (4096 if on_gpu else 256)

    torch.manual_seed(0)
    X, labels = planted(20_000, options.device)
    unseen, X = X[:4000], X[4000:]
    unseen_labels, labels = labels[:4000], labels[4000:]
    right = {"largest class": float((unseen_labels == labels.bincount().argmax()).float().mean())}

    dense = perceptron(hidden).to(options.device)
    dense_step = training_step(dense, X, labels, batch)
    for _ in range(options.steps):
        dense_step()
    right["dense"] = accuracy(dense, unseen, unseen_labels)

    sparse = copy.deepcopy(dense)
    print(sparsify(sparse, BLOCK, DENSITY, filter=lambda name, layer: layer.out_features >= hidden))
    right["pruned"] = accuracy(sparse, unseen, unseen_labels)
    sparse_step = training_step(sparse, X, labels, batch)
    for _ in range(options.steps // 2):
        sparse_step()
    right["pruned, then trained"] = accuracy(sparse, unseen, unseen_labels)

    kept = sparse[0].mask.unflatten(1, (GROUPS, -1)).sum((0, 2)).topk(RELEVANT).values.sum() / sparse[0].mask.sum()
    print(f"of the first layer's blocks, {kept:.0%} read the {RELEVANT} groups of inputs that have most of them")
    print("right on unseen samples: " + ", ".join(f"{name} {share:.1%}" for name, share in right.items()))
    if on_gpu:
        print(f"{speed(sparse_step):.0f} training steps per second; dense {speed(dense_step):.0f}, float32")
    return right


if __name__ == "__main__":
    main()
