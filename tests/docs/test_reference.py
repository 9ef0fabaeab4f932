"""The reference has every public name once, and nothing that is not public."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from test_docstrings import FOR_THE_COMPILER, PACKAGES

from insum_ops.compiler.language import errors

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]


def resolved(name: str) -> object:
    owner, _, last = name.rpartition(".")
    packages = {package.__name__: package for package in (*PACKAGES, errors)}
    return packages[name] if name in packages else getattr(packages[owner], last)


def test_every_public_name_is_in_the_reference_once():
    public = {id(getattr(package, name)): name for package in PACKAGES for name in package.__all__}
    shown = Counter(id(resolved(name)) for name in SHOWN if name != errors.__name__)
    assert {name for key, name in public.items() if key not in shown} == set()
    assert set(shown) <= set(public)
    assert set(shown.values()) == {1}


def test_every_error_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"members: \[(.*)\]", text)
    assert set(names.split(", ")) == {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}


def test_what_is_for_the_compiler_alone_is_left_out():
    (listed,) = re.findall(r"filters: \[(.*)\]", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    left_out = re.findall(r'"!([^"]*)"', listed)
    assert {name for name in FOR_THE_COMPILER if not any(re.search(pattern, name) for pattern in left_out)} == set()
