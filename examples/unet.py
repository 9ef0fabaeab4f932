"""A sparse U-Net learns to tell floor, ceiling, walls and things apart, voxel by voxel, and draws what it learned.

    python examples/unet.py --steps 100 --picture room.png
    INSUM_DATA=folder python examples/unet.py --cloud s3dis_room

`INSUM_DATA` names a folder whose clouds/ holds npz files with `xyz` in metres; without it a furnished room is made up.
Labels come from where a voxel lies, while the network sees only which voxels there are and how high.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from insum_ops.nn import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SparseSequential, SubMConv3d

LABELS = ("floor", "ceiling", "wall", "thing")
COLOURS = ("tab:brown", "tab:gray", "tab:blue", "tab:orange")


class Level(nn.Module):
    """Blocks at one resolution around the rest of the network at half of it."""

    def __init__(self, channels: int, wider: tuple[int, ...], name: str = "0") -> None:
        super().__init__()
        self.before = _block(channels, channels, f"level{name}")
        self.below: Level | None = None
        if wider:
            key = f"down{name}"
            self.down = _followed(SparseConv3d(channels, wider[0], 2, 2, bias=False, indice_key=key), wider[0])
            self.below = Level(wider[0], wider[1:], str(int(name) + 1))
            self.up = _followed(SparseInverseConv3d(wider[0], channels, 2, indice_key=key, bias=False), channels)
            self.after = _block(2 * channels, channels, f"level{name}")

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        x = self.before(x)
        if self.below is None:
            return x
        y = self.up(self.below(self.down(x)))
        return self.after(x.replace_feature(torch.cat([x.features, y.features], 1)))


class UNet(nn.Module):
    """Submanifold blocks, strided convolutions down, inverse convolutions up; one score for each label and voxel."""

    def __init__(self, inputs: int, labels: int, channels: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = SubMConv3d(inputs, channels[0], 3, indice_key="level0")
        self.levels = Level(channels[0], channels[1:])
        self.head = nn.Linear(channels[0], labels)

    def forward(self, x: SparseConvTensor) -> Tensor:
        return self.head(self.levels(self.stem(x)).features)


def _followed(layer: nn.Module, channels: int) -> SparseSequential:
    return SparseSequential(layer, nn.BatchNorm1d(channels), nn.ReLU())


def _block(inputs: int, outputs: int, key: str) -> SparseSequential:
    first = SubMConv3d(inputs, outputs, 3, bias=False, indice_key=key)
    second = SubMConv3d(outputs, outputs, 3, bias=False, indice_key=key)
    return SparseSequential(_followed(first, outputs), _followed(second, outputs))


def room(random: np.random.Generator, points: int = 200_000) -> np.ndarray:
    """The surfaces of a room of 6 x 5 x 3 metres with boxes in it, [points, 3]."""
    boxes = [((0, 0, 0), (6, 5, 3))]
    for _ in range(8):
        size = random.uniform(0.4, 1.4, 3)
        corner = random.uniform((0.3, 0.3, 0), (4.4, 3.4, 0.01))
        boxes.append((tuple(corner), tuple(corner + size)))
    parts = []
    for low, high in boxes:
        xyz = random.uniform(low, high, (points // len(boxes), 3))
        face = random.integers(0, 3, len(xyz))
        side = np.where(random.random(len(xyz)) < 0.5, np.array(low)[face], np.array(high)[face])
        xyz[np.arange(len(xyz)), face] = side
        parts.append(xyz)
    return np.concatenate(parts).astype(np.float32)


def load(name: str | None) -> np.ndarray:
    folder = os.environ.get("INSUM_DATA")
    if folder is None:
        if name is not None:
            sys.exit(f"--cloud {name} needs INSUM_DATA, the folder whose clouds/ holds {name}.npz")
        return room(np.random.default_rng(0))
    files = sorted(Path(folder, "clouds").glob("*.npz"))
    known = {file.stem: file for file in files}
    if not known or (name is not None and name not in known):
        sys.exit(f"no cloud {name or ''} in {Path(folder, 'clouds')}; there are {', '.join(known) or 'none'}")
    return np.load(known[name or files[0].stem])["xyz"]


def voxelized(xyz: np.ndarray, size: float) -> tuple[Tensor, list[int]]:
    """Distinct voxels with a batch index in front, and the grid that holds them."""
    cells = np.unique(np.floor((xyz - xyz.min(0)) / size).astype(np.int32), axis=0)
    indices = torch.from_numpy(np.pad(cells, ((0, 0), (1, 0))))
    return indices, (cells.max(0) + 1).tolist()


def labels_of(indices: Tensor, shape: list[int], size: float) -> Tensor:
    """Which of LABELS a voxel is: the lowest and highest 15 cm, the outer 15 cm, or neither."""
    margin = max(1, round(0.15 / size))
    x, y, z = indices[:, 1:].T
    is_wall = (x < margin) | (x >= shape[0] - margin) | (y < margin) | (y >= shape[1] - margin)
    labels = torch.where(is_wall, 2, 3)
    labels[z >= shape[2] - margin] = 1
    labels[z < margin] = 0
    return labels


def draw(indices: Tensor, labels: Tensor, path: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        sys.exit(f"{path} was not drawn: matplotlib is missing; pip install matplotlib, or leave --picture out")
    figure = pyplot.figure(figsize=(8, 6))
    axes = figure.add_subplot(projection="3d")
    for label, (name, colour) in enumerate(zip(LABELS, COLOURS)):
        if name != "ceiling":  # it would hide the rest
            x, y, z = indices[labels == label, 1:].T.numpy()
            axes.scatter(x, y, z, s=1, c=colour, label=name)
    axes.legend(markerscale=8)
    axes.set_box_aspect((indices[:, 1:].amax(0) + 1).tolist())
    figure.savefig(path, dpi=150)


def train(steps: int, voxel: float, cloud: str | None, device: str, channels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Voxels and their learned labels."""
    indices, shape = voxelized(load(cloud), voxel)
    labels = labels_of(indices, shape, voxel).to(device)
    height = (indices[:, 3:] + 0.5) / shape[2]
    features = torch.cat([torch.ones_like(height), height], 1).to(device)
    x = SparseConvTensor(features, indices.to(device), shape, batch_size=1)
    torch.manual_seed(0)
    model = UNet(features.shape[1], len(LABELS), channels).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    print(f"{len(indices)} voxels of {voxel} m on {device}, {sum(p.numel() for p in model.parameters())} weights")
    scores = model(x)
    with tqdm(range(steps), unit="step") as progress:
        for _ in progress:
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (scores.argmax(1) == labels).float().mean()
            progress.set_postfix(loss=f"{loss.item():.3f}", right=f"{right.item():.1%}")
    return indices, scores.argmax(1).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--voxel", type=float, default=0.1, help="edge of a voxel in metres")
    parser.add_argument("--cloud", help="a file of INSUM_DATA/clouds, without .npz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64], help="of each resolution")
    parser.add_argument("--picture", help="where to write the labelled cloud, as PNG")
    args = parser.parse_args()
    indices, labels = train(args.steps, args.voxel, args.cloud, args.device, tuple(args.channels))
    if args.picture:
        draw(indices, labels, args.picture)
        print(f"wrote {args.picture}")


if __name__ == "__main__":
    main()
