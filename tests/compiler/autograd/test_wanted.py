"""Which gradients a pass backward asks for: those on the way to what the caller named, and of leaves all."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from insum_ops import insum
from insum_ops.compiler import wanted_gradients
from insum_ops.compiler.autograd import wanted


class Product(torch.autograd.Function):
    """x * y * z with a number in front, which keeps what was wanted of it."""

    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx, factor, x, y, z):
        ctx.factor = factor
        ctx.save_for_backward(x, y, z)
        return factor * x * y * z

    @staticmethod
    def backward(ctx, upstream):
        x, y, z = ctx.saved_tensors
        flags = wanted_gradients(ctx)
        Product.asked.append(flags)
        grads = (y * z, x * z, x * y)
        return None, *[ctx.factor * upstream * grad if flag else None for grad, flag in zip(grads, flags[1:])]


@pytest.fixture
def asked():
    Product.asked.clear()
    return Product.asked


def inputs():
    """Return leaves, and tensors that were computed from them."""
    leaves = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return leaves, [leaf * 2 for leaf in leaves]


def test_forces_want_the_gradient_of_positions_alone(asked):
    (x, y, z), (a, b, c) = inputs()
    (force,) = torch.autograd.grad(Product.apply(3.0, a, b, c).sum(), y, create_graph=True)
    assert asked == [(False, False, True, False)]
    torch.testing.assert_close(force, 24 * x * z)
    grads = torch.autograd.grad(force.square().sum(), (x, z))
    for grad, expected in zip(grads, (2 * 24**2 * x * z**2, 2 * 24**2 * z * x**2), strict=True):
        torch.testing.assert_close(grad, expected)


def test_a_tensor_on_the_way_is_wanted_if_the_caller_names_it(asked):
    (x, _, _), (a, b, c) = inputs()
    got, _ = torch.autograd.grad(Product.apply(1.0, a, b, c).sum(), (b, x))
    assert asked == [(False, True, True, False)]
    torch.testing.assert_close(got, a * c)


def test_a_whole_pass_wants_all_and_one_for_some_leaves_wants_those(asked):
    (x, _, z), (a, b, c) = inputs()
    value = Product.apply(1.0, a, b, c).sum()
    value.backward(retain_graph=True)
    value.backward(inputs=[z])
    assert asked == [(False, True, True, True), (False, False, False, True)]
    torch.testing.assert_close(z.grad, 2 * 2 * (a * b))
    torch.testing.assert_close(x.grad, 2 * (b * c))


def test_leaves_are_taken_to_be_wanted_and_what_has_no_gradient_is_not(asked):
    (x, y, z), (_, b, _) = inputs()
    torch.autograd.grad(Product.apply(1.0, x, b, z.detach()).sum(), y)
    assert asked == [(False, True, True, False)]


def test_without_torchs_answer_all_that_have_a_gradient_are_wanted(asked, monkeypatch):
    monkeypatch.setattr(wanted, "_will_run", lambda node: True)
    (_, y, _), (a, b, c) = inputs()
    torch.autograd.grad(Product.apply(1.0, a, b, c).sum(), y)
    assert asked == [(False, True, True, True)]


def test_a_statement_has_no_gradient_that_nobody_wants():
    """A node that is not reached gets nothing, and the results are what they were."""
    (x, y, z), (a, b, c) = inputs()
    value = insum("E[i] += A[i] * B[i] * C[i]", A=a, B=b, C=c)
    (force,) = torch.autograd.grad(value.sum(), y, create_graph=True)
    torch.testing.assert_close(force, 8 * x * z)
    grads = torch.autograd.grad(force.square().sum(), (x, z))
    for grad, expected in zip(grads, (2 * 64 * x * z**2, 2 * 64 * z * x**2), strict=True):
        torch.testing.assert_close(grad, expected)
