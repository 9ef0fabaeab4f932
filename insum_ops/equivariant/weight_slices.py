"""Terms of a tensor product, and the slices of the flat weights that their statements read in place.

Paths of one kind whose weights lie equally far apart share a statement: W[b,p,u,w] with a longer step from p to p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiler import outside_transforms
from .constants import Constants
from .shared_weights import SharedTerm
from .single_channel import SingleTerm
from .slots import gather
from .species import SpeciesTerm
from .table_terms import ColumnTerm, TableTerm, with_held_coefficients
from .terms import PathTerm

__all__ = ["Term", "Terms", "WeightSlice"]

Term = PathTerm | TableTerm | ColumnTerm | SingleTerm | SharedTerm | SpeciesTerm


class WeightSlice(NamedTuple):
    """A term and the slice of the flat weights that it reads."""

    term: Any
    start: int
    step: int = 0  # from one path's weights to the next one's; 0: they are side by side

    @property
    def numel(self) -> int:
        return int(self.term.weight_numel)


Piece = WeightSlice  # as pickles of version 0.1.0 call it


@dataclass(frozen=True)
class Terms:
    """Statements by path, and how the flat weights are handed out to them."""

    terms: tuple[Term, ...]
    order: Constants | None  # weights put in the order of the terms; None: they are

    def parts(self, weight: Tensor | None) -> list[Tensor] | list[None]:
        """Return each term's part of the flat weights, recorded for autograd."""
        if weight is None:
            return [None] * len(self.terms)
        if self.order is not None:
            order = self.order.on(weight.device)
            if weight.dim() == 1:
                weight = weight.index_select(0, order["columns"])
            else:
                weight = gather(weight, order["columns"], order["inverse"])
        if len(self.terms) == 1:
            return [weight]
        return list(weight.split([term.weight_numel for term in self.terms], -1))

    @cached_property  # asked for by those alone who may keep it
    def weight_slices(self) -> dict[bool, tuple[bool, list[WeightSlice]]]:
        """Return the `slices_of` these terms by whether paths of one kind may share a statement."""
        order = None if self.order is None else self.order.tensors["columns"]
        with torch.device("cpu"), outside_transforms():
            return {is_merged: slices_of(self.terms, order, is_merged) for is_merged in (False, True)}

    def ordered(self, weight: Tensor) -> Tensor:
        """Return weights in the order of the terms. No graph is recorded."""
        return weight if self.order is None else weight.index_select(-1, self.order.on(weight.device)["columns"])

    def unordered(self, dW: Tensor) -> Tensor:
        """Return a gradient of ordered weights in the order of the flat weights; the inverse of `ordered`."""
        return dW if self.order is None else dW.index_select(-1, self.order.on(dW.device)["inverse"])


def slices_of(terms: Sequence[Any], order: Tensor | None, is_merged: bool) -> tuple[bool, list[WeightSlice]]:
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
    parts = [WeightSlice(term, start) for term, start in zip(terms, starts)]
    parts = _merged(parts) if is_merged else parts
    return in_place, [part._replace(term=_with_held_coefficients(part.term)) for part in parts]


def _with_held_coefficients(term: object) -> object:
    return with_held_coefficients(term) if isinstance(term, PathTerm) else term


def _merged(parts: Sequence[WeightSlice]) -> list[WeightSlice]:
    """Return slices in which single paths of one kind are joined while their weights lie equally far apart."""
    single = [part for part in parts if _is_single(part.term)]
    merged = [part for part in parts if not _is_single(part.term)]
    kind = lambda part: (part.term.key, part.term.is_worth_a_dot)
    for _, alike in groupby(sorted(single, key=lambda part: (*kind(part), part.start)), kind):
        run: list[WeightSlice] = []
        for part in alike:
            if len(run) > 1 and part.start - run[-1].start != run[1].start - run[0].start:
                merged.append(_joined(run))
                run = []
            run.append(part)
        merged.append(_joined(run))
    return sorted(merged, key=lambda part: part.start)


def _is_single(term: object) -> bool:
    return isinstance(term, PathTerm) and term.key[2] and term.num_paths == 1


def _joined(run: Sequence[WeightSlice]) -> WeightSlice:
    """Return one slice for single paths of one kind whose weights lie equally far apart."""
    if len(run) == 1:
        return run[0]
    first, second = run[:2]
    tables = [part.term.tables.tensors for part in run]
    longest = max(path_tables["CGV"].shape[1] for path_tables in tables)
    # a negative position is no entry
    joined = {
        name: torch.cat([_padded(path_tables[name], longest, 0 if name == "CGV" else -1) for path_tables in tables])
        for name in tables[0]
    }
    term = replace(first.term, num_paths=len(run), tables=Constants(joined))
    return WeightSlice(term, first.start, second.start - first.start)


def _padded(table: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, length - table.shape[1]), value=value)
