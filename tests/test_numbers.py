"""Results and gradients stay under the bound of `error_bounds`, and err no more than torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from error_bounds import Precision, Sums, error_bound, statement_in_torch
from error_comparison import assert_no_worse, draw, every_kind, every_precision, plain
from hypothesis import given, settings
from reference import LoopNest, Sum
from statements import DEVICE, IS_INTERPRETED, Case, examples, random_index, random_values, statements
from tolerances import assert_within
from torch import Tensor
from torch.nn.functional import linear

from insum_ops import insum, spmm
from insum_ops.formats import GroupCOO
from insum_ops.nn import BlockSparseLinear, SparseConvTensor, SubMConv3d

pytestmark = pytest.mark.every_route

# random statements


def sums_of(expected: Sum) -> Sums:
    return Sums(expected.value, expected.magnitude, torch.tensor(expected.terms))


def check_statement(case: Case, precision: Precision) -> None:
    nest = LoopNest(case.expr, case.tensors, case.size)
    expected, names = nest.result(), [read.name for read in nest.reads]
    upstream = random_values(nest.shape, precision.dtype, torch.Generator().manual_seed(6)).to(DEVICE)
    tensors = {name: tensor.detach() for name, tensor in case.tensors.items()}
    leaves = {name: tensors[name].requires_grad_() for name in dict.fromkeys(names)}

    result = insum(case.expr, size=case.size, **tensors)
    assert_within(result, expected.value, error_bound(precision, sums_of(expected), expected.factors))
    if not leaves:
        return
    gradients, wanted = torch.autograd.grad(result, list(leaves.values()), upstream), nest.gradients(upstream)
    for name, gradient in zip(leaves, gradients, strict=True):
        own, is_start = wanted[name], name == nest.sentence.output.name and nest.sentence.is_added
        parts = names.count(name) + is_start
        assert_within(gradient, own.value, error_bound(precision, sums_of(own), own.factors, parts))


@every_precision
def test_random_statements_and_their_gradients_stay_under_their_bound(precision: Precision) -> None:
    @settings(max_examples=examples(60, 12))
    @given(statements((precision.dtype,)))
    def check(case: Case) -> None:
        with precision.allowed():
            check_statement(case, precision)

    check()


# statements that are long enough for tensor cores

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    """A statement with the shapes of its values, and of its index tensors with the extents that they point into."""

    expr: str
    values: dict[str, tuple[int, ...]]
    indices: dict[str, tuple[tuple[int, ...], int]]
    size: tuple[int, ...] | None = None
    factors: int = 2

    def tensors(self, dtype: torch.dtype) -> Tensors:
        generator = torch.Generator().manual_seed(3)
        made = {name: random_values(shape, dtype, generator) for name, shape in self.values.items()}
        for name, (shape, target) in self.indices.items():
            made[name] = random_index(shape, target, 0.1, generator)
        return {name: tensor.to(DEVICE) for name, tensor in made.items()}


K = 40 if IS_INTERPRETED else 700  # an interpreted step of a loop takes 15 ms, hence short sums here and below
BATCH = 2 if IS_INTERPRETED else 5
WORKS = {
    "matrix product": Work("C[i,j] += A[i,k] * B[k,j]", {"A": (33, K), "B": (K, 20)}, {}),
    "sum of everything": Work("C[()] += A[i] * B[i]", {"A": (20 * K,), "B": (20 * K,)}, {}),
    "sparse times dense": Work(
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        {"AV": (K, 4), "B": (50, 17)},
        {"AM": ((K,), 9), "AK": ((K, 4), 50)},
        (9, 17),
    ),
    "blocks times dense": Work(
        "C[AM[p],i,n] += AV[p,i,j] * B[AK[p],j,n]",
        {"AV": (K // 8, 16, 16), "B": (6, 16, 20)},
        {"AM": ((K // 8,), 3), "AK": ((K // 8,), 6)},
        (3, 16, 20),
    ),
    "sampled product": Work(
        "S[p] += X[AM[p],c] * Y[AK[p],c]",
        {"X": (20, K), "Y": (20, K)},
        {"AM": ((30,), 20), "AK": ((30,), 20)},
    ),
    "convolution": Work(
        "Out[MX[p,q],m] += In[MY[p,q],c] * W[MZ[p],c,m]",
        {"In": (20, K // 4), "W": (5, K // 4, 16)},
        {"MX": ((6, 16), 20), "MY": ((6, 16), 20), "MZ": ((6,), 5)},
        (20, 16),
    ),
    "tensor product": Work(
        "Z[b,I[p],w] += V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,u,w]",
        {"V": (12,), "X": (BATCH, 4, 32), "Y": (BATCH, 4), "W": (BATCH, 32, 16)},
        {"I": ((12,), 4), "J": ((12,), 4), "K": ((12,), 4)},
        (BATCH, 4, 16),
        4,
    ),
}


@pytest.mark.sampled
@every_precision
@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS.keys())
def test_statements_err_no_more_than_torch(work: Work, precision: Precision) -> None:
    tensors = work.tensors(precision.dtype)
    names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
    leaves = [tensors[name].requires_grad_() for name in names]

    def in_torch(*own: Tensor) -> Tensor:
        rest = {name: tensor.to(own[0].device) for name, tensor in tensors.items() if name not in names}
        return statement_in_torch(work.expr, {**rest, **dict(zip(names, own))}, work.size)

    assert_no_worse(precision, leaves, lambda: insum(work.expr, size=work.size, **tensors), in_torch, work.factors)


# long sums, by the functions and layers that people call


@pytest.mark.sampled
@every_precision
@every_kind
@pytest.mark.parametrize("length", [100] if IS_INTERPRETED else [1_000, 10_000, 100_000])
def test_long_rows_of_a_sparse_matrix(length: int, kind: Callable[..., Tensor], precision: Precision) -> None:
    dense = draw(kind, precision, 3, length)
    dense[1, ::3] = 0
    A = GroupCOO.from_dense(dense)
    values = A.values.detach().clone().requires_grad_()
    B = draw(kind, precision, length, 5, seed=1, is_even=True).requires_grad_()
    row = A.AM.long()[:, None].expand_as(A.AK)
    column, is_entry = A.AK.long().clamp_min(0), A.AK >= 0

    def in_torch(own: Tensor, other: Tensor) -> Tensor:
        places = tuple(place.to(own.device) for place in (row, column))
        kept = torch.where(is_entry.to(own.device), own, 0)
        return own.new_zeros(3, length).index_put(places, kept, accumulate=True) @ other

    assert_no_worse(precision, [values, B], lambda: spmm(A.with_values(values), B), in_torch, 2)


@pytest.mark.sampled
@every_precision
@every_kind
def test_a_wide_layer(kind: Callable[..., Tensor], precision: Precision) -> None:
    wide = 96 if IS_INTERPRETED else 4096
    layer = BlockSparseLinear(wide, 48, 16, 0.6, generator=torch.Generator().manual_seed(1)).to(DEVICE, precision.dtype)
    with torch.no_grad():
        layer.weight.copy_(draw(kind, precision, *layer.weight.shape))
    x = draw(kind, precision, 7, wide, seed=1, is_even=True).requires_grad_()

    def in_torch(own: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        blocks = weight.new_zeros(3, wide // 16, 16, 16).index_put(tuple(layer.coords.to(weight.device)), weight)
        return linear(own, blocks.transpose(1, 2).reshape(48, wide), bias)

    assert_no_worse(precision, [x, layer.weight, layer.bias], lambda: layer(x), in_torch, 2)


@pytest.mark.sampled
@every_precision
@every_kind
def test_a_convolution_over_many_channels(kind: Callable[..., Tensor], precision: Precision) -> None:
    channels, side = (20, 2) if IS_INTERPRETED else (128, 5)
    indices = torch.cartesian_prod(torch.arange(1), *[torch.arange(side)] * 3).int().to(DEVICE)
    layer = SubMConv3d(channels, 16, 3, bias=True, indice_key="own").to(DEVICE, precision.dtype)
    with torch.no_grad():
        layer.weight.copy_(draw(kind, precision, *layer.weight.shape))
        layer.bias.copy_(draw(plain, precision, 16, seed=2))
    features = draw(kind, precision, len(indices), channels, seed=1, is_even=True).requires_grad_()

    def ours() -> Tensor:
        return layer(SparseConvTensor(features, indices, [side] * 3, 1)).features  # type: ignore[no-any-return]

    tap = torch.cartesian_prod(*[torch.arange(3)] * 3)
    position = indices.cpu()[:, 1:].long()

    def in_torch(own: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result = bias.expand(len(own), -1)
        for z, (i, j, k) in enumerate(tap.tolist()):
            reached = position + tap[z] - 1
            is_inside = ((reached >= 0) & (reached < side)).all(1)
            at = (reached[is_inside] * torch.tensor([side * side, side, 1])).sum(1).to(own.device)
            part = own[at] @ weight[:, i, j, k].T
            result = result.index_add(0, is_inside.nonzero().flatten().to(own.device), part)
        return result

    assert_no_worse(precision, [features, layer.weight, layer.bias], ours, in_torch, 2, parts=2)
