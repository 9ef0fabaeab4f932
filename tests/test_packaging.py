"""What `pip wheel .` and an sdist hold, and what installing asks for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
PACKAGES = {"insum_ops": "insum_ops", "insum_ops/formats": "formats", "insum_ops/compiler": "compiler"}
COPIED = (
    "insum_ops",
    "formats",
    "compiler",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy to build in: building leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    for name in (*COPIED, *(p.name for p in ROOT.glob("MANIFEST.in"))):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(tree, tmp_path_factory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(target),
        str(tree),
    ]
    subprocess.run([sys.executable, "-m", *command], check=True)
    (path,) = target.iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture(scope="session")
def requirements(wheel) -> dict[str, Requirement]:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(path).decode())
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    return {r.name: r for r in found if "extra" not in str(r.marker)}


def _expected() -> set[str]:
    files = {"insum_ops/py.typed"}
    for package, folder in PACKAGES.items():
        files |= {f"{package}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
    return files


def test_every_folder_of_sources_is_a_package_that_setup_names():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = {str(Path(file).parent).replace("/", ".") for file in _expected()}
    assert sorted(config["options"]["packages"].split()) == sorted(folders)


def test_the_wheel_holds_every_package_and_nothing_else(wheel):
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == _expected()
    assert {f"{Path(name).parent}/__init__.py" for name in held} <= held


def test_a_checkout_runs_beside_a_plain_install(tree, wheel, tmp_path):
    """There the checkout's folder hides the installed package, and `compiler` lies beside that folder, not in it."""
    wheel.extractall(tmp_path)
    script = """
import atexit, runpy, sys
atexit.register(lambda: print([sys.modules[f"insum_ops{part}"].__file__ for part in ("", ".compiler", ".formats")]))
runpy.run_module("insum_ops", run_name="__main__", alter_sys=True)
"""
    others = [entry for entry in sys.path if entry and ROOT not in (Path(entry), Path(entry).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *others])}
    # without .pth files, and so without an editable install
    command = [sys.executable, "-S", "-c", script, "doctor", "--probe", "cpu"]
    answer = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")
    parts = [str(tree / folder / "__init__.py") for folder in ("insum_ops", "compiler", "formats")]
    assert answer.stdout == f"{parts}\n"


def test_the_sdist_holds_the_sources(tree, tmp_path):
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=tree, check=True, capture_output=True)
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "insum_ops/py.typed"} <= held
    for folder in PACKAGES.values():
        assert {str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*.py")} <= held


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_an_installed_torch_is_kept(requirements, version):
    assert requirements["torch"].specifier.contains(version)


@pytest.mark.parametrize(("system", "is_needed"), [("Linux", True), ("Darwin", False), ("Windows", False)])
def test_triton_is_for_linux_only(requirements, system, is_needed):
    marker = requirements["triton"].marker
    assert marker is not None
    assert marker.evaluate({"platform_system": system}) is is_needed


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_constraints_pin_each_package_once(version, system):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": version, "platform_system": system}
    active = [pin.name.lower() for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    assert len(active) == len(set(active))
    assert all(len(pin.specifier) == 1 and "==" in str(pin.specifier) for pin in pins)
    assert {"torch", "numpy", "pytest"} <= set(active)


def test_pytest_benchmark_may_say_that_xdist_disables_it():
    """As every version from 5 on does, some of them while pytest starts, where an error would end the whole run."""
    warnings.warn("Benchmarks are automatically disabled because xdist plugin is active.", stacklevel=1)


def test_the_cpu_route_needs_no_triton():
    script = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from insum_ops import insum
B = torch.tensor([1.0, 2.0], requires_grad=True)
insum("C[I[p]] += B[p] * B[p]", I=torch.tensor([1, 1]), B=B, size=(2,)).sum().backward()
assert B.grad.tolist() == [2.0, 4.0]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
