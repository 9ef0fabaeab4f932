"""Every example runs: the README's code blocks, in order, and each docstring of the package."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from test_layering import NAMES

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parent.parent


def run_examples(test: doctest.DocTest) -> None:
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert not printed, "".join(printed)


def test_the_readme_examples_run():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README.md", "README.md", 0)
    assert len(test.examples) > 10
    run_examples(test)


@pytest.mark.parametrize("name", sorted(NAMES - {"insum_ops.__main__"}))
def test_the_docstring_examples_run(name):
    if name.endswith("huggingface"):
        pytest.importorskip("transformers")
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, name):
        run_examples(test)


def test_the_readme_names_only_commands_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {target for pair in named for target in pair if target} <= targets
