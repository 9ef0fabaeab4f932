"""A tensor whose elements are picked along memory, copied so that rows are picked instead.

`Y[c,p] = X[c,G[p]]` reads a whole sector of memory for every element. With `T[t,c] = X[c,t]` first, `Y[c,p] = T[G[p],c]`
reads rows, and all of their sectors. A scatter along memory adds to rows, which are turned afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ..binding import Bound
from ..language import Access, Number, Statement, Var, fresh_name
from .device import Device

__all__ = ["Split", "relaid"]

# The most times faster that an estimate claims: it does not know strides, by which a tensor may lie turned already, so
# that the statement as it stands has to be timed as well.
MOST_GAIN = 2.0


@dataclass(frozen=True)
class Split:
    """Statements to be evaluated in turn; each but the last computes a tensor that a later one reads."""

    steps: tuple[Statement, ...]
    sizes: tuple[tuple[int, ...], ...]  # of the outputs of all steps but the last
    gain: float  # the estimated time of one kernel over that of all steps, by work and bytes

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def relaid(bound: Bound, device: Device) -> Split | None:
    """Return the steps of a statement that picks elements along memory, or None if there is none or nothing is gained.

    >>> import torch
    >>> from insum_ops.compiler.binding import bind
    >>> from insum_ops.compiler.language import parse
    >>> from insum_ops.compiler.planning.device import H200
    >>> X, G = torch.empty(32, 40_000, device="meta"), torch.empty(500_000, dtype=torch.int32, device="meta")
    >>> print(relaid(bind(parse("Y[c,p] = X[c,G[p]]"), dict(X=X, G=G)), H200))
    T[t,c] = X[c,t]
    Y[c,p] = T[G[p],c]
    """
    statement, extents = bound.statement, bound.extents
    if not statement.is_sum or bound.is_empty:
        return None
    taken, position = [*statement.tensor_names, statement.output.name], fresh_name("t", extents)
    turned: dict[Access, Access] = {}  # each access that picks elements, with the one that picks rows
    before, after, sizes = list[Statement](), list[Statement](), list[tuple[int, ...]]()
    for access in dict.fromkeys((statement.output, *statement.accesses)):
        if not _picks_elements(access):
            continue
        is_output = access is statement.output
        shape = bound.size if is_output else bound.shapes[access.name]
        taken.append(fresh_name("T", taken))
        *others, picked = access.indices
        turned[access] = Access(taken[-1], (picked, *others))
        as_rows, as_it_is = Access(taken[-1], (Var(position), *others)), replace(access, indices=(*others, Var(position)))
        if is_output:
            after.append(Statement(as_it_is, (as_rows,), statement.op))
        else:
            before.append(Statement(as_rows, (as_it_is,), "="))
        sizes.append((shape[-1], *shape[:-1]))
    if not turned:
        return None
    if after:  # the rows that are added to are made last
        sizes = [*sizes[1:], sizes[0]]
    factors = tuple(factor if isinstance(factor, Number) else turned.get(factor, factor) for factor in statement.factors)
    main = replace(statement, output=turned.get(statement.output, statement.output), factors=factors, text="")
    main = replace(main, op="+=") if after else main
    saved = sum(_bytes_saved(access, bound, device) for access in turned)
    whole = sum(_bytes(access, extents, bound) for access in (statement.output, *statement.accesses))
    copied = 2 * sum(prod(size) for size in sizes) * bound.dtype.itemsize
    turns = len(turned) * device.launch_gap * device.bandwidth
    wasted = sum(_bytes_wasted(access, bound, device) for access in turned)
    gain = (whole + wasted) / (whole + wasted - saved + copied + turns)
    return Split((*before, main, *after), tuple(sizes), min(gain, MOST_GAIN)) if gain > 1 else None


def _picks_elements(access: Access) -> bool:
    """Whether an access picks positions of its last dimension, and all of each other one."""
    *others, last = access.indices or (None,)
    names = [index.name for index in others if isinstance(index, Var)]
    return (
        isinstance(last, Access)
        and bool(names)
        and len({*names}) == len(others)
        and not {*names} & {*last.names}
    )


def _bytes(access: Access, extents: Mapping[str, int], bound: Bound) -> int:
    return prod(extents[name] for name in access.names) * bound.dtype.itemsize


def _bytes_wasted(access: Access, bound: Bound, device: Device) -> float:
    """Return the bytes of sectors that come along with elements which are picked one by one."""
    return _bytes(access, bound.extents, bound) * (device.sector_bytes / bound.dtype.itemsize - 1)


def _bytes_saved(access: Access, bound: Bound, device: Device) -> float:
    """Return how many bytes fewer come along with rows, which begin and end inside a sector."""
    row = prod(bound.extents[str(index)] for index in access.indices[:-1]) * bound.dtype.itemsize
    total = _bytes(access, bound.extents, bound)
    return max(_bytes_wasted(access, bound, device) - total * device.sector_bytes / row, 0.0)
