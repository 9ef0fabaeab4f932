"""Formats, layers and graphs inside torch.func: made there, given as arguments, and what vmap can't batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sparse_inputs import SPARSE_WARNINGS
from statements import DEVICE
from tolerances import assert_matches
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from insum_ops import insum, nn, spmm
from insum_ops.compiler.language.errors import UnsupportedError
from insum_ops.formats import COO, ELL, BlockCOO, BlockGroupCOO, FormatError, GroupCOO

pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"), SPARSE_WARNINGS]

FORMATS: dict[str, Any] = {kind.__name__: kind for kind in (COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO)}
SPMM = "C[m,n] += A[m,k] * B[k,n]"


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE)


def sparse_matrix() -> Tensor:
    return random(5, 6) * (torch.rand(5, 6) < 0.6).to(DEVICE)


def options(kind: Any) -> dict[str, Any]:
    return {"block_size": (2, 3)} if kind.is_blocked else {}


@pytest.mark.every_route
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_made_inside_a_transform(name: str) -> None:
    """What differentiates wraps all arguments, coordinates too, and whatever is made of them."""
    kind, B, dense = FORMATS[name], random(6, 3), sparse_matrix()
    stored = kind.from_dense(dense, **options(kind))
    loss = lambda A: insum(SPMM, A=A, B=B).pow(2).sum()
    found = grad(lambda A: loss(kind.from_dense(A, **options(kind))))(dense)
    is_stored = stored.with_values(torch.ones_like(stored.values)).to_dense() != 0
    assert_matches(found, 2 * (dense @ B) @ B.T * is_stored)

    coords, values = torch.tensor([[3, 0, 3, 2], [1, 5, 1, 0]], device=DEVICE), random(4)  # one entry twice
    listed = lambda values, coords: loss(kind.from_coo(coords, values, (5, 6), **options(kind)))
    matrix = torch.zeros_like(dense).index_put(tuple(coords), values, accumulate=True)
    wanted = (2 * (matrix @ B) @ B.T)[tuple(coords)]
    assert_matches(grad(listed)(values, coords), wanted)
    assert_matches(vjp(lambda values: listed(values, coords), values)[1](torch.ones_like(values[0]))[0], wanted)
    assert_matches(jvp(lambda values: listed(values, coords), (values,), (values,))[1], (wanted * values).sum())
    assert_matches(vmap(grad(listed), (0, None))(torch.stack([values, 2 * values]), coords)[1], 2 * wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_an_argument_of_a_transform(name: str) -> None:
    kind, B = FORMATS[name], random(6, 3)
    A = kind.from_dense(sparse_matrix(), **options(kind))
    loss = lambda B, A: insum(SPMM, A=A, B=B).pow(2).sum()
    wanted = grad(lambda B: (A.to_dense() @ B).pow(2).sum())(B)
    assert_matches(grad(loss)(B, A), wanted)
    each = vmap(grad(loss), (0, None))(torch.stack([B, 2 * B]), A)
    assert_matches(each, torch.stack([wanted, 2 * wanted]))


def test_buffers_may_be_arguments_of_a_transform() -> None:
    """As torch's own page on gradients of each example passes them, beside the parameters."""
    dense, x, B = sparse_matrix(), random(2, 3, 8), random(2, 6, 3)
    for layer, given in (
        (nn.BlockSparseLinear(8, 6, 2, 0.5).double().to(DEVICE), x),
        (nn.SpMM(dense.to_sparse(), trainable=True), B),
    ):
        parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

        def loss(parameters: Any, buffers: Any, x: Tensor, layer: Any = layer) -> Tensor:
            return functional_call(layer, (parameters, buffers), (x,)).square().sum()

        each = vmap(grad(loss), (None, None, 0))(parameters, buffers, given)
        for at in range(2):
            layer.zero_grad()
            layer(given[at]).square().sum().backward()
            for name, parameter in layer.named_parameters():
                assert_matches(each[name][at], parameter.grad)


def test_what_vmap_can_not_batch() -> None:
    B, edges = random(3, 2), torch.tensor([[[0, 1], [1, 2]], [[0, 2], [1, 1]]], device=DEVICE)
    pattern = "but a format has one pattern for all examples; make the format outside and batch its values, "
    pattern += "A.with_values(values), or write index tensors into the statement"
    cases: list[tuple[Any, Tensor, type[Exception], str]] = [
        (
            lambda edge_index: spmm((edge_index, None), B),
            edges,
            UnsupportedError,
            "edge_index is batched by torch.func.vmap, but a graph is one for all examples; write the product as a "
            'statement, whose index tensors may be batched: insum("C[dst[e],n] += w[e] * B[src[e],n]", ...)',
        ),
        (
            lambda coords: COO.from_coo(coords, B[:2, 0], (3, 3)).to_dense(),
            edges,
            FormatError,
            f"coords is batched by torch.func.vmap, {pattern}",
        ),
        (
            lambda A: GroupCOO.from_dense(A).to_dense(),
            torch.stack([B, B]),
            FormatError,
            f"A is batched by torch.func.vmap, {pattern}",
        ),
        (
            lambda rows: COO((rows, edges[0, 1]), B[:2, 0], (3, 3)).to_dense(),
            edges[:, 0],
            FormatError,
            f"coords[0] is batched by torch.func.vmap, {pattern}",
        ),
        (
            lambda indices: nn.SparseConvTensor(B[:2], indices, [3], 3).features,
            edges,
            FormatError,
            "indices is batched by torch.func.vmap, but voxels are the same for all examples; batch the features, "
            "or list all clouds in one tensor, told apart by the batch index in column 0",
        ),
    ]
    for function, given, error, text in cases:
        with pytest.raises(error, match=f"^{re.escape(text)}$"):
            vmap(function)(given)
