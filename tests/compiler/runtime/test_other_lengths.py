"""Raw statements at ever other lengths: right at lengths that were seen, and at those that come for the first time."""

from __future__ import annotations

import pytest
import torch
from process_caches import forget
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops import insum
from insum_ops.compiler import pipeline
from insum_ops.compiler.language.errors import IndexRangeError
from insum_ops.compiler.runtime import plan_cache
from insum_ops.compiler.runtime.tensor_guard import _tells_apart

# long enough to count roughly; few where kernels are interpreted
SEEN = (600, 602, 604) if IS_INTERPRETED else (600, 602, 777) * 3
NEW = (606,) if IS_INTERPRETED else (1000, 601, 2001, 600, 1000)


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


@pytest.fixture(autouse=True)
def _nothing_is_known():
    forget()


def call(name, length, dtype=torch.float32):
    """A call with numbers of its own is right."""
    expr, size, tensors, expected = CASES[name](length, dtype)
    assert_matches(insum(expr, size=size, **tensors), expected)


@pytest.mark.sampled
@pytest.mark.every_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_new_lengths_after_three_that_came_often(name, dtype):
    for length in SEEN:
        call(name, length, dtype)
    for length in NEW:
        call(name, length, dtype)


@pytest.mark.parametrize("name", CASES)
def test_lengths_of_which_each_comes_once(name):
    for length in (600, 602, 777, 1000, 601, 905):
        call(name, length)


@pytest.mark.parametrize("name", CASES)
def test_lengths_that_something_divides_need_no_plan_of_their_own(name, monkeypatch):
    """Of clouds and graphs a few are as long as 16 divides: each set of such lengths had taken kernels of its own."""
    for length in (593, 599, 601, 597):
        call(name, length)
    planned, runner_of = [], pipeline.runner_of
    monkeypatch.setattr(pipeline, "runner_of", lambda *args: planned.append(args) or runner_of(*args))
    for length in (608, 640, 605, 1008, 592):
        call(name, length)
    assert not planned


@pytest.mark.skipif(not _tells_apart(), reason="this torch has no guards")
@pytest.mark.parametrize("name", CASES)
def test_new_lengths_are_served_by_guards(name, monkeypatch):
    """Keys of all shapes had taken longer than all else that the host does."""
    for length in (593, 599, 601, 597):
        call(name, length)
    monkeypatch.setattr(plan_cache, "_keys", lambda *given: pytest.fail("a key is made of all shapes"))
    for length in (603, 608, 640, 605, 1008, 592):
        call(name, length)


@pytest.mark.every_route
@pytest.mark.parametrize("name", CASES)
def test_lengths_of_other_classes_after_some_that_16_divides(name):
    """Kernels for these load and store without a mask, and find their grid by a length that 16 divides."""
    for length in (80, 96, 112, 96):
        call(name, length)
    for length in (81, 95, 127, 65) if IS_INTERPRETED else (81, 95, 127, 65, 129, 3, 64, 0, 200):
        call(name, length)


def test_lengths_that_were_equal_may_differ_later():
    """C[i] = A[i] * B[I[i]]: as many of A as of B, until there are not."""
    for long, short in ((600, 600), (602, 602), (700, 700), (702, 702), (704, 800), (706, 606), (600, 600)):
        A, B, index = values(long, 3), values(short, 3), positions(short, long)
        expected = A.double() * rows_of(B, index)
        assert_matches(insum("C[i,n] = A[i,n] * B[I[i],n]", A=A, B=B, I=index), expected)


def test_a_length_that_has_stayed_may_change_later():
    for long, stays in ((600, 700), (602, 700), (604, 700), (606, 700), (608, 701), (600, 1400), (606, 700)):
        B, index = values(stays, 3), positions(stays, long)
        assert_matches(insum("C[i,n] = B[I[i],n]", B=B, I=index), rows_of(B, index))


def test_short_and_long_tensors_take_turns():
    for length in (600, 3, 602, 1, 777, 2, 600, 16, 1000, 3, 0, 4000):
        call("gathered", length)


def test_the_other_dimensions_may_change_with_the_length():
    for length, columns in ((600, 3), (602, 4), (604, 5), (606, 3), (608, 4), (610, 7), (612, 3)):
        A, index = values(9, columns), positions(9, length)
        assert_matches(insum("C[p,n] += A[I[p],n]", A=A, I=index), rows_of(A, index))


@pytest.mark.every_route
def test_gradients_at_other_lengths():
    for length in (*SEEN, *NEW):
        expr, size, tensors, _ = convolved(length)
        learns = [tensors[name].requires_grad_() for name in ("In", "Weight")]
        upstream = values(*size)
        found = torch.autograd.grad(insum(expr, size=size, **tensors), learns, upstream)
        wide = [learnt.detach().double().requires_grad_() for learnt in learns]
        dense = torch.einsum("xzc,zcm->xm", rows_of(wide[0], tensors["NBR"]), wide[1])
        wanted = torch.autograd.grad(dense, wide, upstream.double())
        for one, right in zip(found, wanted, strict=True):
            assert_matches(one / length**0.5, right / length**0.5)


@pytest.mark.every_route
def test_index_tensors_with_and_without_absent_entries_take_turns():
    for turn, length in enumerate((600, 602, 604, 606) if IS_INTERPRETED else range(600, 616, 2)):
        expr, size, tensors, _ = gathered(length)
        tensors["I"] = positions(7, length, 2, absent=turn % 3 == 0)
        assert_matches(insum(expr, size=size, **tensors), rows_of(tensors["A"], tensors["I"]).sum(1))


@pytest.mark.parametrize("calls", [1, 2, 6])
def test_positions_out_of_range_are_refused_as_ever(calls):
    for length in range(600, 600 + calls):
        expr, size, tensors, _ = gathered(length)
        insum(expr, size=size, **tensors)
    for length in (604, 704):
        expr, size, tensors, _ = gathered(length)
        tensors["I"][3, 1] = 7
        with pytest.raises(IndexRangeError, match=r"I\[3,1\] is 7"):
            insum(expr, size=size, **tensors)


def test_positions_beyond_a_length_that_varies_are_refused():
    for length in (600, 602, 777, 600, 602):
        call("convolved", length)
    expr, size, tensors, _ = convolved(640)
    tensors["NBR"][5, 0] = 643
    with pytest.raises(IndexRangeError, match=r"NBR\[5,0\] is 643"):
        insum(expr, size=size, **tensors)
    tensors["NBR"][5, 0] = 642
    expected = torch.einsum("xzc,zcm->xm", rows_of(tensors["In"], tensors["NBR"]), tensors["Weight"].double())
    assert_matches(insum(expr, size=size, **tensors), expected)


def test_settings_and_layouts_are_told_apart():
    for length, is_deterministic in ((600, False), (602, True), (604, True), (606, False), (608, True), (610, False)):
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            for _ in range(2):
                call("scattered", length)
        finally:
            torch.use_deterministic_algorithms(False)
    for length in (608, 610, 612, 614, 616, 618):
        expr, size, tensors, expected = gathered(length)
        if length % 4:
            tensors["A"] = tensors["A"].T.contiguous().T
        assert_matches(insum(expr, size=size, **tensors), expected)


@pytest.mark.every_route
@pytest.mark.parametrize("name", CASES)
def test_nothing_at_all(name):
    for length in (600, 602, 604):
        expr, size, tensors, _ = CASES[name](length)
        insum(expr, size=size, **tensors)
    empty = {key: tensor[:0] if len(tensor) > 500 else tensor for key, tensor in tensors.items()}
    made = insum(expr, size=(0, *size[1:]), **empty)
    assert made.shape == (0, *size[1:])
