"""Products of inputs with one channel each: a row of coefficients for each output component, where kernels run."""

from __future__ import annotations

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from statements import DEVICE, IS_INTERPRETED

pytest.importorskip("e3nn.o3", reason="e3nn is an extra")
from irreps import dense_product
from tolerances import assert_matches

from insum_ops import explain
from insum_ops.equivariant.single_channel import SingleTerm
from insum_ops.equivariant.table_terms import TableTerm
from insum_ops.nn import FullyConnectedTensorProduct

pytestmark = pytest.mark.every_route

TETRIS = ("0e + 1o + 2e", "0e + 1o + 2e", "3x0e + 2x1o + 2x1e")
SEEDED = ("0e + 2x1o + 1o", "0e + 1o", "3x0e + 3x1o")  # statements of two kinds add to one slot


@pytest.fixture(autouse=True, params=[TableTerm, SingleTerm], ids=["held", "in a format"])
def kind(request: pytest.FixtureRequest, everywhere: None) -> type:
    """Coefficients in the source of kernels, or in a format."""
    if request.param is SingleTerm:
        request.getfixturevalue("in_memory")
    return request.param


def product(irreps: tuple[str, str, str], kind: type) -> FullyConnectedTensorProduct:
    ours = FullyConnectedTensorProduct(*irreps, shared_weights=False, internal_weights=False)
    assert any(isinstance(term, kind) for term in ours._product.decomposition.each.terms)  # type: ignore[union-attr]
    return ours


def operands(ours: FullyConnectedTensorProduct, rows: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = (rows, ours.irreps_in1.dim), (rows, ours.irreps_in2.dim), (rows, ours.weight_numel)
    return [torch.randn(shape, dtype=dtype).to(DEVICE).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("irreps", [TETRIS, SEEDED], ids=["tetris", "seeded"])
def test_values_and_gradients(irreps, kind):
    ours = product(irreps, kind)
    tensors = operands(ours, 3)
    wide = [tensor.detach().cpu().requires_grad_() for tensor in tensors]
    expected = dense_product(ours, *wide)
    upstream = torch.randn_like(expected)
    references = torch.autograd.grad(expected, wide, upstream)
    for _ in range(2):  # made, then remembered
        actual = ours(*tensors)
        assert type(actual.grad_fn).__name__ == "_ProductBackward"
        assert_matches(actual, expected)
        for got, reference in zip(torch.autograd.grad(actual, tensors, upstream.to(DEVICE)), references, strict=True):
            assert_matches(got, reference)
    with torch.no_grad():
        assert_matches(ours(*tensors), expected)


def test_one_term_alone_and_along_edges(kind):
    ours = product(("0e + 1o", "0e + 1o", "3x0e + 3x1o"), kind)
    tensors = operands(ours, 3)
    src, dst = torch.tensor([2, 0, 2], device=DEVICE), torch.tensor([1, 1, 0], device=DEVICE)
    wide = [tensor.detach().cpu().requires_grad_() for tensor in tensors]
    messages = dense_product(ours, wide[0][src.cpu()], *wide[1:])
    expected = messages.new_zeros(3, ours.irreps_out.dim).index_add(0, dst.cpu(), messages)
    actual = ours(*tensors, src=src, dst=dst)
    assert_matches(actual, expected)
    upstream = torch.randn_like(expected)
    references = torch.autograd.grad(expected, wide, upstream)
    for got, reference in zip(torch.autograd.grad(actual, tensors, upstream.to(DEVICE)), references, strict=True):
        assert_matches(got, reference)


@pytest.mark.skipif(IS_INTERPRETED, reason="hundreds of calls")
def test_gradients_of_first_and_second_order(kind):
    ours = product(("0e + 1o", "0e + 1o", "2x0e + 2x1o"), kind)
    tensors = operands(ours, 2)
    assert gradcheck(ours, tensors)
    assert gradgradcheck(ours, tensors)


@pytest.mark.parametrize("kind", [SingleTerm], indirect=True)
def test_every_result_is_stored_once(kind):
    """Where a row for each path would be added to memory with every coefficient."""
    ours = product(TETRIS, kind)
    term = next(term for term in ours._product.decomposition.each.terms if isinstance(term, SingleTerm))  # type: ignore[union-attr]
    mul_out, counts = term.key[1][2], term.product.forms["Z"].shape
    tensors = {
        "Z": torch.randn(5, counts[0], mul_out),
        "X": torch.randn(5, counts[1], 1),
        "Y": torch.randn(5, counts[2]),
        "W": torch.randn(5, *term.weight_shape),
    }
    for name, text in term.product.texts.items():
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        form = term.product.forms[name].to("cpu", torch.float32)
        assert explain(text, CG=form, size=tensors[name].shape, **others).schedule.strategy == "store"
