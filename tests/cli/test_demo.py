"""The demo's four applications hold their promises, and a broken one is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from insum_ops.__main__ import main
from insum_ops.cli import demo as demo_module
from insum_ops.cli.demo import Outcome, applications, clebsch_gordan, demo, examine, table

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
    assert max(map(len, printed.splitlines())) <= 100


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
            f"'cuda:99' asked for, but torch sees {torch.cuda.device_count()} GPUs",
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
