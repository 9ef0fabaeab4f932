"""Rules for the rows of a block-sparse matrix: taken in a listed order, alone or in pairs, their blocks side by side.

Each rule is about a matrix, a result and a device; the measurements that it follows stand beside it as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .device import HALF_TYPES, Device, line_of

__all__ = ["MEASURED_ROWS", "MeasuredRows", "blocks_side_by_side", "may_be_listed", "rows_of_a_set"]


class MeasuredRows(NamedTuple):
    """Milliseconds of a product of a 4096 x 4096 matrix of random blocks, with rows as they are and listed."""

    block: int
    density: float
    columns: int  # of the dense matrix
    as_they_are: float
    listed: float


# One H200 (torch 2.11, triton 3.6), float16, `make bench CASES=bench/cases/test_structured_spmm.py`: 32 x 32 in pairs,
# 128 x 128 alone. 64 x 64 gained 2 to 7 percent at a density of 0.1 and lost 4 to 5 with tokens: they stay as they are,
# as do types wider than half precision, which were not measured. A full search times them, see `compiler/row_order.py`.
MEASURED_ROWS = (
    MeasuredRows(32, 0.75, 4096, 0.313, 0.222),
    MeasuredRows(32, 0.5, 4096, 0.233, 0.179),
    MeasuredRows(32, 0.3, 4096, 0.152, 0.120),
    MeasuredRows(32, 0.1, 4096, 0.061, 0.051),
    MeasuredRows(32, 0.3, 1024, 0.041, 0.033),
    MeasuredRows(32, 0.3, 512, 0.023, 0.026),
    MeasuredRows(128, 0.5, 4096, 0.125, 0.122),
    MeasuredRows(128, 0.3, 4096, 0.081, 0.075),
    MeasuredRows(128, 0.1, 4096, 0.037, 0.034),
    MeasuredRows(128, 0.3, 1024, 0.023, 0.027),
)
LEAST_PROGRAMS = {1: 4, 2: 1}  # for each multiprocessor, by the rows of a set: fewer leave it idle
LEAST_SHARED = 0.15  # of all blocks, that both rows of a pair have
LEAST_COLUMNS = {1: 1, 2: 8}  # of a set, on average: storing its sums costs the same however few columns it has

# Neighbouring blocks of a row are taken together from so many a row on, four at a time, and eight at a time in long
# rows of narrow blocks, where the padding of the last group counts for little; these numbers are estimated. Each group
# is a program: 128 groups of 64 x 64 blocks took one H200 0.031 ms, 410 blocks alone 0.038.
SHORT_ROW, LONG_ROW = 3, 24
FEW_TOGETHER, MANY_TOGETHER = 4, 8
PART_OF_REGISTERS = 4  # that the sums of a group may take: programs of four warps need the others
LEAST_GROUPS = 0.75  # for each multiprocessor


def rows_of_a_set(block: int, dtype: torch.dtype, device: Device) -> int:
    """Return how many rows of blocks a program takes at once where rows are listed, or 0 if they are not listed.

    Two blocks that fill a tensor core's rows together are taken together, and a block of twice as many rows or more is
    enough for a program. Types wider than half precision were not measured.
    """
    rows = device.dot_rows(dtype)
    if dtype not in HALF_TYPES or rows == 0:
        return 0
    if block >= 2 * rows:
        return 1
    return 2 if 2 * block == rows else 0


def may_be_listed(width: int, sets: int, columns: int, results: int, device: Device, shared: float = 1.0) -> bool:
    """Whether sets of `width` rows keep a GPU busy, and have enough to do each.

    `columns` are those of all sets together, `shared` the part of all blocks that two rows of a set have in common.
    """
    if columns < LEAST_COLUMNS[width] * sets or (width > 1 and shared < LEAST_SHARED):
        return False
    results_of_a_program = device.registers // 2  # sums in float32, beside what is multiplied and where it lies
    return results >= LEAST_PROGRAMS[width] * device.wave * results_of_a_program


def blocks_side_by_side(block: Sequence[int], itemsize: int, blocks: int, rows: int, device: Device) -> int:
    """Return how many neighbouring blocks of a row are taken together in one tile, or 0 if each is taken alone."""
    if max(block) > line_of(itemsize):
        return 0
    average = blocks / max(rows, 1)
    rows_at_most = line_of(itemsize)  # of a block, by the test above
    widest = device.registers // PART_OF_REGISTERS // rows_at_most
    together = FEW_TOGETHER if average < LONG_ROW else min(MANY_TOGETHER, widest // max(block))
    is_busy = blocks >= LEAST_GROUPS * device.multiprocessors * together
    return together if average >= SHORT_ROW and is_busy else 0
