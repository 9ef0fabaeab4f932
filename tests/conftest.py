"""Every test runs seeded, with NaN in fresh memory and the same hypothesis examples on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

import pytest
import torch
from hypothesis import HealthCheck, settings
from statements import IS_INTERPRETED
from torch import Tensor
from triton.runtime import interpreter

from insum_ops.compiler import gradients

settings.register_profile(
    "insum",
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("insum")

if IS_INTERPRETED:  # overflow checks of every index take two thirds of the interpreter's time
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns of the NaN and Inf that interpreted kernels compute with on purpose; a GPU does not."""
    config.addinivalue_line("filterwarnings", "ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _few_groups_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small matrices of tests take blocks of a row together, as large ones do."""
    monkeypatch.setattr(gradients, "FEW_GROUPS", 1)


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
