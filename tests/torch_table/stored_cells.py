"""What a run of the table found, in a stored file, and the page of the documentation that is made of it.

`make test-torch` writes both as its cells are run. `make torch-page` writes the page anew, and with
`CELLS=` a file of cells that a machine with a GPU has stored takes over what only a GPU can run.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from entry_cases import CASES
from entry_columns import COLUMNS as ALONE
from entry_columns import OF_GPUS
from rank_columns import COLUMNS as RANKED

HERE = Path(__file__).parent
STORED = HERE / "cells.json"
PAGE = HERE.parents[1] / "docs" / "use" / "torch-tools.md"
COLUMNS = (  # in the order of the page
    *("compile cold", "dynamic", "export dynamic", "AOTI", "AOTI on a GPU", "make_fx", "functorch", "autocast"),
    *("capture", "DDP", "DDP static", "FSDP2", "TP", "DTensor", "checkpoint", "pickle", "HF"),
)
MARKS = {"passed": "yes", "limit": "torch", "not yet": "not yet", "failed": "no", "not here": "not run"}
# cells whose reason is torch's own, each with a test of torch alone that fails the same way
LIMITS_AT_MOST = 0.1

Cell = tuple[str, str, str]  # what it gave, why, and with which torch on which device
NOT_RUN: Cell = ("not here", "not run yet", "")
Cells = dict[str, dict[str, Cell]]

HEAD = """# In torch's tools

Every entry point in every tool of torch that training stacks use. Each cell is a test; `make test-torch` runs them all
and writes this page from what it found.

- **yes**: it goes through, and values and gradients equal those of an ordinary call.
- **torch**: torch itself can't, and a test of torch alone fails the same way.
- **not yet**: it is ours to mend.
- **not run**: no machine with what the cell needs has run it.

"""


def read(file: Path = STORED) -> Cells:
    """What is stored: for each entry point and column what the last run found that could tell."""
    if not file.exists():
        return {}
    stored = json.loads(file.read_text(encoding="utf-8"))
    return {name: {column: tuple(cell) for column, cell in row.items()} for name, row in stored.items()}


def merged(stored: Cells, found: Mapping[tuple[str, str], Cell], names: Iterable[str]) -> Cells:
    """What is stored after a run: a cell that it could not fill keeps what another machine has found."""
    cells: Cells = {}
    for name in names:
        cells[name] = {}
        for column in COLUMNS:
            new, old = found.get((name, column)), stored.get(name, {}).get(column)
            if new is None or (new[0] == "not here" and old is not None and old[0] != "not here"):
                new = old
            cells[name][column] = NOT_RUN if new is None else new
    return cells


def of_gpus(cells: Cells) -> dict[tuple[str, str], Cell]:
    """What only a GPU can run, as another machine has stored it; the rest of its file may be older than ours."""
    return {(name, column): row[column] for name, row in cells.items() for column in OF_GPUS if column in row}


def write(cells: Cells) -> None:
    """Store the cells, and make the page of them."""
    STORED.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(cells), encoding="utf-8")


def page(cells: Cells) -> str:
    """The page of the documentation."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, row in cells.items():
        marks = [MARKS[row[column][0]] if column in row else MARKS["not here"] for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(marks)} |")
    given = {**ALONE, **RANKED}
    meanings = [f"- **{column}**: {(given[column].__doc__ or '').splitlines()[0]}" for column in COLUMNS]
    reasons: dict[str, list[str]] = {}
    for name, row in cells.items():
        for column, (state, why, _) in row.items():
            if state in ("limit", "not yet", "failed"):
                reasons.setdefault(f"{MARKS[state]}: {why}", []).append(f"{name} ({column})")
    told = [f"- {why} For {'; '.join(where)}." for why, where in sorted(reasons.items())]
    places = Counter(place for row in cells.values() for _, _, place in row.values() if place)
    ran = "; ".join(f"{count} cells with {place}" for place, count in places.most_common())
    parts = [HEAD + "\n".join(lines), f"Run: {ran}.", "## What each column does", "\n".join(meanings)]
    if told:
        parts += ["## What does not go through", "\n".join(told)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    given = [of_gpus(read(Path(file))) for file in sys.argv[1:]]
    write(merged(read(), {key: cell for cells in given for key, cell in cells.items()}, CASES))
