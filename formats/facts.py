"""Facts about index tensors: what a kernel may rely on that the statement does not say.

A fact stands beside a statement and speaks of its tensors by name. A kernel may be faster by it; the statement means
the same without it. There are three kinds, and each holds what it takes:

    WrittenOnce     an index tensor points to every row of the output once
    OwnedRows       a program owns rows of the output, and where its groups begin
    ConstantTables  tensors hold numbers that never change, which a kernel's source may hold too

Facts are objects everywhere but at the torch operator, whose schema has a text and a list of tensors.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

from torch import Tensor

from .errors import FormatError

__all__ = [
    "SHORT_LENGTH",
    "ConstantTables",
    "Fact",
    "OwnedRows",
    "RowFacts",
    "Tables",
    "WrittenOnce",
    "piece_count",
]

ONCE = " once"
WHOLE, CUT, PACKED, COUNTED = " whole", " cut ", " packed ", " counted by "
CONSTANTS = "known "
SHORT_LENGTH = 64  # up to which a kernel's source may rely on a length, even if it varies from call to call
TEXTS = 256  # of constant tables whose parsed form is kept; a longer table would only be parsed again

Tables = Mapping[str, Any]  # by the names of tensors: their numbers, in nested lists


class Fact(ABC):
    """One fact. Two are equal if they say the same and hold the same kinds of tensors, whatever is in these."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fact) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The statement's tensors that the fact speaks of."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a kernel is passed after the statement's own tensors, in the order of `OwnedRows.TENSORS`."""
        return ()

    @property
    def key(self) -> str:
        """What tells facts apart in caches."""
        return str(self)

    @abstractmethod
    def __str__(self) -> str:
        """Return the short form, by which tuned configs are remembered on disk."""

    def without_tensors(self) -> Fact:
        """Return what the fact says, for a holder that must not keep its tensors alive."""
        return self

    def to_text(self) -> str:
        """Return the fact without its tensors, as the torch operator takes it."""
        return str(self)

    @staticmethod
    def from_text(text: str, tensors: Sequence[Tensor]) -> Fact | None:
        """Return the fact whose `to_text` and `tensors` these are.

        None stands for no fact: "", and constant tables by their digest alone, as programs that were exported by
        earlier versions have them.

        Raises:
            FormatError: if the tensors do not make up the fact.

        >>> Fact.from_text("AS once", [])
        WrittenOnce(index='AS')
        >>> import torch
        >>> Fact.from_text("ROW.TILE", [torch.tensor([0, 1, 1, 3])]).names
        ('ROW', 'TILE')
        """
        if text.startswith(CONSTANTS):
            _refuse_tensors(text.split("{")[0], tensors)
            return _tables_of(text)
        if not text or text.endswith(ONCE):
            _refuse_tensors(text, tensors)
            return WrittenOnce(text.removesuffix(ONCE)) if text else None
        is_packed = PACKED in text
        about, _, cut = text.partition(PACKED if is_packed else CUT)
        taken = OwnedRows.TENSORS if cut else OwnedRows.TENSORS[:-1]
        if len(tensors) > len(taken) or (cut and 0 < len(tensors) < len(taken)):
            raise FormatError(f"{text!r} takes {', '.join(taken)}, but {len(tensors)} tensors are given")
        about, _, counted_by = about.removesuffix(WHOLE).partition(COUNTED)
        rows, _, tiles = about.partition(".")
        fields: dict[str, Any] = dict(zip(OwnedRows.TENSORS, tensors))
        fields |= {"is_whole": text.endswith(WHOLE), "cut": int(cut or 0), "is_packed": is_packed}
        fields["counted_by"] = counted_by
        fact = OwnedRows(rows, tiles, **fields)
        # not in __post_init__: a tracer would take note of every length
        if len(tensors) > 1 and len(tensors[1]) != len(tensors[0]) - 1:
            sizes = f"pointers is {list(tensors[0].shape)} but order is {list(tensors[1].shape)}"
            raise FormatError(f"{sizes}; there is one pointer more than there are rows")
        return fact


def _refuse_tensors(text: str, tensors: Sequence[Tensor]) -> None:
    """Raise FormatError if tensors come with a fact that has none."""
    if len(tensors) > 0:
        raise FormatError(f"the fact {text.strip()!r} has no tensors, but {len(tensors)} are given")


@lru_cache(maxsize=TEXTS)
def _tables_of(text: str) -> ConstantTables | None:
    """Return the constant tables that a text spells; None if it has their digest alone."""
    numbers = text.removeprefix(CONSTANTS)
    return ConstantTables(json.loads(numbers)) if numbers.startswith("{") else None


@dataclass(frozen=True, eq=False)
class WrittenOnce(Fact):
    """The index tensor `index` points to every row of the output once, whatever its -1s.

    >>> str(WrittenOnce("AS")), WrittenOnce("AS").names
    ('AS once', ('AS',))
    """

    index: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.index,)

    def __str__(self) -> str:
        return f"{self.index}{ONCE}"


@dataclass(frozen=True, eq=False)
class OwnedRows(Fact):
    """Each program owns rows of the output, and goes through the groups that lead to them.

    Without `tiles`, `rows` [P] ascends and each of its values owns the row that it names. With it, `tiles` [P] ascends
    and each of its values t owns the rows `rows[t,...]`, which hold every row of the output once, and -1 where a tile
    is not full. The tensors say which groups these are; a fact without any says only that it is so. Those that are
    given come in the order of `TENSORS`, with none left out before another. If rows are cut, several programs may share
    a long one: each takes a piece of its groups, and what is said of groups below is said of pieces. If they are packed
    too, a piece holds several short rows, or a part of a long one.

    The winner of a `max` or `min` is told by its group's place in P. Where groups stand in another order than the
    statement's own, `counted_by` [P] says where each stood, and that tells the winner; of equals, the first of those.

    >>> str(OwnedRows("AM")), str(OwnedRows("ROW", "TILE")), OwnedRows("ROW", "TILE").names
    ('AM', 'ROW.TILE', ('ROW', 'TILE'))
    >>> Fact.from_text("AM whole", []).is_whole
    True
    >>> Fact.from_text("F counted by P whole", []).names
    ('F', 'P')
    """

    rows: str
    tiles: str = ""
    pointers: Tensor | None = None  # [D+1]  the groups of row or tile r are pointers[r] to pointers[r+1] - 1
    order: Tensor | None = None  # [D]    the rows or tiles, those with the most groups first
    is_shared: Tensor | None = None  # [P]    bool: the group's row has several groups; of pieces [Q]
    rows_to_zero: Tensor | None = None  # [R]    rows with no group or with several
    pieces: Tensor | None = None  # [2Q]   the groups of piece s are pieces[2s] to pieces[2s+1] - 1, see `piece_count`
    is_whole: bool = False  # nothing tells which rows have one group, so that a program takes all groups of a row
    cut: int = 0  # the most groups of a piece, or about as many if they are packed; 0 if rows are not cut
    is_packed: bool = False
    counted_by: str = ""

    TENSORS = ("pointers", "order", "is_shared", "rows_to_zero", "pieces")

    def __post_init__(self) -> None:
        fields = (self.pointers, self.order, self.is_shared, self.rows_to_zero, self.pieces)
        for at, (name, tensor) in enumerate(zip(self.TENSORS, fields)):
            if tensor is None:
                continue
            if at > 0 and fields[at - 1] is None:
                raise FormatError(f"{name} is given without {self.TENSORS[at - 1]}; a kernel takes them in this order")
            # torch 2.10's tracer makes facts of its own proxies, which have no dimensions yet
            if isinstance(tensor, Tensor) and tensor.dim() != 1:
                raise FormatError(f"{name} is {list(tensor.shape)}; it has one dimension")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([name for name in (self.rows, self.tiles, self.counted_by) if name])

    @property
    def owner(self) -> str:
        """The index tensor that ascends, and whose values own rows."""
        return self.tiles or self.rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        fields = (self.pointers, self.order, self.is_shared, self.rows_to_zero, self.pieces)
        return tuple([tensor for tensor in fields if tensor is not None])

    @cached_property
    def key(self) -> str:  # worked out once, since warm calls ask for it
        return f"{self} {len(self.tensors)}"

    def __str__(self) -> str:
        kind = WHOLE if self.is_whole else f"{PACKED if self.is_packed else CUT}{self.cut}" if self.cut else ""
        counted = f"{COUNTED}{self.counted_by}" if self.counted_by else ""
        return f"{self.rows}{f'.{self.tiles}' if self.tiles else ''}{counted}{kind}"

    def without_tensors(self) -> OwnedRows:
        return replace(self, pointers=None, order=None, is_shared=None, rows_to_zero=None, pieces=None)


@dataclass(frozen=True, eq=False, repr=False)
class ConstantTables(Fact):
    """The tensors that `numbers` names hold these numbers, always; equal for equal numbers.

    >>> import torch
    >>> fact = ConstantTables.of({"I": torch.tensor([2, 0])})
    >>> fact == ConstantTables({"I": [2, 0]}), fact == ConstantTables({"I": [0, 2]})
    (True, False)
    >>> fact.to_text()
    'known {"I": [2, 0]}'
    """

    numbers: Tables
    text: str = field(init=False)  # all of it, as the torch operator takes it
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        text = json.dumps(self.numbers)
        digest = f"{CONSTANTS}{sha256(text.encode()).hexdigest()[:24]}"
        vars(self).update(text=f"{CONSTANTS}{text}", digest=digest)

    @staticmethod
    def of(tables: Mapping[str, Tensor]) -> ConstantTables:
        """Return the fact that these tensors never change."""
        return ConstantTables({name: tensor.tolist() for name, tensor in tables.items()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.numbers)

    def __str__(self) -> str:
        return self.digest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.numbers)})"

    def to_text(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class RowFacts:
    """About P groups in D rows, ascending: the groups of row r are pointers[r] to pointers[r+1] - 1."""

    pointers: Tensor  # [D+1]  int32, or int64 when P needs it
    is_shared: Tensor  # [P]    bool: the group's row has several groups; of pieces [Q] if rows are cut
    rows_to_zero: Tensor  # [R]    int64: rows with no group or with several; or pieces
    order: Tensor  # [D]    int32: the rows, those with the most groups first
    pieces: Tensor | None = None  # [2Q]   the groups of piece s are pieces[2s] to pieces[2s+1] - 1
    cut: int = 0  # the most groups of a piece
    is_packed: bool = False  # a piece holds about as many groups of several short rows, or of one

    def owned(self, rows: str, tiles: str = "") -> OwnedRows:
        """Return these as a fact about a statement in which the rows, and the tiles of rows, have such names."""
        tensors = self.pointers, self.order, self.is_shared, self.rows_to_zero, self.pieces
        return OwnedRows(rows, tiles, *tensors, cut=self.cut, is_packed=self.is_packed)


def piece_count(num_rows: int, num_groups: int, cut: int, is_packed: bool = False) -> int:
    """Return how many pieces of `cut` groups a fact has: a grid follows from shapes, the last ones may have no group.

    >>> piece_count(4, 100, 32), piece_count(4, 100, 32, is_packed=True)
    (7, 4)
    """
    return -(-num_groups // cut) if is_packed else num_rows + num_groups // cut
