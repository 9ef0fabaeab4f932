"""Training over clouds that are new at every step: right whatever earlier plans were for, and soon by those plans."""

from __future__ import annotations

import sys

import pytest
import torch
from process_caches import forget
from short_clouds import check_step, strided, submanifold
from statements import DEVICE, IS_INTERPRETED

from insum_ops.compiler import pipeline
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
