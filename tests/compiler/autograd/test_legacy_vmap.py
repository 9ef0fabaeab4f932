"""Batches of gradients and tangents, as `jacobian(vectorize=True)` asks for them: each is what it would be alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from statements import DEVICE
from tolerances import assert_matches
from torch.autograd.functional import hessian, jacobian

from insum_ops import insum, nn, sddmm, spmm
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.formats import BlockCOO, GroupCOO

DOUBLE = {"dtype": torch.float64, "device": DEVICE}
ROWS = torch.tensor([0, 2, 1, 0, 3], device=DEVICE)


def drawn(*shape):
    return torch.randn(*shape, **DOUBLE)


def matrix():
    return (drawn(6, 5) * (torch.rand(6, 5, device=DEVICE) < 0.6)).requires_grad_(False)


def plain():
    return lambda A, B: insum("C[I[p],q] += A[p,q] * B[p,q]", I=ROWS, A=A, B=B, size=(4, 3)), (drawn(5, 3), drawn(5, 3))


def largest():
    return lambda A: insum("C[m] = max(A[m,k])", A=A), (drawn(4, 3),)


def formats():
    A = GroupCOO.from_dense(matrix(), group_size=2)
    call = lambda values, B: insum("C[m,n] += A[m,k] * B[k,n]", A=A.with_values(values), B=B)
    return call, (A.values.clone(), drawn(5, 3))


def blocks():
    A = BlockCOO.from_dense(matrix(), block_size=(2, 5))
    call = lambda values, B: insum("C[m,n] += A[m,k] * B[k,n]", A=A.with_values(values), B=B)
    return call, (A.values.clone(), drawn(5, 3))


def products(reduce):
    form = GroupCOO.from_dense(matrix(), group_size=2)
    return lambda values, B: spmm(form.with_values(values), B, reduce=reduce), (form.values.clone(), drawn(5, 2))


def edges():
    edge_index = torch.tensor([[0, 1, 3, 1], [2, 2, 0, 1]], device=DEVICE)
    return lambda weight, X: spmm((edge_index, weight), X), (drawn(4), drawn(4, 2))


def sampled():
    form = GroupCOO.from_dense(matrix(), group_size=2)
    return lambda X, Y: sddmm(form, X, Y).values, (drawn(6, 2), drawn(5, 2))


def linear():
    layer = nn.BlockSparseLinear(6, 4, 2, 0.5, **DOUBLE)
    given = (drawn(3, 6), layer.weight.detach().clone(), layer.bias.detach().clone())
    call = lambda x, weight, bias: torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)
    return call, given


def convolution():
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 2, 1, 1]], dtype=torch.int32, device=DEVICE)
    layer = nn.SubMConv3d(2, 3, 3).to(**DOUBLE)
    tensor = nn.SparseConvTensor(drawn(3, 2), indices, (4, 4, 4), 1)
    return lambda features: layer(tensor.replace_feature(features)).features, (drawn(3, 2),)


def tensor_product(irreps, shared):
    product = nn.FullyConnectedTensorProduct(*irreps, shared_weights=shared, internal_weights=False)
    lead = () if shared else (3,)
    shapes = (3, product.irreps_in1.dim), (3, product.irreps_in2.dim), (*lead, product.weight_numel)
    return product, tuple(drawn(*shape) for shape in shapes)


EQUAL, UNEQUAL = ("2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o"), ("1x0e + 2x1o", "0e + 1o", "2x0e + 1x1o")
CASES = {
    "plain": plain,
    "max": largest,
    "formats": formats,
    "blocks": blocks,
    **{f"spmm {reduce}": lambda reduce=reduce: products(reduce) for reduce in ("sum", "mean", "max")},
    "edges": edges,
    "sddmm": sampled,
    "linear": linear,
    "convolution": convolution,
    "tensor product": lambda: tensor_product(EQUAL, False),
    "tensor product, shared": lambda: tensor_product(EQUAL, True),
    "tensor product, unequal": lambda: tensor_product(UNEQUAL, False),
}


@pytest.mark.parametrize("name", CASES)
def test_jacobians(name):
    call, given = CASES[name]()
    for one, other in zip(jacobian(call, given, vectorize=True), jacobian(call, given), strict=True):
        assert_matches(one, other)


@pytest.mark.parametrize("name", CASES)
def test_jacobians_of_tangents(name):
    call, given = CASES[name]()
    found = jacobian(call, given, vectorize=True, strategy="forward-mode")
    for one, other in zip(found, jacobian(call, given), strict=True):
        assert_matches(one, other)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_of_a_tensor_without_elements(strategy):
    A = drawn(4)
    for expr in ("C[i] += A[i] * B[j]", "C[i] = max(A[i] * B[j])"):
        call = lambda B: insum(expr, A=A, B=B)  # noqa: B023 - called before the next
        assert jacobian(call, drawn(0), vectorize=True, strategy=strategy).shape == (4, 0)


@pytest.mark.parametrize("name", ["plain", "formats", "linear", "tensor product"])
def test_hessians_of_tangents(name):
    """Forward over reverse: tangents of gradients are batched."""
    call, given = CASES[name]()
    total = lambda *own: (call(*own) ** 2).sum()
    found = hessian(total, given, vectorize=True, outer_jacobian_strategy="forward-mode")
    for row, other in zip(found, hessian(total, given), strict=True):
        for one, reference in zip(row, other, strict=True):
            assert_matches(one, reference)


@pytest.mark.parametrize("name", ["plain", "formats", "linear", "tensor product"])
def test_hessians(name):
    call, given = CASES[name]()
    total = lambda *own: (call(*own) ** 2).sum()
    for row, other in zip(hessian(total, given, vectorize=True), hessian(total, given), strict=True):
        for one, reference in zip(row, other, strict=True):
            assert_matches(one, reference)


@pytest.mark.every_program
def test_a_batch_of_batches():
    """Gradients of gradients, both batched."""
    A = drawn(3, 2).requires_grad_()
    z = insum("C[I[p],q] += A[p,q] * A[p,q] * A[p,q]", I=ROWS[:3], A=A, size=(4, 2))
    each = torch.eye(8, **DOUBLE).view(8, 4, 2)
    (first,) = torch.autograd.grad(z, A, each, is_grads_batched=True, create_graph=True)
    ups = drawn(5, *first.shape)
    (found,) = torch.autograd.grad(first, A, ups, is_grads_batched=True)
    alone = [
        torch.autograd.grad(
            torch.stack([torch.autograd.grad(z, A, one, create_graph=True)[0] for one in each]),
            A,
            up,
            retain_graph=True,
        )[0]
        for up in ups
    ]
    assert_matches(found, torch.stack(alone))


def test_a_batch_that_another_thread_works_on():
    """The backward of a GPU's tensors does not run in the thread that asked for it."""
    call, given = CASES["plain"]()
    A, B = (tensor.requires_grad_() for tensor in given)
    result = call(A, B)
    ups = drawn(4, *result.shape)

    with ThreadPoolExecutor(1) as pool:

        def gradient(up):
            return pool.submit(torch.autograd.grad, result, A, up, retain_graph=True).result()

        (found,) = torch._vmap_internals._vmap(gradient)(ups)
    assert_matches(found, torch.stack([torch.autograd.grad(result, A, up, retain_graph=True)[0] for up in ups]))


@pytest.mark.every_program
def test_batches_inside_batches_are_refused():
    call, given = CASES["plain"]()
    A, B = (tensor.requires_grad_() for tensor in given)
    result = call(A, B)
    batched = torch._vmap_internals._vmap
    gradient = batched(batched(lambda up: torch.autograd.grad(result, A, up, retain_graph=True)))
    with pytest.raises(UnsupportedError) as refused:
        gradient(drawn(2, 3, *result.shape))
    assert str(refused.value) == "batches of gradients are nested, as is_grads_batched=True inside another; ask for one"
