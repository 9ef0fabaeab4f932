"""(`Schedule`, config) -> Triton source: a pure function from data to text.

Lazy broadcasting: every emitted value knows which tile axes it varies over, and an axis is inserted (`[:, None]`) only
where values over different axes meet. With `lazy=False` every index is born with all axes and operands of a dot are
reshaped, as TorchInductor does; it exists to be measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .bind import Bound
from .broadcast import Eager, Lazy, Value
from .contract import Dot, Leaf, Node, Product, Sum
from .differentiate import fresh_name
from .ir import Access, Const, Index, Var, walk
from .kernel import Config, Flags, Kernel, Parameter
from .schedule import Factor, OneHot, Schedule, Strides

__all__ = ["emit"]

TYPES = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}
BAKED_LOOP = 256  # a serial loop up to this long has its bound in the source; longer ones take it as an argument


def emit(schedule: Schedule, strides: Strides, config: Config, flags: Flags | None = None) -> Kernel:
    """The kernel that runs `schedule` with `config`."""
    return _Emitter(schedule, strides, config, flags or Flags()).kernel()


def _identifier(name: str) -> str:
    """A user's name in ASCII."""
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"u{ord(c):x}" for c in name)


@dataclass
class _Emitter:
    schedule: Schedule
    strides: Strides
    config: Config
    flags: Flags
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    parameters: dict[Parameter, str] = field(default_factory=dict)
    names: dict[str, Value] = field(default_factory=dict)
    bounds: dict[str, Value] = field(default_factory=dict)  # index name -> where it is inside its extent
    positions: dict[Access, Value] = field(default_factory=dict)
    valid: dict[Access, Value] = field(default_factory=dict)
    tiles: dict[int, Value] = field(default_factory=dict)  # factor number -> loaded tile
    cleaned: dict[str, str] = field(default_factory=dict)  # a user's name -> its part in names of the kernel
    counter: int = 0

    # structure

    def kernel(self) -> Kernel:
        s = self.schedule
        self.bound: Bound = s.bound
        self.axes = tuple(axis for axis in s.axes if self.block(axis) > 1)
        self.tile = (Lazy if self.flags.lazy else Eager)(self.axes, dict(self.config.blocks))
        self.accumulate = "tl.float64" if self.bound.dtype == torch.float64 else "tl.float32"
        self.layouts: dict[int, tuple[str, ...]] = {}
        root = self.root_axes()
        self.assign_layouts(s.tree, root)
        grid = self.emit_grid()
        self.emit_level()
        loops = self.loops()
        if loops:
            self.line(f"acc = {self.zeros(root)}")
        if self.is_fused(loops):
            self.emit_fused_loop(loops)
        else:
            for loop in loops:
                self.emit_loop(loop)
        self.emit_update(root, bool(loops))
        self.depth = 1
        for name in s.names("loop", "step", "segment"):
            self.forget(name)
        if loops and isinstance(s.tree, Dot) and self.tile.result("acc", root) != "acc":
            self.line(f"acc = {self.tile.result('acc', root)}")
        self.emit_scatter(root)
        return self.assemble(grid)

    def assemble(self, grid: tuple[tuple[str, int], ...]) -> Kernel:
        name = "insum_kernel"
        ordered = sorted(self.parameters, key=lambda p: p.kind in ("extent", "stride"))
        arguments = ", ".join(self.parameters[p] for p in ordered)
        statement = f"{self.schedule.output} {self.bound.statement.op} " + (
            " * ".join(map(str, self.schedule.factors)) or str(self.bound.statement.scale)
        )
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
        )

    def block(self, name: str) -> int:
        return self.config.block(name)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def clean(self, name: str) -> str:
        """A user's name as part of the kernel's: ASCII, its own, and never ending as only pointers do."""
        if name not in self.cleaned:
            wanted = _identifier(name)
            self.cleaned[name] = fresh_name(f"{wanted}_" if wanted.endswith("_ptr") else wanted, self.cleaned.values())
        return self.cleaned[name]

    def let(self, text: str, axes: tuple[str, ...], stem: str, dtype: torch.dtype | None = None) -> Value:
        name = f"{stem}_{self.counter}"
        self.counter += 1
        self.line(f"{name} = {text}")
        return Value(name, axes, dtype)

    def parameter(self, kind: str, name: str = "", dim: int = 0) -> str:
        key = Parameter(kind, name, dim)
        clean = self.clean(name)
        text = {
            "tensor": f"{clean}_ptr",
            "output": "ptr_of_output",
            "seed": "ptr_of_seed",
            "pointers": f"ptr_of_{clean}_segments",
            "is_shared": f"ptr_of_{clean}_is_shared",
            "extent": f"extent_{clean}",
            "stride": f"stride_{clean}_{dim}",
        }[kind]
        return self.parameters.setdefault(key, text)

    # axes and broadcasting

    def ordered(self, axes: frozenset[str] | set[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis in axes)

    def spread(self, value: Value, axes: tuple[str, ...]) -> str:
        return self.tile.spread(value, axes)

    def arange(self, name: str) -> str:
        return self.tile.arange(name)

    # the program's place

    def emit_grid(self) -> tuple[tuple[str, int], ...]:
        """Program id -> grid positions and tiles; the first of the returned names varies fastest."""
        s = self.schedule
        order = list(reversed([*s.names("grid"), *s.names("tile")]))
        if self.config.reverse:
            order = order[::-1]
        grid = tuple((name, self.block(name) if s.roles[name] == "tile" else 1) for name in order)
        varying = [item for item in grid if not self.is_single(*item)]
        if varying:
            self.line("pid = tl.program_id(0)")
        for position, (name, block) in enumerate(varying):
            clean = f"i_{self.clean(name)}"
            place = "pid"
            if position < len(varying) - 1:
                count = f"tl.cdiv({self.extent(name)}, {block})" if block > 1 else self.extent(name)
                place = f"pid % {count}" if len(varying) > 1 else "pid"
            if block == 1:
                self.line(f"{clean} = {place}")
                self.names[name] = Value(clean)
            else:
                self.line(f"{clean} = ({place}) * {block} + {self.arange(name)}")
                self.names[name] = Value(clean, (name,))
            if position < len(varying) - 1:
                self.line(f"pid = pid // {count}")
        for name, block in grid:
            if (name, block) not in varying:
                clean = f"i_{self.clean(name)}"
                self.line(f"{clean} = {self.arange(name) if block > 1 else 0}")
                self.names[name] = Value(clean, (name,) if block > 1 else ())
        for name, block in grid:
            self.emit_bound(name, block)
        return grid

    def is_single(self, name: str, block: int) -> bool:
        """One tile holds the whole extent, and the source may rely on it."""
        return self.schedule.extents[name] <= block

    def extent(self, name: str) -> str:
        return self.parameter("extent", name)

    def emit_bound(self, name: str, block: int) -> None:
        if block > 1 and self.schedule.extents[name] % block:
            value = self.names[name]
            self.bounds[name] = self.let(f"{value.text} < {self.extent(name)}", value.axes, f"in_{self.clean(name)}")

    # loops

    def loops(self) -> tuple[str, ...]:
        s = self.schedule
        return (
            *s.names("segment"),
            *s.names("loop"),
            *(n for n in s.names("step") if not self.is_one_step(n)),
        )

    def is_one_step(self, name: str) -> bool:
        return self.schedule.extents[name] <= self.block(name)

    def emit_loop(self, name: str) -> None:
        role, clean = self.schedule.roles[name], f"i_{self.clean(name)}"
        if role == "segment":
            self.emit_segment(name, clean)
        elif role == "loop":
            extent = self.schedule.extents[name]
            is_baked = extent <= BAKED_LOOP and not self.is_varying(name)
            self.line(f"for {clean} in range({extent if is_baked else self.extent(name)}):")
            self.depth += 1
            self.names[name] = Value(clean)
        else:
            start, block = f"start_{self.clean(name)}", self.block(name)
            self.line(f"for {start} in range(0, {self.extent(name)}, {block}):")
            self.depth += 1
            self.define_step(name, f"{start} + ")
        self.emit_level()

    def is_fused(self, loops: tuple[str, ...]) -> bool:
        """Nested loops around a dot become one, so that loads of the next round are in flight across all of them."""
        owner = self.schedule.owner
        is_side_by_side = owner is not None and bool(self.names[owner.row].axes)
        return (
            self.schedule.uses_dot
            and len(loops) > 1
            and not is_side_by_side
            and not any(map(self.is_varying, loops[1:]))
        )

    def emit_fused_loop(self, loops: tuple[str, ...]) -> None:
        outer, *inner = loops
        counts = [-(-self.schedule.extents[name] // self.step_of(name)) for name in inner]
        total = math.prod(counts)
        if self.schedule.roles[outer] == "segment":
            first, last = self.emit_pointers()
            self.line(f"for turn in range({first.text} * {total}, {last.text} * {total}):")
        else:
            block = self.step_of(outer)
            rounds = self.extent(outer) if block == 1 else f"tl.cdiv({self.extent(outer)}, {block})"
            self.line(f"for turn in range({rounds} * {total}):")
        self.depth += 1
        self.define_turn(outer, f"turn // {total}")
        for name, count in zip(inner, counts):
            total //= count
            place = f"turn // {total}" if total > 1 else "turn"
            self.define_turn(name, f"{place} % {count}")
        self.emit_level()

    def step_of(self, name: str) -> int:
        return self.block(name) if self.schedule.roles[name] == "step" else 1

    def define_turn(self, name: str, place: str) -> None:
        if self.schedule.roles[name] == "step":
            self.define_step(name, f"({place}) * {self.block(name)} + ")
        else:
            clean = f"i_{self.clean(name)}"
            self.line(f"{clean} = {place}")
            self.names[name] = Value(clean)

    def is_varying(self, name: str) -> bool:
        """The length of a tensor's first dimension (entries, groups, batch) changes from call to call."""
        roots = (self.bound.statement.output, *self.bound.statement.accesses)
        firsts = (access.indices[0] for root in roots for access in walk(root) if access.indices)
        return any(isinstance(first, Var) and first.name == name for first in firsts)

    def define_step(self, name: str, start: str = "") -> None:
        clean, block = f"i_{self.clean(name)}", self.block(name)
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

    # loads

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

    def is_known(self, names: Sequence[str]) -> bool:
        return all(name in self.names for name in names)

    def hidden_by(self, factor: Factor) -> tuple[str, ...]:
        return tuple(name for access in self.hiding(factor) for name in access.names)

    def hiding(self, factor: Factor) -> list[Access]:
        """Indirections of other factors whose -1 must hide this factor's value too: 0 * NaN is NaN."""
        found = []
        for other in self.schedule.factors:
            inside = other.indirections if isinstance(other, Access) else (other.position,)
            for root in inside:
                if set(root.names) <= set(factor.names):
                    found.append(root)
        return found

    def emit_position(self, access: Access) -> None:
        axes = self.axes_of(access.names)
        position = self.load(access, axes, "tensor", "-1", f"at_{self.clean(access.name)}", [])
        self.positions[access] = position
        if self.may_be_negative(access):
            self.valid[access] = self.let(f"{position.text} >= 0", position.axes, f"has_{self.clean(access.name)}")

    def may_be_negative(self, access: Access) -> bool:
        padded = self.flags.padded
        return padded is None or access.name in padded or any(map(self.may_be_negative, access.indirections))

    def emit_factor(self, at: int, factor: Factor) -> Value:
        axes = self.layouts.get(at) or self.axes_of(factor.names)
        if isinstance(factor, OneHot):
            position, name = self.positions[factor.position], self.names[factor.name]
            text = f"{self.spread(position, axes)} == {self.spread(name, axes)}"
            return self.let(text, axes, "one_hot", torch.bool)
        hiding = [self.valid[access] for access in self.hiding(factor) if access in self.valid]
        value = self.load(factor, axes, "tensor", "0.0", f"v_{self.clean(factor.name)}", hiding)
        dtype = self.bound.dtypes[factor.name]
        if self.flags.interpreted and dtype == torch.bfloat16:
            return Value(f"{value.text}.to(tl.float32)", value.axes, torch.float32)
        return Value(value.text, value.axes, dtype)

    def axes_of(self, names: Sequence[str]) -> tuple[str, ...]:
        found = {axis for name in names for axis in self.names[name].axes}
        return self.ordered(found)

    def load(
        self, access: Access, axes: tuple[str, ...], kind: str, other: str, stem: str, hiding: Sequence[Value]
    ) -> Value:
        pointer = self.pointer(access, kind, axes)
        masks = [self.bounds[name] for name in access.names if name in self.bounds]
        masks += [self.valid[index] for index in access.indirections if index in self.valid] + list(hiding)
        mask = self.conjunction(masks, axes)
        guard = f", mask={mask}, other={other}" if mask else ""
        return self.let(f"tl.load({pointer}{guard})", axes, stem)

    def conjunction(self, masks: Sequence[Value], axes: tuple[str, ...]) -> str:
        """All of the masks; those over the same axes meet before they are spread over the tile."""
        groups: dict[tuple[str, ...], dict[str, None]] = {}
        for mask in masks:
            groups.setdefault(mask.axes, {})[mask.text] = None
        joined = [
            Value(" & ".join(texts) if len(texts) == 1 else f"({' & '.join(texts)})", own)
            for own, texts in groups.items()
        ]
        return " & ".join(self.spread(mask, axes) for mask in joined)

    def pointer(self, access: Access, kind: str, axes: tuple[str, ...]) -> str:
        is_output = kind in ("output", "seed")
        base = self.parameter(kind, "" if is_output else access.name)
        shape = self.bound.size if is_output else self.bound.shapes[access.name]
        key = {"output": "", "seed": " seed"}.get(kind, access.name)
        strides = self.strides[key]
        dtype = self.bound.dtype if is_output else self.bound.dtypes[access.name]
        is_wide = _span(shape, strides) * dtype.itemsize >= 2**31
        terms = []
        for dim, index in enumerate(access.indices):
            value = self.index_value(index)
            text = self.spread(value, axes)
            if strides[dim] == 0 or shape[dim] == 1 or text == "0":
                if value.axes:  # the address stays, but its shape must be the tile's
                    terms.append(f"{text} * 0")
                continue
            if is_wide:
                text = f"tl.cast({text}, tl.int64)"
            terms.append(text if strides[dim] == 1 else f"{text} * {self.parameter('stride', key, dim)}")
        return " + ".join([base, *terms]) if len(axes) or terms else base

    def index_value(self, index: Index) -> Value:
        if isinstance(index, Var):
            return self.names[index.name]
        return Value(str(index.value)) if isinstance(index, Const) else self.positions[index]

    # products

    def root_axes(self) -> tuple[str, ...]:
        tree, s = self.schedule.tree, self.schedule
        axes = self.ordered(set(s.names("tile")) | (set(tree.axes) if tree is not None else set()))
        return axes[::-1] if self.config.swap and len(axes) == 2 else axes

    def assign_layouts(self, node: Node | None, axes: tuple[str, ...]) -> None:
        """Decide for each factor in which order its tile's axes are loaded, so that dots need no transpose."""
        if isinstance(node, Leaf):
            self.layouts[node.at] = tuple(axis for axis in axes if axis in node.axes)
        elif isinstance(node, Sum):
            self.assign_layouts(node.of, self.sum_axes(node, axes))
        elif isinstance(node, Product):
            self.assign_layouts(node.left, axes)
            self.assign_layouts(node.right, axes)
        elif isinstance(node, Dot):
            for side, want in self.dot_sides(node, axes):
                self.assign_layouts(side, want)

    def sum_axes(self, node: Sum, axes: tuple[str, ...]) -> tuple[str, ...]:
        if self.block(node.over) == 1:
            return axes
        return (*(axis for axis in axes if axis in node.of.axes), node.over)

    def dot_sides(self, node: Dot, axes: tuple[str, ...]) -> tuple[tuple[Node, tuple[str, ...]], ...]:
        first, second = axes
        left, right = (node.left, node.right) if first in node.left.axes else (node.right, node.left)
        return (left, (first, node.over)), (right, (node.over, second))

    def zeros(self, root: tuple[str, ...]) -> str:
        if not root:
            return f"tl.full((), 0.0, {self.accumulate})"
        shape = self.tile.shape(root)
        if isinstance(self.schedule.tree, Dot):  # a dot adds to two dimensions, whatever the tiles around it look like
            shape = Lazy(self.axes, self.tile.blocks).shape(root)
        return f"tl.zeros({shape}, {self.accumulate})"

    def emit_update(self, root: tuple[str, ...], in_loop: bool) -> None:
        tree = self.schedule.tree
        if isinstance(tree, Dot) and in_loop:
            self.line(f"acc = {self.dot(tree, root, 'acc')}")
            return
        value = self.evaluate(tree, root) if tree is not None else Value("1.0")
        text = self.wide(value, root)
        entries = self.entries_seen_from(root)
        if entries:
            text = f"tl.where({entries}, {text}, 0.0)"
        is_whole = value.axes == root and bool(root) and not entries and self.flags.lazy
        if in_loop:
            self.line(f"acc += {text}")
        elif is_whole or isinstance(tree, Dot):
            self.line(f"acc = {text}")
        else:
            self.line(f"acc = {self.zeros(root)} + {text}")

    def entries_seen_from(self, root: tuple[str, ...]) -> str:
        """Where a product has all its entries, if some factor would not notice: it lacks an index of a -1's tensor."""
        factors = self.schedule.factors
        inside = [
            access for factor in factors for access in (factor.indirections if isinstance(factor, Access) else ())
        ]
        found = [access for access in dict.fromkeys(inside) if access in self.valid]
        if self.schedule.uses_dot or all(set(access.names) <= set(f.names) for access in found for f in factors):
            return ""
        joint = self.ordered({axis for access in found for axis in self.valid[access].axes})
        seen = Value(self.conjunction([self.valid[access] for access in found], joint), joint)
        for axis in joint:
            if axis not in root:
                seen = self.tile.reduce("tl.max", Value(f"({seen.text}).to(tl.int32)", seen.axes), axis)
                seen = Value(f"({seen.text} > 0)", seen.axes)
        return self.spread(Value(f"({seen.text})", seen.axes), root)

    def wide(self, value: Value, axes: tuple[str, ...]) -> str:
        """In the type sums are taken in."""
        return self.convert(self.spread(value, axes), value)

    def convert(self, text: str, value: Value) -> str:
        if value.dtype is None or TYPES.get(value.dtype) == self.accumulate:
            return text
        return f"{text if text.isidentifier() else f'({text})'}.to({self.accumulate})"

    def evaluate(self, node: Node, axes: tuple[str, ...]) -> Value:
        if isinstance(node, Leaf):
            return self.tiles[node.at]
        if isinstance(node, Dot):
            return self.let(self.tile.result(self.dot(node, axes), axes), axes, "product")
        if isinstance(node, Sum):
            if self.block(node.over) == 1:
                return self.evaluate(node.of, axes)
            inner = self.sum_axes(node, axes)
            value = self.evaluate(node.of, inner)
            total = self.tile.reduce("tl.sum", Value(self.wide(value, value.axes), value.axes), node.over)
            return self.let(total.text, total.axes, "total")
        return self.product(node, axes)

    def product(self, node: Product, axes: tuple[str, ...]) -> Value:
        left, right = self.evaluate(node.left, axes), self.evaluate(node.right, axes)
        joint = tuple(axis for axis in axes if axis in left.axes or axis in right.axes)
        if left.dtype == torch.bool or right.dtype == torch.bool:
            chosen, value = (left, right) if left.dtype == torch.bool else (right, left)
            if value.dtype != torch.bool:
                text = f"tl.where({self.spread(chosen, joint)}, {self.wide(value, joint)}, 0.0)"
                return self.let(text, joint, "scattered")
        return self.let(f"{self.wide(left, joint)} * {self.wide(right, joint)}", joint, "scaled")

    def dot(self, node: Dot, axes: tuple[str, ...], accumulator: str = "") -> str:
        (left, left_axes), (right, right_axes) = self.dot_sides(node, axes)
        a, b = self.evaluate(left, left_axes), self.evaluate(right, right_axes)
        texts = [self.tile.operand(a, left_axes), self.tile.operand(b, right_axes)]
        dtype = a.dtype if a.dtype == b.dtype and a.dtype in TYPES else None
        if dtype is None:
            texts = [self.convert(text, value) for text, value in zip(texts, (a, b))]
        extra = f", {accumulator}" if accumulator else ""
        if self.accumulate == "tl.float64":
            return f"tl.dot({', '.join(texts)}{extra}, out_dtype=tl.float64)"
        if dtype in (None, torch.float32):
            # products of half-precision factors are at most tf32's rounding away from exact
            is_half = self.bound.dtype in (torch.float16, torch.bfloat16)
            extra += f', input_precision="{"tf32" if is_half else self.flags.precision}"'
        return f"tl.dot({', '.join(texts)}{extra})"

    # results

    def emit_scatter(self, root: tuple[str, ...]) -> None:
        s = self.schedule
        axes = tuple(axis for axis in root if axis in s.free)
        for axis in root:
            if axis not in axes:
                self.line(f"acc = {self.tile.reduce('tl.sum', Value('acc', root), axis).text}")
                root = tuple(other for other in root if other != axis)
        if self.bound.statement.scale != 1:
            self.line(f"acc *= tl.full((), {float(self.bound.statement.scale)!r}, {self.accumulate})")
        masks = [self.bounds[name] for name in s.free if name in self.bounds]
        entries = [mask for access, mask in self.valid.items() if set(access.names) <= set(s.free)]
        if s.strategy == "atomic":
            masks += entries
        elif entries:  # the element is written all the same: as zero, whatever the other factors hold
            self.line(f"acc = tl.where({self.conjunction(entries, axes)}, acc, 0.0)")
        mask = self.conjunction(masks, axes)
        guard = f", mask={mask}" if mask else ""
        if self.bound.is_seeded and not s.is_atomic:
            other = ", other=0.0" if mask else ""
            self.line(f"acc += tl.load({self.pointer(s.output, 'seed', axes)}{guard}{other}).to({self.accumulate})")
        dtype = self.flags.sum_dtype if s.is_atomic and self.flags.sum_dtype is not None else self.bound.dtype
        pointer = self.pointer(s.output, "output", axes)
        value = "acc" if TYPES[dtype] == self.accumulate else f"acc.to({TYPES[dtype]})"
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


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How far apart the first and last element lie."""
    return sum((size - 1) * abs(stride) for size, stride in zip(shape, strides) if size > 1)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
