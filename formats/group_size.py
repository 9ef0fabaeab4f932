"""Choose the group size of a grouped format from how many entries each row holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "MEASURED_PIECES",
    "MeasuredPieces",
    "gpu_group_size",
    "group_size",
    "group_size_candidates",
    "groups_of",
    "packs_rows",
    "piece_size",
    "pieces_of",
]

# Rows that are longer than this, by their mean, are cut into pieces of single entries, which need no padding: with 256
# columns of float32 and 128 of float16 gowalla-bip took an H200 0.188 and 0.061 ms, and 0.188 and 0.081 in groups of
# 32, fb-Cornell5 0.156 and 0.044, and 0.177 and 0.050, blogcatalog3 0.050 and 0.020, and 0.058 and 0.023, ogbl-ddi
# 0.099 and 0.042, and 0.165 and 0.054.
LARGEST_ON_GPU = 16
SIZES_ON_GPU = tuple(2**power for power in range(LARGEST_ON_GPU.bit_length()))
# Slots for each entry from which on short rows are better taken entry by entry, which needs no padding. One H200,
# float16, N = 32, 128 and 512: PROTEINS 1.04, 1.19 and 1.04 times as fast with groups of one, rows of 1 to 32 entries
# 1.27, 1.31 and 1.28, rows of about 8 (Poisson) 1.11, 1.35 and 0.90; DD, with 1.63 slots, 1.19 and 0.92 (N = 16, 128),
# and with float32 1.04 and 1.06 (N = 16, 256). Groups of 4 and not of 8 for pubmed, with 1.5 slots and not 2.2, took
# 1.17 times as long with 128 columns of float32, and 0.88 times with 128 of float16.
MOSTLY_PADDING = 1.6
LONG_ROW = 32  # entries, from which on a program that takes a whole row is waited for


class MeasuredPieces(NamedTuple):
    """Milliseconds of a product over a graph, by the entries of a piece."""

    graph: str
    entries: int
    rows: int
    columns: int
    itemsize: int
    by_size: Mapping[int, float]


# One H200 (torch 2.11, triton 3.6): the best by `tune` of "C[m,n] += A[m,k] * B[k,n]" over rows in such pieces.
MEASURED_PIECES = (
    MeasuredPieces("REDDIT-BINARY", 1_991_016, 859_254, 16, 2, {8: 0.0351, 16: 0.0400, 32: 0.0513, 64: 0.0547}),
    MeasuredPieces("REDDIT-BINARY", 1_991_016, 859_254, 16, 4, {8: 0.0506, 16: 0.0506, 32: 0.0592, 64: 0.0682}),
    MeasuredPieces("REDDIT-BINARY", 1_991_016, 859_254, 64, 2, {8: 0.0918, 16: 0.0835, 32: 0.0848}),
    MeasuredPieces("REDDIT-BINARY", 1_991_016, 859_254, 128, 2, {8: 0.158, 16: 0.143, 32: 0.141, 64: 0.151}),
    MeasuredPieces("REDDIT-BINARY", 1_991_016, 859_254, 256, 4, {8: 0.485, 16: 0.453, 32: 0.452}),
    MeasuredPieces("blogcatalog3", 667_966, 10_312, 16, 2, {32: 0.0082, 64: 0.0102}),
    MeasuredPieces("blogcatalog3", 667_966, 10_312, 128, 2, {32: 0.0208, 64: 0.0201, 128: 0.0215, 256: 0.0281}),
    MeasuredPieces("blogcatalog3", 667_966, 10_312, 256, 4, {32: 0.0492, 64: 0.0513, 128: 0.0552, 256: 0.0616}),
    MeasuredPieces("fb-Cornell5", 1_581_554, 18_660, 16, 2, {32: 0.0187, 64: 0.0176}),
    MeasuredPieces("fb-Cornell5", 1_581_554, 18_660, 128, 2, {32: 0.0429, 64: 0.0448, 128: 0.0462, 256: 0.0528}),
    MeasuredPieces("fb-Cornell5", 1_581_554, 18_660, 256, 4, {32: 0.156, 64: 0.154, 128: 0.159, 256: 0.171}),
    MeasuredPieces("gowalla-bip", 1_620_256, 70_839, 16, 2, {32: 0.0191, 64: 0.0210}),
    MeasuredPieces("gowalla-bip", 1_620_256, 70_839, 128, 2, {32: 0.0565, 64: 0.0588, 128: 0.0654, 256: 0.0689}),
    MeasuredPieces("gowalla-bip", 1_620_256, 70_839, 256, 4, {32: 0.188, 64: 0.185, 128: 0.188, 256: 0.192}),
    MeasuredPieces("ogbl-ddi", 2_135_822, 4_267, 16, 2, {32: 0.0172, 64: 0.0166}),
    MeasuredPieces("ogbl-ddi", 2_135_822, 4_267, 128, 2, {32: 0.0490, 64: 0.0437, 128: 0.0429, 256: 0.0467}),
    MeasuredPieces("ogbl-ddi", 2_135_822, 4_267, 256, 4, {32: 0.0993, 64: 0.100, 128: 0.111, 256: 0.126}),
)
# Entries of a piece of a row, and how many pieces there are to be; the same of pieces of several rows, of which each of
# the warps of a large GPU is to have one. Fitted to the above.
LEAST_PIECE, LONGEST_PIECE, PIECES = 8, 64, 2**15
LONGEST_PACKED, WARPS = 16, 2**13
# Rows of the longest piece, from which on pieces hold whole short rows: REDDIT-BINARY, of 2.3 entries a row, took 0.501
# ms with 256 columns of float32 and 0.150 with 128 of float16, and 0.601 and 0.217 by pieces of single rows;
# gowalla-bip, of 23, took 0.180 and 0.086, and 0.188 and 0.061.
ROWS_OF_A_PIECE = 8
NEAR = 1024  # pieces of rows, among which those of one length stand together; an estimate, not measured


def group_size(occ: Tensor | Sequence[int]) -> int:
    """Return the group size g with the fewest indirect accesses, F(g) = (g+1) * sum(ceil(occ_i/g)).

    Each group costs a scatter and each of its g slots a gather, padding included. It compares the powers of two on
    either side of the g that minimises a smooth bound of F; where two tie, it takes the smaller one. The grouped
    formats call it where group_size is None, but for a matrix of single entries on a GPU.

    Args:
        occ: how many entries each row holds [rows]; rows without any do not count.

    Returns:
        A power of two, 1 for a matrix without rows.

    Example:
        >>> from insum_ops.formats import group_size
        >>> group_size([3, 1, 1, 2])
        1
        >>> group_size([40, 30, 20, 10])
        8
    """
    candidates, counts = group_size_candidates(occ), _counts(occ)
    if len(candidates) == 1:
        return candidates[0]
    return _fewest_accesses(candidates, torch.stack([_groups(counts, g) for g in candidates]).tolist())


def gpu_group_size(occ: Tensor | Sequence[int]) -> int:
    """Return, for a matrix on a GPU, the power of two at or above 1.5 times the mean row: most rows are one group.

    A row that is one group is stored; several groups of one row meet in atomic additions, which cost more than the
    padding that F(g) counts. It is 1 where rows are longer than groups, and are cut into pieces; or if larger groups
    were mostly padding, and a program can take a whole row, or several.

    >>> gpu_group_size([3, 3, 3, 2]), gpu_group_size([40, 30, 20, 10]), gpu_group_size([9, 1, 1, 2])
    (4, 1, 1)
    """
    counts = _counts(occ)
    if counts.numel() == 0:
        return 1
    sums = [counts.sum(), (counts > 0).sum(), counts.max(), *[_groups(counts, size) for size in SIZES_ON_GPU]]
    entries, rows, fullest, *groups = torch.stack(sums).tolist()
    return size_on_gpu(entries, rows, fullest, groups)


def size_on_gpu(entries: int, rows: int, fullest: int, groups: Sequence[int]) -> int:
    """Return what `gpu_group_size` does; `groups` is how many there are of each of the `SIZES_ON_GPU`."""
    if 2 * LARGEST_ON_GPU * rows < 3 * entries:
        return 1
    at = 0
    while 2 * SIZES_ON_GPU[at] * rows < 3 * entries and SIZES_ON_GPU[at] < fullest:
        at += 1
    is_padding = groups[at] * SIZES_ON_GPU[at] >= MOSTLY_PADDING * entries
    return 1 if is_padding and (fullest <= LONG_ROW or packs_rows(entries, rows)) else SIZES_ON_GPU[at]


def groups_of(positions: Tensor, size: int | None, is_on_gpu: bool) -> tuple[int, int]:
    """Return the size of groups, chosen if it is None, and how many there are.

    `positions` [E] counts, for each entry, those of its row before it; there is at least one. A group begins at each
    entry that has a multiple of the size before it, so that nothing else has to be known of the rows. The host waits
    once for a matrix on a GPU, or for a size that is given.

    >>> groups_of(torch.tensor([0, 1, 2, 0, 0, 1]), 2, False), groups_of(torch.tensor([0, 1, 2, 0, 0, 1]), None, True)
    ((2, 4), (1, 6))
    """
    if size is not None:
        return size, int((positions % size == 0).sum())
    facts = torch.stack([(positions == 0).sum(), positions.max()])
    if is_on_gpu:
        masks = (1 << torch.arange(len(SIZES_ON_GPU), device=positions.device)) - 1
        begins = ((positions & masks[:, None]) == 0).sum(1)  # of each size
        rows, fullest, *groups = torch.cat([facts, begins]).tolist()
        size = size_on_gpu(len(positions), rows, fullest + 1, groups)
        return size, groups[SIZES_ON_GPU.index(size)]
    rows, fullest = facts.tolist()
    candidates = _candidates(len(positions), rows, fullest + 1)
    groups = torch.stack([(positions % own == 0).sum() for own in candidates]).tolist()
    size = _fewest_accesses(candidates, groups)
    return size, groups[candidates.index(size)]


def piece_size(entries: int, is_packed: bool = False) -> int:
    """Return how many entries of a row a program takes at most: so many that there are `PIECES`, or packed `WARPS`.

    >>> piece_size(10_000), piece_size(600_000), piece_size(10_000_000), piece_size(10_000_000, is_packed=True)
    (8, 32, 64, 16)
    """
    size, (longest, pieces) = LEAST_PIECE, (LONGEST_PACKED, WARPS) if is_packed else (LONGEST_PIECE, PIECES)
    while size < longest and size * pieces < entries:
        size *= 2
    return size


def packs_rows(entries: int, rows: int) -> bool:
    """Return whether rows are so short that a piece holds several of them, and there are pieces enough.

    >>> packs_rows(2_000_000, 900_000), packs_rows(2_000_000, 90_000), packs_rows(2_000, 900)
    (True, False, False)
    """
    return ROWS_OF_A_PIECE * entries < LONGEST_PIECE * rows and entries > LONGEST_PACKED * WARPS


def pieces_of(entries: int, rows: int) -> tuple[int, bool]:
    """Return how many entries a piece of a matrix's rows has at most, or about, and whether it holds several rows.

    >>> pieces_of(600_000, 9_000), pieces_of(2_000_000, 900_000)
    ((32, False), (16, True))
    """
    is_packed = packs_rows(entries, rows)
    return piece_size(entries, is_packed), is_packed


def group_size_candidates(occ: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return the powers of two on either side of g* = sqrt(S/n), for S entries over n nonempty rows.

    g* minimises (g+1) * (S/g + n), which is F(g) with its ceiling relaxed: ceil(x) <= x + 1. No candidate
    exceeds the next power of two of the fullest row: what a group had beyond it would be padding.

    >>> group_size_candidates([40, 30, 20, 10])
    (4, 8)
    """
    counts = _counts(occ)
    if counts.numel() == 0:
        return (1,)
    return _candidates(*torch.stack([counts.sum(), (counts > 0).sum(), counts.max()]).tolist())


def _candidates(entries: int, rows: int, fullest: int) -> tuple[int, ...]:
    """Return what `group_size_candidates` does, of entries in rows that are not empty."""
    below = 1
    while (2 * below) ** 2 * rows <= entries and below < fullest:
        below *= 2
    return (below, 2 * below) if below < fullest else (below,)


def _fewest_accesses(sizes: Sequence[int], groups: Sequence[int]) -> int:
    """Return the size of which so many groups make the fewest indirect accesses, the smaller one of two that tie."""
    return min(zip([(g + 1) * count for g, count in zip(sizes, groups)], sizes, strict=True))[1]


def _counts(occ: Tensor | Sequence[int]) -> Tensor:
    """Return occupancies as a tensor whose numbers can be read, whatever device new tensors are made on."""
    return occ.long() if isinstance(occ, Tensor) else torch.tensor(occ, dtype=torch.int64, device="cpu")


def _groups(counts: Tensor, g: int) -> Tensor:
    """Return how many groups of g rows with so many entries make."""
    return ((counts + g - 1) // g).sum()
