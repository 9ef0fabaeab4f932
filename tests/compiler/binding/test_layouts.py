"""Tensors on the way of a product of many factors are laid out so that nothing is copied."""

from __future__ import annotations

import pytest
import torch

from insum_ops import insum
from insum_ops.compiler.binding import bind
from insum_ops.compiler.binding.layouts import MatrixProduct, copied_numbers, laid_out
from insum_ops.compiler.language import parse
from insum_ops.compiler.planning.device import H200
from insum_ops.compiler.planning.split import split

pytestmark = pytest.mark.cpu

EXTENTS = dict(zip("abcdijk", (2, 3, 5, 7, 11, 13, 17)))


@pytest.mark.parametrize(
    ("left", "right", "result", "copied"),
    [
        ("ab", "bc", "ac", 0),
        ("ba", "cb", "ca", 0),  # transposed matrices are matrix products too
        ("iab", "ibc", "iac", 0),
        ("aib", "ibc", "aic", 0),  # a batch of matrices that lie between each other's rows
        ("abi", "ibc", "iac", 2 * 3 * 11),  # the batch along memory
        ("abc", "cbd", "ad", 3 * 5 * 2),  # two summed names in two orders: the smaller of the two
        ("abc", "bcd", "ad", 0),
        ("ab", "cd", "acbd", 2 * 3 * 5 * 7),
    ],
)
def test_what_a_matrix_product_has_to_copy(left, right, result, copied):
    assert copied_numbers(MatrixProduct(tuple(left), tuple(right), tuple(result)), EXTENTS) == copied


def test_a_name_of_one_value_is_never_in_the_way():
    assert copied_numbers(MatrixProduct(("a", "b", "i"), ("i", "b", "c"), ("i", "a", "c")), {**EXTENTS, "i": 1}) == 0


def test_a_result_lies_as_its_reader_wants_it():
    """Rows and columns may trade places, and names among the rows may too: `abcd` would be copied by its reader."""
    orders = laid_out(["abi", "icd", "adcb", "cbj", "adj"], [(0, 1, 2), (2, 3, 4)], EXTENTS)
    products = [MatrixProduct(*[orders[at] for at in parts]) for parts in ((0, 1, 2), (2, 3, 4))]
    natural = MatrixProduct(tuple("abi"), tuple("icd"), tuple("abcd"))
    assert sum(copied_numbers(product, EXTENTS) for product in products) <= copied_numbers(
        MatrixProduct(natural.result, tuple("cbj"), tuple("adj")), EXTENTS
    )
    assert orders[-1] == tuple("adj")


def test_four_factors_are_three_matrix_products():
    shapes = dict(A=(512, 64, 64), B=(64, 64, 256), C=(256, 128), D=(128, 512))
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    bound = bind(parse("Y[a,b] += A[b,i,j] * B[i,j,k] * C[k,l] * D[l,a]"), tensors)
    parts = split(bound, H200, False)
    assert parts is not None
    products = [MatrixProduct(*[access.names for access in (*step.accesses, step.output)]) for step in parts.steps]
    assert sum(copied_numbers(product, bound.extents) for product in products) == 0


class _ThreeFactors(torch.nn.Module):
    def forward(self, x, y, w):
        return insum("Z[b,i] += X[b,j] * Y[b,k] * W[i,j,k]", X=x, Y=y, W=w)


def test_a_tracer_guards_no_length_for_an_order_that_only_saves_work():
    given = lambda b: (torch.randn(b, 4), torch.randn(b, 8), torch.randn(5, 4, 8))
    lengths = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}, None)
    program = torch.export.export(_ThreeFactors(), given(5), dynamic_shapes=lengths)
    for b in (2, 5, 200):
        x, y, w = given(b)
        torch.testing.assert_close(program.module()(x, y, w), torch.einsum("bj,bk,ijk->bi", x, y, w))
