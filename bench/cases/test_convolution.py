"""Submanifold convolution 3^3 over rooms and scans, 5 cm voxels: sparse_conv3d beside spconv and plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from insum_ops import sparse_conv3d
from insum_ops.formats import kernel_map

from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..inputs import cloud_loaders, submanifold_map, voxels
from ..peers import installed

PLAIN = "torch, one matmul a tap"
PROVIDERS = (OURS, "spconv", PLAIN)
CHANNELS = on((32, 64, 128), (16, 32))
VOXEL = on(0.05, 0.25)  # metres
DTYPE = on(torch.float16, torch.float32)
SUMS = on((True, False), (True,))  # whether partial sums may meet in float16
LOADERS = cloud_loaders()


@dataclass(frozen=True)
class Operands:
    case: Case
    indices: Tensor  # [N, 4]  batch, then voxel coordinates from 0
    shape: list[int]
    triples: Tensor  # [3, pairs]
    In: Tensor
    Weight: Tensor  # [M, 3, 3, 3, C], spconv's layout


@held
def operands(name: str, channels: int, is_reduced: bool) -> Operands:
    points = voxels(np.asarray(LOADERS[name]()), VOXEL, DEVICE)
    points = points - points.amin(0)
    triples = submanifold_map(points)
    In = torch.randn(len(points), channels, device=DEVICE, dtype=DTYPE)
    Weight = torch.randn(channels, 3, 3, 3, channels, device=DEVICE, dtype=DTYPE) * channels**-0.5
    taps = Weight.flatten(1, 3).permute(1, 2, 0).double()  # [27, C, M]
    expected = torch.zeros(len(points), channels, device=DEVICE, dtype=torch.float64)
    for tap in range(27):
        pairs = triples[:, triples[0] == tap]
        expected.index_add_(0, pairs[2], In[pairs[1]].double() @ taps[tap])
    sums = "" if DEVICE == "cpu" else ", float16 sums" if is_reduced else ", float32 sums"
    case = Case(
        "convolution",
        f"{name}, {channels} channels{sums}",
        expected,
        LIMIT[DTYPE],
        flops=2.0 * triples.shape[1] * channels**2,
        traffic=float(DTYPE.itemsize * (2 * In.numel() + Weight.numel()) + 8 * triples.shape[1]),
        facts={"series": f"{channels} channels", "voxels": len(points), "pairs": triples.shape[1]},
    )
    indices = torch.cat([torch.zeros_like(points[:, :1]), points], 1).int()
    return Operands(case, indices, (points.amax(0) + 1).tolist(), triples, In, Weight)


def provide(provider: str, given: Operands) -> Call:
    In, Weight = given.In, given.Weight
    if provider == "spconv":
        return spconv_layer(given)
    if provider == PLAIN:
        return tap_by_tap(given)
    pairs = kernel_map(given.indices, given.shape, 1, kernel_size=3)
    return Call(lambda: sparse_conv3d(In, Weight, pairs))


def tap_by_tap(given: Operands) -> Call:
    """Gather, multiply, scatter-add for each tap of the kernel, as one writes it without a library."""
    taps = given.Weight.flatten(1, 3).permute(1, 2, 0).contiguous()
    pairs = [given.triples[1:, given.triples[0] == tap] for tap in range(27)]
    In = given.In

    def run() -> Tensor:
        Out = torch.zeros(len(In), taps.shape[2], device=In.device, dtype=In.dtype)
        for tap, (source, target) in enumerate(pairs):
            Out.index_add_(0, target, In[source] @ taps[tap])
        return Out

    return Call(run)


def spconv_layer(given: Operands) -> Call:
    """spconv's layer with its default algorithm; the map is made by the first call and reused."""
    spconv = installed("spconv.pytorch")
    channels = given.In.shape[1]
    layer = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="map").to(DEVICE, DTYPE)
    layer.weight.data.copy_(given.Weight)
    x = spconv.SparseConvTensor(given.In, given.indices.contiguous(), given.shape, 1)
    x.indice_dict = layer(x).indice_dict

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x).features  # type: ignore[no-any-return]

    return Call(run, is_capturable=False)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("is_reduced", SUMS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", LOADERS)
def test_convolution(name: str, channels: int, is_reduced: bool, provider: str, measure: Measure) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = is_reduced
    try:
        given = operands(name, channels, is_reduced)
        measure(given.case, provider, lambda: provide(provider, given))
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before
