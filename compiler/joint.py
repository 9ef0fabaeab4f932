"""Several statements over the same tensors as one kernel, or one after the other: whichever is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..formats.facts import Fact
from ..formats.torch_state import is_deterministic
from .binding import power_of_two, row_major
from .codegen import Config, emit_joint
from .planning import LARGEST_TILE, Schedule, device_of, is_varying, joint_schedules
from .prepared import PreparedStatement, prepare
from .runtime import JointLauncher, joint_launcher
from .tuning import Problem

__all__ = ["JointCall", "joint_configs", "joint_problem"]


class JointCall(NamedTuple):
    """One of several statements over plain tensors."""

    expr: str
    names: str  # of the tensors, joined by commas
    size: tuple[int, ...]
    tensors: list[Tensor]
    fact: Fact | None = None


class JointProblem(NamedTuple):
    """Statements that one kernel may run."""

    problems: tuple[Problem, ...]
    schedules: tuple[Schedule, ...]

    def launcher(self, config: Config) -> JointLauncher:
        flags = [problem.flags for problem in self.problems]
        strides = [{**problem.strides, str(at): problem.strides[""]} for at, problem in enumerate(self.problems)]
        kernel = emit_joint(self.schedules, strides, config, flags)
        sums = [schedule.sum_dtype(flag.sum_dtype) for schedule, flag in zip(self.schedules, flags)]
        return joint_launcher(self.schedules, kernel, strides, [problem.names for problem in self.problems], sums)


def joint_problem(calls: Sequence[JointCall]) -> JointProblem | None:
    prepared = [prepare(*call) for call in calls]
    problems = tuple(statement.problem(call.tensors, call.fact) for statement, call in zip(prepared, calls))
    schedules = joint_schedules(
        [problem.bound for problem in problems],
        [problem.strides for problem in problems],
        [problem.fact for problem in problems],
        is_deterministic(),
    )
    return None if schedules is None else JointProblem(problems, schedules)


def joint_configs(schedules: Sequence[Schedule]) -> tuple[Config, ...]:
    first, *_ = schedules
    device = device_of(first.bound.device)
    axes = first.names("step", "tile")
    ways = []
    for warps in (1, 2, 4, 8):
        for each in (1, 2, 4, 8):
            elements = warps * each * device.warp_width
            blocks = {name: power_of_two(first.extents[name]) for name in first.names("step")}
            rest = elements // prod(blocks.values())
            if not rest or elements > LARGEST_TILE:
                continue
            for name in reversed(first.names("tile")):
                blocks[name] = min(power_of_two(first.extents[name]), max(rest, 1))
                rest //= blocks[name]
            if not rest and False:
                continue
            ways.append(Config(tuple((name, blocks[name]) for name in axes), warps, 1))
    return tuple(dict.fromkeys(ways))
