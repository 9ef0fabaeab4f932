"""A process of its own: seconds to import, after torch, and to a first convolution; milliseconds to convert and run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from time import perf_counter

import torch

_start = perf_counter()

from insum_ops import sparse_conv3d  # noqa: E402
from insum_ops.formats import kernel_map  # noqa: E402

IMPORTED = perf_counter() - _start

from .case import DEVICE, on  # noqa: E402
from .inputs import cloud_loaders, voxels  # noqa: E402

CHANNELS, VOXEL = on(128, 32), on(0.05, 0.25)


def main() -> None:
    """Print the times as JSON; `first` includes what is compiled and tuned."""
    loaders = cloud_loaders()
    points = voxels(loaders.get("s3dis_room", next(iter(loaders.values())))(), VOXEL, DEVICE)
    indices = torch.cat([torch.zeros_like(points[:, :1]), points - points.amin(0)], 1).int()
    shape = (indices.amax(0)[1:] + 1).tolist()
    dtype = on(torch.float16, torch.float32)
    In = torch.randn(len(points), CHANNELS, device=DEVICE, dtype=dtype)
    Weight = torch.randn(CHANNELS, 3, 3, 3, CHANNELS, device=DEVICE, dtype=dtype)

    def convert() -> object:
        return kernel_map(indices, shape, 1, kernel_size=3).grouped(128)

    convert()  # the first one loads kernels of its own
    pairs = kernel_map(indices, shape, 1, kernel_size=3)
    first = seconds(lambda: sparse_conv3d(In, Weight, pairs))
    times = {
        "import": IMPORTED,
        "first": first,
        "convert": statistics.median(seconds(convert) for _ in range(9)) * 1e3,
        "run": statistics.median(seconds(lambda: sparse_conv3d(In, Weight, pairs)) for _ in range(15)) * 1e3,
    }
    print(json.dumps(times))


def seconds(call: Callable[[], object]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


if __name__ == "__main__":
    main()
