"""Builds the sdist of this tree, unpacks it and runs the tests that it holds: `python tests/try_sdist.py [TARGET...]`.

The unpacked tree, in build/sdist, gets a Python of its own with an editable install of that tree. All other packages
are those of this Python, so that none is fetched. Then `make test`, or what is named instead, runs there. The exit
status is that of `make`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "sdist"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
LEFT_OUT = (".git", ".venv", ".*_cache", ".hypothesis", ".benchmarks", "__pycache__", "build", "dist", "*.egg-info")


def unpack(folder: Path) -> Path:
    """Build the sdist, in a copy of this tree, since building leaves files behind; return what it unpacks to."""
    copy = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-W", "ignore", "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def install(tree: Path) -> None:
    """Make the tree's .venv, as its Makefile would."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tree / ".venv")], check=True)
    (packages,) = (tree / ".venv").glob("lib/python*/site-packages")
    # the .pth files there are not read again, and so not the one of the editable install
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", "."]
    subprocess.run([str(tree / ".venv" / "bin" / "python"), "-m", *command], cwd=tree, check=True)
    (tree / ".venv" / "installed").touch()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    tree = unpack(FOLDER)
    install(tree)
    sys.exit(subprocess.run(["make", "-C", str(tree), *(sys.argv[1:] or ["test"])]).returncode)
