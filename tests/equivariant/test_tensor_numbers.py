"""Tensor products stay under the bound of `error_bounds`, and err no more than e3nn's formula by torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from error_bounds import Precision
from error_comparison import assert_no_worse, draw, every_kind, every_precision, plain
from statements import DEVICE, IS_INTERPRETED
from torch import Tensor

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product

from insum_ops.nn import FullyConnectedTensorProduct

pytestmark = pytest.mark.every_route


@every_precision
@every_kind
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_tensor_product_of_many_channels(is_shared: bool, kind: Callable[..., Tensor], precision: Precision) -> None:
    many = 4 if IS_INTERPRETED else 128
    irreps = f"{many}x0e + {many}x1o", "0e + 1o", "6x0e + 5x1o"
    layer = FullyConnectedTensorProduct(*irreps, shared_weights=is_shared, internal_weights=False)
    rows = 2 if IS_INTERPRETED else 9
    x = draw(kind, precision, rows, layer.irreps_in1.dim, is_even=True).requires_grad_()
    y = draw(plain, precision, rows, layer.irreps_in2.dim, seed=1).requires_grad_()
    shape = (layer.weight_numel,) if is_shared else (rows, layer.weight_numel)
    weight = draw(kind, precision, *shape, seed=2).requires_grad_()
    layer = layer.to(DEVICE)

    def in_torch(*own: Tensor) -> Tensor:
        return dense_product(layer, *own)

    def magnitude(*own: Tensor) -> Tensor:
        return dense_product(layer, *own, is_magnitude=True)

    paths = len(layer.instructions)
    assert_no_worse(precision, [x, y, weight], lambda: layer(x, y, weight), in_torch, 4, 2 * paths, 1, magnitude)
