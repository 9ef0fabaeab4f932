"""Gradients of tensor products, to second order: what forces and their training need."""

from __future__ import annotations

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from torch import Tensor

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from tolerances import TOLERANCE  # noqa: E402

from insum_ops import tensor_product  # noqa: E402
from insum_ops.nn import FullyConnectedTensorProduct, TensorProduct  # noqa: E402

pytestmark = pytest.mark.usefixtures("in_float64")


def inputs(tp, *lead: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, tp.irreps_in1.dim), torch.randn(*lead, tp.irreps_in2.dim)


SMALL = ("1x0e + 2x1o", "0e + 1o", "2x0e + 1x1o")


@pytest.mark.parametrize(("is_shared", "layout"), [(True, "mul_ir"), (False, "mul_ir"), (False, "ir_mul")])
def test_gradients_of_first_and_second_order(is_shared, layout):
    ours = FullyConnectedTensorProduct(*SMALL, shared_weights=is_shared, internal_weights=False, layout=layout)
    lead = () if is_shared else (2,)
    tensors = (*inputs(ours, 2), torch.randn(*lead, ours.weight_numel))
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)


def potential(ours, weight: Tensor, positions: Tensor, features: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """An energy of atoms: messages along edges, then a square."""
    edges = positions[dst] - positions[src]
    length = edges.norm(dim=-1, keepdim=True)
    y = o3.spherical_harmonics(ours.irreps_in2, edges, normalize=True, normalization="component")
    messages = ours(features, y, weight * torch.exp(-length), src=src, dst=dst)
    return messages.square().sum()


def test_forces_are_the_gradient_of_the_energy_and_can_be_trained():
    ours = FullyConnectedTensorProduct("2x0e + 2x1o", "0e + 1o + 2e", "2x0e + 2x1o", shared_weights=False)
    src, dst = torch.tensor([0, 1, 2, 3, 0, 2]), torch.tensor([1, 2, 3, 0, 2, 1])
    positions = torch.randn(4, 3).requires_grad_()
    features = torch.randn(4, ours.irreps_in1.dim)
    weight = torch.randn(6, ours.weight_numel).requires_grad_()
    energy = lambda at, weight: potential(ours, weight, at, features, src, dst)
    (slope,) = torch.autograd.grad(energy(positions, weight), positions, create_graph=True)
    step = 1e-5
    for atom in range(4):
        for axis in range(3):
            shift = torch.zeros_like(positions)
            shift[atom, axis] = step
            with torch.no_grad():
                change = energy(positions + shift, weight) - energy(positions - shift, weight)
            torch.testing.assert_close(slope[atom, axis].detach(), change / (2 * step), rtol=1e-6, atol=1e-6)
    (trained,) = torch.autograd.grad(slope.square().sum(), weight)
    direction = torch.randn_like(weight)
    loss = lambda w: torch.autograd.grad(energy(positions, w), positions, create_graph=True)[0].square().sum()
    change = loss(weight + step * direction) - loss(weight - step * direction)
    torch.testing.assert_close((trained * direction).sum(), (change / (2 * step)).detach(), rtol=1e-5, atol=1e-5)


UVU_PATHS = [(0, 1, 1, "uvu", True), (1, 0, 1, "uvu", True), (1, 1, 0, "uvu", True)]
UVU = ("4x0e + 4x1o", "0e + 1o", "4x0e + 4x1o", UVU_PATHS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, for autograd functions under a tracer
@pytest.mark.parametrize("kind", ["uvw", "uvu"])
def test_a_compiled_module_gives_the_same(kind):
    ours = FullyConnectedTensorProduct(*UVU[:3]) if kind == "uvw" else TensorProduct(*UVU)
    x, y = (tensor.requires_grad_() for tensor in inputs(ours, 3))
    expected = torch.autograd.grad(ours(x, y).sum(), (x, y))
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), ours(x, y), **TOLERANCE[torch.float64])
    torch.testing.assert_close(torch.autograd.grad(compiled(x, y).sum(), (x, y)), expected, **TOLERANCE[torch.float64])


def test_the_compiled_function_gives_the_same():
    irreps = dict(zip(("irreps_in1", "irreps_in2", "irreps_out"), UVU))
    for options, numel in (({}, 64), ({"instructions": UVU_PATHS}, 12)):
        product = lambda x, y, weight: tensor_product(x, y, weight, **irreps, **options)  # noqa: B023
        given = torch.randn(3, 16), torch.randn(3, 4), torch.randn(numel)
        expected = product(*given)
        compiled = torch.compile(product, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), expected, **TOLERANCE[torch.float64])


def test_an_exported_module_learns():
    ours = FullyConnectedTensorProduct(*UVU[:3])
    x, y = (tensor.detach().requires_grad_() for tensor in inputs(ours, 3))
    expected = ours(x, y)
    value = torch.export.export(ours, (x, y)).module()(x, y)
    torch.testing.assert_close(value, expected, **TOLERANCE[torch.float64])
    grads = [torch.autograd.grad(result.square().sum(), (x, y)) for result in (value, expected)]
    torch.testing.assert_close(*grads, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_export_holds_no_autograd_function_of_ours(is_shared, monkeypatch):
    """Around it torch would record how it turns gradients off for constants, and all that follows would have none."""
    ours = TensorProduct(*UVU, shared_weights=is_shared, internal_weights=False)
    given = (*inputs(ours, 3), torch.randn(*(() if is_shared else (3,)), ours.weight_numel))
    tensors = tuple(tensor.requires_grad_() for tensor in given)
    ours(*tensors)  # tables are made now
    called, apply = [], torch.autograd.Function.apply.__func__

    def noting(function, *args, **kwargs):
        if torch.compiler.is_exporting():
            called.append(function.__module__)
        return apply(function, *args, **kwargs)

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(noting))
    torch.export.export(ours, tensors)
    assert not [module for module in called if module.startswith("insum_ops.equivariant")]


@pytest.mark.cpu
@pytest.mark.parametrize("is_shared", [True, False])
def test_gradients_where_channels_never_mix(is_shared):
    ours = TensorProduct(
        "4x1o",
        "1o",
        "4x0e + 4x1e",
        [(0, 0, 0, "uvu", True), (0, 0, 1, "uvu", True)],
        shared_weights=is_shared,
        internal_weights=False,
    )
    assert ours._product.decomposition.channels is not None
    tensors = (*inputs(ours, 2), torch.randn(*(() if is_shared else (2,)), ours.weight_numel))
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["uvw", "uvu"])
def test_gradients_along_edges(mode):
    paths = [(0, 0, 0, mode, True), (1, 1, 0, mode, True)]
    ours = TensorProduct("2x0e + 2x1o", "0e + 1o", "2x0e", paths, shared_weights=False)
    assert (ours._product.decomposition.channels is not None) == (mode == "uvu")
    src, dst = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 0])
    x, y = torch.randn(2, 8), torch.randn(3, 4)
    tensors = tuple(tensor.requires_grad_() for tensor in (x, y, torch.randn(3, ours.weight_numel)))
    product = lambda *tensors: ours(*tensors, src=src, dst=dst)
    assert gradcheck(product, tensors)
    assert gradgradcheck(product, tensors)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_weights_of_no_path_may_learn(lead):
    paths = [(0, 0, 0, "uvu", False), (1, 0, 1, "uvv", False)]
    irreps = dict(irreps_in1="2x0e + 1o", irreps_in2="0e", irreps_out="2x0e + 1o", instructions=paths)
    x, y = torch.randn(2, 5).requires_grad_(), torch.randn(2, 1)
    z = tensor_product(x, y, torch.zeros(*lead, 0).requires_grad_(), **irreps)
    z.sum().backward()
    torch.testing.assert_close(z, x * y, **TOLERANCE[torch.float64])
    torch.testing.assert_close(x.grad, y.expand(2, 5), **TOLERANCE[torch.float64])
