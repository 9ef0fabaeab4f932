"""Results of calls that are ready, added to a sum or written into a part of a larger tensor."""

from __future__ import annotations

import pytest
import torch
from statements import DEVICE, IS_INTERPRETED
from tolerances import assert_matches

from insum_ops.compiler.pipeline import has_kernels
from insum_ops.compiler.ready import pinned

SCATTER = "C[I[p],n] += A[p,n]"
PRODUCT = "C[m,n] += A[m,k] * B[k,n]"


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, device=DEVICE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_a_sum_grows_where_it_is_if_a_kernel_adds_atomically():
    A, C, index = normal(4, 3), normal(2, 3), torch.tensor([0, 1, 0, -1], device=DEVICE)
    call = pinned(SCATTER, {"A": A, "C": C}, {"I": index}, None)
    expected = C.clone()
    expected[0] += A[0] + A[2]
    expected[1] += A[1]
    start = C.clone()
    total = call.add_to(start, [A])
    assert_matches(total, expected)
    assert (total is start) == has_kernels(torch.device(DEVICE))


def test_a_sum_of_another_layout_is_left_alone():
    A, C, index = normal(4, 3), normal(3, 2).T, torch.tensor([0, 1, 0, 1], device=DEVICE)
    before = C.clone()
    call = pinned(SCATTER, {"A": A, "C": C}, {"I": index}, None)
    assert_matches(call.add_to(C, [A]), C + A[:2] + torch.stack([A[2], A[3]]))
    assert torch.equal(C, before)


def test_kernels_that_own_their_rows_make_a_new_tensor():
    A, B, C = normal(3, 4), normal(4, 2), normal(3, 2)
    before = C.clone()
    call = pinned(PRODUCT, {"A": A, "B": B, "C": C}, {}, None)
    assert_matches(call.add_to(C, [A, B]), C + A @ B)
    assert torch.equal(C, before)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_result_is_written_into_its_place(columns):
    """A place of one column has strides that the kernel's source does not leave open."""
    call = None
    for start, width in ((0, 4), (1, 4), (1, 7)):  # aligned, not aligned, other strides
        A, B, whole = normal(3, 4), normal(4, columns), normal(3, width)
        if call is None:
            call = pinned(PRODUCT, {"A": A, "B": B}, {}, None)
        expected = whole.clone()
        expected[:, start : start + columns] = A @ B
        place = whole[:, start : start + columns]
        assert call.write_to(place, [A, B]) is place
        assert_matches(whole, expected)
        assert_matches(call([A, B]), A @ B)


@pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="no kernels here")
def test_what_kernels_add_up_is_copied_into_its_place():
    A, index = normal(4, 3), torch.tensor([0, 1, 0, 1], device=DEVICE)
    call = pinned(SCATTER, {"A": A}, {"I": index}, (2, 3))
    whole = torch.full((2, 5), torch.nan, dtype=torch.float64, device=DEVICE)
    call.write_to(whole[:, 1:4], [A])
    assert_matches(whole[:, 1:4], A[:2] + A[2:])
    assert whole[:, [0, 4]].isnan().all()
