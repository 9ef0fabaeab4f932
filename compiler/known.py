"""Small tables whose numbers a kernel's source may hold, since whoever owns them says that they never change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from torch import Tensor

__all__ = ["Tables", "known", "number_at", "tables_of"]

KNOWN = "known "
Tables = Mapping[str, Any]  # by the names of tensors: their numbers, in nested lists

_tables: dict[str, Tables] = {}


def known(tables: Mapping[str, Tensor]) -> str:
    """The fact that these tensors of a statement hold these numbers, always; equal for equal numbers.

    >>> import torch
    >>> fact = known({"I": torch.tensor([2, 0])})
    >>> fact == known({"I": torch.tensor([2, 0])}), fact == known({"I": torch.tensor([0, 2])})
    (True, False)
    """
    numbers = {name: tensor.tolist() for name, tensor in tables.items()}
    fact = f"{KNOWN}{sha256(json.dumps(numbers).encode()).hexdigest()[:24]}"
    _tables[fact] = numbers
    return fact


def tables_of(fact: str) -> Tables:
    """Those that a fact is about; none if it is about something else."""
    return _tables.get(fact, {})


def number_at(table: Any, place: tuple[int, ...]) -> Any:
    for position in place:
        table = table[position]
    return table
