"""Scatter strategies: how a result may reach the output, and the statement as each strategy rewrites it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Union

from ...formats.facts import ConstantTables, Fact, OwnedRows, WrittenOnce, piece_count
from ..binding import Bound
from ..language import Access, Const, Index, Var, fresh_name, substituted, walk
from .constant_tables import is_permutation
from .device import device_of

__all__ = [
    "ON_CHIP_EXTENT",
    "Factor",
    "Flat",
    "Merged",
    "OneHot",
    "Owner",
    "Start",
    "is_in_set",
    "is_varying",
    "owned_by",
    "owned_rows",
    "scatters_to_rows",
    "strategies",
]

# A scattered dimension up to this long is held whole by one program, beside 64 columns as tuning starts with: its sums
# are 32 registers for each of four warps' threads. And at least so many programs remain for each multiprocessor. Both
# are estimated, not measured.
ON_CHIP_EXTENT = 32 * 4 * 32 // 64
ON_CHIP_PROGRAMS = 2


@dataclass(frozen=True)
class OneHot:
    """A scatter as a factor: 1 where `position` equals index `name`, else 0."""

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
    """Each program owns row `row` of the output and loops over that row's groups, index `segment`."""

    row: str
    segment: str
    index: str  # the index tensor whose values own rows
    is_cut: bool = False  # what a program has is a piece of a row's groups, by whose number `row` is counted
    is_packed: bool = False  # a piece may have the groups of several rows
    counted_by: str = ""  # the index tensor that numbers groups, as winners are told by; "" for their places


@dataclass(frozen=True)
class Merged:
    """Tile axis `name` runs over two index names side by side: `outer = name // width`, `inner = name % width`."""

    name: str
    outer: str
    inner: str
    width: int


@dataclass(frozen=True)
class Flat:
    """Tile axis `name` runs over all values of several index names, `parts`, the last of which is the fastest."""

    name: str
    parts: tuple[str, ...]


def is_varying(bound: Bound, name: str) -> bool:
    """Whether an index runs over a tensor's first dimension (entries, groups, batch), whose length varies by call."""
    if name in bound.dynamic:
        return True
    roots = (bound.statement.output, *bound.statement.accesses)
    firsts = (access.indices[0] for root in roots for access in walk(root) if access.indices)
    return any(isinstance(first, Var) and first.name == name for first in firsts)


def is_of_one_length(bound: Bound, name: str) -> bool:
    """Whether an index has one length in all calls that a kernel serves: it runs over a dimension that is not a first.

    It may vary by call all the same, and each length then has a kernel of its own, of the same source if that holds
    nothing but what many lengths share.
    """
    if name in bound.dynamic:
        return False
    roots = (bound.statement.output, *bound.statement.accesses)
    others = (index for root in roots for access in walk(root) for index in access.indices[1:])
    return any(isinstance(index, Var) and index.name == name for index in others)


def strategies(
    bound: Bound, fact: Fact | None = None, deterministic: bool = False, full: bool = False
) -> tuple[str, ...]:
    """Return how the result may reach the output, the most promising first.

    The result is empty if no deterministic strategy fits, or if a max or min is scattered to rows that no program can
    own. If `full`, atomic sums come after the strategies that rules prefer, whatever the fact says of rows. A sum on
    chip is not added to them: it multiplies by zeros what other rows get, so that a NaN reaches them all.
    """
    preferred = _preferred(bound, fact, deterministic)
    is_scattered = any(isinstance(index, Access) for index in bound.statement.output.indices)
    if not full or not preferred or not is_scattered or not bound.statement.is_sum or "store-once" in preferred:
        return preferred
    return preferred if deterministic or "atomic" in preferred else (*preferred, "atomic")


def scatters_to_rows(indices: tuple[Index, ...]) -> bool:
    """Whether one dimension of the output is scattered to, and every other one has an index name of its own."""
    scattered = [index for index in indices if isinstance(index, Access)]
    direct = [index.name for index in indices if isinstance(index, Var)]
    return (
        len(scattered) == 1
        and len(direct) == len(indices) - 1
        and len(set(direct)) == len(direct)
        and not set(direct) & set(scattered[0].names)
    )


def _preferred(bound: Bound, fact: Fact | None, deterministic: bool) -> tuple[str, ...]:
    """Return the strategies that rules would have tried, the most promising first."""
    indices = bound.statement.output.indices
    scattered = [index for index in indices if isinstance(index, Access)]
    if not scattered:
        return ("store",)
    direct = [index.name for index in indices if isinstance(index, Var)]
    has_owners, is_sum = scatters_to_rows(indices), bound.statement.is_sum
    preferred = []
    if has_owners and _is_written_once(bound, scattered[0], fact):
        return ("store-once",)
    if has_owners and is_sum and bound.size[indices.index(scattered[0])] <= ON_CHIP_EXTENT:
        apart = direct[:-1] if len(direct) > 1 else direct  # the last dimension is a tile, not programs
        if math.prod(bound.extents[name] for name in apart) >= ON_CHIP_PROGRAMS * device_of(bound.device).wave:
            preferred.append("on-chip")
    if has_owners and owned_by(scattered[0], fact) is not None:
        if owns_tiles(fact):
            return ("owner",)
        preferred.append("owner")
        tells_shared = isinstance(fact, OwnedRows) and not fact.is_whole
        if is_sum and not deterministic and not bound.is_seeded and tells_shared:
            preferred.append("store-or-atomic")
    if is_sum and not deterministic and "store-or-atomic" not in preferred:
        preferred.append("atomic")
    return tuple(preferred)


def _is_written_once(bound: Bound, scattered: Access, fact: Fact | None) -> bool:
    """Whether the fact says that each element of the output is written once.

    Constant tables say so if each of their numbers is read once, and they are a permutation of all positions.
    """
    if isinstance(fact, WrittenOnce):
        return fact.index == scattered.name
    table = fact.numbers.get(scattered.name) if isinstance(fact, ConstantTables) else None
    names = [index.name for index in scattered.indices if isinstance(index, Var)]
    if table is None or len({*names}) < len(scattered.indices):
        return False
    length = bound.size[bound.statement.output.indices.index(scattered)]
    return bound.shapes[scattered.name] == tuple(bound.extents[name] for name in names) and is_permutation(
        table, length
    )


def owns_tiles(fact: Fact | None) -> bool:
    """Whether a program owns a tile of several rows."""
    return isinstance(fact, OwnedRows) and bool(fact.tiles)


def owned_by(scattered: Access, fact: Fact | None) -> Access | None:
    """Return the access whose values own rows of the output, AM[p], or TILE[p] in ROW[TILE[p],q]; None if none does."""
    if not isinstance(fact, OwnedRows) or scattered.name != fact.rows:
        return None
    owner: Index = scattered
    if fact.tiles:
        if not all(isinstance(index, Var) for index in scattered.indices[1:]):
            return None
        owner = scattered.indices[0]
    if not isinstance(owner, Access) or owner.name != fact.owner:
        return None
    if owner is not scattered and set(owner.names) & {str(index) for index in scattered.indices[1:]}:
        return None  # the rows of a tile would depend on its groups
    return owner if all(isinstance(index, Var) for index in owner.indices) else None


def is_in_set(owner: Owner | None, output: Access, name: str) -> bool:
    """Whether an owner has several rows of the output, among which `name` counts."""
    return owner is not None and any(name in access.names for access in output.indirections)


def owned_rows(bound: Bound, fact: Fact | None, is_cut: bool) -> int:
    """Return how many rows are owned: those of the output, or of ROW if tiles of rows are owned; or how many pieces."""
    output = bound.statement.output
    if is_cut:
        assert isinstance(fact, OwnedRows)
        rows, groups = bound.size[bound.statement.scatter_dim], bound.shapes[fact.rows][0]
        return piece_count(rows, groups, fact.cut, fact.is_packed)
    return bound.shapes[output.indirections[0].name][0] if owns_tiles(fact) else bound.size[bound.statement.scatter_dim]


@dataclass(frozen=True)
class Start:
    """A statement as its scatter strategy has rewritten it, before indices have roles."""

    bound: Bound
    strategy: str
    output: Access
    factors: tuple[Factor, ...]
    extents: Mapping[str, int]
    owner: Owner | None
    shared_index: str = ""  # the index tensor of rows that several groups may add to; "" where nothing tells which do
    merged: Merged | None = None
    flats: tuple[Flat, ...] = ()

    @staticmethod
    def of(bound: Bound, strategy: str, fact: Fact | None) -> Start:
        """Return a bound statement as a scatter strategy rewrites it."""
        statement = bound.statement
        start = Start(bound, strategy, statement.output, statement.accesses, dict(bound.extents), None)
        if strategy == "owner":
            return start.owned(fact)
        if strategy == "on-chip":
            return start.on_chip()
        if strategy != "store-or-atomic":
            return start
        shared = replace(start, shared_index=start.scattered.name)
        return shared.owned(fact, is_cut=True) if isinstance(fact, OwnedRows) and fact.cut else shared

    @property
    def scattered(self) -> Access:
        return self.output.indirections[0]

    def fresh(self, wanted: str) -> str:
        return fresh_name(wanted, self.extents)

    def owned(self, fact: Fact | None, is_cut: bool = False) -> Start:
        """Return the statement with owned rows: `C[AM[p],n]` becomes `C[r,n]`, with p over the groups of row r.

        `C[ROW[TILE[p],q],n]` becomes `C[ROW[r,q],n]`, where the groups belong to a row of ROW. If `is_cut`, p runs over
        a piece of the groups of row r.
        """
        access = owned_by(self.scattered, fact)
        assert access is not None
        row, segment = self.fresh("r"), str(access.indices[0])
        is_packed = is_cut and isinstance(fact, OwnedRows) and fact.is_packed
        output = substituted(self.output, {access: Var(row)})
        swap: dict[Index, Index] = {} if is_packed else {access: Var(row)}  # entries of a piece may be of several rows
        # groups of one entry need no loop over their entries, which several at a time are then taken of; the place of
        # a winner is counted by all names
        if self.bound.statement.is_sum:
            single = [name for name in self.summed if self.extents[name] == 1 and not is_varying(self.bound, name)]
            swap |= {Var(name): Const(0) for name in single}
        factors = tuple(substituted(factor, swap) for factor in self.accesses)
        counted_by = fact.counted_by if isinstance(fact, OwnedRows) else ""
        owner = Owner(row, segment, access.name, is_cut, is_packed, counted_by)
        extents = {**self.extents, row: owned_rows(self.bound, fact, is_cut)}
        return replace(self, output=output, factors=factors, extents=extents, owner=owner)

    def side_by_side(self, outer: str, inner: str, axis: str) -> Start:
        """Return the statement with one axis for two names: all values of `inner` for each value of `outer`."""
        merged = Merged(self.fresh(axis), outer, inner, self.extents[inner])
        extents = {**self.extents, merged.name: self.extents[outer] * merged.width}
        return replace(self, extents=extents, merged=merged)

    def with_axes(self, groups: Collection[tuple[str, ...]]) -> tuple[Start, tuple[str, ...]]:
        """Return the statement with one axis for all values of each group of names, and the names of the axes."""
        flats = {group: Flat(self.fresh("_".join(group)), group) for group in groups if len(group) > 1}
        lengths = {flat.name: math.prod(self.extents[part] for part in flat.parts) for flat in flats.values()}
        start = replace(self, extents={**self.extents, **lengths}, flats=(*self.flats, *flats.values()))
        return start, tuple(flats[group].name if group in flats else group[0] for group in groups)

    def on_chip(self) -> Start:
        """Return the statement with `Z[b,s,w]` for `Z[b,I[p,q],w]` and one more factor, 1 where I[p,q] is s."""
        name = self.fresh("s")
        extents = {**self.extents, name: self.bound.size[self.output.indices.index(self.scattered)]}
        output = substituted(self.output, {self.scattered: Var(name)})
        return replace(self, output=output, factors=(*self.factors, OneHot(self.scattered, name)), extents=extents)

    @property
    def free(self) -> tuple[str, ...]:
        """The index names of the output."""
        return self.output.names

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        """The factors that read a tensor, in order."""
        return tuple(factor for factor in self.factors if isinstance(factor, Access))

    @property
    def summed(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for factor in self.factors for name in factor.names)
        if self.owner is not None:
            names.setdefault(self.owner.segment)
        return tuple(name for name in names if name not in self.free)

    def parts_of(self, axis: str) -> tuple[str, ...]:
        """Return the index names that an axis holds, the fastest last: itself, or those of a flattened axis."""
        return next((flat.parts for flat in self.flats if flat.name == axis), (axis,))

    def varies_over(self, factor: Factor) -> set[str]:
        """Return the names that a factor's tile depends on; groups depend on the row that owns them."""
        names = set(factor.names)
        if self.owner is not None and self.owner.segment in names:
            names.add(self.owner.row)
        if self.merged is not None and names & {self.merged.outer, self.merged.inner}:
            names.add(self.merged.name)
        names.update(flat.name for flat in self.flats if names.intersection(flat.parts))
        return names

    @property
    def segment(self) -> str | None:
        return self.owner.segment if self.owner is not None else None
