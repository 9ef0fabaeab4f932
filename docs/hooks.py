"""What is made when the site is built: reference pages of docstrings, tables of what was measured, and pictures."""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bench.glance import every_pair
from bench.results import TITLES, load

sys.path.insert(0, str(Path(__file__).parent))
from pictures import picture

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "docs-sources"
RESULTS = ROOT / "bench" / "results" / "nvidia-h200.json"
GENERATED = ROOT / "build" / "docs-pages"  # whole HTML pages, which `make docs` has made before
ROWS = """---
hide: [toc]
---

# Every measurement

Each case beside each library, in milliseconds unless the row says otherwise. "Times faster" is the other library's time
over that of insum_ops, by device time where both have one and as called elsewhere. Type words to see their rows alone;
click on a heading to sort.

<input class="filter" type="search" placeholder="Filter: spconv float16" aria-label="Filter the rows">

<div class="sortable rows">
<table>
<thead><tr><th>what</th><th>case</th><th>against</th><th>insum_ops</th><th>other</th><th>times faster</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
"""


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the package as it is imported, formats/ and compiler/ within it: docstrings are read from its text."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for source, target in (("insum_ops", "."), ("formats", "formats"), ("compiler", "compiler")):
        shutil.copytree(ROOT / source, SOURCES / "insum_ops" / target, ignore=ignored, dirs_exist_ok=True)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the table of every row, the plots, and the pages that other commands write."""
    files.append(File.generated(config, "measured/rows.md", content=ROWS.format(rows="\n".join(rows()))))
    for plot in sorted(RESULTS.with_name("plots").glob("*.png")):
        files.append(File.generated(config, f"measured/plots/{plot.name}", abs_src_path=str(plot)))
    for page in sorted(GENERATED.rglob("*.html")):
        files.append(File.generated(config, page.relative_to(GENERATED).as_posix(), abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the pictures of formats where a page asks for them."""
    return re.sub(r"<!-- format: (\w+) -->", lambda found: picture(found[1]), markdown)


def rows() -> list[str]:
    """A row of HTML for each comparison of the stored run."""
    run, found = load(RESULTS), []
    for experiment in run.experiments:
        for pair in every_pair(run, experiment):
            title = TITLES.get(experiment, experiment).replace("`", "")
            faster = pair.called if pair.device is None else pair.device
            words = (title, pair.ours.case, pair.peer.provider)
            values = (
                f"{row.value:.4g} {'' if row.unit == 'ms' else row.unit}".strip() for row in (pair.ours, pair.peer)
            )
            cells = (*words, *values, f"{faster:.2f}" if faster is not None else "")
            found.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return found
