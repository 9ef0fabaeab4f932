"""The input of the code generator as one value: schedule, strides, config, flags, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ..binding import Bound
from ..planning import Dot, Leaf, Merged, Node, Owner, Product, Schedule, Strides, Sum, is_varying
from .broadcast import Eager, Lazy
from .kernel import Config, Flags

__all__ = ["TYPES", "Axes", "KernelSpec"]

Axes = tuple[str, ...]  # index names that are axes of a tile, in the order of its dimensions

TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}

LEAST_DEPTH = 16  # of tl.dot, whatever its rows and columns


@dataclass(frozen=True)
class KernelSpec:
    """The input of the code generator, which does not depend on the text that is written."""

    schedule: Schedule
    strides: Strides
    config: Config
    flags: Flags
    axes: Axes  # of all tiles: those of the schedule that are longer than one element
    layouts: Mapping[int, Axes] = field(default_factory=dict)  # factor number -> the order in which its axes are loaded
    output: str = ""  # its name among the outputs of a kernel that has several

    @staticmethod
    def of(schedule: Schedule, strides: Strides, config: Config, flags: Flags, output: str = "") -> KernelSpec:
        # statements that share a kernel have the order of their axes in common, whatever the roles in each
        order = [name for name, _ in config.blocks] if output else schedule.axes
        axes = tuple(axis for axis in order if config.block(axis) > 1)
        spec = KernelSpec(schedule, strides, config, flags, axes, output=output)
        if config.is_aligned:  # what lies along the columns varies over the rows too
            return spec
        return replace(spec, layouts=dict(spec._layouts(schedule.tree, spec.result_axes)))

    @property
    def bound(self) -> Bound:
        return self.schedule.bound

    @property
    def owner(self) -> Owner:
        """The owner of rows, of a schedule in which programs own rows of the output."""
        assert self.schedule.owner is not None
        return self.schedule.owner

    @property
    def merged(self) -> Merged:
        """The merged axis, of a schedule that holds two index names on one tile axis."""
        assert self.schedule.merged is not None
        return self.schedule.merged

    @cached_property
    def is_seeded_here(self) -> bool:
        """Whether the kernel adds the seed itself: it is not there before, nor added to the sum of all copies."""
        return self.bound.is_seeded and not self.schedule.is_atomic and not self.schedule.has_copies

    @cached_property
    def tile(self) -> Lazy:
        """The rule by which values over different axes broadcast."""
        return (Lazy if self.flags.lazy else Eager)(self.axes, dict(self.config.blocks))

    @cached_property
    def accumulate(self) -> str:
        """The type in which sums are taken."""
        return "tl.float64" if self.bound.dtype == torch.float64 else "tl.float32"

    @cached_property
    def result_axes(self) -> Axes:
        """The axes of the tile in which the products of a program are accumulated.

        The output may have one that no factor has, and that another statement of the kernel sums over.
        """
        tree, kept = self.schedule.tree, self.kept(self.axes)
        axes = self.ordered({*self.schedule.names("tile"), *kept, *(tree.axes if tree is not None else ())})
        return axes[::-1] if self.config.swap and len(axes) == 2 else axes

    @cached_property
    def loops(self) -> Axes:
        """The index names that are looped over, the outermost first."""
        return self.schedule.loops(dict(self.config.blocks))

    @cached_property
    def turn(self) -> str:
        """The index name whose values a program takes in turn, "" without such: that of runs, or of a joint kernel."""
        if self.schedule.run or self.config.run == 1 or not self.output:
            return self.schedule.run
        return next(name for name in self.schedule.names("tile") if self.is_varying(name))

    @property
    def threads(self) -> int:
        """How many threads a program has."""
        return self.config.num_warps * self.flags.warp_width

    def block(self, name: str) -> int:
        return self.config.block(name)

    def step(self, name: str) -> int:
        """Return how many values of a summed index one turn of its loop takes."""
        return self.block(name) if self.schedule.roles[name] == "step" else 1

    def is_one_step(self, name: str) -> bool:
        """Whether one tile holds all values of a summed index, so that it needs no loop."""
        return self.schedule.is_one_step(name, self.block(name))

    def is_varying(self, name: str) -> bool:
        return is_varying(self.bound, name)

    def ordered(self, axes: frozenset[str] | set[str]) -> Axes:
        return tuple(axis for axis in self.axes if axis in axes)

    def kept(self, axes: Sequence[str]) -> Axes:
        """Return those of `axes` that the output has."""
        return tuple(axis for axis in axes if self.schedule.is_kept(axis))

    # the tree of products

    def is_deep(self, node: Dot) -> bool:
        """Whether a dot is as deep as `tl.dot` requires; others are sums of elementwise products."""
        return self.block(node.over) >= LEAST_DEPTH

    def sum_axes(self, node: Sum, axes: Axes) -> Axes:
        """Return the order of the axes of a sum's operand, if its result has `axes`."""
        if self.block(node.over) == 1:
            return axes
        return (*(axis for axis in axes if axis in node.of.axes), node.over)

    def dot_sides(self, node: Dot, axes: Axes) -> tuple[tuple[Node, Axes], tuple[Node, Axes]]:
        """Return the two operands of a dot whose result has `axes`, each with the order of its axes."""
        first, second = (axis for axis in axes if axis in node.axes)
        left, right = (node.left, node.right) if first in node.left.axes else (node.right, node.left)
        if self.is_deep(node):
            return (left, (first, node.over)), (right, (node.over, second))
        return (left, self.short_dot_axes(node, first)), (right, self.short_dot_axes(node, second))

    def short_dot_axes(self, node: Dot, *axes: str) -> Axes:
        """Return the axes of a dot by elementwise products, which is summed over the first axis, swapped over the last.

        A sum over an axis in the middle is turned into a tf32 dot by Triton.
        """
        return (*axes, node.over) if self.config.swap else (node.over, *axes)

    def _layouts(self, node: Node | None, axes: Axes) -> list[tuple[int, Axes]]:
        """Return the order in which each factor's axes are loaded, so that dots need no transpose."""
        if isinstance(node, Leaf):
            return [(node.at, tuple(axis for axis in axes if axis in node.axes))]
        if isinstance(node, Sum):
            return self._layouts(node.of, self.sum_axes(node, axes))
        if isinstance(node, Product):
            return self._layouts(node.left, axes) + self._layouts(node.right, axes)
        if isinstance(node, Dot):
            return [layout for side, want in self.dot_sides(node, axes) for layout in self._layouts(side, want)]
        return []
