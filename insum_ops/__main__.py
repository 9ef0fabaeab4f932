"""`python -m insum_ops`: demo, doctor, explain, tune and cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from insum_ops import __version__
from insum_ops.cli import cache
from insum_ops.cli.demo import demo
from insum_ops.cli.doctor import doctor, probe
from insum_ops.cli.errors import CommandError
from insum_ops.cli.operands import FORMATS, Requested
from insum_ops.cli.statement import explain_statement, tune_statement
from insum_ops.compiler import DEVICES, InsumError
from insum_ops.formats import FormatError

MISUSED, INTERRUPTED, CUT_OFF = 2, 130, 141  # exit statuses, as shells have them


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what is wrong with its arguments is told in a sentence, with exit status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()  # a reader that has left is noticed here, and not when Python ends
        return status
    except (CommandError, FormatError, InsumError) as error:
        print(f"{options.parser.prog}: error: {error}", file=sys.stderr)
        return MISUSED
    except BrokenPipeError:  # as of `insum_ops explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end
        return CUT_OFF
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("insum_ops", description="Sparse operators, each written as one line.")
    parser.add_argument("--version", action="version", version=f"insum_ops {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="four applications: checked, timed beside plain torch, trained")
    _add_device(shown)
    shown.add_argument("--quick", action="store_true", help="small sizes: a few seconds, times that mean little")
    asked = commands.add_parser("doctor", help="what matters for a bug report")
    asked.add_argument("--probe", metavar="DEVICE", type=_device, help="only run one small statement on DEVICE")
    explained = commands.add_parser("explain", help="what a statement becomes, down to its Triton kernel; nothing runs")
    _add_operands(explained)
    names = ", ".join(f"{name} ({device.name})" for name, device in DEVICES.items())
    explained.add_argument(
        "--gpu", choices=DEVICES, metavar="ARCHITECTURE", help=f"plan for a GPU that need not be there: {names}"
    )
    tuned = commands.add_parser("tune", help="times of the ways to run a statement on a GPU; the best is kept")
    _add_operands(tuned)
    tuned.add_argument("--full", action="store_true", help="try a whole grid of configs, which takes minutes")
    kept = commands.add_parser("cache", help="tuned configs and kernel sources on disk")
    actions = kept.add_subparsers(dest="action", required=True)
    actions.add_parser("show", help="where the cache lies, and each tuned statement with its time")
    actions.add_parser("clear", help="remove tuned configs and kernel sources")
    written = actions.add_parser("export", help="write all tuned configs to FILE, for machines with the same GPU")
    read = actions.add_parser("import", help="take over the tuned configs of a FILE that export wrote")
    for action in (written, read):
        action.add_argument("file", metavar="FILE", type=Path)
    for command in (shown, asked, explained, tuned, kept):
        command.set_defaults(parser=command)
    return parser


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", type=_device, help="cpu, cuda or cuda:1; the GPU if there is one")


def _add_operands(command: argparse.ArgumentParser) -> None:
    command.add_argument("statement", help='as in "C[m,n] += A[m,k] * B[k,n]"')
    command.add_argument(
        "--shape",
        metavar="NAME=64x128",
        nargs="+",
        action="extend",
        default=[],
        help="of a tensor, or the extent of an index; what follows from other shapes may be left out, and a tensor "
        "that stands as an index gets random positions in the dimension that it points into",
    )
    command.add_argument(
        "--dtype",
        metavar="float16",
        nargs="+",
        action="extend",
        default=[],
        help="of all values (float32 otherwise) or of all positions (int64 otherwise), or B=float16 of one tensor",
    )
    command.add_argument(
        "--format",
        metavar="NAME=FORMAT:DENSITY",
        nargs="+",
        action="extend",
        default=[],
        help=f"a random sparse operand, as in A=GroupCOO:0.05 or A=BlockGroupCOO:0.1:32x32; of {', '.join(FORMATS)}",
    )
    command.add_argument("--seed", type=int, default=0, help="of the random operands")
    _add_device(command)


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        return probe(options.probe) if options.probe else doctor()
    if options.command == "cache":
        return _cache(options)
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.command == "demo":
        return demo(options.device or default, is_quick=options.quick)
    requested = Requested.read(options.statement, options.shape, options.dtype, options.format)
    if options.command == "tune":
        return tune_statement(requested, options.device or default, options.full, options.seed)
    if options.gpu is None:
        return explain_statement(requested, options.device or default, seed=options.seed)
    if options.device is not None:
        raise CommandError("--gpu plans for a GPU that need not be there, and --device for the one that is; give one")
    return explain_statement(requested, torch.device("cpu"), options.gpu, options.seed)


def _cache(options: argparse.Namespace) -> int:
    if options.action == "export":
        return cache.export_file(options.file)
    if options.action == "import":
        return cache.import_file(options.file)
    return cache.show() if options.action == "show" else cache.clear()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{name!r} is no device; name cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"this command runs on cpu and cuda, and not on {name!r}")
    if device.type == "cpu" and device.index:
        raise argparse.ArgumentTypeError(f"{name!r} asked for, but there is one cpu; name cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"torch sees {count} GPU{'' if count == 1 else 's'} here"
        remedy = f"name cuda:0 to cuda:{count - 1}" if count > 1 else "name cuda" if count else "name cpu"
        raise argparse.ArgumentTypeError(f"{name!r} asked for, but {there}; {remedy}")
    return device


if __name__ == "__main__":
    sys.exit(main())
