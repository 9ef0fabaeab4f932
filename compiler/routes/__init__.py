"""A statement over plain tensors to what runs it: one kernel, or another route if that takes less.

A file imports only from those above it.

    prepared  a statement bound to tensors of one layout, and what runs it
    steps     smaller statements in the place of one with many factors
    grouped   products over tiles of equal index
    aligned   products over aligned copies of their operands
    choice    which of these routes takes the least
    joint     several statements in one kernel
    exported  the kernel of a statement in an exported program
"""

from .choice import (
    ALIGNED,
    CLEAR,
    GROUPED,
    KERNEL,
    STATEMENTS,
    TORCH,
    chosen_route,
    fastest_program,
    fastest_route,
    grad_like,
)
from .exported import plan_for, run_exported
from .grouped import groupings_of
from .joint import JointCall, run_jointly, sum_jointly
from .prepared import PreparedStatement, Result, Runner, has_kernels, prepare, problem_for, refuse_freed, ways_of
from .steps import LEAST_GAIN, Step, evaluated, may_be_kept, split_of, steps_of

__all__ = [
    "ALIGNED",
    "CLEAR",
    "GROUPED",
    "KERNEL",
    "LEAST_GAIN",
    "STATEMENTS",
    "TORCH",
    "JointCall",
    "PreparedStatement",
    "Result",
    "Runner",
    "Step",
    "chosen_route",
    "evaluated",
    "fastest_program",
    "fastest_route",
    "grad_like",
    "groupings_of",
    "has_kernels",
    "may_be_kept",
    "plan_for",
    "prepare",
    "problem_for",
    "refuse_freed",
    "run_exported",
    "run_jointly",
    "split_of",
    "steps_of",
    "sum_jointly",
    "ways_of",
]
