"""Which of the flat weights each statement of a tensor product reads where they are.

Paths of one kind whose weights lie equally far apart share a statement: W[b,p,u,w] with a longer step from p to p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .constants import Constants
from .tables import with_held_coefficients
from .terms import PathTerm

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """A term and the slice of the flat weights that it reads."""

    term: Any
    start: int
    step: int = 0  # from one path's weights to the next one's; 0: they are side by side

    @property
    def numel(self) -> int:
        return int(self.term.weight_numel)


def pieces_of(terms: Sequence[Any], order: Tensor | None, is_merged: bool) -> tuple[bool, list[Piece]]:
    """Return whether every term reads its weights where they lie, and the slice of each term.

    If not, the slices are those of weights in the order of the terms. `order` is the column of each ordered weight,
    and `is_merged` puts single paths of one kind into one statement.
    """
    numels = [term.weight_numel for term in terms]
    ends = list(accumulate(numels))
    starts = [end - numel for end, numel in zip(ends, numels)]
    in_place = True
    if order is not None:
        columns = [order[start:end] for start, end in zip(starts, ends)]
        in_place = all([bool((part.diff() == 1).all()) for part in columns])
        if in_place:
            starts = [int(part[0]) if len(part) else 0 for part in columns]
    pieces = [Piece(term, start) for term, start in zip(terms, starts)]
    pieces = _merged(pieces) if is_merged else pieces
    return in_place, [piece._replace(term=_with_held_coefficients(piece.term)) for piece in pieces]


def _with_held_coefficients(term: object) -> object:
    return with_held_coefficients(term) if isinstance(term, PathTerm) else term


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Return slices in which single paths of one kind are joined while their weights lie equally far apart."""
    single = [piece for piece in pieces if _is_single(piece.term)]
    merged = [piece for piece in pieces if not _is_single(piece.term)]
    kind = lambda piece: (piece.term.key, piece.term.is_worth_a_dot)
    for _, alike in groupby(sorted(single, key=lambda piece: (*kind(piece), piece.start)), kind):
        run: list[Piece] = []
        for piece in alike:
            if len(run) > 1 and piece.start - run[-1].start != run[1].start - run[0].start:
                merged.append(_joined(run))
                run = []
            run.append(piece)
        merged.append(_joined(run))
    return sorted(merged, key=lambda piece: piece.start)


def _is_single(term: object) -> bool:
    return isinstance(term, PathTerm) and term.key[2] and term.num_paths == 1


def _joined(run: Sequence[Piece]) -> Piece:
    """Return one slice for single paths of one kind whose weights lie equally far apart."""
    if len(run) == 1:
        return run[0]
    first, second = run[:2]
    tables = [piece.term.tables.tensors for piece in run]
    longest = max(path_tables["CGV"].shape[1] for path_tables in tables)
    # a negative position is no entry
    joined = {
        name: torch.cat([_padded(path_tables[name], longest, 0 if name == "CGV" else -1) for path_tables in tables])
        for name in tables[0]
    }
    term = replace(first.term, num_paths=len(run), tables=Constants(joined))
    return Piece(term, first.start, second.start - first.start)


def _padded(table: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, length - table.shape[1]), value=value)
