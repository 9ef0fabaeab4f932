"""A training step of examples/unet.py's network, without its optimizer, beside the same network in spconv."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import util
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum_ops import nn as ours

from .. import plain_convolutions
from ..case import DEVICE, LIMIT, OURS, Call, Case, held, on
from ..conftest import Measure
from ..convolutions import LOADERS, OFTEN, PLAIN, SPCONV, Scene, centimetres, fastest, scene

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "unet.py"
LAYERS = ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d")
CHANNELS, LABELS = on((32, 64, 128), (8, 16)), 4
INPUTS = 8  # a multiple of what Tensor Cores read at once
SIZE = on(0.05, 0.25)
DTYPE = on(torch.float16, torch.float32)  # of autocast
KNOWN: list[str] = [name for name in ("s3dis_room", "kitti_000000") if name in LOADERS]
CLOUDS = KNOWN or list(LOADERS)[: on(2, 1)]
REUSED, ANEW, OTHER = "maps reused", "maps anew", "other sizes each time"
FEWER = range(0, 2000, 37)  # voxels that are left out, one number after another, so that no size comes twice in a row
SCALE = 1024.0  # of the loss, as a gradient scaler would: float16 gradients do not vanish


def unet(library: Any) -> ModuleType:
    """The example's module with its layers taken from a library."""
    spec = util.spec_from_file_location("unet_of_a_library", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in (*LAYERS, "SparseSequential"):
        setattr(module, name, getattr(library, name))
    return module


@dataclass(frozen=True)
class Step:
    scene: Scene
    shape: list[int]  # of the grid, so that every voxel lies in a cell of each resolution
    features: Tensor
    labels: Tensor
    weights: dict[str, Tensor]
    loss: Tensor  # [1], float64

    def case(self, what: str) -> Case:
        words = f"{self.scene.name}, {centimetres(self.scene.size)}, {what}"
        facts: dict[str, float | int | str] = {"series": what, "voxels": len(self.features)}
        return Case("unet", words, self.loss, LIMIT[DTYPE], facts=facts)

    def model(self, library: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
        model: nn.Module = unet(library).UNet(INPUTS, LABELS, CHANNELS).to(DEVICE, dtype)
        model.load_state_dict(self.weights)
        return model

    def losses(self, scores: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, self.labels[: len(scores)])

    def tensor(self, library: Any, fewer: int = 0) -> Any:
        """Voxels that no layer has seen, some at the end left out."""
        count = len(self.features) - fewer
        return library.SparseConvTensor(self.features[:count], self.scene.indices[:count].clone(), self.shape, 1)

    def anew(self, library: Any, what: str) -> Call:
        """A step on voxels that are new each time, all of them or now more and now fewer."""
        made = self.call(library, lambda: self.tensor(library), is_capturable=False)
        if what == ANEW:
            return made
        fewer = cycle(FEWER)
        other = self.call(library, lambda: self.tensor(library, next(fewer)), is_capturable=False)
        return replace(other, result=made.result)

    def call(self, library: Any, tensor: Callable[[], Any], is_capturable: bool) -> Call:
        """Forward, loss and every gradient, under autocast on a GPU."""
        model = self.model(library)
        weights = list(model.parameters())
        context = partial(torch.autocast, DEVICE, DTYPE) if DEVICE == "cuda" else nullcontext

        def step() -> tuple[Tensor, tuple[Tensor, ...]]:
            with context():
                loss = self.losses(model(tensor()))
            return loss, torch.autograd.grad(SCALE * loss, weights)

        return Call(step, result=lambda: step()[0].detach().view(1), is_capturable=is_capturable)


@held
def step(name: str) -> Step:
    given = scene(name, SIZE)
    coarsest = 2 ** (len(CHANNELS) - 1)
    shape = [-(-size // coarsest) * coarsest for size in given.shape]
    place = given.indices[:, 1:] / torch.tensor(shape, device=DEVICE)
    one, height = torch.ones_like(place[:, :1]), place[:, 2:]
    features = torch.cat([one, place, place**2, 1 - height], 1)
    labels = torch.where(place[:, 2] < 0.1, 0, torch.where(place[:, 2] > 0.8, 1, torch.where(place[:, 0] < 0.1, 2, 3)))
    weights = unet(ours).UNet(INPUTS, LABELS, CHANNELS).state_dict()
    made = Step(given, shape, features, labels, weights, torch.zeros(1))
    exact = made.model(plain_convolutions, torch.float64)
    with torch.no_grad():
        loss = made.losses(exact(plain_convolutions.SparseConvTensor(features.double(), given.indices, shape, 1)))
    return Step(given, shape, features, labels, weights, loss.view(1))


def provide(provider: str, what: str, given: Step) -> Call:
    if provider == SPCONV:
        return fastest(partial(spconv_call, what, given))
    library = {OURS: ours, PLAIN: plain_convolutions}[provider]
    if what == REUSED:
        known = given.tensor(library)
        call = given.call(library, lambda: known, is_capturable=True)
        for _ in range(OFTEN):
            call.run()
        return call
    return given.anew(library, what)


def spconv_call(what: str, given: Step, spconv: Any, algorithm: Any) -> Call:
    """spconv refuses to reuse a strided layer's map and what lies below: it keeps the maps of the first level."""
    library = SimpleNamespace(SparseSequential=spconv.SparseSequential, SparseConvTensor=spconv.SparseConvTensor)
    for name in LAYERS:
        setattr(library, name, partial(getattr(spconv, name), algo=algorithm))
    if what != REUSED:
        return given.anew(library, what)
    known, model = given.tensor(library), given.model(library)
    with torch.no_grad():
        kept = model.stem(known).indice_dict  # type: ignore[operator]
    known.indice_dict = {"level0": kept["level0"]}
    return given.call(library, lambda: known, is_capturable=False)


@pytest.mark.parametrize("provider", [OURS, SPCONV, *on([], [PLAIN])])
@pytest.mark.parametrize("what", [REUSED, ANEW, OTHER])
@pytest.mark.parametrize("name", CLOUDS)
def test_unet(name: str, what: str, provider: str, measure: Measure) -> None:
    given = step(name)
    measure(given.case(what), provider, lambda: provide(provider, what, given))
