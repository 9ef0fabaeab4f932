"""`explain` and `tune` of a statement whose operands are given by their shapes."""

from __future__ import annotations

from contextlib import nullcontext
from textwrap import indent

import torch

from insum_ops.cli.errors import CommandError
from insum_ops.cli.operands import Requested
from insum_ops.compiler import DEVICES, cache_dir, described_as, device_of
from insum_ops.functional import explain, tune

__all__ = ["explain_statement", "tune_statement"]


def explain_statement(requested: Requested, device: torch.device, gpu: str | None = None, seed: int = 0) -> int:
    """Print every stage of a statement, for the GPU of the operands or for one that need not be there."""
    operands = requested.make(device, seed)
    with nullcontext() if gpu is None else described_as(DEVICES[gpu]):
        explanation = explain(requested.text, size=operands.size, **operands.tensors)
        planned_for = device_of(device)
    where = f"{planned_for.name}, {planned_for.architecture}"
    if device.type != "cuda" and gpu is None:
        where += "; there is no GPU here, and --gpu names another to plan for"
    print(f"operands, random, on {device}\n{indent(str(operands), '    ')}\n")
    print(f"planned for\n    {where}\n")
    print(explanation)
    return 0


def tune_statement(requested: Requested, device: torch.device, is_full: bool = False, seed: int = 0) -> int:
    """Time the ways to run a statement on its GPU, and print them; the best is kept for later calls."""
    operands = requested.make(device, seed)
    if device.type != "cuda":
        raise CommandError(
            f"tune times kernels, which needs a GPU that torch can use and {_mebibytes(operands.num_bytes)} of its "
            f"memory for these operands, but they are on {device}; run it on a machine with one, or see the kernel "
            "that a GPU would run by `explain` with the same arguments"
        )
    print(f"operands, random, on {device}\n{indent(str(operands), '    ')}\n")
    print(tune(requested.text, size=operands.size, full=is_full, **operands.tensors))
    print(f"\nthe first is kept in {cache_dir()}: later calls of this kind take it")
    return 0


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
