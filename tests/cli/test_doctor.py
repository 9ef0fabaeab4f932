"""The doctor's report holds what a bug report needs, and a route that fails is called failing."""

from __future__ import annotations

import re

import pytest
import torch

from insum_ops.__main__ import main
from insum_ops.cli import doctor as doctor_module
from insum_ops.cli.doctor import probe

pytestmark = pytest.mark.cpu


@pytest.fixture
def fast_routes(monkeypatch):
    """The report without its three processes."""
    monkeypatch.setattr(doctor_module, "_routes", lambda: iter([("torch.fx on CPU", "works")]))


@pytest.mark.usefixtures("fast_routes")
def test_the_report_names_what_matters(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernel.py").write_bytes(b"x" * 2**20)
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for line in (
        f"torch +{re.escape(torch.__version__)}",
        "insum_ops +0.1.0",
        f"folder +{re.escape(str(tmp_path))}",
        "holds +1 files, 1.0 MiB",
        "float32 matmul +ieee",
        "deterministic +False",
        f"INSUM_CACHE_DIR +{re.escape(str(tmp_path))}",
        "torch.fx on CPU +works",
    ):
        assert re.search(f"^  {line}$", report, re.MULTILINE), line


def test_a_failing_route_sets_the_exit_status(capsys, monkeypatch):
    monkeypatch.setattr(doctor_module, "_routes", lambda: iter([("triton on GPU", "fails: no ptxas")]))
    assert main(["doctor"]) == 1
    assert "  triton on GPU           fails: no ptxas\n" in capsys.readouterr().out


def test_the_fx_route_works_in_a_process_of_its_own():
    assert doctor_module._try("cpu", {"TRITON_INTERPRET": "0"}) == "works"


def test_a_crash_is_reported_by_its_last_line():
    state = doctor_module._try("cpu", {"INSUM_CACHE_DIR": "", "PYTHONSTARTUP": "", "PYTHONHOME": "nowhere"})
    assert state.startswith("fails: ")
    assert "\n" not in state


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "'gpu' is no device; name cpu, cuda or cuda:1"),
        ("mps", "this command runs on cpu and cuda, and not on 'mps'"),
        ("meta", "this command runs on cpu and cuda, and not on 'meta'"),
        ("cpu:1", "'cpu:1' asked for, but there is one cpu; name cpu"),
        ("cuda", "'cuda' asked for, but torch sees 0 GPUs here; name cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_words(name, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--probe", name])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument --probe: {message}\n")


def test_the_probe_notices_a_wrong_result(capsys, monkeypatch):
    assert probe(torch.device("cpu")) == 0
    monkeypatch.setattr(doctor_module, "insum", lambda expr, **tensors: torch.zeros(tensors["size"]))
    assert probe(torch.device("cpu")) == 1
    expected = "got [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]] instead of [[5.0, 50.0], [0.0, 0.0], [6.0, 60.0]]\n"
    assert capsys.readouterr().err == expected


def test_a_package_that_is_missing_is_called_so():
    assert doctor_module._version("no_such_package") == "not installed"
