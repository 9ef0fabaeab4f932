"""`make sanitize` says so where it can't check, believes no tool that misses a planted fault, and tells runs apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import sanitize
import torch
from sanitize import Work, check, differences, layer_works, matrix_works, tensor_product_works
from statements import DEVICE, IS_INTERPRETED

FINDS = """if echo "$@" | grep -q plant; then echo "Invalid __global__ read"; exit 99; fi; echo "3 works"; exit 0"""
MISSES = """echo "3 works"; exit 0"""
ALWAYS = """echo "Invalid __global__ read of size 4"; exit 99"""


def tool(folder: Path, body: str) -> str:
    """A program that stands for compute-sanitizer."""
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_without_the_tool_nothing_passes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 1
    assert capsys.readouterr().out == (
        "nothing was checked: compute-sanitizer is neither on the PATH nor in the CUDA toolkit of CUDA_HOME\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_passes(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool(tmp_path, FINDS)
    assert sanitize.main([]) == 1
    assert capsys.readouterr().out == "nothing was checked: there is no GPU\n"


def test_the_tool_is_found_on_the_path_and_in_the_toolkit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "bin").mkdir()
    inside = tool(tmp_path / "bin", FINDS)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.sanitizer() == inside
    on_path = tool(tmp_path, FINDS)
    assert sanitize.sanitizer() == on_path


def test_a_tool_is_believed_that_finds_the_plant_and_nothing_else(tmp_path, capsys):
    assert check("memcheck", tool(tmp_path, FINDS))
    assert capsys.readouterr().out == "memcheck: reports the planted fault, and nothing in 3 works\n"


def test_a_tool_that_misses_the_plant_is_not_believed(tmp_path, capsys):
    assert not check("racecheck", tool(tmp_path, MISSES))
    assert capsys.readouterr().out == (
        "3 works\n\nracecheck: did not report the planted fault (exit status 0), so it is not believed\n"
    )


def test_what_a_tool_reports_is_a_failure(tmp_path, capsys):
    assert not check("memcheck", tool(tmp_path, ALWAYS))
    assert capsys.readouterr().out == (
        "Invalid __global__ read of size 4\n\nmemcheck: reports a fault (exit status 99)\n"
    )


class Changing:
    """Calls whose last one differs."""

    def __init__(self, change: float, last: int) -> None:
        self.change, self.last, self.calls = change, last, 0

    def __call__(self) -> list[torch.Tensor]:
        self.calls += 1
        return [torch.arange(4), torch.ones(5) + self.change * (self.calls == self.last)]


def test_runs_that_differ_are_told_apart():
    lost_update = Changing(-0.01, 20)
    assert differences(Work("lost", lost_update, False)) == "lost: tensor 1 of run 19 is not that of run 0"
    assert lost_update.calls == 20
    assert differences(Work("same", Changing(0, 20), True)) == ""


def test_another_order_of_sums_differs_in_bits_alone():
    noise = torch.finfo(torch.float32).eps
    assert differences(Work("sums", Changing(noise, 3), False)) == ""
    assert differences(Work("sums", Changing(noise, 3), True)) == "sums: tensor 1 of run 2 is not that of run 0"


@pytest.mark.skipif(IS_INTERPRETED or DEVICE != "cpu", reason="`make sanitize` itself runs them elsewhere")
def test_the_works_run_and_are_the_same_each_time():
    for work in (*matrix_works(37, 9), *layer_works(64, 4, 5), *tensor_product_works()):
        assert differences(work, 2) == ""
