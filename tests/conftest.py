"""Every test runs seeded, with NaN in fresh memory and the same hypothesis examples on every machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from statements import DEVICE, IS_INTERPRETED
from torch import Tensor
from triton.runtime import interpreter

from insum_ops.compiler.planning.device import H200, Device, described_as

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
    """numpy warns of the NaN and Inf that interpreted kernels compute with on purpose; a GPU does not.

    Torch warns where cuBLAS is first called in one of autograd's own threads.
    """
    config.addinivalue_line("filterwarnings", "ignore:(invalid value|overflow) encountered:RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


@cache
def _default_device(path: Path) -> str | None:
    """Where a file's tests make their tensors: in a file that names no device, on the one that is tested."""
    return None if re.search("DEVICE|cuda", path.read_text(encoding="utf-8")) else DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What says nothing about a GPU, its tests elsewhere are marked with `cpu`, is not run again on one."""
    if DEVICE.startswith("cuda"):
        items[:] = [item for item in items if item.get_closest_marker("cpu") is None]


if DEVICE.startswith("cuda"):

    def pytest_collectstart(collector: pytest.Collector) -> None:
        """A file's constants lie where its tests make their tensors."""
        if isinstance(collector, pytest.Module):
            torch.set_default_device(_default_device(collector.path))

    @pytest.fixture(autouse=True)
    def _on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
        torch.set_default_device(_default_device(request.path))
        yield
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def smallest_gpu() -> Iterator[Device]:
    """Plans are for a GPU of one multiprocessor: the small tensors of tests fill it, as large ones fill a large one."""
    with described_as(replace(H200, name="one multiprocessor", multiprocessors=1)) as device:
        yield device


@pytest.fixture(autouse=True, scope="session")
def _nan_in_fresh_memory() -> Iterator[None]:
    """What `torch.empty` and its kin return is NaN, so that an element nobody wrote is found."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def make_filled(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                with torch.no_grad():  # not a detached view of it: a launch plan would see memory that others use
                    tensor.fill_(float("nan"))
            return tensor

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
