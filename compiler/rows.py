"""Several rows to a program, one after another in one loop: while one is stored, what the next one reads is on its way.

A program for each row begins with loads that nothing is there to hide, and ends with a store. Four rows to a program,
and as many programs as a GPU has cores: pairs of rows of 32 x 32 blocks at a tenth, 4096^3 in float16, took .050 ms on
an H200, .060 with a program for each; rows of 128 x 128 blocks .033 and .039.
"""

from __future__ import annotations

from copy import copy

from .broadcast import Value
from .frame import Frame
from .kernel import Kernel
from .scatter import Merged, Owner

__all__ = ["Rows"]


class Rows(Frame):
    """A dot over the groups of neighbouring rows; where a row's groups end its sums are stored and begin again."""

    @property
    def owner(self) -> Owner:
        owner = self.schedule.owner
        assert owner is not None
        return owner

    def kernel(self) -> Kernel:
        root = self.root_axes()
        self.assign_layouts(self.schedule.tree, root)
        grid = self.emit_grid()
        self.emit_level()
        leaks = self.emit_rows(root)
        self.emit_empty_rows(root)
        if leaks:
            self.emit_exact_rows(root)
        return self.assemble(grid)

    # the program's place

    def share(self, name: str) -> int:
        return self.config.rows if name == self.owner.row else super().share(name)

    def emit_place(self, name: str, block: int, place: str) -> None:
        """Its rows are from `first_row` to `past_row` - 1."""
        if name != self.owner.row:
            super().emit_place(name, block, place)
            return
        self.line(f"first_row = {f'({place}) * {block}' if place else 0}")
        self.line(f"past_row = tl.minimum(first_row + {block}, {self.extent(name)})")

    def emit_bound(self, name: str, block: int) -> None:
        if name != self.owner.row:
            super().emit_bound(name, block)

    # the loop

    def emit_pointers(self) -> tuple[Value, Value]:
        """Where the groups of all its rows begin and end, or of one."""
        if self.owner.row in self.names:
            return super().emit_pointers()
        pointers = self.parameter("pointers", self.owner.fact)
        begin = self.let(f"tl.load({pointers} + first_row)", (), "begin")
        end = self.let(f"tl.load({pointers} + past_row)", (), "end")
        row = self.index(self.owner.row)
        self.line(f"{row} = first_row")
        self.line(f"until = tl.load({pointers} + {row} + 1)")
        self.emit_skip(begin.text)
        return begin, end

    def emit_skip(self, begin: str) -> None:
        """To the next row that has groups: the one of which the group `begin` is the first."""
        row = self.index(self.owner.row)
        self.line(f"while until == {begin}:")
        self.line(f"    {row} += 1")
        self.line(f"    until = {self.end_of_next()}")

    def end_of_next(self) -> str:
        """Where the groups of the row end that it has come to; -1 after its last one."""
        row, pointers = self.index(self.owner.row), self.parameter("pointers", self.owner.fact)
        return f"tl.load({pointers} + {row} + 1, mask={row} < past_row, other=-1)"

    def emit_rows(self, root: tuple[str, ...]) -> bool:
        """All rows that have groups; whether sums of one may have reached another."""
        row, loops = self.index(self.owner.row), self.loops()
        self.line("stored = 0")
        self.line(f"acc = {self.zeros(root)}")
        self.emit_loops(loops)
        self.emit_update(root, in_loop=True)
        leaks = self.may_leak()
        is_last = f"turn + 1 == until * {self.inner_turns(loops)}" if self.is_fused(loops) else None
        self.line(f"if {is_last or f'{self.index(self.owner.segment)} + 1 == until'}:")
        row_end = self.inside(row)
        row_end.emit_result(root)
        row_end.line(f"acc = {self.zeros(root)}")
        row_end.line("stored += 1")
        row_end.line(f"{row} += 1")
        row_end.line("before = until")
        row_end.line(f"until = {self.end_of_next()}")
        row_end.emit_skip("before")
        self.counter = row_end.counter
        self.leave_loops(1)
        return leaks

    def inside(self, row: str, stem: str = "i") -> Rows:
        """What writes to the same source, one level deeper and in one row: what it knows is forgotten with it."""
        found = copy(self)
        found.depth, found.stem = self.depth + 1, stem
        found.names = {**self.names, self.owner.row: Value(row)}
        found.positions, found.valid, found.tiles = {**self.positions}, {**self.valid}, {**self.tiles}
        return found

    def emit_result(self, root: tuple[str, ...]) -> None:
        """The sums of one row to where they belong."""
        self.emit_level()
        whole = self.tile.result(self.sums, root)
        if whole != self.sums:
            self.line(f"result = {whole}")
            self.sums = "result"
        self.emit_scatter(root)

    def emit_empty_rows(self, root: tuple[str, ...]) -> None:
        """Rows without groups, which the loop has not met."""
        self.line("if stored < past_row - first_row:")
        clean = self.clean(self.owner.row)
        empty = self.inside(f"empty_{clean}", "empty")
        empty.line(f"for empty_{clean} in range(first_row, past_row):")
        empty.depth += 1
        begin, end = empty.emit_pointers()
        empty.line(f"if {begin.text} == {end.text}:")
        empty.depth += 1
        empty.sums = "nothing"
        empty.line(f"nothing = {self.zeros(root)}")
        empty.emit_result(root)
        self.counter = empty.counter

    # sums that are no number

    def emit_exact_rows(self, root: tuple[str, ...]) -> None:
        """As `emit_exact`, for all rows at the end.

        A leak is in all rows of a block: the first of each is read back, for all columns.
        """
        merged = self.schedule.merged
        assert merged is not None
        self.line("tl.debug_barrier()")  # what other threads have stored comes first
        first = self.first_of_each(merged)
        axes = tuple(axis for axis in root if self.schedule.is_kept(axis))
        first.line(f"is_wrong = tl.zeros({first.tile.shape(axes)}, tl.int1)")
        first.line(f"for turn in tl.static_range({self.config.rows}):")
        look = first.inside(f"{first.stem}_{self.clean(self.owner.row)}", first.stem)
        look.line(f"{look.names[self.owner.row].text} = tl.minimum(first_row + turn, past_row - 1)")
        look.emit_level()
        mask = look.conjunction(look.output_masks(), axes)
        guard = f", mask={mask}, other=0.0" if mask else ""
        pointer = look.pointer(self.schedule.output, "output", axes)
        read = look.let(f"tl.load({pointer}{guard}).to({self.accumulate})", axes, "result")
        look.line(f"is_wrong = is_wrong | ({read.text} != {read.text})")
        self.counter = look.counter
        self.line("if tl.max(is_wrong.to(tl.int32)) > 0:")
        row = f"single_{self.clean(self.owner.row)}"
        again = self.inside(row)
        again.line(f"for {row} in range(first_row, past_row):")
        again.depth += 1
        again.emit_again(root)

    def first_of_each(self, merged: Merged) -> Rows:
        """The tile with one row of each part that stands beside others in it."""
        first = self.few_rows(merged, self.block(merged.name) // merged.width)
        first.stem = "top"
        clean = first.index(merged.name)
        first.line(f"{clean} = {first.arange(merged.name)} * {merged.width}")
        first.names[merged.name] = Value(clean, (merged.name,))
        first.emit_bound(merged.name, self.block(merged.name))
        first.emit_merged(merged)
        return first
