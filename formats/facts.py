"""What a kernel may know about the rows that a format's groups belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowFacts", "longest_first", "row_facts"]


@dataclass(frozen=True, eq=False)
class RowFacts:
    """About P groups in D rows, ascending: the groups of row r are pointers[r] to pointers[r+1] - 1."""

    pointers: Tensor  # [D+1]  int32, or int64 when P needs it
    is_shared: Tensor  # [P]    bool: the group's row has several groups
    rows_to_zero: Tensor  # [R]    int64: rows with no group or with several
    order: Tensor  # [D]    int32: the rows, those with the most groups first


def row_facts(rows: Tensor, num_rows: int) -> RowFacts:
    """Work out the facts about `rows` [P], the ascending row of each group.

    >>> facts = row_facts(torch.tensor([0, 2, 2]), num_rows=4)
    >>> facts.pointers.tolist(), facts.is_shared.tolist(), facts.rows_to_zero.tolist(), facts.order.tolist()
    ([0, 1, 1, 3, 3], [False, True, True], [1, 2, 3], [2, 0, 1, 3])
    """
    rows = rows.long()
    bounds = torch.arange(num_rows + 1, device=rows.device)
    pointers = torch.searchsorted(rows, bounds, out_int32=len(rows) < 2**31)
    groups = pointers.diff()
    return RowFacts(
        pointers=pointers,
        is_shared=groups[rows] > 1,
        rows_to_zero=(groups != 1).nonzero().flatten(),
        order=longest_first(pointers),
    )


def longest_first(pointers: Tensor) -> Tensor:
    """The rows whose groups begin at `pointers`, those with the most groups first."""
    return pointers.diff().argsort(descending=True, stable=True).int()
