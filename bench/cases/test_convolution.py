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
from ..paper import FLEX_GEMM

SIZES = on((0.05, 0.02), (0.25,))  # of a voxel, in metres
# each precision with its channels, and whether only the larger voxels are measured in it
KINDS: tuple[tuple[Precision, tuple[int, ...], bool], ...] = on(
    (
        (FLOAT16, (16, 32, 64, 128, 256), False),
        (FLOAT16_FULL, (32, 64, 128), True),
        (TF32, (32, 64, 128), True),
        (FLOAT32, (32, 128), True),
    ),
    ((FLOAT32, (16, 32), False),),
)
PLAIN_CHANNELS = on((64,), (16, 32))


def parameters() -> Iterator[Any]:
    """Precisions that share a cloud and its voxels come one after another."""
    for name, size, (precision, widths, is_large_only) in product(LOADERS, SIZES, KINDS):
        for channels in widths if size == SIZES[0] or not is_large_only else ():
            with_plain = precision is KINDS[0][0] and size == SIZES[0] and channels in PLAIN_CHANNELS
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
def operands(name: str, size: float, channels: int, precision: Precision) -> Operands:
    given = scene(name, size)
    In, Weight = given.features(channels, precision.dtype), weight_for(channels, precision.dtype)
    facts: dict[str, float | int | str] = {"series": precision.name, "voxels": len(In), "pairs": given.pairs}
    if precision is FLOAT16 and size == SIZES[0] and (name, channels) in FLEX_GEMM:
        facts["FlexGEMM in another run on an H200, device ms"] = FLEX_GEMM[name, channels]
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


def provide(provider: str, given: Operands) -> Call:
    if provider == SPCONV:
        return fastest(lambda spconv, algorithm: layer_call(spconv, given, algo=algorithm))
    if provider == PLAIN:
        return tap_by_tap(given)
    return layer_call(ours, given)


def layer_call(library: Any, given: Operands, **options: object) -> Call:
    """A layer that has seen its cloud before, as one calls it once training is over."""
    layer = new_layer(library, given.Weight, **options).eval()
    x = with_map(layer, new_tensor(library, given.scene, given.In))

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x).features  # type: ignore[no-any-return]

    return Call(run, result=lambda: run()[given.scene.rows])


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
        measure(given.case, provider, lambda: provide(provider, given))
