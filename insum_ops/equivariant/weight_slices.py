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
from .tables import with_known
from .terms import PathTerm

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """A term and where its weights begin."""

    term: Any
    start: int
    step: int = 0  # from one path's weights to the next one's; 0: they are side by side

    @property
    def numel(self) -> int:
        return int(self.term.weight_numel)


def pieces_of(terms: Sequence[Any], order: Tensor | None, is_merged: bool) -> tuple[bool, list[Piece]]:
    """Whether every term's weights are found where they lie, and the pieces; else they are those of ordered weights."""
    numels = [term.weight_numel for term in terms]
    ends = list(accumulate(numels))
    starts = [end - numel for end, numel in zip(ends, numels)]
    in_place = True
    if order is not None:
        own = [order[start:end] for start, end in zip(starts, ends)]
        in_place = all([bool((part.diff() == 1).all()) for part in own])
        if in_place:
            starts = [int(part[0]) if len(part) else 0 for part in own]
    pieces = [Piece(*each) for each in zip(terms, starts)]
    pieces = _merged(pieces) if is_merged else pieces
    return in_place, [piece._replace(term=_with_known(piece.term)) for piece in pieces]


def _with_known(term: object) -> object:
    return with_known(term) if isinstance(term, PathTerm) else term


def _merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Single paths of one kind together, as long as the next one is as far away as the last."""
    single = [piece for piece in pieces if _is_single(piece.term)]
    found = [piece for piece in pieces if not _is_single(piece.term)]
    kind = lambda piece: (piece.term.key, piece.term.is_worth_a_dot)
    for _, alike in groupby(sorted(single, key=lambda piece: (*kind(piece), piece.start)), kind):
        run: list[Piece] = []
        for piece in alike:
            if len(run) > 1 and piece.start - run[-1].start != run[1].start - run[0].start:
                found.append(_joined(run))
                run = []
            run.append(piece)
        found.append(_joined(run))
    return sorted(found, key=lambda piece: piece.start)


def _is_single(term: object) -> bool:
    return isinstance(term, PathTerm) and term.key[2] and term.num_paths == 1


def _joined(run: Sequence[Piece]) -> Piece:
    if len(run) == 1:
        return run[0]
    first, second = run[:2]
    tables = [piece.term.tables.tensors for piece in run]
    longest = max(own["CGV"].shape[1] for own in tables)
    # a negative position is no entry
    joined = {
        name: torch.cat([_padded(own[name], longest, 0 if name == "CGV" else -1) for own in tables])
        for name in tables[0]
    }
    term = replace(first.term, num_paths=len(run), tables=Constants(joined))
    return Piece(term, first.start, second.start - first.start)


def _padded(table: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, length - table.shape[1]), value=value)
