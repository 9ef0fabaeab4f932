"""What the site takes from outside docs/ when it is built."""

from __future__ import annotations

import shutil
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "docs-sources"


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the package as it is imported, formats/ and compiler/ within it: docstrings are read from its text."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for source, target in (("insum_ops", "."), ("formats", "formats"), ("compiler", "compiler")):
        shutil.copytree(ROOT / source, SOURCES / "insum_ops" / target, ignore=ignored, dirs_exist_ok=True)
