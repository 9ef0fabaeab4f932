"""Has type checkers read a program that uses insum_ops: with the editable install of this Python, and with the wheel.

`python tests/try_types.py` runs mypy, and pyright where it is installed, on a copy of tests/typed_client.py in a folder
of its own. Prints a line for each; the exit status is 1 if one of them finds a fault.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from try_wheel import build

CLIENT = Path(__file__).with_name("typed_client.py")
STRICT = ["--strict", "--no-error-summary"]
PYRIGHT_CONFIG = '{"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error"}'


def install(wheel: Path, folder: Path) -> str:
    """Make a Python that has the wheel, and all else that this one has; return its path."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    # the .pth files there are not read again, and so not the one of the editable install
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def check(python: str, what: str, folder: Path) -> bool:
    """Run the type checkers on the client as a program of this Python; print what came of it."""
    shutil.copy(CLIENT, folder)
    (folder / "pyrightconfig.json").write_text(PYRIGHT_CONFIG)
    commands = {"mypy": ["--python-executable", python, *STRICT, CLIENT.name]}
    if importlib.util.find_spec("pyright") is not None:
        commands["pyright"] = ["--pythonpath", python]
    good = True
    for checker, options in commands.items():
        answer = subprocess.run([sys.executable, "-m", checker, *options], cwd=folder, capture_output=True, text=True)
        faults = "no faults" if answer.returncode == 0 else answer.stdout + answer.stderr
        good &= answer.returncode == 0
        print(f"{checker}, {what}: {faults}", flush=True)
    return good


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "client").mkdir()
        results = [check(sys.executable, "editable install", folder / "client")]
        results.append(check(install(build(folder), folder / "with_wheel"), "wheel", folder / "client"))
    sys.exit(0 if all(results) else 1)
