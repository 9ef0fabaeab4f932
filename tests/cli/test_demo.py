"""The demo's four applications hold their promises, and a broken one is noticed."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from insum_ops.__main__ import main
from insum_ops.cli import demo as demo_module
from insum_ops.cli.demo import Outcome, applications, bars, clebsch_gordan, demo, examine, table

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
GOOD = Outcome("SpMM", 2e-7, 0.0012, "dense matmul", 0.0034, (1.0, 0.5, 0.25))


def test_the_demo_passes_and_prints_four_statements_and_one_table(capsys):
    assert demo(CPU, is_quick=True) == 0
    printed = capsys.readouterr().out
    for application in applications(CPU, is_quick=True):
        assert f"\n\n     {application.statement}\n     " in printed
    assert printed.count("  ok\n") == 4
    assert "\nall checks passed, " in printed
    assert "\n\nA CPU is the reference route: " in printed
    assert "the best of several\n" in printed
    assert "####" not in printed  # which is no terminal
    assert max(map(len, printed.splitlines())) <= 101


def test_a_wrong_result_fails_the_demo(capsys, monkeypatch):
    def off_by_a_little(device, is_quick):
        application = next(applications(device, is_quick))
        yield replace(application, reference=lambda: application.reference() * 1.001)

    monkeypatch.setattr(demo_module, "applications", off_by_a_little)
    assert demo(CPU, is_quick=True) == 1
    assert "\nfailed: structured SpMM, " in capsys.readouterr().out


def test_plain_torch_computes_the_same():
    for application in applications(CPU, is_quick=True):
        expected = application.reference()
        error = (application.plain().double() - expected).abs().max() / expected.abs().max()
        assert error < demo_module.TOLERANCE, application.title


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "ok"),
        ({"error": 1e-4}, "wrong"),
        ({"error": float("nan")}, "wrong"),
        ({"losses": (1.0, 0.5, 0.6)}, "not learning"),
        ({"losses": (1.0, float("nan"))}, "not learning"),
    ],
)
def test_the_verdict_notices(change, verdict):
    assert replace(GOOD, **change).verdict == verdict


def test_the_table_lines_up():
    assert table([GOOD]).splitlines() == [
        "      error    insum  plain torch                        loss",
        "-" * 65,
        "SpMM  2e-07  1.20 ms      3.40 ms  dense matmul  1.00 -> 0.25  ok",
    ]


def test_on_a_gpu_the_table_tells_the_speed_up_and_the_share_of_the_floor():
    """4 kB pass in 0.0003 s here: a quarter of the 0.0012 s that the statement takes."""
    assert table([replace(GOOD, floor_seconds=0.0003)]).splitlines() == [
        "      error    insum  plain torch                speed-up  floor          loss",
        "-" * 82,
        "SpMM  2e-07  1.20 ms      3.40 ms  dense matmul      2.8x    25%  1.00 -> 0.25  ok",
    ]


def test_the_floor_passes_every_byte_once():
    application = next(applications(CPU, is_quick=True))
    A, B = application.operands["A"], application.operands["B"]
    result = application.run()
    size = 4 * (A.values.numel() + B.numel() + result.numel()) + sum(c.numel() * c.element_size() for c in A.coords)
    assert demo_module._floor_seconds(application, result) == pytest.approx(size / 4.8e12)


def test_bars_are_as_long_as_times_and_fit_the_terminal():
    lines = bars([GOOD, replace(GOOD, title="conv", seconds=0.0017)], 60).splitlines()
    assert [line.split()[-2:] for line in lines] == [["1.20", "ms"], ["3.40", "ms"], ["1.70", "ms"], ["3.40", "ms"]]
    counts = [line.count("#") for line in lines]
    assert counts[1] == counts[3] == 34
    assert counts[0] == round(34 * 1.2 / 3.4)
    assert counts[2] == 17
    assert max(map(len, lines)) <= 60


def test_a_terminal_shows_bars(capsys, monkeypatch):
    monkeypatch.setattr(demo_module, "applications", lambda device, is_quick: iter([next(applications(CPU, True))]))
    monkeypatch.setattr(demo_module, "bars", lambda outcomes, width: f"{len(outcomes)} pair of bars")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert demo(CPU, is_quick=True) == 0
    assert "\n1 pair of bars\n" in capsys.readouterr().out


def test_the_best_of_several_times_counts(monkeypatch):
    class Timing:
        def __init__(self, times):
            self.times = times

    answers = iter([Timing([3.0, 2.0]), Timing([5.0]), Timing([1.5, 9.0]), Timing([4.0]), Timing([4.0])])
    monkeypatch.setattr(demo_module.Timer, "blocked_autorange", lambda self, min_run_time: next(answers))
    assert demo_module._best_seconds(lambda: torch.zeros(1), True) == 1.5


def test_examine_leaves_the_operands_alone():
    application = next(applications(CPU, is_quick=True))
    before = [operand.clone() for operand in (application.weights, application.operands["B"])]
    examine(application, is_quick=True)
    assert torch.equal(application.weights, before[0])
    assert torch.equal(application.operands["B"], before[1])


def test_the_coefficients_are_equivariant():
    """Rotating both factors rotates the product, for each of the five products."""
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    rotation = rotation * torch.linalg.det(rotation)
    D = torch.block_diag(torch.eye(1, dtype=torch.float64), rotation)
    coefficients = clebsch_gordan().double()
    rotated = torch.einsum("ijkl,ia,jb,kc->abcl", coefficients, D, D, D)
    torch.testing.assert_close(rotated, coefficients)
    torch.testing.assert_close(coefficients.square().sum((0, 1, 2)), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--device", "gpu"], "argument --device: 'gpu' is no device; name cpu, cuda or cuda:1"),
        (
            ["demo", "--device", "cuda:99"],
            f"'cuda:99' asked for, but torch sees {torch.cuda.device_count()} GPU",
        ),
        (["dance"], "argument command: invalid choice: 'dance'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
