"""`Schedule`: which index is a grid position, a tile axis or a loop; dot or multiply-add; how to scatter.

| role    | the index name is                                                         |
|---------|---------------------------------------------------------------------------|
| grid    | one value per program                                                     |
| tile    | a block of values per program, an axis of its tiles                       |
| loop    | a serial loop over single values                                          |
| step    | a serial loop over blocks, an axis of the tiles                           |
| segment | a serial loop over the groups of the program's output row (owner)         |
| merged  | one of several names that one tile axis holds side by side                |
| unrolled | its values are numbers in the source, as those of the tables it runs over |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from ...formats.facts import Fact, Tables
from ..binding import Bound, bucket
from ..language import Var
from .contraction import Dot, Node, dots, leaves
from .movement import WARP_ROW
from .scatter import OneHot, Start, is_in_set, is_varying, owned_rows

__all__ = ["Schedule", "Strides", "resized", "resized_extents"]

Strides = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Schedule(Start):
    """A statement as its scatter strategy has rewritten it, with a role for every index; prints as a table."""

    roles: Mapping[str, str]
    tree: Node | None
    is_shared: bool = False  # several programs share one sum, each with a part of the longest loop
    has_copies: bool = False  # programs write to copies of the output, which a second kernel sums
    tables: Tables = field(default_factory=dict)  # whose numbers the source holds
    along: str = ""  # the axis along memory of a sum that reads stretches of it
    form: str = ""  # of a statement that moves data: rows, flat, turned, looped, runs

    @staticmethod
    def from_start(start: Start, **more: Any) -> Schedule:
        """Return a rewritten statement with the roles, the tree and whatever else a schedule has."""
        return Schedule(**{each.name: getattr(start, each.name) for each in fields(Start)}, **more)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names that are axes of tiles, in their usual order: rows, then summed names, then columns."""
        tiles, steps = self.names("tile"), self.names("step")
        if len(tiles) == 1 and not self.uses_dot and self.is_along(tiles[0]):
            return (*steps, *tiles)
        return (*tiles[:1], *steps, *tiles[1:])

    @cached_property
    def holds_set(self) -> bool:
        """Whether a tile holds the rows of one set side by side, which share their loads."""
        merged = self.merged
        return merged is not None and is_in_set(self.owner, self.output, merged.outer)

    @cached_property
    def has_rows_in_turn(self) -> bool:
        """Whether a program may own several rows in turn: a row matters only for where its sums are stored."""
        owner, merged, output = self.owner, self.merged, self.output.indirections
        if owner is None or not output or not isinstance(self.tree, Dot):
            return False
        if any(owner.row in factor.names for factor in self.factors) or self.names("loop") or self.flats:
            return False
        if any(is_varying(self.bound, name) for name in self.names("step")):
            return False
        if merged is None:
            return len(output[0].indices) == 1
        inside = [access for factor in self.accesses for access in factor.indirections]
        return self.holds_set and not any(merged.inner in access.names for access in inside)

    @cached_property
    def has_one_row(self) -> bool:
        """Whether a program on chip has one row of a scattered dimension, and reads the entries of all."""
        return any(isinstance(factor, OneHot) and self.roles[factor.name] == "grid" for factor in self.factors)

    @cached_property
    def walks_rows(self) -> bool:
        """Whether a program adds up the entries of the rows that it owns: nothing but rows to be moved."""
        if self.owner is None or not self.is_sum or self.uses_dot:
            return False
        return not self.names("loop") and {*self.names("step")} <= {self.owner.segment}

    @cached_property
    def uses_dot(self) -> bool:
        return bool(dots(self.tree))

    @cached_property
    def run(self) -> str:
        """The index name of which a program takes several values in turn, and adds up those of one position; or ""."""
        return str(self.output.indirections[0].indices[0]) if self.form == "runs" else ""

    @cached_property
    def adds_outer_products(self) -> bool:
        """Whether each program has one row of the output, and tiles of two more axes that no factor has both of."""
        if self.owner is None or self.roles[self.owner.row] != "grid" or self.uses_dot or len(self.axes) != 2:
            return False
        return self.axes == self.names("tile") and not any({*self.axes} <= {*factor.names} for factor in self.accesses)

    @cached_property
    def stores_vectors(self) -> bool:
        """Whether a kernel relies on what divides the strides of its output, to write several elements at once."""
        return bool(self.form) or (self.strategy == "atomic" and bool(self.tables))

    @cached_property
    def may_be_aligned(self) -> bool:
        """Whether rows of the output begin between sectors, and each row of a tile may begin at another column."""
        return (
            self.form == "rows"
            and self.strategy == "store"
            and len(self.axes) == 2
            and self.is_along(self.axes[1])
            and self.bound.size[-1] % WARP_ROW != 0
        )

    @cached_property
    def has_table(self) -> bool:
        """Whether a factor is a table over three short axes, summed before it is multiplied with the others."""
        return self.uses_dot and any(len(leaf.axes) > 2 for leaf in leaves(self.tree))

    @property
    def reduction(self) -> str:
        return self.bound.statement.reduction

    @property
    def is_sum(self) -> bool:
        return self.bound.statement.is_sum

    @cached_property
    def is_atomic(self) -> bool:
        return self.strategy in ("atomic", "store-or-atomic")

    @cached_property
    def covers_output(self) -> bool:
        """Whether every element of the output is written, so that it needs no initial value."""
        is_tiled = self.owner is not None and bool(
            self.output.indirections
        )  # each tile owns rows, every row has a tile
        if self.strategy == "store-once" or is_tiled:
            return True
        names = [index.name for index in self.output.indices if isinstance(index, Var)]
        return len(set(names)) == len(self.output.indices) and not self.is_atomic

    @cached_property
    def may_be_shared(self) -> bool:
        """Whether several programs could each take a part of a sum; of a max or min if every part has a product."""
        has_loop = bool(self.along or self.is_sum) and bool(self.names("loop", "step"))
        return (
            has_loop and not self.is_shared and not self.tables and self.strategy in ("store", "store-once", "atomic")
        )

    def shared(self) -> Schedule:
        """Return the schedule with its sum cut over programs that add their parts atomically."""
        return replace(self, strategy="atomic", is_shared=True)

    def in_copies(self) -> Schedule | None:
        """Return the schedule with copies of the output, None if it can have none.

        Programs that share a sum, or a max, store their parts in a copy each, in a fixed order; those that scatter add
        atomically to one of several copies, where fewer of them meet at one place.
        """
        if self.has_copies or self.tables or self.merged is not None or self.run:
            return None
        if self.strategy == "store" and self.may_be_shared:
            return replace(self, is_shared=True, has_copies=True)
        is_scatter = self.is_sum and self.strategy == "atomic" and not self.is_shared
        return replace(self, has_copies=True) if is_scatter else None

    def sum_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        """Return the type in which partial sums are added in memory.

        It is `wanted` for atomic sums, and float32 where programs share a sum in half precision, or where halves would
        be added one by one: GPUs add pairs of them, and single ones in a loop that tries until nobody came between.
        1.2 million rows of 50 took an H200 0.70 ms one by one, about as many as it adds in float32 in 0.08.
        """
        dtype, output = self.bound.dtype, self.output
        has_pairs = bool(output.indices) and isinstance(output.indices[-1], Var) and self.bound.size[-1] % 2 == 0
        # hundreds of parts for a few results: a wider type costs nothing
        is_wide = self.is_shared or self.has_copies or (self.strategy == "atomic" and not has_pairs)
        if is_wide and dtype.itemsize == 2:
            return torch.float32
        return wanted if self.is_atomic and wanted is not None else dtype

    def is_along(self, name: str) -> bool:
        """Whether a name runs along the output's last dimension, so along memory."""
        return bool(self.output.indices) and str(self.output.indices[-1]) == name

    def is_kept(self, axis: str) -> bool:
        """Whether the output has a tile axis, so that nothing is summed over it."""
        is_merged = self.merged is not None and axis == self.merged.name
        return is_merged or self.parts_of(axis)[0] in self.free

    def names(self, *roles: str) -> tuple[str, ...]:
        return tuple(name for name, role in self.roles.items() if role in roles)

    def loops(self, blocks: Mapping[str, int]) -> tuple[str, ...]:
        """Return the index names that a kernel with tiles of these sizes loops over, the outermost first."""
        steps = (name for name in self.names("step") if not self.is_one_step(name, blocks[name]))
        return (*self.names("segment"), *self.names("loop"), *steps)

    def is_one_step(self, name: str, block: int) -> bool:
        """Whether a tile of this size holds all values of a summed index, so that it needs no loop."""
        if self.owner is not None and name == self.owner.segment:
            return False
        parts = self.parts_of(name)
        # lengths that vary are known by their power of two, and so is what several of them make together
        lengths = [bucket(self.extents[part]) if is_varying(self.bound, part) else self.extents[part] for part in parts]
        return (math.prod(lengths) if len(parts) > 1 else self.extents[name]) <= block

    def are_fused(self, loops: Sequence[str]) -> bool:
        """Whether nested loops around a dot become one loop, so that loads are pipelined across all of them."""
        owner = self.owner
        is_by_entry = owner is not None and (owner.is_packed or self.roles[owner.row] == "tile")
        has_fixed_turns = not any(is_varying(self.bound, name) for name in loops[1:])
        return self.uses_dot and len(loops) > 1 and not is_by_entry and has_fixed_turns

    def __str__(self) -> str:
        rows = [f"{'index':10}{'extent':>10}  role"]
        rows += [f"{name:10}{self.extents[name]:>10}  {role}" for name, role in self.roles.items()]
        kind = "tl.dot" if self.uses_dot else "multiply-add" if self.is_sum else f"multiply-{self.reduction}"
        shared = ", sums shared by programs" if self.is_shared else ""
        shared += ", copies of the output" if self.has_copies else ""
        return "\n".join([f"scatter: {self.strategy}, product: {kind}{shared}", *rows])


def resized(schedule: Schedule, bound: Bound, fact: Fact | None) -> dict[str, int]:
    """Return a schedule's extents for tensors of other lengths; a dimension held on chip is too short to vary."""
    extents = resized_extents(schedule, bound.extents)
    if schedule.owner is not None:
        extents[schedule.owner.row] = owned_rows(bound, fact, schedule.owner.is_cut)
    return extents


def resized_extents(schedule: Schedule, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return a schedule's extents for other lengths of its index names; owned rows keep their number."""
    extents = {**schedule.extents, **lengths}
    if schedule.merged is not None:
        extents[schedule.merged.name] = extents[schedule.merged.outer] * schedule.merged.width
    for flat in schedule.flats:
        extents[flat.name] = math.prod(extents[part] for part in flat.parts)
    return extents
