"""Reading constant tables, numbers in nested lists that a kernel's source may hold: see `ConstantTables`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..language import Access, Var

__all__ = ["is_permutation", "line_at", "line_of_access", "number_at"]


def number_at(table: Any, place: tuple[int, ...]) -> Any:
    """Return the number, or the nested list, at a position of a table."""
    for position in place:
        table = table[position]
    return table


def line_at(table: Any, place: tuple[int | None, ...]) -> tuple[Any, int] | None:
    """Return the first number of a table along the dimension whose place is None, and the step between its numbers.

    The result is None if the steps differ, if some but not all numbers are below 0, or for several such dimensions.

    >>> line_at([[7, 1, 4, 7]], (0, None)), line_at([[0, 1, 4]], (0, None)), line_at([[7, 1, 4]], (0, 2))
    (None, None, (4, 0))
    >>> line_at([[0, 3, 6], [1, 4, 7]], (1, None))
    (1, 3)
    """
    if place.count(None) > 1:
        return None
    along = place.index(None) if None in place else len(place)
    table = number_at(table, tuple(at for at in place[:along] if at is not None))
    if along == len(place):
        return table, 0
    rest = tuple(at for at in place[along + 1 :] if at is not None)
    numbers = [number_at(row, rest) for row in table]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    is_line = numbers == [numbers[0] + step * at for at in range(len(numbers))]
    return (numbers[0], step) if is_line and (step == 0 or min(numbers[0], numbers[-1]) >= 0) else None


def line_of_access(access: Access, tables: Mapping[str, Any], at: Mapping[str, int]) -> tuple[Any, int] | None:
    """Return what `line_at` returns for an access to a table, where `at` has the values of all names but an axis.

    A table may be read at the positions that another holds, `COLUMN[PART[i],u]`. No position is -1, and a line of them
    along the axis, inside another table, has no answer.
    """
    place: list[int | None] = []
    for index in access.indices:
        if isinstance(index, Var):
            place.append(at.get(index.name))
        elif isinstance(index, Access):
            inner = line_of_access(index, tables, at)
            if inner is None or inner[1] != 0:
                return None
            if inner[0] < 0:
                return -1, 0
            place.append(inner[0])
        else:
            return None
    return line_at(tables[access.name], tuple(place))


def is_permutation(table: Any, length: int) -> bool:
    """Whether every number below `length` stands in the table once.

    >>> is_permutation([[2, 0], [1, 3]], 4), is_permutation([[2, 0], [1, 2]], 4)
    (True, False)
    """
    numbers = [table]
    while numbers and isinstance(numbers[0], list):
        numbers = [number for nested in numbers for number in nested]
    return sorted(numbers) == list(range(length))
