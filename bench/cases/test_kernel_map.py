"""What a cloud costs that no layer has seen: its map, a first call, a step of training, a call that reuses the map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from insum_ops import nn as ours
from insum_ops.formats import kernel_map

from ..case import OURS, Call, Case, held, on
from ..conftest import Measure
from ..convolutions import (
    FLOAT16,
    FLOAT32,
    LOADERS,
    SPCONV,
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

pytestmark = pytest.mark.alone
PRECISION = on(FLOAT16, FLOAT32)
CHANNELS = on(32, 16)
SIZE = on(0.05, 0.25)
FINER = on([("s3dis_room", 0.02)], [])
CLOUDS = [(name, SIZE) for name in LOADERS] + [(name, size) for name, size in FINER if name in LOADERS]
MAP, NEW, STEP, REUSED = "the map alone", "a new cloud", "a step of four layers over a new cloud", "the map reused"


@dataclass(frozen=True)
class Operands:
    scene: Scene
    In: Tensor
    Weight: Tensor
    expected: Tensor

    def case(self, what: str) -> Case:
        name = f"{self.scene.name}, {centimetres(self.scene.size)}, {what}"
        facts: dict[str, float | int | str] = {"series": what, "voxels": len(self.In), "pairs": self.scene.pairs}
        if what == MAP:
            return Case("kernel_map", name, self.scene.neighbours, limit=0.0, facts=facts)  # one wrong pair is too many
        return Case("kernel_map", name, self.expected, PRECISION.limit, facts=facts)


@held
def operands(name: str, size: float) -> Operands:
    given = scene(name, size)
    In, Weight = given.features(CHANNELS, PRECISION.dtype), weight_for(CHANNELS, PRECISION.dtype)
    return Operands(given, In, Weight, given.outputs(In, Weight))


def provide(provider: str, what: str, given: Operands) -> Call:
    if what == STEP:
        if provider == OURS:
            return stepped(ours, given)
        return fastest(lambda spconv, algorithm: stepped(spconv, given, algo=algorithm))
    if provider == OURS:
        return our_map(given) if what == MAP else called(ours, what, given)
    if what == MAP:
        return fastest(lambda spconv, algorithm: spconv_map(spconv, algorithm, given))
    return fastest(lambda spconv, algorithm: called(spconv, what, given, algo=algorithm))


def called(library: Any, what: str, given: Operands, **options: object) -> Call:
    """A layer on voxels that are new each time, or the same."""
    layer = new_layer(library, given.Weight, **options).eval()
    fresh: Callable[[], Any] = lambda: new_tensor(library, given.scene, given.In)
    known = with_map(layer, fresh())
    take = fresh if what == NEW else lambda: known

    def run() -> Tensor:
        with torch.no_grad():
            return layer(take()).features  # type: ignore[no-any-return]

    return Call(run, result=lambda: run()[given.scene.rows], is_capturable=what == REUSED)


def stepped(library: Any, given: Operands, **options: object) -> Call:
    """A layer four times, forward and backward, over a cloud that has another number of voxels each time."""
    layer = new_layer(library, given.Weight, **options)
    indices, shape, lengths = given.scene.indices, given.scene.shape, count()

    def run() -> None:
        voxels = len(indices) - 37 * next(lengths) % 999 % len(indices)
        x = library.SparseConvTensor(given.In[:voxels], indices[:voxels].clone(), shape, 1)
        for _ in range(4):
            x = layer(x)
        x.features.sum().backward()
        layer.weight.grad = None

    whole = lambda: layer(new_tensor(library, given.scene, given.In)).features[given.scene.rows].detach()
    return Call(run, result=whole, is_capturable=False)


def our_map(given: Operands) -> Call:
    indices, shape = given.scene.indices, given.scene.shape
    run = lambda: kernel_map(indices.clone(), shape, 1, kernel_size=3)
    return Call(run, result=lambda: run().neighbours.T, is_capturable=False)


def spconv_map(spconv: Any, algorithm: Any, given: Operands) -> Call:
    """What spconv's layer calls for a cloud that is new to it."""
    indices, shape, three, one, none = given.scene.indices, given.scene.shape, [3] * 3, [1] * 3, [0] * 3
    if algorithm == spconv.ConvAlgo.Native:
        raise RuntimeError("its pairs are in lists, and the layer is slower with them")
    find = spconv.ops.get_indice_pairs_implicit_gemm

    def run() -> Any:
        sizes = (three, one, none, one, none)
        return find(indices.clone(), 1, shape, algorithm, *sizes, subm=True, transpose=False, is_train=False)

    return Call(run, result=lambda: run()[2])


@pytest.mark.parametrize("provider", [OURS, SPCONV])
@pytest.mark.parametrize("what", on([MAP, NEW, STEP, REUSED], [MAP, NEW, REUSED]))
@pytest.mark.parametrize(("name", "size"), CLOUDS)
def test_kernel_map(name: str, size: float, what: str, provider: str, measure: Measure) -> None:
    with asked(PRECISION):
        given = operands(name, size)
        measure(given.case(what), provider, lambda: provide(provider, what, given))
