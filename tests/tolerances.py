"""How far a result may lie from its float64 reference: one table by dtype, the same on every machine.

`TOLERANCE` is for dense references, whose summands are not at hand. `bound` is for loop nests, which know the
magnitude of what was added up: it is an error analysis, not a guess, so it holds for any order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products are added up in: half precision is summed in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def bound(
    dtype: torch.dtype, magnitude: Tensor, terms: int, factors: int, summed_in: torch.dtype | None = None
) -> Tensor:
    """The largest error of a sum of `terms` products of `factors` numbers, `magnitude` in all.

    Summed in `summed_in` (`accumulator(dtype)` unless told) and rounded to `dtype` once for the store, once
    for the seed and once for each factor past the second, which may be multiplied into another operand first.
    """
    rounding = torch.finfo(dtype).eps / 2
    summing = torch.finfo(summed_in or accumulator(dtype)).eps / 2
    underflow = torch.finfo(dtype).tiny * torch.finfo(dtype).eps * (terms + factors)
    return magnitude * (rounding * max(2, factors) + summing * (terms + factors)) + underflow


def assert_within(actual: Tensor, expected: Tensor, limit: Tensor) -> None:
    """Every element of `actual` lies within `limit` of `expected`; a NaN never does."""
    assert actual.shape == expected.shape
    expected, limit = expected.detach().cpu(), limit.detach().cpu()
    error = (actual.detach().cpu().double() - expected).abs()
    is_wrong = ~(error <= limit)
    if is_wrong.any():
        where = tuple(is_wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(is_wrong.sum())} of {actual.numel()} elements are wrong; the first, at {where}, is "
            f"{actual[where].item()} instead of {expected[where].item()}, allowed {limit[where].item():.3g}"
        )


def assert_matches(actual: Tensor, expected: Tensor) -> None:
    """`actual` equals a dense float64 reference to the tolerance of its own dtype."""
    torch.testing.assert_close(actual.detach().cpu().double(), expected.detach().cpu(), **TOLERANCE[actual.dtype])
