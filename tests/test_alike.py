"""Calls that come once, at ever other lengths: by a kernel that ran before, with no plan of their own."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler import pipeline, ready
from insum_ops.compiler.errors import IndexRangeError

HAS_KERNELS = IS_INTERPRETED or DEVICE == "cuda"
LENGTHS = (600, 602, 777, 1000)  # long enough to count roughly


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def positions(extent, *shape, absent=True):
    found = torch.randint(0, extent, shape, dtype=torch.int32)
    return torch.where(torch.rand(shape) < 0.3, -1, found).to(DEVICE) if absent else found.to(DEVICE)


def rows_of(A, index):
    """A[index], zeros where that is -1, in float64."""
    wide, at = A.double(), index.long().clamp(min=0)
    return torch.where((index >= 0)[..., None], wide[at], 0.0)


def gathered(length, dtype=torch.float32):
    A, index = values(7, 4, dtype=dtype), positions(7, length, 2)
    return "C[p,n] += A[I[p,q],n]", (length, 4), {"A": A, "I": index}, rows_of(A, index).sum(1)


def scattered(length, dtype=torch.float32):
    A, index = values(length, 4, dtype=dtype), positions(length + 5, length, absent=False)
    expected = torch.zeros(length + 5, 4, dtype=torch.float64, device=DEVICE).index_add(0, index.long(), A.double())
    return "C[I[p],n] += A[p,n]", (length + 5, 4), {"A": A, "I": index}, expected


def convolved(length, dtype=torch.float32):
    In, NBR, Weight = (
        values(length + 3, 16, dtype=dtype),
        positions(length + 3, length, 2),
        values(2, 16, 16, dtype=dtype),
    )
    expected = torch.einsum("xzc,zcm->xm", rows_of(In, NBR), Weight.double())
    tensors = {"In": In, "Weight": Weight, "NBR": NBR}
    return "Out[x,m] += In[NBR[x,z],c] * Weight[z,c,m]", (length, 16), tensors, expected


def started(length, dtype=torch.float32):
    expr, size, tensors, expected = convolved(length, dtype)
    bias = values(16, dtype=dtype)
    return expr, size, {**tensors, "Out": bias.expand(size)}, expected + bias.double()


CASES = {"gathered": gathered, "scattered": scattered, "convolved": convolved, "started": started}


@pytest.fixture
def plans(monkeypatch):
    """Names of the tensors of calls that a plan was asked for."""
    asked = []
    plan_for = ready.plan_for
    monkeypatch.setattr(ready, "plan_for", lambda *given: asked.append(given[1]) or plan_for(*given))
    monkeypatch.setattr(ready, "_once", {})
    monkeypatch.setattr(ready, "_plans", {})
    monkeypatch.setattr(pipeline, "_plans", {})
    monkeypatch.setattr(pipeline, "_kins", {})
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_other_lengths_take_the_kernel_that_there_is(plans, name, dtype):
    if dtype == torch.float16 and name == "scattered":
        pytest.skip("sums meet in another type, which takes more than a launch")
    for number, length in enumerate(LENGTHS):
        expr, size, tensors, expected = CASES[name](length, dtype)
        assert_matches(insum(expr, size=size, **tensors), expected)
        assert len(plans) == (1 if HAS_KERNELS else number + 1)


def test_lengths_that_come_again_are_remembered(plans):
    for length in (600, 602, 602, 602):
        expr, size, tensors, expected = gathered(length)
        assert_matches(insum(expr, size=size, **tensors), expected)
    assert len(plans) == (2 if HAS_KERNELS else 3)  # of 600, and of 602 the second time
    assert len(ready._plans) > 0


def test_index_tensors_with_and_without_absent_entries_have_kernels_of_their_own(plans):
    for length in (600, 602, 604, 606):
        expr, size, tensors, _ = gathered(length)
        tensors["I"] = positions(7, length, 2, absent=length in (600, 606))
        assert_matches(insum(expr, size=size, **tensors), rows_of(tensors["A"], tensors["I"]).sum(1))
    assert len(plans) == (2 if HAS_KERNELS else 4)


@pytest.mark.usefixtures("plans")
def test_positions_out_of_range_are_refused_as_ever():
    for length in (600, 602):
        expr, size, tensors, _ = gathered(length)
        insum(expr, size=size, **tensors)
    expr, size, tensors, _ = gathered(604)
    tensors["I"][3, 1] = 7
    with pytest.raises(IndexRangeError, match=r"I\[3,1\] is 7"):
        insum(expr, size=size, **tensors)


def test_settings_and_layouts_are_told_apart(plans):
    asked = 0
    for length, is_deterministic in ((600, False), (602, True), (604, True), (606, False)):
        expr, size, tensors, expected = scattered(length)
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            first, second = (insum(expr, size=size, **tensors) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        assert_matches(first, expected)
        assert_matches(second, expected)
        assert len(plans) > asked
        asked = len(plans)
    expr, size, tensors, expected = gathered(608)
    insum(expr, size=size, **tensors)
    expr, size, tensors, expected = gathered(610)
    tensors["A"] = tensors["A"].T.contiguous().T
    assert_matches(insum(expr, size=size, **tensors), expected)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("name", CASES)
def test_nothing_at_all(name):
    for length in (600, 602):
        expr, size, tensors, _ = CASES[name](length)
        insum(expr, size=size, **tensors)
    empty = {key: tensor[:0] if len(tensor) > 500 else tensor for key, tensor in tensors.items()}
    made = insum(expr, size=(0, *size[1:]), **empty)
    assert made.shape == (0, *size[1:])
