"""Statements of three or more factors as several of fewer."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from insum_ops.compiler.binding import Bound, bind
from insum_ops.compiler.language import parse
from insum_ops.compiler.planning.device import H200
from insum_ops.compiler.planning.split import split

pytestmark = pytest.mark.cpu


def bound(text: str, **shapes: tuple[int, ...]) -> Bound:
    return bind(parse(text), {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


CHAIN = "Y[i,l] += A[i,j] * B[j,k] * C[k,l]"


@pytest.mark.parametrize(
    ("sizes", "first"),
    [((5000, 200, 5000, 200), "T[j,l] += B[j,k] * C[k,l]"), ((200, 5000, 200, 5000), "T[i,k] += A[i,j] * B[j,k]")],
)
def test_the_cheaper_pair_of_a_chain_comes_first(sizes, first):
    rows, j, k, columns = sizes
    parts = split(bound(CHAIN, A=(rows, j), B=(j, k), C=(k, columns)), H200, True)
    assert parts is not None
    assert parts.gain > 1
    assert str(parts.steps[0]) == first
    assert parts.steps[-1].output == parse(CHAIN).output


def test_what_saves_no_work_stays_whole():
    tiny = bound(CHAIN, A=(4, 4), B=(4, 4), C=(4, 4))
    weighted = bound("Y[i,l] += V[i] * A[i,j] * B[j,l]", V=(900,), A=(900, 900), B=(900, 900))
    maximum = bind(parse("Y[i] = max(A[i,j] * B[j,k] * C[k])"), {n: torch.empty(s) for n, s in MAXIMUM.items()})
    assert split(tiny, H200, True) is None
    assert split(weighted, H200, True) is None
    assert split(maximum, H200, True) is None


def test_steps_that_may_be_faster_than_they_are_estimated_are_there_to_be_timed():
    whole = bound("M[i,r] += X[i,j,k] * B[j,r] * C[k,r]", X=(89, 149, 135), B=(149, 9), C=(135, 9))
    assert split(whole, H200, False) is None
    parts = split(whole, H200, False, 0.5)
    assert str(parts).splitlines() == ["T[r,i,k] += X[i,j,k] * B[j,r]", "M[i,r] += C[k,r] * T[r,i,k]"]
    assert 0.5 < parts.gain < 1


def test_few_results_of_a_long_sum_are_not_the_last_step():
    """Programs share such a sum, which takes a launch more than many results do."""
    whole = bound("M[i,r] += X[i,j,k] * B[j,r] * C[k,r]", X=(211, 75, 63), B=(75, 29), C=(63, 29))
    parts = split(whole, H200, False, 0.5)  # the product of B and C first would have fewer bytes
    assert str(parts).splitlines() == ["T[r,i,k] += X[i,j,k] * B[j,r]", "M[i,r] += C[k,r] * T[r,i,k]"]


def test_factors_of_two_precisions_stay_together():
    """A product of the two in half precision would be rounded, where the sum is in float32."""
    half, single = (torch.empty(512, 512, dtype=dtype, device="meta") for dtype in (torch.float16, torch.float32))
    assert split(bind(parse(CHAIN), dict(A=half, B=half, C=half)), H200, True) is not None
    assert split(bind(parse(CHAIN), dict(A=half, B=half, C=single)), H200, True) is None


MAXIMUM = {"A": (900, 900), "B": (900, 900), "C": (900,)}


def test_a_factor_is_multiplied_where_another_one_is_read_that_has_its_indices():
    text = "Y[i,l] += V[j] * A[i,j] * B[j,k] * C[k,l] * 2"
    parts = split(bound(text, V=(800,), A=(700, 800), B=(800, 600), C=(600, 500)), H200, True)
    assert parts is not None
    assert len(parts.steps) == 2
    assert sum(factor.name == "V" for step in parts.steps for factor in step.accesses) == 1
    assert parts.steps[-1].scale == 2


def test_what_one_group_of_factors_alone_sums_is_summed_first():
    text = "Y[b,o] += X[b,i] * A[U[b],i,r] * B[U[b],r,o] * 2"
    shapes = dict(X=(393, 673), A=(55, 673, 11), B=(55, 11, 355), U=(393,))
    tensors = {
        name: torch.empty(shape, dtype=torch.int64 if name == "U" else torch.float16, device="meta")
        for name, shape in shapes.items()
    }
    parts = split(bind(parse(text), tensors), H200, True)
    assert parts is not None
    assert list(map(str, parts.steps)) == ["T[b,r] += A[U[b],i,r] * X[b,i]", "Y[b,o] += B[U[b],r,o] * T[b,r] * 2"]
    assert parts.sizes == ((393, 11),)
    lone = split(bound("Y[i] += A[i,j] * B[k]", A=(9000, 9000), B=(9000,)), H200, True)
    assert lone is not None
    assert list(map(str, lone.steps)) == ["T[i] += A[i,j]", "T_[()] += B[k]", "Y[i] += T[i] * T_[()]"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_steps_come_to_the_same_as_the_statement(seed):
    """Evaluated by torch.einsum, step after step, in float64."""
    generator = torch.Generator().manual_seed(seed)
    letters = "ijklm"
    extents = {name: int(torch.randint(2, 7, (), generator=generator)) * 60 for name in letters}
    names = ["".join(letters[at] for at in torch.randperm(5, generator=generator)[:2].tolist()) for _ in range(4)]
    reached = [name for name in letters if any(name in factor for factor in names)]
    free = [name for name in reached if float(torch.rand((), generator=generator)) < 0.4]
    factors = [f"{tensor}[{','.join(own)}]" for tensor, own in zip("ABCD", names)]
    text = f"Y[{','.join(free) or '()'}] += {' * '.join(factors)}"
    shapes = {tensor: tuple(extents[name] for name in own) for tensor, own in zip("ABCD", names)}
    parts = split(bound(text, **shapes), H200, True)
    assume(parts is not None)
    small = {name: 2 + at for at, name in enumerate(letters)}
    tensors = {
        tensor: torch.rand([small[name] for name in own], generator=generator, dtype=torch.float64)
        for tensor, own in zip("ABCD", names)
    }
    expected = torch.einsum(f"{','.join(names)}->{''.join(free)}", *tensors.values())
    for step in parts.steps:
        terms = ",".join("".join(access.names) for access in step.accesses)
        operands = [tensors[access.name] for access in step.accesses]
        tensors[step.output.name] = torch.einsum(f"{terms}->{''.join(step.output.names)}", *operands)
    torch.testing.assert_close(tensors["Y"], expected)
    assert prod(tensors["Y"].shape) == prod(small[name] for name in free)
