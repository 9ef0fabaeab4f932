"""The support table says what setup.cfg asks for and what tests/cross compiles for, and names only what exists."""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch

import insum_ops
import insum_ops.nn

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
SUPPORT = (ROOT / "docs" / "start" / "support.md").read_text()
NOT_OFFERED = (ROOT / "docs" / "start" / "not-offered.md").read_text()
STATES = {"run", "compiled only", "not tried", "no"}


@pytest.fixture(scope="module")
def config() -> ConfigParser:
    found = ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def cross_compiled() -> set[str]:
    """The architectures that `make test-cross` builds for, read off its source."""
    tree = ast.parse((ROOT / "tests" / "cross" / "building.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SHARED_MEMORY":
            keys = [ast.literal_eval(key) for key in node.value.keys]
            return {key if isinstance(key, str) else f"sm_{key}" for key in keys}
    raise AssertionError("no SHARED_MEMORY in tests/cross/building.py")


def test_every_row_has_a_state():
    for heading, column in (("GPUs", 2), ("Systems", 2), ("Versions", 2), ("Peers", 2)):
        table = rows(SUPPORT, heading)
        assert len(table) >= 5
        assert {row[column] for row in table} <= STATES


def test_gpus_that_were_not_run_are_compiled_for_and_the_others_are_not():
    states = {row[1]: row[2] for row in reversed(rows(SUPPORT, "GPUs"))}  # of equal ones the first
    known = {architecture for architecture, state in states.items() if state in ("run", "compiled only")}
    assert known == cross_compiled()


def test_pythons_are_those_of_the_package(config):
    table = rows(SUPPORT, "Versions")
    first = next(at for at, row in enumerate(table) if row[0] == "Python")
    run = [row[1] for row in table[first:] if row[2] == "run" and row[0] in ("Python", "")]
    classifiers = config["metadata"]["classifiers"]
    assert run == re.findall(r"Python :: (3\.\d+)", classifiers)
    assert config["options"]["python_requires"] == f">={run[0]}"


def test_the_oldest_torch_is_that_of_the_package(config):
    (bound,) = re.findall(r"torch>=([\d.]+)", config["options"]["install_requires"])
    assert f"| | below {bound} | no | pip refuses: `torch>={bound}` |" in SUPPORT


def test_the_list_of_what_pip_installs_is_that_of_the_package(config):
    names = [re.split(r"[>=<;]", line)[0] for line in config["options"]["install_requires"].split("\n") if line]
    (told,) = re.findall(r"`pip install \.` in a checkout asks for ([^.]*?\d\.\d+[^.]*)\.", SUPPORT)
    assert re.findall(r"\b(?!or\b|newer\b|and\b)[a-z]\w+", told) == names


def test_every_extra_is_told_and_no_other(config):
    table = rows(SUPPORT, "What pip installs")
    told = {row[0].strip("`") for row in table}
    assert told == set(config["options.extras_require"])
    for name, _, brings in table:
        asked = config["options.extras_require"][name.strip("`")]
        for package in brings.split(", "):
            assert re.search(rf"^{re.escape(package)}\b", asked, re.MULTILINE), (name, package)


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`", SUPPORT + NOT_OFFERED)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_what_is_offered_instead_exists():
    for name in re.findall(r"`nn\.(\w+)`", NOT_OFFERED):
        assert hasattr(torch.nn if name == "DataParallel" else insum_ops.nn, name), name
    for name in ("spmm", "sddmm", "insum"):
        assert f"`{name}`" in NOT_OFFERED
        assert hasattr(insum_ops, name)
    assert hasattr(torch.sparse, "to_sparse_semi_structured")
    assert hasattr(torch, "_scaled_mm")


def test_the_page_of_what_is_not_offered_has_an_alternative_in_each_row():
    lines = [line for line in NOT_OFFERED.splitlines() if line.startswith("| ") and "not offered" not in line]
    assert len(lines) >= 14
    for line in lines:
        assert all(cell.strip() for cell in line.strip("|").split("|")), line


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64], ids=str)
def test_the_types_that_are_not_offered_are_refused(dtype):
    A = torch.ones(2, 2).to(dtype)
    with pytest.raises(insum_ops.compiler.OperandError, match="must be float16, bfloat16, float32 or float64"):
        insum_ops.insum("C[i] += A[i,k]", A=A)


def test_an_exported_layer_runs():
    layer, x = insum_ops.nn.BlockSparseLinear(64, 64, block_size=(32, 32)), torch.randn(2, 64)
    with torch.no_grad():
        expected = layer(x)
        program = torch.export.export(layer, (x,))
        torch.testing.assert_close(program.module()(x), expected)
