"""Training over clouds that are new at every step: right whatever earlier plans were for, and soon by those plans."""

from __future__ import annotations

import sys
from random import Random

import pytest
import torch
from process_caches import forget
from short_clouds import check_step, expected_of, strided, submanifold
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops.compiler import pipeline
from insum_ops.compiler.runtime import plan_cache
from insum_ops.compiler.runtime.tensor_guard import _tells_apart
from insum_ops.nn import SparseConvTensor

# of two that are alike one is a cloud of as many other voxels, which no plan may take for the first; then a length of
# another class, and lengths that divide by 16
LENGTHS = [70, 70, 75, 75, 71, 90, 90, 97, 96, 80, 80, 112, 74, 74, 93, 93]
if IS_INTERPRETED:
    LENGTHS = [32, 18, 18, 35]


def new_cloud(length: int, channels: int = 4) -> SparseConvTensor:
    place = torch.randperm(3 * length)[:length].sort().values
    indices = torch.stack([torch.zeros_like(place), place], 1).int().to(DEVICE)
    features = torch.randn(length, channels, dtype=torch.float64, device=DEVICE, requires_grad=True)
    return SparseConvTensor(features, indices, [3 * length], 1)


@pytest.mark.every_route
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(submanifold, {"channels": 2, "out": 2}, id="submanifold"),
        pytest.param(submanifold, {"groups": 2}, id="groups"),
        pytest.param(strided, {"channels": 2, "out": 2}, id="strided"),
    ],
)
def test_values_and_gradients_over_ever_new_clouds(make, options, is_deterministic):
    layer = make(**options).to(DEVICE)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for length in LENGTHS:
            x = new_cloud(length, layer.in_channels)
            layer(x)  # as a block of two layers uses one map twice
            check_step(layer, x)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(IS_INTERPRETED, reason="kernels for dozens of lengths are slow there")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", [submanifold, strided])
def test_clouds_of_drawn_lengths(make, seed, monkeypatch):
    """Most are used once, some twice, with and without gradients; a cloud may hold one voxel, or as many as another."""
    monkeypatch.setenv("INSUM_TUNE", "off")
    forget()
    draw, length = Random(seed), 70
    layers = [make(channels, 4).to(DEVICE) for channels in (2, 4)]
    for _ in range(30):
        lengths = length, draw.choice((1, 2, 17, 64, 65, 67, 80, 96, 127, 128, 129, 160, 211)), draw.randint(60, 140)
        length, layer = draw.choice(lengths), draw.choice(layers)
        x = new_cloud(length, layer.in_channels)
        if draw.random() < 0.3:
            with torch.no_grad():
                y = layer(x)
            assert_matches(y.features, expected_of(layer, x, y))
        if draw.random() < 0.2:  # the weight's gradient alone
            x = x.replace_feature(x.features.detach())
            layer(x).features.sum().backward()
            continue
        for _ in range(draw.choice((1, 1, 3))):
            check_step(layer, x)


@pytest.mark.parametrize(
    ("known", "new"),
    [
        pytest.param(range(81, 97, 2), (82, 84, 94), id="a group for each tap"),
        pytest.param(range(300, 380, 10), (390, 405, 470, 500), id="other numbers of groups"),
    ],
)
def test_a_cloud_of_a_known_kind_is_not_planned_again(known, new):
    """A step over a new cloud asks nobody for its statement's kernel: that took longer than all of its work."""
    layer = submanifold().to(DEVICE)

    def is_planned(length: int) -> bool:
        """Take a step, and return whether it went the cold road, which begins in pipeline.py."""
        x, files = new_cloud(length), set[str]()
        sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
        try:
            for _ in range(2):
                y = layer(x)
            y.features.sum().backward()
        finally:
            sys.setprofile(None)
        return pipeline.__file__ in files

    forget()
    assert all([is_planned(length) for length in known[:1]])
    for length in known[1:]:
        is_planned(length)
    assert not any([is_planned(length) for length in new])


@pytest.mark.skipif(not _tells_apart(), reason="this torch has no guards")
def test_a_step_over_a_new_cloud_makes_no_key_of_all_shapes(monkeypatch):
    monkeypatch.setenv("INSUM_TUNE", "off")
    forget()
    layer, made, keys = submanifold().to(DEVICE), list[int](), plan_cache._keys

    def step(length: int) -> int:
        """Take a step, and return how many keys it made."""
        made.clear()
        x = new_cloud(length)
        for _ in range(2):
            y = layer(x)
        y.features.sum().backward()
        return len(made)

    monkeypatch.setattr(plan_cache, "_keys", lambda *given: made.append(1) or keys(*given))
    assert step(301)
    for length in (311, 321, 331, 341, 351):
        step(length)
    assert [step(length) for length in (390, 405, 471, 500)] == [0] * 4
