"""`python -m insum_ops demo` and `python -m insum_ops doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from insum_ops.cli.demo import demo
from insum_ops.cli.doctor import doctor, probe


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("insum_ops", description="Sparse operators, each written as one line.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="four applications: checked, timed beside plain torch, trained")
    shown.add_argument("--device", type=_device, help="cpu, cuda or cuda:1; the GPU if there is one")
    shown.add_argument("--quick", action="store_true", help="small sizes: a few seconds, times that mean little")
    asked = commands.add_parser("doctor", help="what matters for a bug report")
    asked.add_argument("--probe", metavar="DEVICE", help="only run one small statement on DEVICE")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return probe(options.probe) if options.probe else doctor()
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return demo(options.device or default, is_quick=options.quick)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{name!r} is no device; name cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{name!r} asked for, but torch sees {torch.cuda.device_count()} GPUs")
    return device


if __name__ == "__main__":
    sys.exit(main())
