"""Layers that are made where torch gives no tensor memory: sizes alone are worked out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn as torch_nn
from torch._subclasses import FakeTensorMode

from insum_ops import nn

pytestmark = pytest.mark.cpu


def product() -> torch_nn.Module:
    pytest.importorskip("e3nn", reason="e3nn is an extra")
    return nn.FullyConnectedTensorProduct("2x0e + 1o", "1o", "3x0e + 2x1o")


LAYERS: dict[str, tuple[Callable[[], torch_nn.Module], list[tuple[int, ...]], tuple[int, ...]]] = {
    "linear": (lambda: nn.BlockSparseLinear(10, 6, 4, 0.5), [(3, 10)], (3, 6)),
    "tensor product": (product, [(3, 5), (3, 3)], (3, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_stand_ins(name: str) -> None:
    make, shapes, expected = LAYERS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):  # constant tables have numbers
        layer = make()
        result = layer(*[torch.randn(shape) for shape in shapes])
        result.sum().backward()
    assert tuple(result.shape) == expected
    real, (weight, *_) = make(), layer.parameters()
    assert {key: part.shape for key, part in layer.state_dict().items()} == {
        key: part.shape for key, part in real.state_dict().items()
    }
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert torch.isfinite(real(*[torch.randn(shape) for shape in shapes])).all()  # nothing fake was kept
