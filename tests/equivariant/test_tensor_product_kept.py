"""The tables of a tensor product are kept, so they must be good for whoever comes next."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from tolerances import assert_matches

from insum_ops import tensor_product
from insum_ops.equivariant.decomposition import decompose
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct

BOTH = "3x0e + 3x1o"
PRODUCTS = {
    "uvw": ("uvw", "3x1o", True),
    "uvw each": ("uvw", "3x1o", False),
    "uvu": ("uvu", "3x1o", True),
    "uvu each": ("uvu", "3x1o", False),
    "uuw": ("uuw", "3x1o", True),
    "uuu": ("uuu", "3x1o", True),
    "uvv": ("uvv", "3x1o", True),
    "uvuv": ("uvuv", "9x1o", True),
}


@pytest.fixture(autouse=True)
def _nothing_is_known():
    decompose.cache_clear()


def product(name):
    mode, out, is_shared = PRODUCTS[name]
    paths = [(0, 1, 0, mode, True), (1, 0, 0, mode, True)]
    return TensorProduct(BOTH, BOTH, out, paths, shared_weights=is_shared).double()


def inputs(tp):
    weight = None if tp.internal_weights else torch.randn(4, tp.weight_numel, dtype=torch.float64)
    return torch.randn(4, 12, dtype=torch.float64), torch.randn(4, 12, dtype=torch.float64), weight


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_made_in_inference_mode_serves_training(name):
    tp = product(name)
    x, y, weight = inputs(tp)
    with torch.inference_mode():
        expected = tp(x, y, weight)
    x.requires_grad_()
    z = tp(x, y, weight)
    assert_matches(z, expected.clone())
    (dx,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    assert dx.isfinite().all()


def test_the_function_too():
    x, y, weight = (torch.randn(2, n, dtype=torch.float64) for n in (12, 12, 18))
    irreps = {"irreps_in1": BOTH, "irreps_in2": BOTH, "irreps_out": "1x1o"}
    with torch.inference_mode():
        expected = tensor_product(x, y, weight, **irreps)
    z = tensor_product(x.requires_grad_(), y, weight, **irreps)
    assert_matches(z, expected.clone())
    z.sum().backward()


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_made_under_another_default_device_serves_all(name):
    with torch.device("meta"):
        product(name)
    tp = product(name)
    x, y, weight = inputs(tp)
    assert tp(x, y, weight).isfinite().all()


def test_a_fake_tensor_is_not_kept():
    tp = FullyConnectedTensorProduct(BOTH, "0e + 1o", BOTH)
    x, y = torch.randn(2, 12), torch.randn(2, 4)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert tp(torch.randn(2, 12), torch.randn(2, 4)).shape == (2, 12)
        assert type(tp(x, y)) is torch.Tensor


@pytest.mark.parametrize("name", PRODUCTS)
def test_on_the_meta_device_it_tells_shapes(name):
    tp = product(name).to("meta")
    given = [tensor if tensor is None else tensor.to("meta") for tensor in inputs(tp)]
    assert tp(*given).shape == (4, tp.irreps_out.dim)
