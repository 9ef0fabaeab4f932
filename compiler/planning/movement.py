"""Tiles of statements that move data: no sum, or a short one.

Such a statement takes as long as its bytes do, if threads read and write whole sectors and few of them are masked. So a
tile spans the fast index name of the output and of every large factor; other names are flattened into one axis with
them, in the order of memory, by which a program covers a stretch of the output without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..binding import power_of_two
from ..language import Access, Var
from .scatter import OneHot, Start, is_varying

__all__ = [
    *("LEAST_WIDTH", "VECTOR_BYTES", "WARP_ROW", "Tiling", "block_along", "contiguity", "masked"),
    *("run_name", "tilings", "widened"),
]

# A factor with fewer elements than this part of the largest operand's is not worth a tile axis along its own memory.
SMALL_PART = 1 / 8
# A sum that is held whole beside the results, so that the statement still takes as long as its bytes; an estimate.
LONGEST_SUM = 64
# A warp's row of 4 bytes is a line of memory. A row up to `WHOLE_ROW` long is one block, however many of its elements
# are masked: what two programs write of one sector meets in memory. In blocks of 64 a gather of 165 columns in half
# precision took an H200 0.061 ms, and 0.052 in blocks of 256 of 161 columns. Of longer rows blocks from `WIDE` on gain
# nothing.
LEAST_WIDTH, WIDE, WHOLE_ROW = 32, 256, 512
WARP_ROW = 32  # elements that a warp loads or stores at once
VECTOR_BYTES = 16  # that one thread loads or stores at once, at most
# Elements with masked ones to elements without: up to the first a tile of rows is as good as a flattened one, beyond
# the second it comes after it. 33 columns of float32 took 0.041 ms in rows of 64 and 0.027 flattened, on the same H200.
FITTING, WASTEFUL = 1.3, 1.6
SIDE_BY_SIDE = 8  # rows of a tile at least, so that a program has enough to do


@dataclass(frozen=True)
class Tiling:
    """The tile axes of a statement, each with the index names that it holds, the fastest last; and its summed axis."""

    form: str  # rows, flat, turned, looped: a sum to each thread, runs: of one position
    tiles: tuple[tuple[str, ...], ...]
    steps: tuple[str, ...] = ()


def contiguity(start: Start, strides: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return for each name how many elements are read or written along a unit stride of it."""
    elements_along: dict[str, int] = {}
    for access in (start.output, *start.accesses):
        elements = math.prod(start.extents[name] for name in access.names)
        # the output is allocated contiguous: its last dimension has unit stride
        steps = strides.get(access.name) if access is not start.output else None
        for dim, index in enumerate(access.indices):
            unit = steps[dim] == 1 if steps is not None else dim == len(access.indices) - 1
            if isinstance(index, Var) and unit:
                elements_along[index.name] = elements_along.get(index.name, 0) + elements
    return elements_along


def masked(extent: int, block: int) -> float:
    """Return how many elements blocks hold for each one inside the extent.

    >>> masked(96, 64), masked(33, 64)
    (1.3333333333333333, 1.9393939393939394)
    """
    return -(-extent // block) * block / max(extent, 1)


def block_along(extent: int) -> int:
    """Return the block of an axis along memory: the whole of it if it is short, else one that masks few elements.

    >>> [block_along(extent) for extent in (21, 99, 161, 600, 6633)]
    [32, 128, 256, 128, 256]
    """
    whole = power_of_two(max(extent, LEAST_WIDTH))
    if whole <= WHOLE_ROW:
        return whole
    return WIDE if masked(extent, WIDE) <= 1.1 * masked(extent, WIDE // 2) else WIDE // 2


def tilings(start: Start, strides: Mapping[str, tuple[int, ...]]) -> list[Tiling]:
    """Return the tilings of a statement that moves data, the most promising first; none if it is another one."""
    if start.owner is not None or start.strategy not in ("store", "store-once", "atomic"):
        return []
    if not start.bound.statement.is_sum or any(isinstance(factor, OneHot) for factor in start.factors):
        return []
    free = [name for name in start.free if start.extents[name] > 1]
    along = contiguity(start, strides)
    vector = max((*free, *start.summed), key=lambda name: (along.get(name, 0), start.extents[name]), default="")
    if len(free) < 2:
        return []
    if start.summed:
        return _short_sums(start, free, vector)
    last = str(start.output.indices[-1])
    large = SMALL_PART * max(along.values(), default=0)
    # a factor of which several dimensions have unit strides, all but one with a single element, lies along one of them
    units = {_unit(factor, strides) for factor in start.accesses}
    others = [name for name in free if name in units - {last} and along.get(name, 0) >= max(large, 1)]
    if last in free and others:
        other = max(others, key=lambda name: (along[name], start.extents[name]))
        return [_turned(start, strides, free, other, last)]
    rows = _rows(start, [name for name in free if name != vector], vector)
    in_rows, flat = Tiling("rows", (rows, (vector,))), Tiling("flat", (tuple(free),))
    extent = start.extents[vector]
    # of a row of fixed length the compiler leaves out what no thread of a warp has
    is_left_out = extent <= WHOLE_ROW and not is_varying(start.bound, vector)
    waste = masked(extent, WARP_ROW if is_left_out else block_along(extent))
    ways = [in_rows] if vector != last or waste <= FITTING else [flat, in_rows] if waste > WASTEFUL else [in_rows, flat]
    if vector != last or not run_name(start):
        return ways
    group = widened(start, vector)
    is_wide = math.prod(start.extents[name] for name in group) >= LEAST_WIDTH
    # A row that fills a warp is as good in a run as alone, and better where its neighbours have the same place: 782,111
    # rows of 55 columns took an H200 0.057 ms and not 0.108 where sorted, 715,119 of 43 0.076 and 0.075 where not.
    runs = [Tiling("runs", _beside(start, group))]
    return [*runs, *ways] if is_wide else [*ways, *runs]


def _short_sums(start: Start, free: Sequence[str], vector: str) -> list[Tiling]:
    """Return the tilings of a statement with a short sum: of what lies along memory, or of rows that are as short.

    A tile holds the whole sum beside its results, or a thread adds up one result of a stretch of the output. In
    `Y[p,f] += W[p,c] * T[H[p,c],f]` the first reads W and H along memory, once for all f, and the threads of a warp
    share what lies along f; the second has no element that is masked and no sum over threads. 363,323 points by 8 by 3
    took an H200 0.0250 and 0.0268 ms, 81,965 points of 11 levels 0.060 and 0.065; loops over rows 0.038 and 0.176.
    """
    (summed, *others), extents = start.summed, start.extents
    is_along = summed == vector
    if others or extents[summed] > LONGEST_SUM or not (is_along or extents[vector] < LEAST_WIDTH):
        return []
    rows = (tuple(free),) if is_along else (tuple(name for name in free if name != vector), (vector,))
    ways = [Tiling("rows", rows, (summed,)), Tiling("looped", (tuple(free),))]
    # what threads can't load several at once costs each element an address, and a sum over threads
    is_aligned = extents[summed] * start.bound.dtype.itemsize % VECTOR_BYTES == 0
    return ways if is_aligned else ways[::-1]


def _beside(start: Start, group: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the axes of a run: one for all names of a group, or two, if a factor that lacks the last is read less so.

    In `Y[T[e],h,d] += A[e,h] * X[U[e],h,d]` a thread has neighbours along d, to be read at once, and of A one number
    for them all; along one axis it would read that number for each: 761,224 edges of 9 by 8 took an H200 0.039 ms and
    not 0.057. Where threads have no neighbours there is nothing to share, and two axes must not be padded more than
    one.
    """
    extents, itemsize = [start.extents[name] for name in group], start.bound.dtype.itemsize
    is_shared = len(group) == 2 and any(group[0] in f.names and group[1] not in f.names for f in start.factors)
    is_aligned = extents[-1] * itemsize % VECTOR_BYTES == 0
    is_close = math.prod(map(power_of_two, extents)) == power_of_two(math.prod(extents))
    return tuple((name,) for name in group) if is_shared and is_aligned and is_close else (group,)


def run_name(start: Start) -> str:
    """Return the index name p of a scatter `Y[G[p],c]` that nothing else of the output has, "" if there is none.

    Where neighbours of p are added to one place, as those of a sorted G are, their sum is added to it once.
    """
    scattered = start.output.indirections
    if start.strategy != "atomic" or len(scattered) != 1 or len(scattered[0].indices) != 1:
        return ""
    name = str(scattered[0].indices[0])
    is_free = isinstance(scattered[0].indices[0], Var) and Var(name) not in start.output.indices
    return name if is_free else ""


def _rows(start: Start, names: Sequence[str], vector: str) -> tuple[str, ...]:
    """Return the names of which the rows of a tile are made, the last of `names`: as many as keep its loads few.

    A factor that lacks the rows or the vector is loaded once for the whole tile: in `Y[b,i,j] = A[b,i] * B[b,j]` both
    are, if a tile has the rows of one b.
    """

    def loads(rows: Sequence[str]) -> int:
        return sum(vector in factor.names and bool({*rows} & {*factor.names}) for factor in start.factors)

    suffixes = [tuple(names[first:]) for first in range(len(names))]  # the longest first
    long = [rows for rows in suffixes if math.prod(start.extents[name] for name in rows) >= SIDE_BY_SIDE]
    return min(long or suffixes[:1], key=loads)


def _turned(start: Start, strides: Mapping[str, tuple[int, ...]], free: Sequence[str], other: str, last: str) -> Tiling:
    """Return the tiling of a transpose: one axis along the output's memory, one along that of a factor.

    Names that come before one of the two in its operand lengthen its axis, that of which blocks mask more elements.
    """
    source = max(
        (factor for factor in start.accesses if _unit(factor, strides) == other),
        key=lambda factor: math.prod(start.extents[name] for name in factor.names),
    )
    rest = [name for name in free if name not in (other, last)]
    before_other, before_last = _before(source, other, rest), _before(start.output, last, rest)
    waste = {name: masked(start.extents[name], LEAST_WIDTH) for name in (other, last)}
    if before_other and (waste[other] >= waste[last] or not before_last):
        return Tiling("turned", ((*before_other, other), (last,)))
    return Tiling("turned", ((other,), (*before_last, last)))


def _unit(factor: Access, strides: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the index name along which a factor lies in memory."""
    units = [str(index) for index, step in zip(factor.indices, strides[factor.name]) if step == 1]
    return units[-1] if units else None


def _before(access: Access, name: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the names that stand directly before `name` in an access, as far as they are allowed, in their order."""
    names = [str(index) for index in access.indices]
    end = len(names) - 1 - names[::-1].index(name)
    first = end
    while first > 0 and names[first - 1] in allowed and names[first - 1] not in names[first:end]:
        first -= 1
    return tuple(names[first:end])


def widened(start: Start, vector: str) -> tuple[str, ...]:
    """Return a short name along the output's memory with those before it, until a block along memory is filled.

    They are one axis of tiles instead of programs, each of which would have few elements along memory.
    """
    row = start.owner.row if start.owner is not None else None
    names, group = [str(index) for index in start.output.indices], [vector]
    if names[-1:] != [vector]:
        return (vector,)
    for name in names[-2::-1]:
        size = math.prod(start.extents[part] for part in group)
        is_new = name in start.free and name != row and name not in group and name in start.extents
        if not is_new or size >= 2 * LEAST_WIDTH or size * start.extents[name] > WIDE:
            break
        group.insert(0, name)
    return tuple(group)
