"""A statement over tiles of equal index.

`Y[p,m] += X[p,c] * W[E[p],c,m]` becomes `Y[P[t,q],m] += X[P[t,q],c] * W[F[t],c,m]`.
`P` [T, Q] lists the positions p of each tile, all of which have one value of `E`, and -1 where a tile is not full; `F`
[T] is that value. A weight that an index chooses is then shared by the rows of a tile, so that products with it are
matrix products. The same rewrite makes a scatter `Y[E[p],m] += ...` one to `Y[F[t],m]`, where the tiles of a row lie
side by side: a program owns a row and sums it without atomic additions. With Q of 1, `P` [T] is the order of sorted
positions.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from ..binding import SHORT_LENGTH, Bound, Meta, bind, power_of_two, row_major
from ..language import Access, Index, Statement, Var, fresh_name, substituted, walk
from .device import Device
from .rules import schedules
from .scatter import scatters_to_rows, strategies
from .schedule import Strides

__all__ = ["Grouping", "groupings", "number_of_tiles"]

TILES = (128, 64, 32, 16)  # positions of a tile: rows of a matrix product, of which Tensor Cores take 16 at least
SUMMANDS = (64, 32, 16, 8)  # positions of a tile that are summed, of which none is padding but in the last of a row
MOST_LENGTHS = 2  # of tiles that are tried for one index


@dataclass(frozen=True)
class Grouping:
    """A statement over the positions of an index tensor, grouped by its values."""

    statement: Statement
    index: str  # the tensor whose equal values are brought together
    name: str  # of the index tensor's own index, whose values are its positions
    positions: str  # the name of P
    values: str  # the name of F
    tile: int  # Q
    count: int  # the values are from 0 to count - 1
    is_scattered: bool  # the output has a row for each value
    is_stored_once: bool  # the output has a row for each position
    gain: float  # the estimated time of the statement as it is over that of the grouped one, by work and bytes

    def __str__(self) -> str:
        return f"{self.index} sorted" if self.tile == 1 else f"{self.index} in tiles of {self.tile}"


def groupings(
    bound: Bound, strides: Strides, device: Device, uses_tensor_cores: bool, tables: Container[str] = ()
) -> tuple[Grouping, ...]:
    """Return the ways to group the products of a statement by one of its index tensors, the most promising first.

    The products of a weight are grouped if they become matrix products, which they are not yet. A scatter is grouped if
    its rows have several entries; that of a `max` or `min` always, which no kernel runs unless a program owns each row.
    Beside constant `tables`, which no matrix product reads, and for a `max` or `min`, scatters are sorted alone.

    >>> import torch
    >>> from insum_ops.compiler.language import parse
    >>> from insum_ops.compiler.planning.device import H200
    >>> X, W = torch.empty(4096, 512, device="meta"), torch.empty(8, 512, 512, device="meta")
    >>> operands = dict(X=X, W=W, E=torch.empty(4096, dtype=torch.int32, device="meta"))
    >>> bound = bind(parse("Y[p,m] += X[p,c] * W[E[p],c,m]"), operands)
    >>> strides = {"": row_major(bound.size)} | {name: tensor.stride() for name, tensor in operands.items()}
    >>> for way in groupings(bound, strides, H200, True):
    ...     print(f"{way}: {way.statement}")
    E in tiles of 128: Y[P[t,q],m] += X[P[t,q],c] * W[F[t],c,m]
    E in tiles of 64: Y[P[t,q],m] += X[P[t,q],c] * W[F[t],c,m]
    """
    statement = bound.statement
    if bound.is_empty or bound.is_seeded:
        return ()
    accesses = [access for access in statement.index_accesses if _is_plain(access, bound) and access.name not in tables]
    ways: list[Grouping] = []
    has_dots = bool(accesses) and statement.is_sum and _has_dots(bound, strides)
    for access in accesses:
        is_scattered, mean = access in statement.output.indices, _mean(bound, access)
        if any(rows > _count(bound, access) for rows in _scattered(bound, access)):
            continue  # whoever owns a row reads that row of the other factors, of which one has fewer
        if is_scattered and (mean > 1 if statement.is_sum else scatters_to_rows(statement.output.indices)):
            ways.append(_grouped(bound, access, 1, device, uses_tensor_cores))
        if tables or not statement.is_sum:
            continue
        # sums that are long, or few side by side, are cut into tiles of summands that are side by side
        is_cut = is_scattered and (mean >= TILES[0] or _width(bound) < device.warp_width)
        for tile in _lengths(mean, SUMMANDS if is_cut else TILES)[: 1 if is_cut else MOST_LENGTHS]:
            way = _grouped(bound, access, tile, device, uses_tensor_cores)
            if is_cut or ((is_scattered or not has_dots) and _has_dots(*_rebound(way, bound, strides))):
                ways.append(way)
    return tuple(ways)


def number_of_tiles(length: int, count: int, tile: int) -> int:
    """Return the tiles of `length` positions: each of `count` values, and -1, has one at most that is not full.

    A kernel may be built for a number of tiles that is small, so that those are rounded up: eight numbers in a power of
    two serve all lengths.
    """
    if tile == 1:
        return length
    tiles = length // tile + count + 1
    step = power_of_two(tiles) // 16 if tiles <= SHORT_LENGTH else 1
    return tiles + -tiles % max(step, 1)


def _width(bound: Bound) -> int:
    """Return how many elements of the output each entry of a scatter adds to."""
    return prod(bound.extents[name] for name in bound.statement.direct)


def _is_plain(access: Access, bound: Bound) -> bool:
    """Whether an index access is `E[p]`, and stands on the left at most as an index of the output itself."""
    if len(access.indices) != 1 or not isinstance(access.indices[0], Var):
        return False
    output = bound.statement.output
    inside = [inner for indirection in output.indirections for inner in walk(indirection) if inner is not indirection]
    return access not in inside and access.name != output.name


def _count(bound: Bound, access: Access) -> int:
    """Return how many values an index tensor may have."""
    return min(pointed.extent for pointed in bound.pointed if pointed.index == access.name)


def _scattered(bound: Bound, access: Access) -> list[int]:
    """Return the lengths of the output's dimensions that an index access scatters to."""
    return [length for index, length in zip(bound.statement.output.indices, bound.size) if index == access]


def _mean(bound: Bound, access: Access) -> float:
    """Return how many positions have the same value, if all values are met."""
    return bound.extents[access.names[0]] / _count(bound, access)


def _lengths(mean: float, tiles: Sequence[int]) -> list[int]:
    """Return the lengths of tiles that are tried: no longer than a group, so that not much of them is padding."""
    return [tile for tile in tiles if tile <= mean] or ([tiles[-1]] if 2 * mean > tiles[-1] else [])


def _grouped(bound: Bound, access: Access, tile: int, device: Device, uses_tensor_cores: bool) -> Grouping:
    """Return a statement with F[t] in the place of `access`, and P[t,q] in that of its index, or P[t]."""
    statement, (name,) = bound.statement, access.names
    taken = {*statement.tensor_names, statement.output.name, *statement.names}
    new_names: list[str] = []
    for wanted in ("P", "F", "t", "q"):
        new_names.append(fresh_name(wanted, {*taken, *new_names}))
    positions, values, t, q = new_names
    listed = Access(positions, (Var(t), Var(q)) if tile > 1 else (Var(t),))
    swap: dict[Index, Index] = {access: Access(values, (Var(t),)), Var(name): listed}
    output = substituted(statement.output, swap)
    factors = tuple(substituted(factor, swap) if isinstance(factor, Access) else factor for factor in statement.factors)
    indices, count = statement.output.indices, _count(bound, access)
    gain = _gain(bound, access, tile, device, uses_tensor_cores)
    kind = access in indices, indices.count(Var(name)) == 1
    grouped = replace(statement, output=output, factors=factors, text="")
    return Grouping(grouped, access.name, name, positions, values, tile, count, *kind, gain)


def _gain(bound: Bound, access: Access, tile: int, device: Device, uses_tensor_cores: bool) -> float:
    """Return how many times faster a grouped statement is, by its products and by what it loads of a weight.

    Each product of the statement as it is takes a multiply-add and, of a weight that an index chooses, a number read
    from L2; in tiles it takes Tensor Cores, and the weight is read once for each tile.
    """
    if not bound.statement.is_sum:
        return inf  # no kernel runs it as it is
    if tile == 1 or access in bound.statement.output.indices:
        return 1.0  # how much atomic additions take depends on how many meet
    products, itemsize = prod(bound.extents.values()), bound.dtype.itemsize
    vector_rate = device.multiprocessors * device.vector_flops
    padding = 1 + tile / _mean(bound, access)
    rate = device.flops(itemsize) if uses_tensor_cores else vector_rate
    alone = max(2 * products / vector_rate, products * itemsize / device.bandwidth)
    together = max(2 * padding * products / rate, padding * products / tile * itemsize / device.bandwidth)
    return alone / (together + TABLES_SECONDS)


# of making the tables of an index that is new; estimated, not measured
TABLES_SECONDS = 50e-6


def _rebound(way: Grouping, bound: Bound, strides: Strides) -> tuple[Bound, Strides]:
    """Return a grouped statement bound to the tensors and to its tables, and the strides of all of them."""
    tiles = number_of_tiles(bound.shapes[way.index][0], way.count, way.tile)
    shapes = {name: bound.shapes[name] for name in bound.statement.tensor_names}
    shapes |= {way.values: (tiles,), way.positions: (tiles, way.tile) if way.tile > 1 else (tiles,)}
    dtypes = {**bound.dtypes, **dict.fromkeys((way.positions, way.values), bound.dtypes[way.index])}
    metas = {name: Meta(shapes[name], dtypes[name], bound.device) for name in way.statement.tensor_names}
    own = {name: row_major(shapes[name]) for name in (way.positions, way.values)}
    return bind(way.statement, metas, bound.size), {**strides, **own}


def _has_dots(bound: Bound, strides: Strides) -> bool:
    """Return whether some schedule of a statement is a matrix product."""
    return any(schedule.uses_dot for way in strategies(bound) for schedule in schedules(bound, strides, way))
