"""Choose the group size of a grouped format from how many entries each row holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "gpu_group_size",
    "group_size",
    "group_size_candidates",
    "groups_of",
    "indirect_accesses",
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
# 1.27, 1.31 and 1.28, rows of about 8 (Poisson) 1.11, 1.35 and 0.90; with 1.6 slots, DD 1.0, 1.05 and 0.96.
MOSTLY_PADDING = 1.75
LONG_ROW = 32  # entries, from which on a program that takes a whole row is waited for
# Entries of a piece of a row, and the warps of a large GPU, which are to have one each: of pieces of 16, 32, 64, 128
# and 512 entries those of 16 were the best on one H200 for cora, of 32 or 64 for graphs of long rows (float32, 256
# columns).
LEAST_PIECE, LONGEST_PIECE, WARPS = 8, 64, 2**13
LONGEST_PACKED = 32  # of several rows: REDDIT-BINARY with 64 columns took 0.138 ms, and 0.148 by pieces of 64
# Rows of a piece, from which on pieces hold whole short rows: REDDIT-BINARY, of 2.3 entries a row, took 0.501 ms with
# 256 columns of float32 and 0.150 with 128 of float16, and 0.601 and 0.217 by pieces of single rows; gowalla-bip, of
# 23, took 0.180 and 0.086, and 0.188 and 0.061.
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
    """Return how many entries of a row a program takes at most: so many that each of `WARPS` has a piece.

    >>> piece_size(10_000), piece_size(200_000), piece_size(10_000_000), piece_size(10_000_000, is_packed=True)
    (8, 32, 64, 32)
    """
    size = LEAST_PIECE
    while size < (LONGEST_PACKED if is_packed else LONGEST_PIECE) and size * WARPS < entries:
        size *= 2
    return size


def packs_rows(entries: int, rows: int) -> bool:
    """Return whether rows are so short that a piece holds several of them.

    >>> packs_rows(2_000_000, 900_000), packs_rows(2_000_000, 90_000), packs_rows(2_000, 900)
    (True, False, False)
    """
    return ROWS_OF_A_PIECE * entries < piece_size(entries) * rows


def pieces_of(entries: int, rows: int) -> tuple[int, bool]:
    """Return how many entries a piece of a matrix's rows has at most, or about, and whether it holds several rows.

    >>> pieces_of(200_000, 9_000), pieces_of(2_000_000, 900_000)
    ((32, False), (32, True))
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


def indirect_accesses(occ: Tensor | Sequence[int], g: int) -> int:
    """Return F(g) = (g+1) * sum(ceil(occ_i/g)): a scatter for each group and a gather for each of its g slots."""
    return (g + 1) * int(_groups(_counts(occ), g))


def _fewest_accesses(sizes: Sequence[int], groups: Sequence[int]) -> int:
    """Return the size of which so many groups make the fewest indirect accesses, the smaller one of two that tie."""
    return min(zip([(g + 1) * count for g, count in zip(sizes, groups)], sizes, strict=True))[1]


def _counts(occ: Tensor | Sequence[int]) -> Tensor:
    """Return occupancies as a tensor whose numbers can be read, whatever device new tensors are made on."""
    return occ.long() if isinstance(occ, Tensor) else torch.tensor(occ, dtype=torch.int64, device="cpu")


def _groups(counts: Tensor, g: int) -> Tensor:
    """Return how many groups of g rows with so many entries make."""
    return ((counts + g - 1) // g).sum()
