"""`Bound` -> `Schedule`: which index is a grid position, a tile axis or a loop; dot or multiply-add; how to scatter.

| role    | the index name is                                                         |
|---------|---------------------------------------------------------------------------|
| grid    | one value per program                                                     |
| tile    | a block of values per program, an axis of its tiles                       |
| loop    | a serial loop over single values                                          |
| step    | a serial loop over blocks, an axis of the tiles                           |
| segment | a serial loop over the groups of the program's output row (owner)         |
| merged  | one of two names that one tile axis holds side by side                    |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Union

import torch

from .bind import Bound
from .contract import Dot, Node, contract, dots, multiply
from .differentiate import fresh_name
from .ir import Access, Index, Var, walk

__all__ = [
    "NARROW",
    "Merged",
    "OneHot",
    "Owner",
    "Schedule",
    "Strides",
    "is_varying",
    "resized",
    "schedules",
    "strategies",
    "written_once",
]

Strides = Mapping[str, tuple[int, ...]]

ON_CHIP_EXTENT = 64  # a scattered dimension up to this long is held whole by one program: (lmax+1)^2 at lmax 7
ON_CHIP_PROGRAMS = 256  # and only if at least this many programs remain, about two for each of a large GPU's cores
DEEP_EXTENT = 8  # a loop this long is worth taking several summands at once
SCATTERED = 8  # an element loaded alone costs its whole 32-byte sector
SHARED_LOOP = 1024  # a loop this long is shared by several programs
SHARED_PROGRAMS = 128  # where there would be fewer than this many, one for each of a large GPU's cores,
SHARED_TILE = 64  # with tiles of this size
NARROW = 32  # a dot's tile up to this wide is made wider by neighbours, which share what the other side loads
SPLIT_EXTENT = 8192  # a sum this long over few outputs is cut over programs that add atomically


@dataclass(frozen=True)
class OneHot:
    """1 where `position` equals index `name`, else 0: a scatter as a factor."""

    position: Access
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.name, *self.position.names)))

    def __str__(self) -> str:
        return f"[{self.position} == {self.name}]"


Factor = Union[Access, OneHot]  # noqa: UP007 - evaluated before the classes exist on Python 3.10


@dataclass(frozen=True)
class Owner:
    """Each program owns row `row` of the output and walks that row's groups, index `segment`."""

    row: str
    segment: str
    fact: str


@dataclass(frozen=True)
class Merged:
    """Tile axis `name` runs over two index names side by side: `outer = name // width`, `inner = name % width`."""

    name: str
    outer: str
    inner: str
    width: int


@dataclass(frozen=True)
class Schedule:
    """A bound statement with a role for every index; prints as a table."""

    bound: Bound
    strategy: str
    output: Access
    factors: tuple[Factor, ...]
    extents: Mapping[str, int]
    roles: Mapping[str, str]
    tree: Node | None
    owner: Owner | None = None
    fact: str = ""
    is_shared: bool = False  # several programs share one sum, each with a part of the longest loop
    merged: Merged | None = None

    @cached_property
    def free(self) -> tuple[str, ...]:
        return self.output.names

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names that are axes of tiles, in their usual order: rows, then what is summed, then columns."""
        tiles, steps = self.names("tile"), self.names("step")
        if len(tiles) == 1 and not self.uses_dot and self.is_along(tiles[0]):
            return (*steps, *tiles)
        return (*tiles[:1], *steps, *tiles[1:])

    @cached_property
    def uses_dot(self) -> bool:
        return bool(dots(self.tree))

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
        """Every element of the output is written, so it needs no initial value."""
        is_tiled = self.owner is not None and bool(
            self.output.indirections
        )  # each tile owns rows, every row has a tile
        if self.strategy == "store-once" or is_tiled:
            return True
        names = [index.name for index in self.output.indices if isinstance(index, Var)]
        return len(set(names)) == len(self.output.indices) and not self.is_atomic

    def sum_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        """The type in which partial sums meet in memory; `wanted` holds where a few do."""
        own = self.bound.dtype
        if self.is_shared and own.itemsize == 2:  # hundreds of parts for a few results: a wider type costs nothing
            return torch.float32
        return wanted if self.is_atomic and wanted is not None else own

    def is_along(self, name: str) -> bool:
        """The name runs along the output's last dimension, so along memory."""
        return bool(self.output.indices) and str(self.output.indices[-1]) == name

    def is_kept(self, axis: str) -> bool:
        """A tile axis that the output has, so that nothing is summed over it."""
        return axis in self.free or (self.merged is not None and axis == self.merged.name)

    def names(self, *roles: str) -> tuple[str, ...]:
        return tuple(name for name, role in self.roles.items() if role in roles)

    def __str__(self) -> str:
        rows = [f"{'index':10}{'extent':>10}  role"]
        rows += [f"{name:10}{self.extents[name]:>10}  {role}" for name, role in self.roles.items()]
        product = "tl.dot" if self.uses_dot else "multiply-add" if self.is_sum else f"multiply-{self.reduction}"
        shared = ", sums shared by programs" if self.is_shared else ""
        return "\n".join([f"scatter: {self.strategy}, product: {product}{shared}", *rows])


def written_once(name: str) -> str:
    """The fact that an index tensor points to every place once, whatever its -1s."""
    return f"{name} once"


def is_varying(bound: Bound, name: str) -> bool:
    """The length of a tensor's first dimension (entries, groups, batch) changes from call to call."""
    roots = (bound.statement.output, *bound.statement.accesses)
    firsts = (access.indices[0] for root in roots for access in walk(root) if access.indices)
    return any(isinstance(first, Var) and first.name == name for first in firsts)


def strategies(bound: Bound, fact: str = "", deterministic: bool = False) -> tuple[str, ...]:
    """How the result may reach the output, the most promising first.

    Empty: nothing deterministic fits, or a max or min is scattered to rows that no program can own.
    """
    indices = bound.statement.output.indices
    scattered = [index for index in indices if isinstance(index, Access)]
    if not scattered:
        return ("store",)
    direct = [index.name for index in indices if isinstance(index, Var)]
    is_simple = (
        len(scattered) == 1
        and len(direct) == len(indices) - 1
        and len(set(direct)) == len(direct)
        and not set(direct) & set(scattered[0].names)
    )
    found = []
    is_sum = bound.statement.is_sum
    if is_simple and fact == written_once(scattered[0].name):
        return ("store-once",)
    if is_simple and is_sum and bound.size[indices.index(scattered[0])] <= ON_CHIP_EXTENT:
        apart = direct[:-1] if len(direct) > 1 else direct  # the last dimension is a tile, not programs
        if math.prod(bound.extents[name] for name in apart) >= ON_CHIP_PROGRAMS:
            found.append("on-chip")
    if is_simple and owned_by(scattered[0], fact) is not None:
        if scattered[0].name != fact:  # tiles own their rows
            return ("owner",)
        found.append("owner")
        if is_sum and not deterministic and not bound.is_seeded:
            found.append("store-or-atomic")
    if is_sum and not deterministic and "store-or-atomic" not in found:
        found.append("atomic")
    return tuple(found)


def owned_by(scattered: Access, fact: str) -> Access | None:
    """The access whose values own what is scattered to, if `fact` says so.

    "AM": AM[p] ascends, and each of its values owns a row. "ROW.TILE": TILE[p] ascends, and each of its values t owns
    the rows ROW[t,...]; ROW holds every row of the output once, and -1 where a tile is not full.
    """
    outer, _, inner = fact.rpartition(".")
    owner: Index = scattered
    if outer:
        if scattered.name != outer or not all(isinstance(index, Var) for index in scattered.indices[1:]):
            return None
        owner = scattered.indices[0]
    if not isinstance(owner, Access) or owner.name != inner:
        return None
    return owner if all(isinstance(index, Var) for index in owner.indices) else None


def schedules(
    bound: Bound,
    strides: Strides,
    strategy: str,
    fact: str = "",
    deterministic: bool = False,
    use_dot: bool | None = None,
) -> tuple[Schedule, ...]:
    """The ways worth trying to run a statement with one scatter strategy, the most promising first.

    `use_dot`: True or False allows one kind of product only; None lets extents decide.
    """
    start = _Start.of(bound, strategy, fact)
    found = []
    may_dot = use_dot is not False and bound.statement.is_sum
    dotted = _dot_schedule(start, strides) if may_dot else None
    if dotted is not None and (use_dot or _is_worth_a_dot(dotted)):
        found += [*_merged_schedules(start, dotted), dotted]
    if not found:
        found.append(_plain_schedule(start, strides, deterministic))
        deep = _deep_schedule(start, found[0])
        found += [deep] if deep is not None else []
    if not deterministic and _is_worth_sharing(found[0]):
        found.insert(0, replace(found[0], strategy="atomic", is_shared=True))
    return tuple(found)


def resized(schedule: Schedule, bound: Bound, fact: str) -> Schedule:
    """The same schedule for a statement of other extents."""
    extents = dict(_Start.of(bound, schedule.strategy, fact).extents)
    if schedule.merged is not None:
        extents[schedule.merged.name] = extents[schedule.merged.outer] * schedule.merged.width
    return replace(schedule, bound=bound, extents=extents)


@dataclass(frozen=True)
class _Start:
    """The statement after its scatter strategy has had its say, before roles."""

    bound: Bound
    strategy: str
    output: Access
    factors: tuple[Factor, ...]
    extents: Mapping[str, int]
    owner: Owner | None
    fact: str
    merged: Merged | None = None

    @staticmethod
    def of(bound: Bound, strategy: str, fact: str) -> _Start:
        statement = bound.statement
        start = _Start(bound, strategy, statement.output, statement.accesses, dict(bound.extents), None, "")
        if strategy == "owner":
            return start.owned(fact)
        if strategy == "on-chip":
            return start.on_chip()
        return replace(start, fact=fact if strategy == "store-or-atomic" else "")

    @property
    def scattered(self) -> Access:
        return self.output.indirections[0]

    @property
    def _scattered_dim(self) -> int:
        return self.output.indices.index(self.scattered)

    def fresh(self, wanted: str) -> str:
        return fresh_name(wanted, self.extents)

    def owned(self, fact: str) -> _Start:
        """`C[AM[p],n]` becomes `C[r,n]`; p is summed over the groups of row r.

        `C[ROW[TILE[p],q],n]` becomes `C[ROW[r,q],n]`: a row of ROW has its groups instead.
        """
        access = owned_by(self.scattered, fact)
        assert access is not None
        row, segment = self.fresh("r"), str(access.indices[0])
        is_tile = access is not self.scattered
        rows = self.bound.shapes[self.scattered.name] if is_tile else self.bound.size[self._scattered_dim :]
        swap = {access: Var(row)}
        factors = tuple(_substitute(factor, swap) for factor in self.factors if isinstance(factor, Access))
        owner, extents = Owner(row, segment, access.name), {**self.extents, row: rows[0]}
        return replace(self, output=_substitute(self.output, swap), factors=factors, extents=extents, owner=owner)

    def side_by_side(self, outer: str, inner: str) -> _Start:
        """One axis for two names, the values of `inner` for one value of `outer` after another."""
        merged = Merged(self.fresh("c"), outer, inner, self.extents[inner])
        extents = {**self.extents, merged.name: self.extents[outer] * merged.width}
        return replace(self, extents=extents, merged=merged)

    def on_chip(self) -> _Start:
        """`Z[b,I[p,q],w]` becomes `Z[b,s,w]` with one more factor, 1 where I[p,q] is s."""
        name = self.fresh("s")
        extents = {**self.extents, name: self.bound.size[self.output.indices.index(self.scattered)]}
        output = _substitute(self.output, {self.scattered: Var(name)})
        return replace(self, output=output, factors=(*self.factors, OneHot(self.scattered, name)), extents=extents)

    @property
    def free(self) -> tuple[str, ...]:
        return self.output.names

    @property
    def summed(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for factor in self.factors for name in factor.names)
        if self.owner is not None:
            names.setdefault(self.owner.segment)
        return tuple(name for name in names if name not in self.free)

    def varies_over(self, factor: Factor) -> set[str]:
        """The names a factor's tile changes with: groups follow the row that owns them."""
        names = set(factor.names)
        if self.owner is not None and self.owner.segment in names:
            names.add(self.owner.row)
        if self.merged is not None and names & {self.merged.outer, self.merged.inner}:
            names.add(self.merged.name)
        return names

    @property
    def segment(self) -> str | None:
        return self.owner.segment if self.owner is not None else None


def _substitute(access: Access, swap: Mapping[Access, Index]) -> Access:
    def index(item: Index) -> Index:
        if isinstance(item, Access):
            return swap.get(item) or _substitute(item, swap)
        return item

    return replace(access, indices=tuple(map(index, access.indices)))


def _finish(
    start: _Start, tiles: tuple[str, ...], steps: tuple[str, ...], tree: Node | None, strategy: str = ""
) -> Schedule:
    """Roles for the names that are no tile axis: what is written is a grid position, what is summed is a loop."""
    roles: dict[str, str] = {}
    together = (start.merged.outer, start.merged.inner) if start.merged is not None else ()
    for name in start.free:
        if name not in tiles:
            roles[name] = "merged" if name in together else "grid"
    roles.update(dict.fromkeys(tiles, "tile"))
    if start.segment is not None:
        roles[start.segment] = "segment"
    for name in start.summed:
        if name not in roles and name not in steps:
            roles[name] = "loop"
    roles.update(dict.fromkeys(steps, "step"))
    return Schedule(
        start.bound,
        strategy or start.strategy,
        start.output,
        start.factors,
        start.extents,
        roles,
        tree,
        start.owner,
        start.fact,
        merged=start.merged,
    )


def _tree(start: _Start, tiles: tuple[str, ...], steps: tuple[str, ...], use_dot: bool) -> Node | None:
    axes = {*tiles, *steps}
    leaves = [frozenset(axes.intersection(start.varies_over(factor))) for factor in start.factors]
    if not start.bound.statement.is_sum:
        return multiply(leaves)
    return contract(leaves, frozenset(tiles), {axis: min(start.extents[axis], 128) for axis in axes}, use_dot)


def _dot_schedule(start: _Start, strides: Strides) -> Schedule | None:
    """The best choice of rows, columns and summed axes such that every product of tiles is a dot."""
    row = {start.owner.row} if start.owner is not None else set()
    rows = [name for name in start.free if name not in row]
    sums = [name for name in start.summed if name != start.segment]
    best: tuple[float, Schedule] | None = None
    for wide, deep in ((2, 1), (2, 2), (1, 3)):
        for steps in combinations(sums, deep):
            for tiles in combinations(rows, wide):
                tree = _tree(start, tiles, steps, use_dot=True)
                if tree is None or not dots(tree) or len(tree.axes | set(tiles)) > 2:
                    continue
                if wide == 2 and {dot.over for dot in dots(tree)} != set(steps):
                    continue
                cost = _loaded_elements(start, {*tiles, *steps}, strides)
                if best is None or cost < best[0]:
                    best = cost, _finish(start, tiles, steps, tree)
    return best[1] if best else None


def _merged_schedules(start: _Start, narrow: Schedule) -> tuple[Schedule, ...]:
    """A narrow dot with its neighbours along a grid position beside it: what only the other side has is loaded once."""
    tiles, steps = narrow.names("tile"), narrow.names("step")
    if len(tiles) != 2 or max(start.extents[name] for name in tiles) > NARROW:
        return ()
    for inner, other in (tiles, tiles[::-1]):
        for outer in narrow.names("grid"):
            if not _may_merge(start, outer, inner, other):
                continue
            wide = start.side_by_side(outer, inner)
            assert wide.merged is not None
            axes = tuple(wide.merged.name if name == inner else name for name in tiles)
            tree = _tree(wide, axes, steps, use_dot=True)
            if isinstance(tree, Dot) and {dot.over for dot in dots(tree)} == set(steps):
                return (_finish(wide, axes, steps, tree),)
    return ()


def _may_merge(start: _Start, outer: str, inner: str, other: str) -> bool:
    """Tiles of a fixed power of two that `outer` moves, while it does not move those along `other`."""
    width, names = start.extents[inner], start.bound.statement.free
    if outer not in names or inner not in names or start.extents[outer] < 2 or width & (width - 1):
        return False
    if is_varying(start.bound, outer) or is_varying(start.bound, inner):
        return False
    moved = [start.varies_over(factor) for factor in start.factors if outer in start.varies_over(factor)]
    return bool(moved) and all(other not in names for names in moved)


def _loaded_elements(start: _Start, axes: set[str], strides: Strides) -> float:
    """Elements that all programs load together with tiles of at most 128 along `axes`; scattered ones count more."""
    blocks = {name: min(start.extents[name], 128) if name in axes else 1 for name in start.extents}
    programs = math.prod(start.extents[name] / blocks[name] for name in start.free)
    total = 0.0
    for factor in start.factors:
        if isinstance(factor, Access):
            names = [name for name in factor.names if name not in start.free]
            tile = math.prod(blocks[name] for name in factor.names if name in start.free)
            steps = strides[factor.name]
            unit = {
                index.name for dim, index in enumerate(factor.indices) if isinstance(index, Var) and steps[dim] == 1
            }
            is_scattered = bool(unit) and not unit & axes
            total += (
                programs * tile * math.prod(start.extents[name] for name in names) * (SCATTERED if is_scattered else 1)
            )
    return total


def _is_worth_a_dot(schedule: Schedule) -> bool:
    """Tensor Cores want 16 x 16 x 16; a padded side may be as short as 4, but not two of the three."""
    for dot in dots(schedule.tree):
        extents = sorted(schedule.extents[name] for name in (*dot.axes, dot.over))
        if extents[0] < 4 or extents[1] < 12:
            return False
    return True


def _is_worth_sharing(schedule: Schedule) -> bool:
    """Too few results to keep a GPU busy, each a long sum: the gradient of weights that all rows share."""
    if not schedule.is_sum or schedule.strategy not in ("store", "store-once", "atomic"):
        return False
    longest = max((schedule.extents[name] for name in schedule.names("loop", "step")), default=0)
    programs = math.prod(
        -(-schedule.extents[name] // SHARED_TILE) if role == "tile" else schedule.extents[name]
        for name, role in schedule.roles.items()
        if role in ("grid", "tile")
    )
    return longest >= SHARED_LOOP and programs < SHARED_PROGRAMS


def _contiguity(start: _Start, strides: Strides) -> dict[str, int]:
    """For each name, how many elements are read or written along a unit stride of it."""
    found: dict[str, int] = {}
    for factor in (start.output, *start.factors):
        if isinstance(factor, Access):
            elements = math.prod(start.extents[name] for name in factor.names)
            # the output is allocated contiguous: its last dimension has unit stride
            steps = strides.get(factor.name) if factor is not start.output else None
            for dim, index in enumerate(factor.indices):
                unit = steps[dim] == 1 if steps is not None else dim == len(factor.indices) - 1
                if isinstance(index, Var) and unit:
                    found[index.name] = found.get(index.name, 0) + elements
    return found


def _deep_schedule(start: _Start, plain: Schedule) -> Schedule | None:
    """Instead of several results side by side, several summands: many gathers in flight for rows of many entries."""
    sums = [name for name in plain.names("loop") if start.extents[name] >= DEEP_EXTENT]
    if not sums or plain.names("step") or not plain.names("tile"):
        return None
    tiles, steps = plain.names("tile")[-1:], (max(sums, key=lambda name: start.extents[name]),)
    return _finish(start, tiles, steps, _tree(start, tiles, steps, use_dot=False))


def _plain_schedule(start: _Start, strides: Strides, deterministic: bool) -> Schedule:
    """No dot: one axis along memory, one more over results, everything else serial."""
    contiguous = _contiguity(start, strides)
    row = start.owner.row if start.owner is not None else None
    candidates = [name for name in (*start.free, *start.summed) if name not in (row, start.segment)]
    vector = max(candidates, key=lambda name: (contiguous.get(name, 0), start.extents[name]), default=None)
    others = [name for name in start.free if name != vector]
    other = row or max(others, key=lambda name: start.extents[name], default=None)
    scatter = start.factors[-1] if start.factors else None
    if isinstance(scatter, OneHot) and vector != scatter.name:
        other = scatter.name
    tiles = tuple(name for name in (other, vector) if name is not None and name in start.free)
    steps = (vector,) if vector is not None and vector not in start.free else ()
    strategy = start.strategy
    results = math.prod(start.extents[name] for name in start.free)
    is_long = any(start.extents[name] >= SPLIT_EXTENT >= results for name in steps)
    if strategy == "store" and start.bound.statement.is_sum and not deterministic and is_long:
        tiles, steps, strategy = (*tiles, *steps), (), "atomic"
    return _finish(start, tiles, steps, _tree(start, tiles, steps, use_dot=False), strategy)
