"""Every test runs seeded, with NaN in fresh memory and the same hypothesis examples on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

settings.register_profile(
    "insum",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("insum")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _nan_in_fresh_memory() -> Iterator[None]:
    """What `torch.empty` and its kin return is NaN, so that an element nobody wrote is found."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def make_filled(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return make_filled

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield


@pytest.fixture(autouse=True, scope="session")
def _half_precision_is_summed_in_float32() -> Iterator[None]:
    """Tests of what torch's reduced-precision flags allow set them for themselves."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before
