"""A training step of bench/unet.py's network, without its optimizer, beside the same network in spconv."""

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

NETWORK = Path(__file__).parent.parent / "unet.py"
LAYERS = ("SubMConv3d", "SparseConv3d", "SparseInverseConv3d")
CHANNELS, LABELS = on((32, 64, 128), (8, 16)), 4
INPUTS = 8  # a multiple of what Tensor Cores read at once
SIZE = on(0.05, 0.25)
DTYPE = on(torch.float16, torch.float32)  # of autocast
KNOWN: list[str] = [name for name in ("s3dis_room", "kitti_000000") if name in LOADERS]
CLOUDS = KNOWN or list(LOADERS)[: on(2, 1)]
REUSED, ANEW, OTHER = "maps reused", "maps anew", "other sizes each time"
# the share of voxels that is left out, one after another: up to a tenth, and no size comes twice in a row
LEFT_OUT = tuple(17 * number % 50 / 500 for number in range(50))
SCALE = 1024.0  # of the loss, as a gradient scaler would: float16 gradients do not vanish
# of scores, and of each gradient: rounding flips some ReLUs, so that a weight's gradient was off by 6 % in float16 and
# by 3e-6 in float32, at most, over a generated room of 55,693 and 3,078 voxels
LIMITS = on((2 * LIMIT[torch.float16], 0.2), (4 * LIMIT[torch.float32], 1e-4))


def unet(library: Any) -> ModuleType:
    """The network's module with its layers taken from a library."""
    spec = util.spec_from_file_location("unet_of_a_library", NETWORK)
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

    def case(self, what: str) -> Case:
        words = f"{self.scene.name}, {centimetres(self.scene.size)}, {what}"
        facts: dict[str, float | int | str] = {"series": what, "voxels": len(self.features)}
        found = expected(self.scene.name, LEFT_OUT[-1] if what == OTHER else 0.0)
        return Case("unet", words, found, (LIMITS[0], *[LIMITS[1]] * (len(found) - 1)), facts=facts)

    def model(self, library: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
        model: nn.Module = unet(library).UNet(INPUTS, LABELS, CHANNELS).to(DEVICE, dtype)
        model.load_state_dict(self.weights)
        return model

    def losses(self, scores: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, self.labels[: len(scores)])

    def tensor(self, library: Any, left_out: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
        """Voxels that no layer has seen, a share of them at the end left out."""
        count = len(self.features) - int(left_out * len(self.features))
        features, indices = self.features[:count].to(dtype), self.scene.indices[:count].clone()
        return library.SparseConvTensor(features, indices, self.shape, 1)

    def anew(self, library: Any, what: str) -> Call:
        """A step on voxels that are new each time, all of them or now more and now fewer."""
        if what == ANEW:
            return self.call(library, lambda: self.tensor(library), is_capturable=False)
        shares = cycle(LEFT_OUT)
        call = self.call(library, lambda: self.tensor(library, next(shares)), is_capturable=False)

        def result() -> Tensor | tuple[Tensor, ...]:
            """The step that is timed, when its turn comes to leave out what the case does."""
            while next(shares) != LEFT_OUT[-2]:
                pass
            assert call.result is not None
            return call.result()

        return replace(call, result=result)

    def call(self, library: Any, tensor: Callable[[], Any], is_capturable: bool) -> Call:
        """Forward, loss and every gradient, under autocast on a GPU."""
        model = self.model(library)
        weights = parameters(model)
        context = partial(torch.autocast, DEVICE, DTYPE) if DEVICE == "cuda" else nullcontext

        def step() -> tuple[Tensor, ...]:
            with context():
                scores = model(tensor())
                loss = self.losses(scores)
            return scores, *torch.autograd.grad(SCALE * loss, weights)

        def result() -> tuple[Tensor, ...]:
            scores, *gradients = step()
            return scores.detach(), *(gradient / SCALE for gradient in gradients)

        return Call(step, result=result, is_capturable=is_capturable)


def parameters(model: nn.Module) -> list[Tensor]:
    """By name: each library has an order of its own."""
    return [own for _, own in sorted(model.named_parameters())]


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
    return Step(given, shape, features, labels, weights)


@held
def expected(name: str, left_out: float) -> tuple[Tensor, ...]:
    """The scores and the gradient of every weight, by plain torch in float64."""
    given = step(name)
    model = given.model(plain_convolutions, torch.float64)
    scores = model(given.tensor(plain_convolutions, left_out, torch.float64))
    return scores.detach(), *torch.autograd.grad(given.losses(scores), parameters(model))


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
    """spconv refuses to reuse a strided layer's map and what lies below: it keeps the map of the first level."""
    library = SimpleNamespace(SparseSequential=spconv.SparseSequential, SparseConvTensor=spconv.SparseConvTensor)
    for name in LAYERS:
        setattr(library, name, partial(getattr(spconv, name), algo=algorithm))
    if what != REUSED:
        return given.anew(library, what)
    known, model = given.tensor(library), given.model(library)
    with torch.no_grad():
        kept = model.stem(known).indice_dict  # type: ignore[operator]
    known.indice_dict = {"level0": kept["level0"]}
    call = given.call(library, lambda: known, is_capturable=False)
    return replace(call, facts={"maps": "the first level's reused, the others made anew: spconv keeps no more"})


@pytest.mark.parametrize("provider", [OURS, SPCONV, *on([], [PLAIN])])
@pytest.mark.parametrize("what", [REUSED, ANEW, OTHER])
@pytest.mark.parametrize("name", CLOUDS)
def test_unet(name: str, what: str, provider: str, measure: Measure) -> None:
    given = step(name)
    measure(given.case(what), provider, lambda: provide(provider, what, given))
