"""The launch of a kernel of several statements, with an output for each or one for their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..binding import Bound, row_major
from ..codegen import NUMBERS, Kernel, Parameter
from ..planning import Schedule
from .launch import Launcher

__all__ = ["JointLauncher", "joint_launcher"]

Tensors = Sequence[Sequence[Tensor]]  # of each statement, in the order of its names


@dataclass(frozen=True)
class Output:
    """The memory that one of the statements takes for its result."""

    size: tuple[int, ...]
    sum_dtype: torch.dtype  # in which sums meet in memory
    dtype: torch.dtype
    is_covered: bool  # the kernel writes all of it

    def memory(self, device: torch.device, place: Tensor | None) -> Tensor:
        """Return what the kernel writes to: the place itself unless sums have another dtype."""
        if place is not None and self.dtype is self.sum_dtype:
            output = place
        else:
            strides = row_major(self.size) if place is None else place.stride()
            output = torch.empty_strided(self.size, strides, dtype=self.sum_dtype, device=device)
        return output if self.is_covered else output.zero_()

    def finished(self, total: Tensor, place: Tensor | None) -> Tensor:
        """Return the result that the kernel has left in its memory."""
        if place is not None:
            return place if total is place else place.copy_(total)
        return total if self.dtype is self.sum_dtype else total.to(self.dtype)


@dataclass
class JointLauncher:
    """A kernel of several statements, bound to shapes and strides: give it their tensors, get their results."""

    kernel: Launcher  # with the first statement's bound and schedule
    outputs: tuple[Output, ...]
    places: tuple[tuple[int, int], ...]  # of each tensor that the kernel reads: its statement, and its number there

    def __call__(self, tensors: Tensors, places: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Return the results, each in its place where it has one, whose strides are those that the kernel is for."""
        given = places or [None] * len(self.outputs)
        outputs = [own.memory(self.kernel.device, place) for own, place in zip(self.outputs, given)]
        self.kernel.launch((*[tensors[part][at] for part, at in self.places], *outputs))
        return [own.finished(total, place) for own, total, place in zip(self.outputs, outputs, given)]

    def build(self, tensors: Tensors) -> None:
        """Compile for these tensors without running; raise UnsupportedError if the kernel can't be built."""
        read = [tensors[part][at] for part, at in self.places]
        self.kernel.build_for(read, [output.sum_dtype for output in self.outputs])

    def resized(self, bounds: Sequence[Bound], extents: Mapping[str, int]) -> JointLauncher:
        """Return a launcher of the same kernel for tensors of other lengths and equal strides."""
        outputs = tuple([replace(own, size=bound.size) for own, bound in zip(self.outputs, bounds)])
        return JointLauncher(self.kernel.resized(bounds[0], extents), outputs, self.places)


def joint_launcher(
    schedules: Sequence[Schedule],
    kernel: Kernel,
    strides: Sequence[Mapping[str, tuple[int, ...]]],
    names: Sequence[Sequence[str]],
    sum_dtypes: Sequence[torch.dtype],
) -> JointLauncher:
    """Return the launcher of a kernel that `emit_joint` or `emit_summed` wrote; the last three are of each statement.

    `names` is the order in which its tensors will arrive.
    """
    written = [parameter for parameter in kernel.parameters if parameter.kind == "output"]
    pointers = [parameter for parameter in kernel.parameters if parameter.kind not in NUMBERS]
    read = [parameter.name for parameter in pointers if parameter.kind == "tensor"]
    places = tuple(next((part, own.index(name)) for part, own in enumerate(names) if name in own) for name in read)
    order = tuple(
        read.index(parameter.name) if parameter.kind == "tensor" else int(parameter.name or 0) - len(written)
        for parameter in pointers
    )

    def number(parameter: Parameter) -> int:
        if parameter.kind == "extent":
            return next(own.extents[parameter.name] for own in schedules if parameter.name in own.extents)
        return next(own[parameter.name] for own in strides if parameter.name in own)[parameter.dim]

    bound = schedules[0].bound
    numbers = tuple([number(parameter) for parameter in kernel.numbers])
    grid = tuple((schedules[0].extents[name], block) for name, block in kernel.grid)
    fields = order, numbers, grid, bound.statement.scatter_dim, -1
    outputs = tuple(
        Output(schedule.bound.size, dtype, schedule.bound.dtype, schedule.covers_output)
        for schedule, dtype in zip(schedules[: len(written)], sum_dtypes)
    )
    return JointLauncher(Launcher(bound, schedules[0], kernel, sum_dtypes[0], *fields), outputs, places)
