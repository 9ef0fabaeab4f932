"""What `pip wheel .` and an sdist hold, and what installing asks for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import insum_ops

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent
PACKAGES = {"insum_ops": "insum_ops", "insum_ops/formats": "formats", "insum_ops/compiler": "compiler"}
COPIED = (
    "insum_ops",
    "formats",
    "compiler",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy to build in, with the bytecode that is there: building leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    for name in (*COPIED, *(p.name for p in ROOT.glob("MANIFEST.in"))):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
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
def metadata(wheel) -> Message:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(path).decode())


@pytest.fixture(scope="session")
def requirements(metadata) -> dict[str, Requirement]:
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


@pytest.fixture(scope="session")
def sources() -> set[str]:
    """Every file of this tree that is not ignored, by its path: what git tracks, or what an unpacked sdist has."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if (ROOT / ".git").exists():
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        return {path for path in listed if (ROOT / path).is_file()}
    (listing,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return {path for path in listing.read_text().splitlines() if ".egg-info" not in path}


@pytest.fixture(scope="session")
def sdist(sources, tmp_path_factory) -> Path:
    """The folder that an sdist of this tree unpacks to."""
    copy, built = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("sdist")
    for path in sources:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(built)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=copy, check=True, capture_output=True)
    (path,) = built.iterdir()
    with tarfile.open(path) as archive:
        archive.extractall(built, filter="data")
    (folder,) = (entry for entry in built.iterdir() if entry.is_dir())
    return folder


def test_the_sdist_holds_every_tracked_file(sources, sdist):
    held = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert sources - held <= {".gitignore"}
    assert {path for path in held - sources if ".egg-info/" not in path} <= {"PKG-INFO", "setup.cfg"}


def test_tests_pass_in_an_unpacked_sdist(sdist):
    """A small part of them: where formats/ and compiler/ are found, a statement, files beside the tests, the docs.

    `make test-sdist` runs all.
    """
    parts = ["tests/test_lru_cache.py", "tests/test_pickled.py", "tests/test_support.py"]
    others = [entry for entry in sys.path if entry and ROOT not in (Path(entry), Path(entry).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(sdist), *others]), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *parts]
    command += ["-k", "not exported"]  # which imports all of torch
    answer = subprocess.run(command, cwd=sdist, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert " passed" in answer.stdout


def test_the_package_says_who_made_it_and_what_it_is_for(metadata):
    assert metadata["Author"] == "The insum_ops project"
    assert {"sparse", "einsum", "pytorch", "triton"} <= set(metadata["Keywords"].split(","))
    classifiers = metadata.get_all("Classifier")
    pythons = {
        line.rpartition(" ")[2] for line in classifiers if line.startswith("Programming Language :: Python :: 3.")
    }
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}
    assert metadata["Requires-Python"] == ">=3.10"


def test_no_address_is_told_until_one_is_given(metadata):
    assert metadata.get_all("Project-URL") is None
    assert metadata["Home-page"] is None
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_one_setting_gives_every_address():
    spec = spec_from_file_location("insum_ops_setup", ROOT / "setup.py")
    setup = module_from_spec(spec)
    spec.loader.exec_module(setup)
    address = "https://example.org/insum_ops"
    assert setup.links("") == {}
    assert set(setup.links(address)) == {"Homepage", "Issues", "Changelog", "Support table"}
    assert all(link.startswith(address) for link in setup.links(address).values())
    text = '![bars](docs/a.png) [start](docs/start/) [top](#top) [peer](https://peer.org) <img src="b.svg">'
    assert setup.page(text, "") == text
    assert setup.page(text, address) == (
        f"![bars]({address}/raw/main/docs/a.png) [start]({address}/blob/main/docs/start/) [top](#top) "
        f'[peer](https://peer.org) <img src="{address}/raw/main/b.svg">'
    )


def test_the_version_is_that_of_the_metadata(metadata):
    assert insum_ops.__version__ == metadata["Version"] == importlib.metadata.version("insum_ops")


def test_the_wheel_brings_a_command(wheel):
    (path,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(path).decode() == "[console_scripts]\ninsum_ops = insum_ops.__main__:main\n"


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an sdist has a setup.cfg without comments")
def test_every_extra_says_what_it_is_for():
    lines = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("\n[")[0].splitlines()
    extras = [at for at, line in enumerate(lines) if re.fullmatch(r"\w+ =", line)]
    assert len(extras) > 5
    assert [lines[at] for at in extras if not lines[at - 1].startswith("# ")] == []


@pytest.mark.parametrize("version", ["2.10.0", "2.11.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_an_installed_torch_is_kept(requirements, version):
    assert requirements["torch"].specifier.contains(version)


def test_triton_is_left_to_torch(requirements, metadata):
    """ROCm builds of torch bring one under another name, whose files those of `triton` would replace."""
    assert "triton" not in requirements
    optional = [Requirement(line) for line in metadata.get_all("Requires-Dist") if line.startswith("triton")]
    for system, extras in (("Linux", {"interpreter", "test"}), ("Darwin", set()), ("Windows", set())):
        asking = {
            extra
            for extra in metadata.get_all("Provides-Extra")
            for each in optional
            if each.marker.evaluate({"platform_system": system, "extra": extra})
        }
        assert asking == extras


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


def test_a_checkout_without_triton_e3nn_and_metadata_computes_and_has_a_version(tree):
    script = """
import importlib.metadata, sys
sys.modules["triton"] = sys.modules["e3nn"] = None  # importing them raises ImportError
import torch
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
import insum_ops
print(insum_ops.__version__)
B = torch.tensor([1.0, 2.0], requires_grad=True)
insum_ops.insum("C[I[p]] += B[p] * B[p]", I=torch.tensor([1, 1]), B=B, size=(2,)).sum().backward()
print(B.grad.tolist())
from insum_ops.nn import FullyConnectedTensorProduct
try:
    FullyConnectedTensorProduct("0e", "0e", "0e")
except ImportError as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", script], cwd=tree, capture_output=True, text=True, check=True)
    assert answer.stdout == (
        "0+unknown\n[2.0, 4.0]\n"
        "equivariant tensor products read irreps with e3nn, which is not installed; "
        "install it with pip install 'insum_ops[e3nn]'\n"
    )


def test_an_editable_install_names_a_folder_that_type_checkers_can_read(tree, tmp_path):
    script = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.whl")
    built = zipfile.ZipFile(path)
    assert built.testzip() is None
    folder = Path(built.read("insum_ops-editable.pth").decode().strip())
    assert folder == tree.resolve() / "build" / "editable"
    for name in _expected():
        assert (folder / name).is_file(), name
    (record,) = (name for name in built.namelist() if name.endswith("RECORD"))
    listed = [line.split(",")[0] for line in built.read(record).decode().splitlines()]
    assert sorted(listed) == sorted(built.namelist())
