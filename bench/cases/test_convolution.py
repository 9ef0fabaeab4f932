"""Submanifold convolution 3^3 over rooms and scans, as a layer is called: SubMConv3d beside spconv and plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_ops import nn as ours

from ..case import OURS, Call, Case, held, on
from ..conftest import Measure
from ..convolutions import (
    FLOAT16,
    FLOAT16_FULL,
    FLOAT32,
    LOADERS,
    OFTEN,
    PLAIN,
    SPCONV,
    TF32,
    Precision,
    Scene,
    asked,
    centimetres,
    fastest,
    new_layer,
    new_tensor,
    scene,
    weight_for,
    with_map,
)
from ..paper import FLEX_GEMM, FLEX_GEMM_MS

SIZES = on((0.05, 0.02), (0.25,))  # of a voxel, in metres
WIDTHS = on((16, 32, 64, 128, 256), (16, 32))  # channels
PRECISIONS = on((FLOAT16, FLOAT16_FULL, TF32, FLOAT32), (FLOAT32,))
PLAIN_CHANNELS = on((64,), (16, 32))
FEW = on((32, 128), WIDTHS)  # channels, of the larger voxels, at which full float32 is measured


def parameters() -> Iterator[Any]:
    """Precisions that share a cloud and its voxels come one after another."""
    for name, size, channels, precision in product(LOADERS, SIZES, WIDTHS, PRECISIONS):
        is_large = size == SIZES[0]
        if precision is FLOAT32 and not (is_large and channels in FEW):
            continue
        with_plain = precision is PRECISIONS[0] and is_large and channels in PLAIN_CHANNELS
        for provider in (OURS, SPCONV, *([PLAIN] if with_plain else [])):
            words = (name, centimetres(size), channels, precision.name, provider)
            yield pytest.param(name, size, channels, precision, provider, id="-".join(map(str, words)))


@dataclass(frozen=True)
class Operands:
    case: Case
    scene: Scene
    In: Tensor
    Weight: Tensor


@held
def tensors(name: str, size: float, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return scene(name, size).features(channels, dtype), weight_for(channels, dtype)


@held
def operands(name: str, size: float, channels: int, precision: Precision) -> Operands:
    given = scene(name, size)
    In, Weight = tensors(name, size, channels, precision.dtype)
    facts: dict[str, float | int | str] = {"series": precision.name, "voxels": len(In), "pairs": given.pairs}
    if precision is FLOAT16 and size == SIZES[0] and (name, channels) in FLEX_GEMM:
        facts[FLEX_GEMM_MS] = FLEX_GEMM[name, channels]
    case = Case(
        "convolution",
        f"{name}, {centimetres(size)}, {channels} channels, {precision.name}",
        given.outputs(In, Weight),
        precision.limit,
        flops=2.0 * given.pairs * channels**2,
        traffic=float(precision.dtype.itemsize * (2 * In.numel() + Weight.numel()) + 8 * given.pairs),
        facts=facts,
    )
    return Operands(case, given, In, Weight)


@held
def spconv_call(given: Scene, In: Tensor, Weight: Tensor, is_tf32: bool) -> Call:
    """At the best of its algorithms; torch's flag for sums in float16 is nothing to it."""
    return fastest(lambda spconv, algorithm: layer_call(spconv, given, In, Weight, algo=algorithm))


def provide(provider: str, given: Operands, precision: Precision) -> Call:
    if provider == SPCONV:
        return spconv_call(given.scene, given.In, given.Weight, precision.is_tf32)
    if provider == PLAIN:
        return tap_by_tap(given)
    return layer_call(ours, given.scene, given.In, given.Weight)


def layer_call(library: Any, given: Scene, In: Tensor, Weight: Tensor, **options: object) -> Call:
    """A layer that has seen its cloud often, as one calls it once training is over."""
    layer = new_layer(library, Weight, **options).eval()
    x = with_map(layer, new_tensor(library, given, In))

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x).features  # type: ignore[no-any-return]

    for _ in range(OFTEN):
        run()
    return Call(run, result=lambda: run()[given.rows])


def tap_by_tap(given: Operands) -> Call:
    """Gather, multiply, scatter-add for each tap of the kernel, as one writes it without a library."""
    matrices = given.Weight.flatten(1, 3).permute(1, 2, 0).contiguous()
    In = given.In

    def run() -> Tensor:
        Out = torch.zeros(len(In), matrices.shape[2], device=In.device, dtype=In.dtype)
        for matrix, (source, target) in zip(matrices, given.scene.by_tap):
            Out.index_add_(0, target, In[source] @ matrix)
        return Out

    return Call(run, result=lambda: run()[given.scene.rows])


@pytest.mark.parametrize(("name", "size", "channels", "precision", "provider"), list(parameters()))
def test_convolution(
    name: str, size: float, channels: int, precision: Precision, provider: str, measure: Measure
) -> None:
    with asked(precision):
        given = operands(name, size, channels, precision)
        measure(given.case, provider, lambda: provide(provider, given, precision))
