"""Every Python block of every page of docs/ runs on the CPU, page by page, in the order in which a reader meets it."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.cpu

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OF_ERRORS = DOCS / "use" / "mistakes.md"  # its blocks raise what they show, which tests/test_mistakes.py compares
FENCE = re.compile(
    r"(?:^[ ]*<!--[ ]*not[ ]run:[ ]*(?P<reason>.*?)[ ]*-->\n\s*)?"
    r"^(?P<indent>[ ]*)```[ ]*(?:python|pycon|py)\b(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = 2  # blocks of a page that may be shown without being run


def blocks(text: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, code, why it is not run or None) of each Python fence; a file that is shown has tests of its own."""
    for fence in FENCE.finditer(text):
        code = dedent(fence["code"])
        if not code.startswith("--8<--"):
            yield text[: fence.start("code")].count("\n"), code, fence["reason"]


def run(page: str, text: str) -> None:
    """Run a page's blocks in one namespace: sessions by doctest, which compares what they print, others as they are."""
    names: dict[str, object] = {"__name__": "__page__"}
    for line, code, reason in blocks(text):
        if reason is not None:
            continue
        if ">>>" not in code:
            exec(compile("\n" * line + code, page, "exec", dont_inherit=True), names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page, page, line)
        printed: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=printed.append, clear_globs=False)
        assert not printed, "".join(printed)
        names = test.globs


# torch's own: of its tracer, and of a layout that pages show
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != OF_ERRORS], ids=lambda page: str(page.relative_to(DOCS))
)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text(encoding="utf-8"))


def test_few_blocks_are_shown_without_being_run_and_each_says_why():
    for page in PAGES:
        reasons = [reason for _, _, reason in blocks(page.read_text(encoding="utf-8")) if reason is not None]
        assert len(reasons) <= NOT_RUN, page
        assert all(reasons), f"{page}: write <!-- not run: the reason --> above the block"


def test_a_block_that_is_wrong_is_found():
    shown = "```python\nx = 1\n```\ntext\n\n    ```python\n    >>> x + 1\n    3\n\n    ```\n"
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run("page", shown)
    with pytest.raises(ZeroDivisionError):
        run("page", "```py\n1 / 0\n```\n")
    run("page", "<!-- not run: it would divide by zero -->\n```python\n1 / 0\n```\n")
