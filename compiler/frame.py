"""A kernel's frame: where a program stands, what it loops over, where its results go."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .broadcast import Value
from .contract import Dot
from .exact import Exact
from .ir import Access, Var, walk
from .kernel import Kernel
from .loads import TYPES
from .scatter import Merged, Owner, known_divisor, power_of_two
from .unroll import Unrolled

__all__ = ["Frame"]

BAKED_LOOP = 256  # a serial loop up to this long has its bound in the source; longer ones take it as an argument
UNROLLED = 16  # an innermost loop of rivals up to this long is unrolled: ptxas for sm_90 left it rolled with winners


class Frame(Exact, Unrolled):
    """One tile of results to a program."""

    def kernel(self) -> Kernel:
        s = self.schedule
        root = self.root_axes()
        self.assign_layouts(s.tree, root)
        grid = self.emit_grid()
        self.emit_level()
        if s.tables:
            self.emit_unrolled()
            return self.assemble(grid)
        loops = self.loops()
        is_sum = self.bound.statement.is_sum
        early = self.early_seed(root) if is_sum and loops else None
        if not is_sum:
            self.emit_no_winner(root)
        elif loops:
            self.line(f"acc = {self.zeros(root)}")
        self.emit_loops(loops)
        if is_sum:
            self.emit_update(root, bool(loops))
        else:
            self.emit_rivals(root, loops)
        self.leave_loops(1)
        if loops and isinstance(s.tree, Dot) and self.tile.result("acc", root) != "acc":
            self.line(f"acc = {self.tile.result('acc', root)}")
        if not is_sum:
            self.emit_winner(root)
        elif self.may_leak():
            self.emit_exact(root, early)
        else:
            self.emit_scatter(root, early)
        return self.assemble(grid)

    def emit_exact(self, root: tuple[str, ...], early: Value | None) -> None:
        """A sum that is no number may be another row's: each row is summed again from its own products."""
        self.emit_scatter(root, early)  # on its way while the sums are looked at
        total = self.sum_of_sums(root)
        self.line(f"if {total} != {total}:")
        self.depth += 1
        self.line("tl.debug_barrier()")  # what other threads have stored comes first
        self.emit_again(root)

    def emit_again(self, root: tuple[str, ...]) -> None:
        """The sums of the tile once more, a few rows at a time."""
        merged = self.schedule.merged
        assert merged is not None
        tile, size = self.names[merged.name], self.block(merged.name)
        few = self.without_dot(merged)
        few.emit_few_rows(merged, tile, size)
        few.emit_bound(merged.name, size)  # few rows may divide an extent past which the tile goes on
        few.emit_merged(merged)
        few.emit_level()
        depth = few.depth
        few.line(f"{few.sums} = {few.zeros(root)}")
        few.emit_loops(few.loops())
        few.emit_update(root, in_loop=True)
        few.leave_loops(depth)
        few.emit_scatter(root)

    def emit_loops(self, loops: tuple[str, ...]) -> None:
        if self.is_fused(loops):
            self.emit_fused_loop(loops)
        else:
            for loop in loops:
                self.emit_loop(loop)

    def leave_loops(self, depth: int) -> None:
        self.depth = depth
        for name in self.schedule.names("loop", "step", "segment"):
            self.forget(name)

    def assemble(self, grid: tuple[tuple[str, int], ...]) -> Kernel:
        name = "insum_kernel"
        ordered = sorted(self.parameters, key=lambda p: p.kind in ("extent", "stride"))
        arguments = ", ".join(self.parameters[p] for p in ordered)
        product = " * ".join(map(str, self.schedule.factors)) or str(self.bound.statement.scale)
        if not self.bound.statement.is_sum:
            product = f"{self.bound.statement.reduction}({product})"
        statement = f"{self.schedule.output} {self.bound.statement.op} {product}"
        extents = [self.parameters[p] for p in ordered if p.kind == "extent"]
        head = [
            "import triton",
            "import triton.language as tl",
            "",
            "",
            f"@triton.jit(do_not_specialize={extents!r})",
            f"def {name}({arguments}):",
            f"    # {self.bound.statement}",
            f"    # {self.schedule.strategy}: {statement}",
            f"    # {self.config}",
        ]
        head = [_ascii(text) for text in head]
        return Kernel(
            "\n".join([*head, *self.lines, ""]),
            name,
            tuple(ordered),
            grid,
            self.config.num_warps,
            self.config.num_stages,
            self.config.parts,
        )

    # the program's place

    def emit_grid(self) -> tuple[tuple[str, int], ...]:
        """Program id -> grid positions and tiles; the first of the returned names varies fastest."""
        s = self.schedule
        order = list(reversed([*s.names("grid"), *s.names("tile")]))
        if self.config.reverse:
            order = order[::-1]
        grid = tuple((name, self.share(name)) for name in order)
        varying = [item for item in grid if not self.is_single(*item)]
        parts = self.config.parts
        if varying or parts > 1:
            self.line("pid = tl.program_id(0)")
        if parts > 1:
            self.line(f"part = pid % {parts}")
            self.line(f"pid = pid // {parts}")
        for position, (name, block) in enumerate(varying):
            place = "pid"
            if position < len(varying) - 1:
                count = f"tl.cdiv({self.long_extent(name, block)}, {block})" if block > 1 else self.extent(name)
                place = f"pid % {count}" if len(varying) > 1 else "pid"
            self.emit_place(name, block, place)
            if position < len(varying) - 1:
                self.line(f"pid = pid // {count}")
        for name, block in grid:
            if (name, block) not in varying:
                self.emit_place(name, block, "")
        for name, block in grid:
            self.emit_bound(name, block)
        if s.owner is not None and self.config.longest_first:
            self.emit_order(s.owner)
        if s.merged is not None:
            self.emit_merged(s.merged)
        return grid

    def share(self, name: str) -> int:
        """How many values of an index of the grid one program takes."""
        return self.block(name) if self.schedule.roles[name] == "tile" else 1

    def emit_place(self, name: str, block: int, place: str) -> None:
        """The values that a program takes, by its place among those that differ in them; "": it has all."""
        clean = self.index(name)
        if block == 1:
            self.line(f"{clean} = {place or 0}")
            self.names[name] = Value(clean)
            return
        start = f"tl.cast({place}, tl.int64)" if self.is_long(name, block) else f"({place})"
        self.line(f"{clean} = {f'{start} * {block} + ' if place else ''}{self.arange(name)}")
        self.names[name] = Value(clean, (name,))

    def emit_order(self, owner: Owner) -> None:
        """The program's row, by its place among rows that are sorted by length."""
        row, order = self.names[owner.row], self.parameter("order", owner.fact)
        assert not row.axes
        self.line(f"{row.text} = tl.load({order} + {row.text})")

    def emit_merged(self, merged: Merged) -> None:
        """The two names that one axis holds; loads through the outer one are alike for all of the inner one."""
        both = self.names[merged.name]
        for name, text in ((merged.outer, "//"), (merged.inner, "%")):
            clean = self.index(name)
            self.line(f"{clean} = {both.text} {text} {merged.width}")
            self.names[name] = Value(clean, both.axes)
            if merged.name in self.bounds:
                self.bounds[name] = self.bounds[merged.name]

    def is_long(self, name: str, block: int) -> bool:
        """The last tile may end where 32 bits no longer count; lengths near that have a source of their own."""
        return self.schedule.extents[name] + block > 2**31

    def long_extent(self, name: str, block: int) -> str:
        """An extent to which a block can be added."""
        return f"tl.cast({self.extent(name)}, tl.int64)" if self.is_long(name, block) else self.extent(name)

    def is_single(self, name: str, block: int) -> bool:
        """One tile holds the whole extent, and the source may rely on it."""
        return self.schedule.extents[name] <= block

    def emit_bound(self, name: str, block: int) -> None:
        if block > 1 and self.divisor(name) % block:
            value = self.names[name]
            self.bounds[name] = self.let(f"{value.text} < {self.extent(name)}", value.axes, f"in_{self.clean(name)}")

    def divisor(self, name: str) -> int:
        """What the source may rely on to divide an extent, which it serves at other lengths too."""
        extent, owner = self.schedule.extents[name], self.schedule.owner
        is_row = owner is not None and name == owner.row
        return known_divisor(extent) if is_row or self.is_varying(name) else extent

    # loops

    def loops(self) -> tuple[str, ...]:
        s = self.schedule
        return (
            *s.names("segment"),
            *s.names("loop"),
            *(n for n in s.names("step") if not self.is_one_step(n)),
        )

    def shared_loop(self) -> str | None:
        """The loop of which each program has a part: the one with the most turns, by the power of two of its length."""
        if self.config.parts == 1:
            return None
        return max(self.loops(), key=lambda name: power_of_two(self.schedule.extents[name]) / self.step_of(name))

    def part_of(self, turns: str) -> tuple[str, str]:
        """The first turn of this program's part and the one after its last."""
        share = self.let(f"tl.cdiv({turns}, {self.config.parts})", (), "share").text
        return f"part * {share}", f"tl.minimum((part + 1) * {share}, {turns})"

    def is_one_step(self, name: str) -> bool:
        return self.schedule.extents[name] <= self.block(name)

    def emit_loop(self, name: str) -> None:
        role, clean = self.schedule.roles[name], self.index(name)
        if role == "segment":
            self.emit_segment(name, clean)
        elif role == "loop":
            extent = self.schedule.extents[name]
            is_baked = extent <= BAKED_LOOP and not self.is_varying(name)
            is_short = is_baked and extent <= UNROLLED and name == self.loops()[-1]
            function = "tl.static_range" if is_short and not self.bound.statement.is_sum else "range"
            turns = str(extent if is_baked else self.extent(name))
            if name == self.shared_loop():
                turns = ", ".join(self.part_of(turns))
            self.line(f"for {clean} in {function}({turns}):")
            self.depth += 1
            self.names[name] = Value(clean)
        else:
            start, block = f"start_{self.clean(name)}", self.block(name)
            first, end = "0", self.long_extent(name, block)
            if name == self.shared_loop():
                share = self.let(f"tl.cdiv({end}, {block * self.config.parts}) * {block}", (), "share").text
                first, end = f"part * {share}", f"tl.minimum((part + 1) * {share}, {end})"
            self.line(f"for {start} in range({first}, {end}, {block}):")
            self.depth += 1
            self.define_step(name, f"{start} + ")
        self.emit_level()

    def is_fused(self, loops: tuple[str, ...]) -> bool:
        """Nested loops around a dot become one, so that loads of the next round are in flight across all of them."""
        owner = self.schedule.owner
        is_side_by_side = owner is not None and self.schedule.roles[owner.row] == "tile"
        return (
            self.schedule.uses_dot
            and len(loops) > 1
            and not is_side_by_side
            and not any(map(self.is_varying, loops[1:]))
        )

    def emit_fused_loop(self, loops: tuple[str, ...]) -> None:
        outer, *inner = loops
        counts, total = [self.turns(name) for name in inner], self.inner_turns(loops)
        if self.schedule.roles[outer] == "segment":
            first, last = self.emit_pointers()
            self.line(f"for turn in range({first.text} * {total}, {last.text} * {total}):")
        else:
            block = self.step_of(outer)
            rounds = self.extent(outer) if block == 1 else f"tl.cdiv({self.extent(outer)}, {block})"
            turns = f"{rounds} * {total}"
            if self.config.parts > 1:
                turns = ", ".join(self.part_of(turns))
            self.line(f"for turn in range({turns}):")
        self.depth += 1
        self.define_turn(outer, f"turn // {total}")
        for name, count in zip(inner, counts):
            total //= count
            place = f"turn // {total}" if total > 1 else "turn"
            self.define_turn(name, f"{place} % {count}")
        self.emit_level()

    def turns(self, name: str) -> int:
        """Of a loop whose length the source may rely on."""
        return -(-self.schedule.extents[name] // self.step_of(name))

    def inner_turns(self, loops: tuple[str, ...]) -> int:
        """Of the loops inside the outermost one, for each of its own."""
        return math.prod(self.turns(name) for name in loops[1:])

    def step_of(self, name: str) -> int:
        return self.block(name) if self.schedule.roles[name] == "step" else 1

    def define_turn(self, name: str, place: str) -> None:
        if self.schedule.roles[name] == "step":
            self.define_step(name, f"({place}) * {self.block(name)} + ")
        else:
            clean = self.index(name)
            self.line(f"{clean} = {place}")
            self.names[name] = Value(clean)

    def define_step(self, name: str, start: str = "") -> None:
        clean, block = self.index(name), self.block(name)
        if block > 1:
            self.line(f"{clean} = {start}{self.arange(name)}")
            self.names[name] = Value(clean, (name,))
        else:
            self.line(f"{clean} = {start}0")
            self.names[name] = Value(clean)
        self.emit_bound(name, block)

    def emit_pointers(self) -> tuple[Value, Value]:
        """Where the groups of the program's row, or rows, begin and end."""
        owner = self.schedule.owner
        assert owner is not None
        row, pointers = self.names[owner.row], self.parameter("pointers", owner.fact)
        mask = f", mask={self.bounds[owner.row].text}, other=0" if owner.row in self.bounds else ""
        first = self.let(f"tl.load({pointers} + {row.text}{mask})", row.axes, "first")
        last = self.let(f"tl.load({pointers} + {row.text} + 1{mask})", row.axes, "last")
        return first, last

    def emit_segment(self, name: str, clean: str) -> None:
        """The groups of one row, or of a tile of rows side by side."""
        first, last = self.emit_pointers()
        row = first
        if not row.axes:
            self.line(f"for {clean} in range({first.text}, {last.text}):")
            self.depth += 1
            self.names[name] = Value(clean)
            return
        length = self.let(f"tl.max({last.text} - {first.text})", (), "length")
        self.line(f"for turn in range(0, {length.text}):")
        self.depth += 1
        self.line(f"{clean} = {first.text} + turn")
        self.names[name] = Value(clean, row.axes)
        self.bounds[name] = self.let(f"{clean} < {last.text}", row.axes, f"in_{self.clean(name)}")

    def forget(self, name: str) -> None:
        """Outside its loop a summed name means nothing."""
        self.names.pop(name, None)
        self.bounds.pop(name, None)

    def emit_level(self) -> None:
        """Load everything whose index names have just become known, so that nothing is loaded deeper than needed."""
        for name in self.schedule.names("step"):
            if name not in self.names and self.is_one_step(name) and self.depth == 1:
                self.define_step(name)
        roots: list[Access] = []
        for factor in (self.schedule.output, *self.schedule.factors):
            roots += factor.indirections if isinstance(factor, Access) else [factor.position]
        for root in roots:
            for access in walk(root):
                if access not in self.positions and self.is_known(access.names):
                    self.emit_position(access)
        for at, factor in enumerate(self.schedule.factors):
            if at not in self.tiles and self.is_known(factor.names) and self.is_known(self.hidden_by(factor)):
                self.tiles[at] = self.emit_factor(at, factor)

    # results

    def early_seed(self, root: tuple[str, ...]) -> Value | None:
        """A seed that lacks an axis of the tile, as a bias does, is so small that it is loaded before the loops."""
        if not self.bound.is_seeded or self.schedule.is_atomic:
            return None
        axes = tuple(axis for axis in root if self.schedule.is_kept(axis))
        return self.seed(axes) if self.seed_axes(axes) != axes else None

    def seed_axes(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        moving = self.moving_axes(self.schedule.output.indices, self.bound.size, self.strides[" seed"])
        return tuple(axis for axis in axes if axis in moving)

    def seed(self, axes: tuple[str, ...]) -> Value:
        """What the sums of a tile start from."""
        own = self.seed_axes(axes)
        mask = self.conjunction([mask for mask in self.output_masks() if {*mask.axes} <= {*own}], own)
        guard = f", mask={mask}, other=0.0" if mask else ""
        pointer = self.pointer(self.schedule.output, "seed", own)
        return self.let(f"tl.load({pointer}{guard}).to({self.accumulate})", own, "seed")

    def output_masks(self) -> list[Value]:
        """Where the program's tile has places in the output."""
        masks = [self.bounds[name] for name in self.schedule.free if name in self.bounds]
        return masks + [self.valid[access] for access in self.own_places() if access in self.valid]

    def own_places(self) -> tuple[Access, ...]:
        """Positions in the output that no other program writes: where there is none nothing is stored."""
        s = self.schedule
        return s.output.indirections if s.strategy in ("store-once", "owner") else ()

    def emit_scatter(self, root: tuple[str, ...], early: Value | None = None) -> None:
        s, acc = self.schedule, self.sums
        axes = tuple(axis for axis in root if s.is_kept(axis))
        for axis in root:
            if axis not in axes:
                self.line(f"{acc} = {self.tile.reduce('tl.sum', Value(acc, root), axis).text}")
                root = tuple(other for other in root if other != axis)
        if self.bound.statement.scale != 1:
            self.line(f"{acc} *= tl.full((), {float(self.bound.statement.scale)!r}, {self.accumulate})")
        masks, places = self.output_masks(), self.own_places()
        known = [access for access in self.valid if set(access.names) <= set(s.free) and access not in places]
        entries = [self.valid[access] for access in known]
        if s.strategy == "atomic":
            masks += entries
        elif entries:  # the element is written all the same: as zero, whatever the other factors hold
            self.line(f"{acc} = tl.where({self.conjunction(entries, axes)}, {acc}, 0.0)")
        mask = self.conjunction(masks, axes)
        guard = f", mask={mask}" if mask else ""
        if self.bound.is_seeded and not s.is_atomic:
            self.line(f"{acc} += {self.spread(early or self.seed(axes), axes)}")
        dtype = s.sum_dtype(self.flags.sum_dtype)
        pointer = self.pointer(s.output, "output", axes)
        value = acc if TYPES[dtype] == self.accumulate else f"{acc}.to({TYPES[dtype]})"
        if s.strategy == "store-or-atomic":
            self.emit_store_or_atomic(pointer, value, masks, axes)
        elif s.is_atomic:
            self.line(f'tl.atomic_add({pointer}, {value}{guard}, sem="relaxed")')
        else:
            self.line(f"tl.store({pointer}, {value}{guard})")

    def emit_store_or_atomic(self, pointer: str, value: str, masks: Sequence[Value], axes: tuple[str, ...]) -> None:
        """Groups that have their row alone are stored, only the others are added atomically."""
        group = self.schedule.output.indirections[0].indices[0]
        assert isinstance(group, Var)
        place = self.names[group.name]
        guard = f", mask={self.bounds[group.name].text}, other=0" if group.name in self.bounds else ""
        flag = self.parameter("is_shared", self.schedule.fact)
        shared = self.let(f"tl.load({flag} + {place.text}{guard}) != 0", place.axes, "is_shared")
        alone = self.let(f"{shared.text} == 0", place.axes, "is_alone")
        self.line(f"tl.store({pointer}, {value}, mask={self.conjunction([*masks, alone], axes)})")
        self.line(f"if tl.max({shared.text}.to(tl.int32)) > 0:" if place.axes else f"if {shared.text}:")
        self.depth += 1
        self.line(f'tl.atomic_add({pointer}, {value}, mask={self.conjunction([*masks, shared], axes)}, sem="relaxed")')
        self.depth -= 1


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
