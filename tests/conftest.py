"""Every test runs seeded, with NaN in fresh memory and the same hypothesis examples on every machine."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path

import fast_interpreter
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from pretended_clock import drawn_programs
from reduced_precision import reduced_precision
from sampling import sampled
from statements import DEVICE, IS_INTERPRETED, IS_THOROUGH, examples
from torch import Tensor

from insum_ops.compiler.planning.device import H200, Device, described_as
from insum_ops.compiler.tuning.captured import captured

SLOW = {"torch_table": 0, "cross": 1}  # folders, the slowest first

settings.register_profile(
    "insum",
    max_examples=examples(100, 100),
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("insum")

# Else examples would hold the numbers and words of all modules that are no tests and not in a folder `site-packages`,
# which take 4 s to read where packages lie elsewhere, and would be others after any change of a number there.
providers._get_local_constants = lambda: providers._local_constants

IS_TABLE = os.environ.get("INSUM_TESTS") == "torch"  # whose cells say something on every machine

if IS_INTERPRETED:
    fast_interpreter.install()
elif DEVICE == "cpu":
    os.environ.setdefault("INSUM_TUNE", "off")  # results that depend on a clock are for those who ask for them


gc.disable()  # until `pytest_collection_finish`


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns of the NaN and Inf that interpreted kernels compute with on purpose; a GPU does not.

    Torch warns where cuBLAS is first called in one of autograd's own threads.
    """
    config.addinivalue_line("filterwarnings", "ignore:(invalid value|overflow) encountered:RuntimeWarning")
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _default_device(path: Path) -> str | None:
    """Where a file's tests make their tensors: in a file that names no device, on the one that is tested."""
    return None if re.search("DEVICE|cuda", _text(path)) else DEVICE


def _thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of tests that are marked `sampled` some cases, of others all."""
    cases: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and isinstance(item, pytest.Function):
            cases.setdefault((item.path, item.originalname), []).append(item)
    kept: set[pytest.Item] = set()
    for own in cases.values():
        mark = next(own[0].iter_markers("sampled"))
        kept |= sampled(own, mark.args, **mark.kwargs)
    return [item for item in items if item in kept or not item.get_closest_marker("sampled")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test is run where it says something: not `cpu` on a GPU, and `kernels` only where kernels run.

    Those that wait for compilers come first, so that no worker is left with one of them at the end.
    """
    items.sort(key=lambda item: SLOW.get(item.path.parent.name, len(SLOW)))
    if DEVICE.startswith("cuda") and not IS_TABLE:
        items[:] = [item for item in items if item.get_closest_marker("cpu") is None]
    elif not IS_THOROUGH:
        items[:] = _thinned(items)
    for item in items:
        marks = [mark.name for mark in item.iter_markers() if mark.name in ("kernels", "every_route")]  # nearest first
        if marks and f"mark.{marks[0]}" not in _text(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: write pytest.mark.{marks[0]} in that file, where the Makefile looks"
            )
        if marks[:1] == ["kernels"] and not IS_INTERPRETED and not DEVICE.startswith("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs kernels: TRITON_INTERPRET=1, or a GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of `every_program` on a CPU run twice."""
    if metafunc.definition.get_closest_marker("every_program") and DEVICE == "cpu" and not IS_INTERPRETED:
        metafunc.fixturenames.append("_programs")
        metafunc.parametrize("_programs", ["likeliest", "drawn"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def _programs(request: pytest.FixtureRequest) -> Iterator[None]:
    with drawn_programs() if request.param == "drawn" else nullcontext():
        yield


def pytest_collection_finish() -> None:
    """What is there now stays: the garbage collector need not look through a million objects again and again.

    Nor need it look after every 700 new ones: tests of what is freed ask for it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 50)


if DEVICE.startswith("cuda"):

    def pytest_collectstart(collector: pytest.Collector) -> None:
        """A file's constants lie where its tests make their tensors."""
        if isinstance(collector, pytest.Module):
            torch.set_default_device(_default_device(collector.path))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport() -> Iterator[None]:
        """A capture that failed in one test leaves torch's stream and random numbers to the next as they were.

        Until 2.13 torch's generator believes that it goes on, and every draw raises; one that ends tells it otherwise.
        """
        report = yield
        if report.failed:
            with suppress(RuntimeError):  # after an illegal access there is nothing to save
                torch.cuda.set_stream(torch.cuda.default_stream())
                captured(torch.zeros(1, device=DEVICE).zero_, 1)
        return report

    @pytest.fixture(autouse=True)
    def _on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
        torch.set_default_device(_default_device(request.path))
        yield
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if DEVICE.startswith("cuda"):
        torch.manual_seed(0)
    else:  # without a note for a GPU that may come, which holds the text of the whole stack
        torch.default_generator.manual_seed(0)


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
    with reduced_precision(False):
        yield
