"""`python -m bench COMMAND`: what to make of results files; `--help` lists the commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .compare import compare
from .rank import rank_statements, table_of
from .readme import TARGETS, write, write_pictures
from .results import ResultsError, load, merge
from .row_file import time_table
from .statement_page import statement_page
from .statement_times import time_statements
from .suite_times import EXPERIMENT, measured_of, summary

try:
    from .report import report
except ImportError as error:  # matplotlib is an extra
    report, MISSING = None, str(error)  # type: ignore[assignment]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("report", help="one HTML page and PNG plots")
    make.add_argument("results", type=Path)
    make.add_argument("--out", type=Path, default=Path("build/bench/report"), help="folder of the page and the plots")
    text = commands.add_parser("readme", help="rewrite the marked blocks of README.md and docs/, and the picture")
    text.add_argument("results", type=Path)
    text.add_argument("--readme", type=Path, help="this file alone, instead of those and the picture")
    text.add_argument("--check", action="store_true", help="change nothing; fail if the block disagrees")
    ratio = commands.add_parser(
        "compare", help="fail if a ratio to a peer shrank, or a row of ours is gone, since a stored run"
    )
    ratio.add_argument("results", type=Path)
    ratio.add_argument("stored", type=Path, nargs="?", help="default: bench/results/MACHINE.json")
    ratio.add_argument("--stored-peers", action="store_true", help="peers that did not run have their stored times")
    ratio.add_argument("--threshold", type=float, help="how many times worse is allowed, above 1")
    join = commands.add_parser("merge", help="join runs of several experiments into one file")
    join.add_argument("target", type=Path)
    join.add_argument("results", type=Path, nargs="+")
    shown = commands.add_parser("statements", help="one HTML page: twenty statements, stage by stage")
    shown.add_argument("--out", type=Path, default=Path("build/statements.html"))
    shown.add_argument(
        "--times", type=Path, help="default: the first file of bench/results/statements/, if there is one"
    )
    timed = commands.add_parser("time-statements", help="time those twenty statements on this GPU")
    timed.add_argument("--out", type=Path, help="default: bench/results/statements/MACHINE.json")
    ranked = commands.add_parser("rank", help="how well the cost model ranks the kernels of the suite, on this GPU")
    ranked.add_argument("--out", type=Path, default=Path("build/bench/rank.json"), help="predicted and measured times")
    ranked.add_argument("--seed", type=int, default=1, help="of the sizes")
    ranked.add_argument("--match", default="", help="a part of the statements' names")
    suite = commands.add_parser("suite", help="the table of the suite of statements, and the seconds of its stages")
    suite.add_argument("results", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "statements":
            print(statement_page(given.out, given.times))
            return 0
        if given.command == "time-statements":
            print(time_statements(given.out))
            return 0
        if given.command == "rank":
            print("\n".join(table_of(rank_statements(given.out, given.seed, given.match))))
            return 0
        if given.command == "merge":
            merge(given.results, given.target)
            return 0
        if given.command == "compare":
            return compare(given.results, given.stored, given.threshold, given.stored_peers)
        run = load(given.results)
        if given.command == "suite":
            seeds = " and ".join(map(str, sorted({row.facts["seed"] for row in run.of(EXPERIMENT)})))  # type: ignore[type-var]
            print("\n".join([*summary(measured_of(run), seeds), *time_table(given.results)]))
            return 0
        if given.command == "readme":
            if given.readme:
                return write(given.results, given.readme, run, given.check)
            wrong = [write(given.results, target, run, given.check) for target in TARGETS]
            return max(*wrong, write_pictures(given.results, run, given.check))
        if report is None:
            raise ResultsError(f"the report needs matplotlib ({MISSING}); pip install '.[bench]'")
        print(report(run, given.out))
        return 0
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
