"""Measured points of the space of configs, in the order in which tuning tries them.

All of it was measured on one H200 (torch 2.11, triton 3.6), by `make bench CASES=bench/cases/...`: the block-sparse
points by `test_structured_spmm.py` and `test_block_sparse_linear.py` (4096^3, float16, densities from 0.02 to 0.75),
those of tables and unrolled tables by `test_tensor_product.py` and `test_equivariant.py` (10,000 samples), those
without a dot by `test_unstructured_spmm.py` and `test_equivariant_edges.py`. Elsewhere they are where tuning starts,
clipped to the statement and to the GPU.

A point names the sides of a tile by their lengths, so that a statement and its transpose meet the same points: `narrow`
is the side that a statement keeps short, `wide` the long one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import NamedTuple

from .traits import Traits

__all__ = ["MEASURED_TILES", "MeasuredTiles", "Point", "measured_points"]


@dataclass(frozen=True)
class Point:
    """One choice of tile, warps, stages and orders, before it is clipped to a statement."""

    narrow: int
    wide: int
    warps: int = 4  # 0: as many as leave each thread `each` elements
    stages: int = 2
    depths: tuple[float, ...] = (1,)  # of the summed axes, or of each of them, in lines of 128 bytes
    is_narrow_rows: bool = False  # the narrow side lies along the rows of the tensor core's instruction
    reverse: bool = False
    each: int = 0
    is_in_turn: bool = False  # several rows to a program, one after another; nothing where there are too few
    is_else: bool = False  # only where no rows were taken in turn
    is_aligned: bool = False  # only where rows of the output begin between sectors


def measured_points(traits: Traits) -> tuple[Point, ...]:
    """Return the points at which tuning starts, the most promising first."""
    if traits.form == "alone":
        return ALONE[min(traits.narrow, 128), traits.is_narrow_first, traits.is_long_by_narrow]
    if traits.form == "set":
        return SET_IN_TURN if traits.is_narrow_first else SET
    if traits.form == "neighbours":
        points = NEIGHBOURS[32 if traits.narrow <= 32 else 64]
        return tuple(replace(point, wide=traits.widest // point.wide) for point in points)
    if traits.form == "table":
        points = TABLE[:3] if traits.is_fallback else TABLE
        return tuple(replace(point, warps=min(point.warps * traits.few_warps, 4)) for point in points)
    if traits.form == "unrolled tile":
        return UNROLLED_TILE[traits.is_streamed]
    if traits.form == "crowd":
        sizes = ((each * 128, min(traits.widest, each * 128)) for each in CROWD)
        return tuple(Point(max(elements // wide, 1), wide, 4) for elements, wide in sizes)
    if traits.form == "plain":
        fuller = [Point(height, 0, 4) for each in FULLER if (height := each * 128 // traits.widest) > MOST_HEIGHT]
        listed = _gathered(traits) if traits.used else (*PLAIN[traits.narrow], *fuller)
        whole = [replace(point, wide=traits.widest) for point in listed]
        return (*whole, *_in_slices(traits.slices, SLICED))
    if traits.form == "walk":
        whole = _in_slices((traits.widest,), WALKED[:1])
        return (*whole, *_in_slices(traits.slices, WALKED), *LONG_WALKS)
    if traits.form == "runs":  # a warp to each program: a position is then one for all threads
        return (Point(traits.used, traits.widest, max(1, traits.used // RUN_OF_A_WARP)),)
    if traits.form == "rows":
        plain = [_moved_rows(each, warps, traits.widest, traits.used) for each, warps in MOVED_ROWS]
        wide = traits.widest_aligned
        aligned = [
            replace(_moved_rows(each, warps, wide, wide), is_aligned=True) for each, warps in ALIGNED_ROWS if wide
        ]
        return (*aligned, *plain)
    return tuple(replace(point, wide=point.wide or traits.widest) for point in OTHERS[traits.form])


def _gathered(traits: Traits) -> list[Point]:
    """Return points of which a thread loads so many vectors of each gathered row; one warp has at least a row."""
    rows = [(int(each * traits.used * warps / traits.widest), warps) for each, warps in GATHERED[traits.is_walk]]
    rows = [(max(height, int(warps == 1)), warps) for height, warps in rows]
    return [Point(height, 0, warps) for height, warps in (*rows, *(() if traits.is_even else FEW_ROWS)) if height]


def _in_slices(slices: tuple[int, ...], sizes: Sequence[tuple[int, int]]) -> list[Point]:
    """Return points over slices of gathered rows, with so many elements to a thread of so many warps."""
    return [
        Point(max(1, each * 32 * warps // wide), wide, warps, reverse=True) for wide in slices for each, warps in sizes
    ]


def _moved_rows(each: int, warps: int, wide: int, used: int) -> Point:
    """Return rows of which a thread has about so many elements, by the ratio of powers of two."""
    return Point(max(1, 2 ** round(log2(each * 32 * warps / used))), wide, warps)


def _rows(point: Point) -> Point:
    """Return a point with its narrow side along the rows of the tensor core's instruction."""
    return replace(point, is_narrow_rows=True)


# A dot whose narrow side is one tile of 32: it sits best on the columns' side of wgmma. Programs of one stretch of the
# wide side run at once, and with the longest rows first they keep pace (8 % faster at half density, 16 % at three
# quarters). The position's own load takes two of the stages.
NARROW_ROWS_32 = (
    Point(32, 256, 4, 6, reverse=True),
    Point(32, 512, 4, 5, reverse=True),
    Point(32, 512, 4, 6, reverse=True),
    Point(32, 256, 4, 6),
    Point(32, 256, 4, 5),
    Point(32, 128, 4, 6),
    _rows(Point(32, 128, 4, 3)),
    _rows(Point(32, 64, 2, 3)),
    _rows(Point(32, 64, 4, 3, (2,))),
)
NARROW_COLUMNS_32 = (
    Point(32, 256, 4, 5, reverse=True),
    Point(32, 512, 4, 5, reverse=True),
    Point(32, 256, 4, 6, reverse=True),
    Point(32, 128, 4, 5, reverse=True),
    Point(32, 128, 4, 7),
    Point(32, 64, 4, 7),  # 256 tokens by 32 x 32 blocks, 0.3 dense: 0.0171 ms; tiles of 128 with 5 stages 0.0177
    Point(32, 256, 4, 5),
)
# Tiles of 64 are as wide as the rows of wgmma. The first fits every GPU.
NARROW_ROWS_64 = (
    _rows(Point(64, 128, 4, 3)),
    _rows(Point(64, 512, 8, 5, reverse=True)),
    _rows(Point(64, 256, 4, 6, reverse=True)),
    _rows(Point(64, 256, 4, 4, reverse=True)),
    _rows(Point(64, 256, 4, 5)),
    _rows(Point(64, 256, 8, 3)),
    _rows(Point(64, 128, 4, 3, reverse=True)),
    _rows(Point(64, 128, 4, 5)),
    _rows(Point(64, 128, 4, 3, (2,))),
    Point(64, 256, 4, 4),
    _rows(Point(64, 64, 2, 2)),
)
NARROW_COLUMNS_64 = (
    Point(64, 128, 4, 3),
    _rows(Point(64, 512, 8, 5, reverse=True)),
    Point(64, 128, 4, 3, reverse=True),
    Point(64, 128, 4, 5),
    _rows(Point(64, 128, 4, 5)),
    _rows(Point(64, 256, 4, 5, reverse=True)),
    _rows(Point(64, 256, 4, 3, reverse=True)),
    _rows(Point(64, 256, 8, 6, reverse=True)),
    Point(64, 64, 4, 3),
    Point(64, 128, 8, 3),
    Point(64, 128, 4, 3, (2,)),
    Point(64, 64, 2, 2),
)
# A tile of 128 and more on both sides; rows in turn took 0.120 ms half dense, one row to a program 0.147. Of few
# columns or tokens only short tiles have programs enough, and they want many stages: 256 tokens by 128 x 128 blocks,
# 0.3 dense, took 0.0140 ms with the two of 6 stages, 0.0207 with 4 and 0.0188 in tiles of 128; a dense product 0.0161.
FEW_ALONG_128 = (_rows(Point(128, 64, 4, 6)), _rows(Point(64, 64, 4, 6)))
ROWS_128 = (
    _rows(Point(128, 128, 4, 3)),
    _rows(Point(128, 256, 8, 5, reverse=True, is_in_turn=True)),
    *FEW_ALONG_128,
    _rows(Point(128, 128, 4, 3, reverse=True)),
    _rows(Point(128, 128, 4, 5)),
    _rows(Point(128, 256, 8, 3, (2,))),
    _rows(Point(64, 128, 4, 3)),
    _rows(Point(128, 128, 8, 3)),
    _rows(Point(128, 128, 4, 3, (2,))),
    _rows(Point(128, 256, 8, 3)),
    Point(64, 256, 4, 4),
    _rows(Point(64, 64, 2, 2)),
)
COLUMNS_128 = (
    Point(128, 128, 4, 3),
    _rows(Point(128, 256, 8, 5, reverse=True, is_in_turn=True)),
    *FEW_ALONG_128,
    Point(128, 128, 4, 3, reverse=True),
    Point(128, 128, 4, 5),
    Point(256, 128, 8, 3, (2,)),
    Point(128, 128, 8, 3),
    Point(128, 128, 4, 3, (2,)),
    Point(256, 128, 8, 3),
    _rows(Point(256, 64, 4, 4)),
)
# where the columns are one tile, the rows are worth a longer one
LONG_BY_128 = (*COLUMNS_128[:6], _rows(Point(128, 256, 8, 5, is_else=True)), *COLUMNS_128[6:])
# short rows, and chains of dots: small tiles, many programs, a few warps each
SHORT = (
    *(_rows(Point(16, 64, warps, 2, (depth,))) for warps in (2, 1, 4) for depth in (1, 2)),
    _rows(Point(16, 64, 4, 3, (2,))),
    _rows(Point(16, 64, 2, 2, (2, 1))),  # of a chain all of the first sum by half of the second: 10 % at lmax 3
)
ALONE = {  # by the class of the narrow side, whether it is the rows, and whether the other goes on
    (16, True, False): SHORT,
    (16, True, True): SHORT,
    (32, True, False): NARROW_ROWS_32,
    (32, True, True): NARROW_ROWS_32,
    (32, False, False): NARROW_COLUMNS_32,
    (32, False, True): NARROW_COLUMNS_32,
    (64, True, False): NARROW_ROWS_64,
    (64, True, True): NARROW_ROWS_64,
    (64, False, False): NARROW_COLUMNS_64,
    (64, False, True): NARROW_COLUMNS_64,
    (128, True, False): ROWS_128,
    (128, True, True): ROWS_128,
    (128, False, False): COLUMNS_128,
    (128, False, True): LONG_BY_128,
}
# Rows of a set side by side are the rows of wgmma, and columns are as many as registers hold sums of. With 5 and 6
# stages there is memory for three tiles, with 7 and 8 for four: positions are loaded ahead of them. Sets in turn took
# 0.050 ms at a tenth, a set to a program 0.060; with tokens for columns it is the other way round (0.162 and 0.143 at
# 0.3).
HALF_LINE = (0.5,)
SET = tuple(
    _rows(Point(64, wide, warps, stages, HALF_LINE, reverse=True))
    for wide, warps, stages in (
        (256, 4, 6),
        (512, 8, 7),
        (512, 8, 5),
        (256, 4, 8),
        (256, 4, 5),
        (128, 4, 6),
        (64, 4, 5),
    )
)
SET_IN_TURN = (
    SET[0],
    replace(SET[1], is_in_turn=True),
    replace(SET[1], is_else=True),
    replace(SET[3], is_in_turn=True),
    *SET[2:],
)
# Neighbours side by side are the wide side, whose length is here the part of the widest tile that they take; the tile
# that they share is the narrow one, and wide enough for rows of wgmma from 64 on.
NEIGHBOURS = {
    32: (
        Point(64, 1, 4, 4, HALF_LINE),
        Point(64, 1, 4, 3, HALF_LINE),
        Point(64, 1, 8, 3),
        Point(64, 1, 4, 4),
        Point(64, 1, 4, 3),
        Point(64, 1, 8, 4),
        Point(64, 2, 4, 4, HALF_LINE),
        Point(64, 2, 4, 4),
        Point(64, 4, 4, 4),
    ),
    64: (
        _rows(Point(64, 1, 4, 4)),
        _rows(Point(64, 1, 4, 6, HALF_LINE)),
        _rows(Point(64, 1, 8, 4)),
        _rows(Point(64, 1, 4, 3)),
        _rows(Point(64, 2, 4, 4)),
    ),
}
# Results with a few rows are one warp's: no wait for others at every sum over short axes (1.7 times as fast as two at
# lmax 3 with 16 channels). The next ones want fewer registers, or read weights that lie transposed.
TABLE = (
    Point(64, 64, 1, 3, (0.5,), is_narrow_rows=True),
    Point(64, 64, 1, 3, is_narrow_rows=True),
    Point(64, 64, 1, 3),
    Point(64, 64, 2, 3, is_narrow_rows=True),
    Point(64, 64, 2, 2, is_narrow_rows=True),
    Point(64, 64, 4, 3, is_narrow_rows=True),
)
# Eight elements to a thread, or four where that many rows have no room; the next tiles on their way.
UNROLLED_TILE = {
    is_streamed: tuple(
        Point(side, side, 0, stages, each=each)
        for side in (64, 16)
        for each, stages in (((8, 4), (8, 2), (4, 2)) if is_streamed else ((8, 1), (4, 1)))
    )
    for is_streamed in (False, True)
}
# Multiply-adds: rows beside each other (narrow) by elements along memory (wide), which share what is long.
HEIGHTS = ((4, 4), (8, 4), (8, 2), (4, 1), (1, 1), (2, 1))
# Short rows leave a thread one or two elements of such a tile, too few loads on their way to hide the time of memory:
# taller ones give each thread of four warps so many. Scores along 600,000 edges, four heads of 32, took 0.062 ms and
# not 0.183, sums of weighted messages 0.124 and not 0.190 (`python -m bench time-statements`).
FULLER, MOST_HEIGHT = (4, 8, 16), 8
PLAIN = {
    0: tuple(Point(height, 0, warps) for height, warps in HEIGHTS),
    16: tuple(Point(height, 0, warps) for height, warps in (*HEIGHTS, (16, 1), (32, 2), (32, 4))),  # few fill a warp
}


class MeasuredTiles(NamedTuple):
    """Microseconds of a product over a graph, by vectors of 16 bytes that a thread loads of a row, and warps."""

    graph: str
    columns: int
    itemsize: int
    is_walk: bool
    is_even: bool
    by_tile: Mapping[tuple[float, int], float]


# One H200 (torch 2.11, triton 3.6), by `tune` of "C[m,n] += A[m,k] * B[k,n]": pieces of 64 entries, whole rows, groups.
MEASURED_TILES = (
    MeasuredTiles("gowalla-bip", 128, 2, True, True, {(1, 1): 58.8, (1, 4): 60.6, (2, 1): 61.0, (2, 2): 67.9}),
    MeasuredTiles("fb-Cornell5", 16, 2, True, True, {(1, 1): 17.6, (0.25, 1): 19.5, (1, 4): 23.0, (2, 4): 29.1}),
    MeasuredTiles("PROTEINS", 256, 4, True, False, {(4, 1): 29.7, (2, 2): 31.4, (2, 1): 32.1, (8, 1): 33.5}),
    MeasuredTiles("PROTEINS", 128, 2, True, False, {(2, 1): 9.1, (1, 2): 9.9, (1, 4): 10.3, (1, 1): 14.7}),
    MeasuredTiles("DD", 16, 2, True, False, {(1, 2): 13.8, (2, 1): 13.9, (1, 1): 15.3, (0.25, 1): 52.1}),
    MeasuredTiles("pubmed", 256, 4, False, True, {(1, 4): 18.3, (4, 1): 19.7, (2, 1): 20.7, (2, 4): 21.2}),
    MeasuredTiles("pubmed", 128, 2, False, True, {(1, 4): 8.4, (1, 2): 8.5, (0.5, 4): 9.5, (2, 4): 11.6}),
    MeasuredTiles("pubmed", 16, 2, False, True, {(0.5, 4): 3.5, (1, 1): 3.8, (1, 4): 4.3, (0.125, 4): 14.4}),
    MeasuredTiles("REDDIT-BINARY", 16, 2, False, True, {(2, 1): 35.0, (1, 2): 35.1, (1, 4): 35.7, (0.25, 1): 163.4}),
)
# The vectors and warps that are tried of rows that are gathered, by whether a program goes through rows of the output,
# or pieces of them, or has groups of their entries side by side: what was the best somewhere of the above. Of whole
# rows, which are of many lengths, all that are side by side wait for the longest.
GATHERED = {
    True: ((1, 1), (2, 1), (1, 4), (2, 4), (0.5, 4), (1, 2), (4, 1)),
    False: ((1, 4), (2, 4), (0.5, 4), (1, 2), (1, 1), (2, 1), (4, 1)),
}
FEW_ROWS = ((4, 1), (1, 1))
# Elements of a row that one warp holds the sum of: 322,981 rows of 207 took an H200 0.0686 ms with one warp and 0.0721
# with two, and 0.0610 where a warp loads a factor of 9 numbers once and hands it on.
RUN_OF_A_WARP = 256
# Elements to a thread, and warps, of tiles over slices of gathered rows: a slice of all rows stays in the cache where
# whole rows do not. Products with 256 columns of float32 took an H200 0.175 ms and not 0.188 (fb-Cornell5, slices of 64
# over pieces of rows) and 0.057 and not 0.070 (blogcatalog3, slices of 128 over groups).
SLICED = ((4, 2), (4, 1))
# The same for walks over entries side by side, of whole rows of columns too: few entries in a turn, for pieces of rows
# are short (gowalla-bip took 0.185 ms by one entry and 0.192 by pieces side by side), and more for whole rows (ogbl-ddi
# 0.153 by eight entries of slices of 128 with the longest rows first, and 0.194 by groups).
WALKED = ((8, 1), (8, 4))
LONG_WALKS = (Point(64, 64, 4),)
# Elements to a thread of programs that scatter into copies of a small output: 8 of rows, 2 of single numbers.
CROWD = (8, 2, 4)
# Statements that move data: elements to a thread, and warps. One warp reads all of a row at constant distances, so that
# a thread needs one address for all of them: 302,387 rows of 137 elements in half precision took an H200 0.035 ms with
# one warp and 0.045 with two, 134,603 rows of 83 took 0.014 and 0.018. An H200 begins about 1.6 programs in a
# nanosecond: 313,875 rows of 165 elements took 0.191, 0.096 and 0.050 ms with 1, 2 and 4 of them to a program of one
# warp, so that programs have more to do than a thread needs on its way: 674,407 rows of 77 took 0.040 ms with 96
# elements and 0.045 with 48. The last leave few programs enough to do.
MOVED_ROWS = ((64, 1), (96, 1), (32, 1), (32, 2), (16, 4), (8, 4))
# Rows of 2,241 numbers, of which each begins at another place of its line, took 0.019 ms to be written as they lie and
# 0.017 if a warp stores whole sectors; what fills that memory takes 0.016.
ALIGNED_ROWS = ((32, 1), (64, 1), (16, 4))
OTHERS = {
    # outer products: sums in registers, as many as make each number that is loaded good for several. Estimated; of a
    # weight's gradient for each of 1,733 samples, 31 by 35, an H200 takes all gradients 0.244 ms with what tuning finds
    # among them and the rest, and took 0.378 without (`bench/cases/test_statements.py --seed 2027`)
    "outer": (Point(32, 64, 2), Point(16, 64, 1), Point(32, 64, 4), Point(64, 64, 4), Point(64, 128, 8)),
    # contiguous stretches of the output
    "flat": tuple(Point(1, each * 32 * warps, warps) for each, warps in ((4, 4), (8, 4), (4, 8))),
    # a sum to each thread, which reads its summands at constant distances: no sum goes through other threads
    "looped": (Point(1, 128, 4), Point(1, 256, 4), Point(1, 256, 8)),
    # transposes, of which both sides are to fill lines of memory
    # 5,657 by 48,497 numbers took 0.606 ms in tiles of 32 by 256, 0.624 of 64 by 128 and 0.655 of 64 by 64
    # 173 by 225 by 71, reversed, took 0.0071 ms in tiles of 16 by 256 and 0.0084 of 64 by 64, 2,617 by 4,787 0.032 and
    # 0.031: the first is the better guess
    "turned": (
        Point(16, 256, 4),
        Point(64, 64, 8),
        Point(32, 256, 8),
        Point(64, 64, 4),
        Point(32, 64, 4),
        Point(32, 128, 4),
        Point(64, 128, 8),
        Point(64, 32, 4),
        Point(32, 32, 4),
    ),
    # Of rows that are gathered and multiplied by each other a warp has 64 numbers of eight: 390,825 products of rows of
    # 229 took an H200 0.098 ms so and 0.31 in the tile of 64 by 64, 300,007 of 101 took 0.037 and 0.049, 403,603 of 81
    # took 0.035 and 0.045. The last two read more of each row at once, for fewer results; not measured.
    "deep": (
        Point(64, 8, 1),
        *(Point(height, 0, warps) for height, warps in ((8, 1), (16, 1), (16, 2), (32, 4))),
        Point(64, 64, 4),
        Point(128, 32, 4),
    ),
    # one result to a thread has the fewest registers, several the fewest instructions; estimated, not measured
    "unrolled": tuple(Point(1, 0, 0, 1, each=each) for each in (1, 2, 4)),
    # One warp to a program, for which a position is one for all threads: 18,357 edges of 68 channels to 11 rows took
    # 0.0155 ms in tiles of 128, 0.0160 of 64 and 0.0172 of 32, with four warps 0.0197; 39,205 edges to 71 rows 0.200 in
    # tiles of 32 and 0.244 with four warps (`python -m bench.products --cases 7`, seeds 25 and 27).
    "unrolled runs": tuple(Point(1, wide, 1, 1) for wide in (128, 32)),
    "scalar": (Point(1, 1, 1, 1),),
}
