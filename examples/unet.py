"""A sparse U-Net tells floor, ceiling, walls and things apart, voxel by voxel: `python examples/unet.py --steps 20`.

It learns from one generated room and is judged by another, which `--picture room.png` draws. Labels come from where a
voxel lies, while the network sees only which voxels there are and how high. `--voxel 0.05 --width 32` suits a GPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SparseModule, SparseSequential, SubMConv3d

LABELS = ("floor", "ceiling", "wall", "thing")
DEVICES = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


class Level(SparseModule):
    """Blocks at one resolution around the rest of the network at half of it; `channels` of each resolution."""

    def __init__(self, channels: list[int], depth: int = 0) -> None:
        super().__init__()
        (here, wider), key = channels[:2], f"down{depth}"
        self.before = block(here, here, depth)
        self.down = followed(SparseConv3d(here, wider, 2, 2, bias=False, indice_key=key), wider)
        self.below = Level(channels[1:], depth + 1) if channels[2:] else block(wider, wider, depth + 1)
        self.up = followed(SparseInverseConv3d(wider, here, 2, bias=False, indice_key=key), here)
        self.after = block(2 * here, here, depth)

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        x = self.before(x)
        y = self.up(self.below(self.down(x)))
        return self.after(x.replace_feature(torch.cat([x.features, y.features], 1)))


def followed(layer: nn.Module, channels: int) -> SparseSequential:
    return SparseSequential(layer, nn.BatchNorm1d(channels), nn.ReLU())


def block(inputs: int, outputs: int, depth: int) -> SparseSequential:
    layers = [SubMConv3d(width, outputs, 3, bias=False, indice_key=f"level{depth}") for width in (inputs, outputs)]
    return SparseSequential(*(followed(layer, outputs) for layer in layers))


def unet(width: int) -> SparseSequential:
    """Voxels with two features each to voxels with a score for each label, over three resolutions."""
    stem = SubMConv3d(2, width, 3, indice_key="level0")
    return SparseSequential(stem, Level([width, 2 * width, 4 * width]), nn.Linear(width, len(LABELS)))


def room(points: int = 100_000) -> Tensor:
    """Points on the surfaces of a room of 6 x 5 x 3 metres with eight boxes in it, [points, 3]."""
    low = torch.cat([torch.zeros(1, 3), torch.rand(8, 3) * torch.tensor([4.4, 3.4, 0.01]) + 0.1])
    high = torch.cat([torch.tensor([[6.0, 5.0, 3.0]]), low[1:] + 0.4 + torch.rand(8, 3)])
    box, face = torch.randint(len(low), (points,)), torch.randint(3, (points, 1))
    side = torch.where(torch.rand(points, 3) < 0.5, low[box], high[box])
    return torch.lerp(low[box], high[box], torch.rand(points, 3)).scatter(1, face, side.gather(1, face))


def voxels(xyz: Tensor, size: float, device: str) -> tuple[SparseConvTensor, Tensor]:
    """The voxels that hold points, and their labels: the lowest and highest 15 cm, the outer 15 cm, or neither."""
    cells = ((xyz - xyz.amin(0)) / size).int().unique(dim=0)
    indices = nn.functional.pad(cells, (1, 0)).to(device)  # batch 0, then x, y and z
    shape, margin = (cells.amax(0) + 1).tolist(), max(1, round(0.15 / size))
    x, y, z = indices[:, 1:].T
    is_wall = (x < margin) | (x >= shape[0] - margin) | (y < margin) | (y >= shape[1] - margin)
    labels = torch.where(is_wall, 2, 3).masked_fill(z >= shape[2] - margin, 1).masked_fill(z < margin, 0)
    features = torch.stack([torch.ones(len(z), device=device), z / shape[2]], 1)
    return SparseConvTensor(features, indices, shape, batch_size=1), labels


def draw(indices: Tensor, labels: Tensor, path: str) -> None:
    from matplotlib import pyplot  # needed for pictures alone

    axes = pyplot.figure(figsize=(8, 6)).add_subplot(projection="3d")
    for label in (0, 2, 3):  # the ceiling would hide the rest
        axes.scatter(*indices[labels == label, 1:].T.tolist(), s=1, label=LABELS[label])
    axes.legend(markerscale=8)
    axes.set_box_aspect((indices[:, 1:].amax(0) + 1).tolist())
    axes.figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--voxel", type=float, default=0.2, help="edge of a voxel in metres")
    parser.add_argument("--width", type=int, default=8, help="channels of the finest of three resolutions")
    parser.add_argument("--picture", help="where to draw the labelled room, as PNG; needs matplotlib")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="cuda only where torch finds a GPU")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    (x, labels), (other, wanted) = (voxels(room(), options.voxel, options.device) for _ in range(2))
    model = unet(options.width).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(x).features, labels).backward()
        optimizer.step()

    for _ in range(options.steps):
        step()
    guessed = model.eval()(other).features.argmax(1)
    right, guess = (float((one == wanted).float().mean()) for one in (guessed, labels.bincount().argmax()))
    print(f"{len(wanted)} voxels of a room not seen before: {right:.1%} right (always the largest class: {guess:.1%})")
    if options.device == "cuda":
        time = Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.5).median
        print(f"{1 / time:.0f} training steps per second, each of {len(labels)} voxels")
    if options.picture is not None:
        draw(other.indices.cpu(), guessed.cpu(), options.picture)
    return right, guess


if __name__ == "__main__":
    main()
