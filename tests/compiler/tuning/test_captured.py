"""Captures for timing, with a stand-in for torch's: one that can't be ended leaves no trace."""

from __future__ import annotations

import pytest
import torch

from bench.harness import device_times
from insum_ops.compiler.tuning.captured import captured

pytestmark = pytest.mark.cpu


class Cuda:
    """The parts of `torch.cuda` that a capture touches; as torch before 2.13 ends a capture that has failed."""

    def __init__(self) -> None:
        self.stream, self.is_generator_capturing, self.is_valid, self.captures = "user's", False, True, 0

    def graph(self, graph: object, stream: str, capture_error_mode: str) -> Cuda:
        self.asked = stream
        return self

    def __enter__(self) -> None:
        self.before, self.stream, self.is_valid = self.stream, self.asked, True
        self.is_generator_capturing = True
        self.captures += 1

    def __exit__(self, *error: object) -> None:
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stream, self.is_generator_capturing = self.before, False

    def fail(self) -> None:
        self.is_valid = False
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()

    def set_stream(stream):
        cuda.stream = stream

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "its own")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Named(cuda.stream))
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "graph", cuda.graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return cuda


class Named(str):
    device = "cpu"


def test_a_capture_holds_as_many_calls_as_were_asked_for(cuda):
    calls = []
    captured(lambda: calls.append(cuda.stream), 3)
    assert calls == ["its own"] * 3
    assert (cuda.stream, cuda.is_generator_capturing, cuda.captures) == ("user's", False, 1)


@pytest.mark.parametrize("time", [lambda call: captured(call, 2), device_times], ids=["tuning", "benchmarks"])
def test_after_a_capture_that_failed_numbers_can_be_drawn_on_the_stream_that_was_there(cuda, time):
    with pytest.raises(RuntimeError, match="previous error during capture"):
        time(lambda: cuda.fail() if cuda.captures else None)
    assert (cuda.stream, cuda.is_generator_capturing, cuda.captures) == ("user's", False, 2)


def test_the_first_error_is_raised_where_torch_can_not_be_helped(cuda, monkeypatch):
    def full(*size, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(cuda.fail, 1)
    assert cuda.stream == "user's"
