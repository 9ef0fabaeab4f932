"""A statement over tiles of equal index: `Y[p,m] += X[p,c] * W[E[p],c,m]` as `Y[P[t,q],m] += X[P[t,q],c] * W[F[t],c,m]`.

`P` [T, Q] lists the positions p of each tile, all of which have one value of `E`, and -1 where a tile is not full; `F`
[T] is that value. A weight that an index chooses is then shared by the rows of a tile, so that products with it are
matrix products. The same rewrite makes a scatter `Y[E[p],m] += ...` one over `Y[F[t],m]`, whose tiles of one row
ascend: a program owns a row and sums it without atomic additions. With Q of 1, `P` [T] is the order of sorted positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..binding import Bound, Meta, bind, row_major
from ..language import Access, Index, Statement, Var, fresh_name, walk
from .schedule import Strides, schedules
from .scatter import strategies

__all__ = ["Grouping", "groupings"]

TILES = (128, 64, 32, 16)  # positions of a tile: rows of a matrix product, of which Tensor Cores take 16 at least
MOST_TILES = 2  # lengths of tiles that are tried for one index


@dataclass(frozen=True)
class Grouping:
    """A statement over the positions of an index tensor, grouped by its values."""

    statement: Statement
    index: str  # the tensor whose equal values are brought together
    positions: str  # the name of P
    values: str  # the name of F
    tile: int  # Q; 1: positions [T] are sorted, none is -1
    count: int  # the values are from 0 to count - 1
    is_scattered: bool  # the output has a row for each value
    is_stored_once: bool  # the output has a row for each position

    def __str__(self) -> str:
        what = f"{self.tile} equal {self.index}" if self.tile > 1 else f"sorted {self.index}"
        return f"{what}: {self.statement}"


def groupings(bound: Bound, strides: Strides) -> tuple[Grouping, ...]:
    """Return the ways to group the products of a sum by one of its index tensors, the most promising first.

    A weight is grouped if its products become matrix products, which they are not yet; a scatter always.
    """
    statement = bound.statement
    if not statement.is_sum or bound.is_empty or bound.is_seeded:
        return ()
    candidates: list[Grouping] = []
    has_dots: bool | None = None
    for access in dict.fromkeys(statement.index_accesses):
        if len(access.indices) != 1 or not isinstance(access.indices[0], Var) or access.name in statement.output.name:
            continue
        count = _count(bound, access)
        is_scattered = access in statement.output.indices
        if count is None or (not is_scattered and access in [inner for inner in walk(statement.output)]):
            continue
        if is_scattered:
            lengths = (1, *_lengths(bound, access, count))
        else:
            if has_dots is None:
                has_dots = _has_dots(bound, strides)
            lengths = () if has_dots else _lengths(bound, access, count)
        for tile in lengths:
            grouping = _grouped(bound, access, tile, count)
            if tile == 1 or _has_dots(*_rebound(grouping, bound, strides)):
                candidates.append(grouping)
    return tuple(candidates)


def _count(bound: Bound, access: Access) -> int | None:
    """Return how many values an index access may have; None if it points into several dimensions of different sizes."""
    extents = {pointed.extent for pointed in bound.pointed if pointed.index == access.name}
    return min(extents) if extents else None


def _lengths(bound: Bound, access: Access, count: int) -> tuple[int, ...]:
    """Return the lengths of tiles that are worth trying: about half a group, so that little of them is padding."""
    positions = bound.extents[access.names[0]]
    mean = positions / max(min(count, positions), 1)
    fitting = [tile for tile in TILES if tile <= mean] or list(TILES[-1:])
    return tuple(fitting[:MOST_TILES])


def _grouped(bound: Bound, access: Access, tile: int, count: int) -> Grouping:
    """Return a statement with `access` as F[t] and its index name as P[t,q], or P[t] for single positions."""
    statement, (name,) = bound.statement, access.names
    taken = {*statement.tensor_names, statement.output.name, *statement.names}
    made: list[str] = []
    for wanted in ("P", "F", "t", "q"):
        made.append(fresh_name(wanted, {*taken, *made}))
    positions, values, t, q = made
    listed = Access(positions, (Var(t), Var(q)) if tile > 1 else (Var(t),))
    swap: dict[Index, Index] = {access: Access(values, (Var(t),)), Var(name): listed}
    output = _swapped(statement.output, swap)
    factors = tuple(_swapped(factor, swap) if isinstance(factor, Access) else factor for factor in statement.factors)
    direct = [index for index in statement.output.indices if index == Var(name)]
    return Grouping(
        Statement(output, factors, statement.op),
        access.name,
        positions,
        values,
        tile,
        count,
        access in statement.output.indices,
        len(direct) == 1,
    )


def _swapped(access: Access, swap: Mapping[Index, Index]) -> Access:
    """Return an access with indices in the place of others, at any depth."""

    def swapped(index: Index) -> Index:
        if index in swap:
            return swap[index]
        return _swapped(index, swap) if isinstance(index, Access) else index

    return replace(access, indices=tuple(map(swapped, access.indices)))


def tiles_of(positions: int, tile: int, count: int) -> int:
    """Return a number of tiles that suffices for any index: each value has one tile at most that is not full."""
    return -(-positions // tile) + min(count + 1, positions) if tile > 1 else positions


def _rebound(grouping: Grouping, bound: Bound, strides: Strides) -> tuple[Bound, Strides]:
    """Return a grouped statement bound to the tensors and to tables of its own, and the strides of all of them."""
    import torch

    statement = bound.statement
    positions = bound.shapes[grouping.index][0]
    tiles = tiles_of(positions, grouping.tile, grouping.count)
    shape = (tiles, grouping.tile) if grouping.tile > 1 else (tiles,)
    names = grouping.statement.tensor_names
    metas = {
        name: Meta(bound.shapes[name], bound.dtypes[name], bound.device) for name in statement.tensor_names if name in names
    }
    metas[grouping.positions] = Meta(shape, torch.int32, bound.device)
    metas[grouping.values] = Meta((tiles,), torch.int32, bound.device)
    own = {grouping.positions: row_major(shape), grouping.values: (1,)}
    return bind(grouping.statement, metas, bound.size), {**strides, **own}


def _has_dots(bound: Bound, strides: Strides) -> bool:
    return any(schedule.uses_dot for way in strategies(bound) for schedule in schedules(bound, strides, way))
