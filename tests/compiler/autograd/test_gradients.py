"""Gradients of random statements, of repeated factors and of every format's values."""

from __future__ import annotations

import math

import pytest
import torch
from gradient_checks import gradcheck, gradgradcheck
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import LoopNest, dense, positions
from statements import DEVICE, FORMATS, Case, Operand, examples, random_values, statements
from tolerances import DTYPES, assert_matches, assert_within, bound
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from insum_ops import insum
from insum_ops.formats import BlockCOO

SMALL = {1: 4, 2: 3, 3: 3, 4: 2, 5: 2}
TINY = {1: 3, 2: 2, 3: 2, 4: 2, 5: 1}
DOUBLE = (torch.float64,)


def leaves(case: Case) -> tuple[Tensor, ...]:
    return tuple(case.operands[name].base.clone().requires_grad_() for name in case.value_names)


def call(case: Case, *bases: Tensor) -> Tensor:
    tensors = case.with_bases(dict(zip(case.value_names, bases, strict=True))).tensors
    return insum(case.expr, size=case.size, **tensors)


@pytest.mark.every_program
@pytest.mark.every_route
@settings(max_examples=examples(100, 15))
@given(statements(DOUBLE, largest=SMALL))
def test_gradcheck(case: Case) -> None:
    assert gradcheck(lambda *bases: call(case, *bases), leaves(case))


@pytest.mark.every_program
@pytest.mark.every_route
@settings(max_examples=examples(20, 5))
@given(statements(DOUBLE, largest=TINY))
def test_gradgradcheck(case: Case) -> None:
    assert gradgradcheck(lambda *bases: call(case, *bases), leaves(case))


@pytest.mark.every_program
@pytest.mark.every_route
@settings(max_examples=examples(250, 60))
@given(statements(), st.sampled_from((math.nan, math.inf)))
def test_gradients_equal_the_loop_nest(case: Case, poison: float) -> None:
    """In every dtype, with `poison` wherever no product reads or writes: it reaches no gradient."""
    nest = LoopNest(case.expr, case.tensors, case.size)
    upstream = random_values(nest.shape, nest.dtype, torch.Generator().manual_seed(6)).to(DEVICE)
    expected = nest.gradients(upstream)
    if nest.sentence.output.name not in case.operands or not nest.sentence.is_added:
        output = Case("", {"grad": Operand(upstream, "contiguous", nest.shape)}, None)
        upstream = output.poisoned({"grad": {output for output, _ in nest.terms}}, poison).tensors["grad"]
    poisoned = case.poisoned(nest.touched, poison)
    tensors = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point()) for name, tensor in poisoned.tensors.items()
    }

    result = insum(case.expr, size=case.size, **tensors)
    names = [name for name in tensors if name in expected]
    actual = torch.autograd.grad(result, [tensors[name] for name in names], upstream, allow_unused=True)

    for name, grad in zip(names, actual, strict=True):
        if grad is None:
            assert name == nest.sentence.output.name
            assert not nest.sentence.is_added
            continue
        own = expected[name]
        rounding = bound(own.dtype, own.magnitude, 0, 1)  # the gradient is summed in the result's dtype
        assert grad.dtype == own.dtype
        assert_within(grad, own.value, rounding + bound(nest.dtype, own.magnitude, own.terms, own.factors))


@pytest.mark.every_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_in_two_factors_gets_both_terms(dtype: torch.dtype) -> None:
    A = random_values((5, 5), dtype, torch.Generator().manual_seed(7)).to(DEVICE).requires_grad_()
    upstream = random_values((5, 5), dtype, torch.Generator().manual_seed(8)).to(DEVICE)
    wide, up = A.detach().cpu().double(), upstream.cpu().double()

    def gradient(expr: str) -> Tensor:
        (grad,) = torch.autograd.grad(insum(expr, A=A), A, upstream)
        return grad

    assert_matches(gradient("C[i,j] += A[i,j] * A[i,j]"), 2 * wide * up)
    assert_matches(gradient("C[i,j] += A[i,k] * A[k,j]"), up @ wide.T + wide.T @ up)
    assert_matches(gradient("C[i,j] += A[i,j] * A[j,i]"), wide.T * (up + up.T))


@pytest.mark.every_route
def test_a_seed_that_is_also_a_factor_gets_both_terms() -> None:
    C, A = (torch.randn(4, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2))
    (grad,) = torch.autograd.grad(insum("C[i] += C[i] * A[i]", C=C, A=A).sum(), C)
    assert_matches(grad, 1 + A.cpu())


def test_a_counter_of_operations_may_watch() -> None:
    """It hooks every module, and what it asks of their inputs has no answer inside an autograd function."""
    V, AM = torch.randn(3, device=DEVICE).requires_grad_(), torch.tensor([0, 1, 1], device=DEVICE)
    with FlopCounterMode(display=False):
        insum("C[AM[p]] += V[p]", V=V, AM=AM, size=(4,)).sum().backward()
    assert torch.equal(V.grad, torch.ones_like(V))


def test_only_what_requires_a_gradient_gets_one() -> None:
    A = torch.randn(4, device=DEVICE, requires_grad=True)
    B = torch.randn(4, device=DEVICE)
    insum("C[i] += A[i] * B[i]", A=A, B=B).sum().backward()
    assert_matches(A.grad, B.cpu().double())
    assert B.grad is None
    assert not insum("C[i] += B[i] * B[i]", B=B).requires_grad
    with torch.no_grad():
        assert not insum("C[i] += A[i] * B[i]", A=A, B=B).requires_grad


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_values_of_a_format_get_gradients(name: str, group_dim: int, dtype: torch.dtype) -> None:
    """dV = (dC @ B.T) at the stored positions, 0 in the padding; dB = A.T @ dC."""
    generator = torch.Generator().manual_seed(9)
    A = random_values((7, 9), dtype, generator)
    A[torch.rand(A.shape, generator=generator) < 0.6] = 0
    sparse = FORMATS[name](A.to(DEVICE), group_dim)
    values = sparse.values.detach().clone().requires_grad_()
    sparse = sparse.with_values(values)
    B = random_values((9, 5), dtype, generator).to(DEVICE).requires_grad_()
    upstream = random_values((7, 5), dtype, generator).to(DEVICE)

    C = insum("C[m,n] += A[m,k] * B[k,n]", A=sparse, B=B)
    dvalues, dB = torch.autograd.grad(C, (values, B), upstream)

    wide, up = B.detach().cpu().double(), upstream.cpu().double()
    place = positions(sparse)
    assert_matches(C, A.double() @ wide)
    assert_matches(dB, A.double().T @ up)
    assert_matches(dvalues, torch.where(place >= 0, (up @ wide.T).flatten()[place.clamp(min=0)], 0))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_a_format_pass_gradgradcheck(name: str) -> None:
    generator = torch.Generator().manual_seed(10)
    A = random_values((3, 4), torch.float64, generator)
    A[torch.rand(A.shape, generator=generator) < 0.5] = 0
    sparse = FORMATS[name](A.to(DEVICE), 0)
    values = sparse.values.detach().clone().requires_grad_()
    B = random_values((4, 2), torch.float64, generator).to(DEVICE).requires_grad_()

    def multiply(values: Tensor, B: Tensor) -> Tensor:
        return insum("C[m,n] += A[m,k] * B[k,n]", A=sparse.with_values(values), B=B)

    assert gradcheck(multiply, (values, B))
    assert gradgradcheck(multiply, (values, B))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_a_format_get_gradients_in_three_dimensions(name: str) -> None:
    generator = torch.Generator().manual_seed(11)
    A = random_values((3, 5, 4), torch.float64, generator)
    A[torch.rand(A.shape, generator=generator) < 0.6] = 0
    X = random_values((5, 2), torch.float64, generator).to(DEVICE)
    Y = random_values((4, 3), torch.float64, generator).to(DEVICE)
    upstream = random_values((3, 2, 3), torch.float64, generator)
    wide = torch.einsum("zxy,ix,jy->zij", upstream, X.cpu(), Y.cpu())
    for group_dim in range(3):
        sparse = FORMATS[name](A.to(DEVICE), group_dim)
        values = sparse.values.detach().clone().requires_grad_()
        sparse = sparse.with_values(values)
        C = insum("C[z,x,y] += A[z,i,j] * X[i,x] * Y[j,y]", A=sparse, X=X, Y=Y)
        (dvalues,) = torch.autograd.grad(C, values, upstream.to(DEVICE))
        place = positions(sparse)
        assert_matches(C, torch.einsum("zij,ix,jy->zxy", dense(sparse), X.cpu(), Y.cpu()))
        assert_matches(dvalues, torch.where(place >= 0, wide.flatten()[place.clamp(min=0)], 0))


# blocks of a row side by side: rows of none to six blocks, so groups of four are full, padded or missing

COUNTS = (6, 4, 0, 3, 5)


BLOCKS = ((16, 16), (4, 16), (16, 12), (24, 16))


def narrow(block: tuple[int, int], group_dim: int = 0, missing: int = 0) -> BlockCOO:
    """Random values, the last block of each side `missing` rows and columns short."""
    generator = torch.Generator().manual_seed(12)
    is_stored = torch.arange(6) < torch.tensor(COUNTS)[:, None]
    if group_dim == 1:
        is_stored = is_stored.T
    is_stored = is_stored.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    A = random_values(tuple(is_stored.shape), torch.float64, generator) * is_stored
    A = A[: A.shape[0] - missing, : A.shape[1] - missing]
    return BlockCOO.from_dense(A.to(DEVICE), group_dim=group_dim, block_size=block)


beside_each_other = pytest.mark.usefixtures("smallest_gpu")  # which few groups of blocks fill


def values_gradients(sparse: BlockCOO, upstream: Tensor, B: Tensor, times: int = 3) -> list[Tensor]:
    """Worked out, recorded and replayed."""
    found = []
    for _ in range(times):
        values = sparse.values.detach().clone().requires_grad_()
        C = insum("C[m,n] += A[m,k] * B[k,n]", A=sparse.with_values(values), B=B.requires_grad_())
        found += torch.autograd.grad(C, values, upstream)
    return found


def sampled(sparse: BlockCOO, wide: Tensor) -> Tensor:
    """The elements of a dense gradient at the stored positions, 0 outside the matrix."""
    place = positions(sparse)
    return torch.where(place >= 0, wide.flatten()[place.clamp(min=0)], 0)


@pytest.mark.sampled
@pytest.mark.every_route
@beside_each_other
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("group_dim", [0, 1])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_of_narrow_blocks_get_gradients(block: tuple[int, int], group_dim: int, missing: int) -> None:
    sparse = narrow(block, group_dim, missing)
    generator = torch.Generator().manual_seed(13)
    B = random_values((sparse.shape[1], 20), torch.float64, generator)
    upstream = random_values((sparse.shape[0], 20), torch.float64, generator)
    for dvalues in values_gradients(sparse, upstream.to(DEVICE), B.to(DEVICE)):
        assert_matches(dvalues, sampled(sparse, upstream @ B.T))


@pytest.mark.sampled
@pytest.mark.every_route
@beside_each_other
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_values_of_narrow_blocks_get_gradients_in_every_dtype(dtype: torch.dtype, deterministic: bool) -> None:
    sparse = narrow((16, 16)).to(dtype)
    generator = torch.Generator().manual_seed(14)
    B, upstream = (random_values(shape, dtype, generator) for shape in ((96, 20), (80, 20)))
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = values_gradients(sparse, upstream.to(DEVICE), B.to(DEVICE))
    finally:
        torch.use_deterministic_algorithms(False)
    for dvalues in found:
        assert dvalues.dtype == dtype
        assert_matches(dvalues, sampled(sparse, upstream.double() @ B.double().T))


@pytest.mark.every_route
@beside_each_other
def test_padding_beside_narrow_blocks_reads_nothing() -> None:
    """No block reads the first 16 rows of B, nor the third 16 of the upstream gradient."""
    pattern = narrow((16, 16))
    coords = (pattern.coords[0], pattern.coords[1] + 1)
    sparse = BlockCOO(coords, pattern.values, (80, 112), block_size=(16, 16))
    B = torch.ones(112, 20, dtype=torch.float64)
    B[:16] = math.nan
    upstream = torch.full((80, 20), math.nan, dtype=torch.float64)
    upstream[(torch.tensor(COUNTS) > 0).repeat_interleave(16)] = 2.0
    for dvalues in values_gradients(sparse, upstream.to(DEVICE), B.to(DEVICE)):
        assert_matches(dvalues, torch.full(dvalues.shape, 40.0).double())


@pytest.mark.every_route
@beside_each_other
def test_a_missing_row_of_the_output_leaves_its_blocks_without_a_gradient() -> None:
    """`C[E[m],n]` with E[m] of -1: all of the gradient is written all the same."""
    sparse, generator = narrow((16, 16)), torch.Generator().manual_seed(15)
    B, upstream = (random_values(shape, torch.float64, generator) for shape in ((96, 20), (30, 20)))
    E = torch.randint(-1, 30, (80,), generator=generator, dtype=torch.int32)
    E[:16] = -1
    rows = torch.where((E >= 0)[:, None], upstream[E.clamp(min=0).long()], 0)
    for _ in range(2):
        values = sparse.values.detach().clone().requires_grad_()
        given = dict(E=E.to(DEVICE), A=sparse.with_values(values), B=B.to(DEVICE).requires_grad_())
        C = insum("C[E[m],n] += A[m,k] * B[k,n]", **given, size=(30, 20))
        (dvalues,) = torch.autograd.grad(C, values, upstream.to(DEVICE))
        assert_matches(dvalues, sampled(sparse, rows @ B.T))


@pytest.mark.every_route
def test_values_of_few_blocks_to_a_row_and_of_wide_blocks_get_gradients() -> None:
    B, upstream = torch.rand(96, 20, device=DEVICE).double(), torch.rand(80, 20, device=DEVICE).double()
    diagonal = BlockCOO.from_dense(torch.eye(96, dtype=torch.float64, device=DEVICE)[:80], block_size=(16, 16))
    dense = torch.ones(64, 192, dtype=torch.float64, device=DEVICE)
    wide = BlockCOO.from_dense(dense, block_size=(64, 64))
    for sparse, rows, columns in ((diagonal, upstream, B), (wide, upstream[:64], torch.cat([B, B]))):
        for dvalues in values_gradients(sparse, rows, columns):
            assert_matches(dvalues, sampled(sparse, (rows @ columns.detach().T).cpu()))


@beside_each_other
@pytest.mark.kernels
def test_blocks_of_64_in_half_precision_stand_side_by_side() -> None:
    """24 and more blocks of a row would be eight at a time, if they were narrower."""
    generator = torch.Generator().manual_seed(17)
    B, upstream = (random_values((rows, 24), torch.float16, generator) for rows in (1600, 64))
    A = random_values((64, 1600), torch.float16, generator)
    sparse = BlockCOO.from_dense(A.to(DEVICE), block_size=(64, 64))
    for dvalues in values_gradients(sparse, upstream.to(DEVICE), B.to(DEVICE)):
        assert_matches(dvalues, sampled(sparse, upstream.double() @ B.double().T))


@beside_each_other
def test_second_gradients_of_narrow_blocks() -> None:
    sparse, generator = narrow((16, 16)), torch.Generator().manual_seed(16)
    dense_A = sparse.to_dense().cpu().requires_grad_()
    B = random_values((96, 17), torch.float64, generator)
    values, mine = sparse.values.detach().clone().requires_grad_(), B.to(DEVICE).requires_grad_()
    C = insum("C[m,n] += A[m,k] * B[k,n]", A=sparse.with_values(values), B=mine)
    (dvalues,) = torch.autograd.grad(C.square().sum(), values, create_graph=True)
    dA, dB = torch.autograd.grad(dvalues.square().sum(), (values, mine))
    theirs = B.clone().requires_grad_()
    is_stored = (positions(sparse)[..., None] == torch.arange(80 * 96)).flatten(0, -2).any(0).view(80, 96)
    (first,) = torch.autograd.grad((dense_A @ theirs).square().sum(), dense_A, create_graph=True)
    expected_dA, expected_dB = torch.autograd.grad((first * is_stored).square().sum(), (dense_A, theirs))
    assert_matches(dvalues, sampled(sparse, first.detach()))
    for found, expected in ((dA, sampled(sparse, expected_dA)), (dB, expected_dB)):
        largest = expected.abs().max()
        assert_matches(found.cpu() / largest, expected / largest)
