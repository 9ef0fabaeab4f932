"""Tensor products on every route: the torch.fx graph, generated kernels on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product  # noqa: E402
from tolerances import assert_matches, assert_within, bound  # noqa: E402

from insum_ops import tensor_product  # noqa: E402
from insum_ops.compiler.planning import scatter  # noqa: E402
from insum_ops.equivariant.decomposition import decompose  # noqa: E402
from insum_ops.formats import GroupCOO  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

pytestmark = pytest.mark.kernels

SMALL = ("2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o")
UNEQUAL = ("1x0e + 2x1o", "2x0e + 1o", "2x0e + 1x1o")
UVU_PATHS = [(0, 1, 1, "uvu", True), (1, 0, 1, "uvu", True), (1, 1, 0, "uvu", True)]
UVU = ("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o", UVU_PATHS)


def operands(ours, rows: int, weight_rows: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """x, y and weight on the device, and the same in float64 for the reference."""
    shapes = (rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (*weight_rows, ours.weight_numel)
    tensors = [torch.randn(shape, dtype=dtype) / 2 for shape in shapes]
    wide = [tensor.double().requires_grad_() for tensor in tensors]
    return [tensor.to(DEVICE).requires_grad_() for tensor in tensors], wide


def assert_right(ours, rows: int, weight_rows: tuple[int, ...], **edges: Tensor) -> None:
    """Values and gradients against e3nn's formula, dense in float64."""
    tensors, wide = operands(ours, rows, weight_rows, torch.float32)
    actual = ours(*tensors, **{name: tensor.to(DEVICE) for name, tensor in edges.items()})
    x, y, weight = wide
    if edges:
        messages = dense_product(ours, x[edges["src"]], y, weight)
        expected = messages.new_zeros(rows, ours.irreps_out.dim).index_add(0, edges["dst"], messages)
    else:
        expected = dense_product(ours, x, y, weight)
    assert_matches(actual, expected)
    upstream = torch.randn(actual.shape)
    want = torch.autograd.grad(expected, wide, upstream.double())
    for got, reference in zip(torch.autograd.grad(actual, tensors, upstream.to(DEVICE)), want):
        assert_matches(got, reference)


@pytest.mark.parametrize("irreps", [SMALL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_fully_connected(irreps, is_shared):
    ours = FullyConnectedTensorProduct(*irreps, shared_weights=is_shared, internal_weights=False)
    assert_right(ours, 3, () if is_shared else (3,))


@pytest.mark.parametrize("mode", ["uvw", "uvu", "function"])
def test_tables_that_a_transform_made_first_are_good_for_kernels(mode):
    decompose.cache_clear()
    ours = TensorProduct(*UVU) if mode == "uvu" else FullyConnectedTensorProduct(*UVU[:3])
    ours.to(DEVICE)
    irreps = dict(zip(("irreps_in1", "irreps_in2", "irreps_out"), UVU))
    if mode == "function":
        decompose.cache_clear()
        run = lambda x, y, weight: tensor_product(x, y, weight, **irreps)
    else:
        run = ours
    tensors, wide = operands(ours, 3, (), torch.float32)
    x, y, weight = (tensor.detach() for tensor in tensors)
    torch.func.grad(lambda x: run(x, y, weight).sum())(x)
    assert_matches(run(x, y, weight), dense_product(ours, *wide))


@pytest.mark.parametrize("is_shared", [True, False])
def test_channels_that_never_mix(is_shared):
    ours = TensorProduct(*UVU, shared_weights=is_shared, internal_weights=False)
    assert_right(ours, 3, () if is_shared else (3,))


@pytest.mark.parametrize("kind", ["uvw", "uvu"])
def test_edges(kind):
    options = dict(shared_weights=False)
    ours = TensorProduct(*UVU, **options) if kind == "uvu" else FullyConnectedTensorProduct(*SMALL, **options)
    assert_right(ours, 3, (3,), src=torch.tensor([0, 2, 2]), dst=torch.tensor([1, 1, 0]))


def test_scattering_on_chip(monkeypatch):
    """What a batch of hundreds runs, with a dot over channels."""
    monkeypatch.setattr(scatter, "ON_CHIP_PROGRAMS", 0)
    assert_right(
        FullyConnectedTensorProduct("16x0e + 16x1o", "0e + 1o", "16x0e + 16x1o", shared_weights=False), 5, (5,)
    )


@pytest.mark.parametrize("kind", ["uvw", "uvu"])
def test_gradients_of_second_order(kind):
    """What the training of forces needs: the gradient of a gradient's norm."""
    paths = [(0, 0, 0, kind, True), (0, 0, 1, kind, True)]
    ours = TensorProduct("2x1o", "1o", "2x0e + 2x1e", paths, shared_weights=False)
    tensors, wide = operands(ours, 2, (2,), torch.float64)

    def second(z: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        (force,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
        return torch.autograd.grad(force.square().sum(), (x, y, weight))

    expected = second(dense_product(ours, *wide), *wide)
    for got, want in zip(second(ours(*tensors), *tensors), expected):
        assert_matches(got, want)


@pytest.mark.parametrize("kind", ["positions", "format"])
def test_a_one_hot_second_input(kind):
    ours = FullyConnectedTensorProduct("2x0e + 2x1o", "3x0e", "2x0e + 2x1o").to(DEVICE)
    x, positions = torch.randn(4, 8, requires_grad=True), torch.tensor([2, 0, 2, 1])
    one_hot = torch.nn.functional.one_hot(positions, 3).float()
    y = positions.to(DEVICE) if kind == "positions" else GroupCOO.from_dense(one_hot.to(DEVICE), group_dim=1)
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, ours.weight)]
    expected = dense_product(ours, wide[0], one_hot.double(), wide[1])
    actual = ours(x.to(DEVICE), y)
    assert_matches(actual, expected)
    upstream = torch.randn(actual.shape)
    want = torch.autograd.grad(expected, wide, upstream.double())
    for got, reference in zip(torch.autograd.grad(actual, (x, ours.weight), upstream.to(DEVICE)), want):
        assert_matches(got, reference)


def test_half_precision_is_summed_in_float32():
    ours = FullyConnectedTensorProduct(*SMALL, shared_weights=False)
    tensors, wide = operands(ours, 3, (3,), torch.float16)
    magnitude = dense_product(ours, *wide, is_magnitude=True)
    # five factors: the coefficient that is read was rounded from float64
    limit = bound(torch.float16, magnitude, terms=ours.weight_numel * 9, factors=5)
    assert_within(ours(*tensors), dense_product(ours, *wide).detach(), limit.detach())
