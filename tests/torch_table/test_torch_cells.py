"""The table of torch's tools: each entry point in each of them, every cell a test.

`make test-torch` runs all cells, those of a row in one process and those of two ranks in one pair of processes, and
stores what they gave; other runs hold one cheap cell of each column, and an AOTInductor package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest
from entry_cases import CASES
from entry_columns import COLUMNS as ALONE
from entry_columns import OF_GPUS, exported
from not_green import LIMITS, NOT_YET
from rank_columns import COLUMNS as RANKED
from stored_cells import COLUMNS, LIMITS_AT_MOST, NOT_RUN, PAGE, merged, of_gpus, page, read

HERE = Path(__file__).parent
IS_WHOLE = os.environ.get("INSUM_TESTS") == "torch"
SECONDS = 400  # for one cell
RANKED_SECONDS = 900  # for a column of all entry points
ROW = "nn.BlockSparseLinear"  # whose cells other runs hold
RANKED_CELLS = {
    **dict.fromkeys(RANKED, ROW),
    "DDP static": "nn.SpMM, trained",
    "DTensor": "insum, dense",
}

# Where a single package is built, its speed is not worth headers compiled for others, or three programs that find out
# which vectors this CPU has.
SINGLE = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
# A row has one core, and needs no pool of processes that all import torch first. A package's wrapper, whose code is
# torch's, takes longest to compile: without optimizations.
ENVIRONMENT = {
    **os.environ,
    # where the package is not installed a cell's process finds that of the checkout
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    **({} if IS_WHOLE else SINGLE),
}


class Row:
    """A process that fills the cells of one entry point."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, str(HERE / "entry_columns.py"), name]
        self.name, self.errors = name, tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=self.errors, text=True
        )
        self.answers: Queue[str] = Queue()
        self.listener = Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, column: str) -> tuple[str, str]:
        assert self.process.stdin is not None
        try:
            print(column, file=self.process.stdin, flush=True)
            line = self.answers.get(timeout=SECONDS)
        except (BrokenPipeError, Empty):
            line = ""
        if not line:
            self.errors.seek(0)
            told = self.errors.read().decode()[-3000:]
            self.end()
            return "ended", f"the process ended or took too long: {told}"
        state, why = json.loads(line)
        if (state, column) == ("failed", "capture"):
            self.end()  # torch's random numbers stay as they are inside a capture: the row goes on in another process
        return state, why

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.join()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


_rows: list[Row] = []  # at most one: the last that was asked


def _row(name: str) -> Row:
    if _rows and (_rows[0].name != name or not _rows[0].is_alive):
        _rows.pop().end()
    if not _rows:
        _rows.append(Row(name))
    return _rows[0]


@pytest.fixture(scope="module", autouse=True)
def _ends():
    yield
    while _rows:
        _rows.pop().end()


@cache
def _on_ranks(cells: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """What two processes gave for cells `name|column`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "rank_columns.py"), folder, *cells]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, env=ENVIRONMENT, stdout=errors, stderr=errors, start_new_session=True)
            try:
                process.wait(RANKED_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            errors.seek(0)
            told = errors.read().decode()[-3000:]
        results = {}
        for number, cell in enumerate(cells):
            files = [Path(folder, f"{number}-{rank}.json") for rank in range(2)]
            found = [json.loads(file.read_text()) for file in files if file.exists()]
            failed = [why for state, why in found if state != "passed"]
            missing = [] if len(found) == 2 else [f"a rank ended: {told}"]
            results[cell] = ("failed", "\n".join([*failed, *missing])) if failed or missing else ("passed", "")
        return results


def _cells() -> list[object]:
    """Those that one process fills stand together; conftest.py tells by its id which worker takes a cell."""
    columns = [(name, column) for name in CASES for column in ALONE]
    columns += [(name, column) for column in RANKED for name in CASES]
    of_cpu = {column: [] if column in OF_GPUS else [pytest.mark.cpu] for column in (*ALONE, *RANKED)}
    return [pytest.param(name, column, id=f"{name}-{column}", marks=of_cpu[column]) for name, column in columns]


@pytest.mark.skipif(not IS_WHOLE, reason="part of make test-torch")
@pytest.mark.parametrize(("name", "column"), _cells() if IS_WHOLE else [(ROW, "AOTI")])
def test_an_entry_point_goes_through(name, column, record_property):
    if column in ALONE:
        state, why = _row(name).ask(column)
    else:
        state, why = _on_ranks(tuple(f"{other}|{column}" for other in CASES))[f"{name}|{column}"]
    assert state != "ended", why  # which is no limit
    limit, known = LIMITS.get((name, column)), NOT_YET.get((name, column))
    if state == "failed" and (limit or known):
        record_property("cell", [name, column, "limit" if limit else "not yet", limit or known])
        pytest.xfail(limit or known)
    record_property("cell", [name, column, state, why if state == "not here" else why.strip()[-300:]])
    if state == "not here":
        pytest.skip(why)
    assert state == "passed", why
    assert (limit or known) is None, "it goes through now: take it out of not_green.py"


@pytest.mark.cpu
@pytest.mark.skipif(IS_WHOLE, reason="among all others")
def test_one_cell_of_each_column_goes_through():
    """In one process, an AOTInductor package among them."""
    failed = {column: why for column in ALONE for state, why in [_row(ROW).ask(column)] if state in ("failed", "ended")}
    assert not failed


@pytest.mark.cpu
def test_a_program_for_a_package_holds_operations_of_torch_alone():
    _, program = exported(CASES["nn.FullyConnectedTensorProduct, shared"])
    assert not [node for node in program.graph.nodes if "insum_ops" in str(node.target)]


@pytest.mark.cpu
@pytest.mark.skipif(IS_WHOLE, reason="among all others")
def test_one_cell_of_each_column_of_two_ranks_goes_through():
    results = _on_ranks(tuple(f"{name}|{column}" for column, name in RANKED_CELLS.items()))
    assert not [why for state, why in results.values() if state != "passed"]


def test_the_page_shows_what_is_stored():
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_every_entry_point_and_column_is_stored():
    cells = read()
    assert [*cells] == [*CASES]
    assert all([*row] == [*COLUMNS] for row in cells.values())
    assert {*COLUMNS} == {*ALONE, *RANKED}


def test_few_cells_are_torchs_limit():
    assert len(LIMITS) <= LIMITS_AT_MOST * len(CASES) * len(COLUMNS)
    assert {*LIMITS, *NOT_YET} <= {(name, column) for name in CASES for column in COLUMNS}
    assert not {*LIMITS} & {*NOT_YET}


def test_a_cell_that_a_machine_can_not_fill_keeps_what_another_found():
    stored = {"a": {"capture": ("passed", "", "H200"), "HF": ("not here", "", "")}}
    found = {("a", "capture"): ("not here", "needs a GPU", "CPU"), ("a", "HF"): ("passed", "", "CPU")}
    cells = merged(stored, found, ["a"])["a"]
    assert cells.pop("capture") == ("passed", "", "H200")
    assert cells.pop("HF") == ("passed", "", "CPU")
    assert {*cells.values()} == {NOT_RUN}


def test_what_a_gpu_found_elsewhere_is_taken_over(tmp_path):
    there = {"a": {"capture": ("passed", "", "H200"), "HF": ("passed", "", "an old run"), "AOTI on a GPU": NOT_RUN}}
    file = tmp_path / "cells.json"
    file.write_text(json.dumps(there))
    here = {"a": {"HF": ("failed", "", "CPU"), "AOTI on a GPU": ("passed", "", "L40")}}
    cells = merged(here, of_gpus(read(file)), ["a"])["a"]
    assert cells["capture"] == ("passed", "", "H200")
    assert cells["HF"] == ("failed", "", "CPU")
    assert cells["AOTI on a GPU"] == ("passed", "", "L40")
