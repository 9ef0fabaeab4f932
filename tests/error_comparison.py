"""Errors of results and gradients beside their bound and beside the errors of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bounds import PRECISIONS, Precision, Sums, error_bound, exact_sums
from statements import DEVICE, IS_INTERPRETED, random_values
from tolerances import assert_within
from torch import Tensor

__all__ = ["assert_no_worse", "draw", "every_kind", "every_precision", "plain"]

# How much larger an error may be, in the norm over many elements, than that of torch's own operations. What is rounded
# to half precision at the end errs by that. Sums in float32 err by their order: torch has up to 16 sums side by side,
# and one of 16 times the length, as a kernel's may be, errs 4 times as much. On an H200 a linear layer's sums of very
# unequal numbers erred 6.5 times as much as cuBLAS's, of equal ones 8.2 times (`make test-gpu`).
KERNEL_SUMS = 10.0 if DEVICE.startswith("cuda") else 4.0 if IS_INTERPRETED else 1.5
OTHER_ORDER = {torch.float16: 1.5, torch.bfloat16: 1.5, torch.float32: KERNEL_SUMS}
MANY = 50  # elements: the norm over fewer is a matter of luck

every_precision = pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: precision.name)


def error(actual: Tensor, sums: Sums) -> float:
    return float((actual.detach().cpu().double() - sums.value).norm())


def torch_error(other: Tensor, sums: Sums, precision: Precision) -> float:
    """At least that of one rounding; what is chopped instead of rounded errs twice as much."""
    rounded = sums.value.to(precision.dtype)
    chopping = 2 * precision.rounding / torch.finfo(precision.dtype).eps
    return chopping * max(error(other, sums), error(rounded, sums))


def assert_no_worse(
    precision: Precision,
    leaves: list[Tensor],
    ours: Callable[[], Tensor],
    in_torch: Callable[..., Tensor],
    factors: int,
    parts: int = 1,
    rounded_factors: int = 0,
    magnitude: Callable[..., Tensor] | None = None,
) -> None:
    """Value and gradients of `ours`, of the same leaves, against `in_torch` in float64 and in their own dtype."""
    with precision.allowed():
        result = ours()
        upstream = random_values(tuple(result.shape), precision.dtype, torch.Generator().manual_seed(7)).to(DEVICE)
        found = [result, *torch.autograd.grad(result, leaves, upstream)]
        same = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        torch_result = in_torch(*same)
        torch_found = [torch_result, *torch.autograd.grad(torch_result, same, upstream)]
    wanted = exact_sums(in_torch, leaves, upstream, magnitude)
    for at, (own, other, sums) in enumerate(zip(found, torch_found, wanted, strict=True)):
        limit = error_bound(precision, sums, factors + (at > 0), parts, rounded_factors)
        assert_within(own, sums.value, limit)
        if own.numel() >= MANY and not (precision.name == "tf32" and DEVICE.startswith("cuda")):
            # a GPU rounds to tf32 in our products, and in few of the operations that torch takes here: no comparison
            ratio = error(own, sums) / max(torch_error(other, sums, precision), torch.finfo(torch.float64).tiny)
            what = "the result" if at == 0 else f"gradient {at}"
            assert ratio <= OTHER_ORDER[precision.dtype], f"{what} errs {ratio:.2f} times as much as torch"


# operands of long sums


def plain(*shape: int, generator: torch.Generator) -> Tensor:
    return random_values(shape, torch.float64, generator)


def spread(*shape: int, generator: torch.Generator) -> Tensor:
    """Magnitudes that differ by a factor of a million."""
    exponents = 20 * torch.rand(shape, generator=generator, dtype=torch.float64) - 16
    return random_values(shape, torch.float64, generator) * 2**exponents


def cancelling(*shape: int, generator: torch.Generator) -> Tensor:
    """Along the last dimension nearly all of the second half is taken away from the first."""
    values = random_values(shape, torch.float64, generator)
    half = shape[-1] // 2
    values[..., half : 2 * half] = -values[..., :half] * (1 + 1e-3 * values[..., half : 2 * half])
    return values


KINDS = [cancelling] if IS_INTERPRETED else [plain, spread, cancelling]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def draw(
    kind: Callable[..., Tensor], precision: Precision, *shape: int, seed: int = 0, is_even: bool = False
) -> Tensor:
    """`is_even`: what is multiplied with numbers that cancel is nearly one, so that the products cancel as well."""
    generator = torch.Generator().manual_seed(seed)
    values = kind(*shape, generator=generator)
    if is_even and kind is cancelling:
        values = 1 + values / 1000
    return values.to(precision.dtype).to(DEVICE)
