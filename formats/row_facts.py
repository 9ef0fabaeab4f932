"""What is known of rows whose groups ascend: where they begin, which are alone in theirs, and pieces of them.

A piece is what one program takes: a part of a long row's groups, or several short rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .device_kernels import layouts, runs_kernels
from .facts import RowFacts, piece_count
from .group_size import NEAR

__all__ = ["longest_first", "row_facts"]


def row_facts(
    rows: Tensor, num_rows: int, cut: int = 0, is_packed: bool = False, columns: Tensor | None = None
) -> RowFacts:
    """Work out the facts about `rows` [P], the ascending row of each group; if `cut`, with pieces of so many groups.

    Pieces of rows come in the order of their `columns` [P], if these are given. On a GPU the host waits once.

    >>> facts = row_facts(torch.tensor([0, 2, 2]), num_rows=4)
    >>> facts.pointers.tolist(), facts.is_shared.tolist(), facts.rows_to_zero.tolist(), facts.order.tolist()
    ([0, 1, 1, 3, 3], [False, True, True], [1, 2, 3], [2, 0, 1, 3])
    >>> facts = row_facts(torch.tensor([0, 2, 2]), num_rows=4, cut=1)
    >>> facts.pieces.tolist(), facts.is_shared.tolist(), facts.rows_to_zero.tolist()
    ([0, 1, 1, 2, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0], [False, True, True, False, False, False, False], [1, 2, 3])
    """
    if len(rows) and num_rows and max(len(rows), num_rows) < 2**31 and runs_kernels(rows):
        ordered_by = columns if columns is None else columns.contiguous()
        return layouts.find_facts(rows.contiguous(), num_rows, cut, is_packed, ordered_by)
    rows = rows.long()
    bounds = torch.arange(num_rows + 1, device=rows.device)
    pointers = torch.searchsorted(rows, bounds, out_int32=len(rows) < 2**31)
    lengths = pointers.diff()
    if not cut:
        has_one = lengths == 1
        is_shared = ~has_one[rows]
        return RowFacts(pointers, is_shared, (~has_one).nonzero().flatten(), longest_first(pointers))
    find = _pack if is_packed else _cut
    pieces, owners = find(rows, pointers, cut)
    if not is_packed:
        order = _order(pieces, columns, cut)
        pieces, owners = pieces[order], owners[order]
    first, last = pieces.unbind(1)
    is_shared = (last > first) & ((pointers[owners] < first) | (pointers[owners + 1] > last))
    shared = torch.zeros_like(lengths).index_add_(0, owners, is_shared.to(lengths.dtype))
    to_zero = ((lengths == 0) | (shared > 0)).nonzero().flatten()
    flat = pieces.flatten().to(pointers.dtype)
    return RowFacts(pointers, is_shared, to_zero, longest_first(pointers), flat, cut, is_packed)


def _pack(rows: Tensor, pointers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return where pieces begin and end [Q, 2], one for each `size` groups, and the row with which each begins.

    A piece begins with the first row that begins among its groups. If none does, all of them belong to one row: then it
    begins with that row, if this left the piece before with others, else with the first of its groups.

    >>> _pack(torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2, 3]), torch.tensor([0, 2, 3, 9, 10]), 2)[0].tolist()
    [[0, 2], [2, 3], [3, 6], [6, 9], [9, 10]]
    """
    places = torch.arange(0, len(rows), size, device=rows.device)
    starts, ends = pointers[rows[places]].long(), pointers[rows[places] + 1].long()  # of the rows of these groups
    nexts = torch.where(starts == places, places, ends)  # where the next row begins
    has_start = nexts < (places + size).clamp(max=len(rows))
    follows = (starts >= places - size) & (starts != torch.cat([nexts[:1], nexts[:-1]]))
    firsts = torch.where(has_start, nexts, torch.where(follows, starts, places))
    return torch.stack([firsts, pad(firsts, (0, 1), value=len(rows))[1:]], 1), rows[firsts]


def _cut(rows: Tensor, pointers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return where pieces begin and end [Q, 2], at most `size` groups of a row each, about as many, and their rows.

    How many there are is not waited for: the last ones may have no group.

    >>> _cut(torch.tensor([0] + [2] * 70), torch.tensor([0, 1, 1, 71]), 32)[0].tolist()
    [[0, 1], [1, 24], [24, 47], [47, 71], [0, 0]]
    """
    lengths = pointers.diff().long()
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    number = torch.arange(piece_count(len(lengths), len(rows), size), device=rows.device)
    owners = torch.searchsorted(ends, number, right=True)
    is_piece = owners < len(lengths)
    owners = owners.clamp(max=len(lengths) - 1)
    place, count = number - (ends - counts)[owners], counts[owners].clamp(min=1)
    bounds = [(pointers[owners] + lengths[owners] * at // count) * is_piece for at in (place, place + 1)]
    return torch.stack(bounds, 1), owners


def _order(pieces: Tensor, columns: Tensor | None, size: int) -> Tensor:
    """Return an order in which pieces [Q, 2] that read the same columns are neighbours; those without groups come last.

    Programs that run at once have neighbouring pieces. In the order of the column in their middle these read the same
    rows of another factor, which are then in the cache: products with 256 columns of float32 took an H200 0.099 ms and
    not 0.162 (ogbl-ddi), 0.050 and not 0.061 (blogcatalog3), 0.156 and not 0.176 (fb-Cornell5), and 0.188 and not 0.188
    (gowalla-bip). Of `NEAR` neighbours the longest come first, so that none waits for a longer one.

    >>> _order(torch.tensor([[0, 1], [1, 24], [24, 47], [47, 71], [0, 0]]), torch.arange(71), 32).tolist()
    [3, 1, 2, 0, 4]
    """
    first, last = pieces.unbind(1)
    by_column = number = torch.arange(len(pieces), device=pieces.device)
    if columns is not None and len(columns):
        middle = torch.where(last > first, columns[(first + last) // 2], torch.iinfo(columns.dtype).max)
        by_column = middle.argsort(stable=True)
    lengths = (last - first)[by_column]
    near = torch.where(lengths > 0, number // NEAR, len(pieces))
    return by_column[(near * (size + 1) + size - lengths).argsort(stable=True)]


def longest_first(pointers: Tensor) -> Tensor:
    """Return the rows whose groups begin at `pointers`, those with the most groups first."""
    return pointers.diff().argsort(descending=True, stable=True).int()
