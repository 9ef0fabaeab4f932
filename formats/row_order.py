"""Rows of a matrix in the order in which programs take them, alone or in pairs, whose entries in a column share a p."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .facts import RowFacts
from .row_facts import row_facts
from .row_matching import paired

__all__ = ["RowOrder", "RowOrderedView", "balanced", "order_rows"]

MOST_PAIRS = 2**20  # of rows, or of a row and a column, that are looked at: beyond that, rows are paired by length
AT_ONCE = 2**26  # columns of pairs of rows


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Rows in sets of one or two; each p is a column of one set, in which at least one of its rows has an entry."""

    rows: Tensor  # [S] or [S, 2] the rows of each set, -1 where the last one is not full
    sets: Tensor  # [P] ascending
    columns: Tensor  # [P]
    source: Tensor  # [P] or [P, 2] which entry the row has there, -1: none

    @cached_property
    def facts(self) -> RowFacts:
        return row_facts(self.sets, len(self.rows))

    @cached_property
    def shared(self) -> float:
        """The share of the entries that need no p of their own: 0 if paired rows share no column, at most a half."""
        return 1 - len(self.sets) / max(int((self.source >= 0).sum()), 1)


@torch.inference_mode(False)  # what is kept must be good for training too
def order_rows(rows: Tensor, columns: Tensor, grid: tuple[int, int], width: int) -> RowOrder:
    """Return the rows in sets of `width`; rows of a pair have many columns in common.

    Each 2, 4 or 8 neighbouring sets have about the same length together.

    Args:
        rows: row of each entry [E].
        columns: column of each entry [E].
        grid: the number of rows and of columns.
        width: rows of a set, 1 or 2.

    >>> order = order_rows(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1, 1]), (3, 2), width=2)
    >>> order.rows.tolist(), order.sets.tolist(), order.columns.tolist(), order.source.tolist()
    ([[1, 2], [0, -1]], [0, 0, 1], [0, 1, 1], [[1, -1], [2, 3], [0, -1]])
    >>> order_rows(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 1, 1]), (3, 2), width=1).source.tolist()
    [1, 2, 0, 3]
    """
    rows, columns = rows.long(), columns.long()
    num_rows, num_columns = grid
    order = _in_pairs(rows, columns, grid) if width == 2 else torch.arange(num_rows, device=rows.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=rows.device)
    place = place[rows]
    repeat = _repeats(place * num_columns + columns)  # an entry that stands twice is met twice
    most = int(repeat.max()) + 1 if len(repeat) else 1
    met, at = torch.unique(((place // width) * num_columns + columns) * most + repeat, return_inverse=True)
    source = rows.new_full((len(met), width), -1)
    source[at, place % width] = torch.arange(len(rows), device=rows.device)
    met //= most
    in_turn = balanced(torch.bincount(met // num_columns, minlength=len(order) // width))
    rank = torch.empty_like(in_turn)
    rank[in_turn] = torch.arange(len(in_turn), device=rows.device)
    sets, by_set = rank[met // num_columns].sort(stable=True)
    set_rows = torch.where(order < num_rows, order, -1).view(-1, width)[in_turn]
    shape = (-1, 2) if width == 2 else (-1,)
    fields = set_rows.int().view(shape), sets.int(), (met % num_columns)[by_set].int(), source[by_set].int().view(shape)
    return RowOrder(*fields)


def balanced(lengths: Tensor) -> Tensor:
    """Return an order in which each two, each four and each eight neighbours have about the same length together.

    The longest stands beside the shortest, and so on with pairs and with fours; what is left over comes last.

    >>> balanced(torch.tensor([9, 1, 5, 4, 2, 8, 6, 3, 1])).tolist()
    [0, 1, 2, 3, 5, 4, 6, 7, 8]
    """
    longest = lengths.argsort(descending=True, stable=True)
    left_over = len(lengths) % 8
    groups = longest[: len(lengths) - left_over, None]
    while groups.shape[1] < 8 and len(groups):
        groups = groups[lengths[groups].sum(1).argsort(descending=True, stable=True)]
        half = len(groups) // 2
        groups = torch.cat([groups[:half], groups[half:].flip(0)], 1)
    return torch.cat([groups.flatten(), longest[len(lengths) - left_over :]])


def _in_pairs(rows: Tensor, columns: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return all rows, and one more if their number is odd, with the two of a pair side by side."""
    num_rows, num_columns = grid
    even = num_rows + num_rows % 2
    lengths = torch.bincount(rows, minlength=even)
    if even * max(even, num_columns) > MOST_PAIRS:
        return lengths.argsort(descending=True, stable=True)
    has = torch.zeros(even, num_columns, dtype=torch.bool, device=rows.device)
    has[rows, columns] = True
    # no matrix product: deterministic mode would ask for cuBLAS's workspace, and autocast round it
    common = torch.zeros(even, even, dtype=torch.long, device=rows.device)
    for part in has.split(max(AT_ONCE // max(even * even, 1), 1), dim=1):
        common += (part[:, None] & part).sum(-1)
    return paired(common).flatten()


def _repeats(keys: Tensor) -> Tensor:
    """Return how many equal keys there are before each key.

    >>> _repeats(torch.tensor([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    ordered, order = keys.sort(stable=True)
    counts = torch.empty_like(keys)
    counts[order] = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
    return counts


class RowOrderedView:
    """A matrix of single entries or blocks, its rows in the sets of a `RowOrder` and its values in place."""

    def __init__(self, form: Any, row_order: RowOrder, group_dim: int) -> None:
        self.shape, self.block_size, self.group_dim = form.shape, form.block_size, group_dim
        self.values, self.dtype, self.device = form.flat_values, form.dtype, form.device
        self.coords = (row_order.rows, row_order.columns) if group_dim == 0 else (row_order.columns, row_order.rows)
        self.sets, self.value_source, self.facts = row_order.sets, row_order.source, row_order.facts
        self.value_axes = ("p", "q")[: row_order.rows.ndim]
        self.has_padding = row_order.rows.ndim == 2
        self.row_order = row_order

    @property
    def coord_axes(self) -> tuple[tuple[str, ...], ...]:
        return (self.value_axes, ("p",)) if self.group_dim == 0 else (("p",), self.value_axes)


Walk = RowOrder  # its name in older pickles
