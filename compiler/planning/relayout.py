"""A tensor whose elements are picked along memory, copied so that rows are picked instead.

`Y[c,p] = X[c,G[p]]` reads a whole sector of memory for every element. After `T[t,c] = X[c,t]` the same is
`Y[c,p] = T[G[p],c]`, which reads rows, and all of their sectors. A scatter along memory adds to rows, which are
turned afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ..binding import Bound
from ..language import Access, Statement, Var, fresh_name
from .device import Device

__all__ = ["MOST_GAIN", "Split", "relaid"]

# The most times faster that an estimate claims: it does not know strides, by which a tensor may lie turned already, nor
# what caches hold, so that the statement as it stands has to be timed as well.
MOST_GAIN = 2.0


@dataclass(frozen=True)
class Split:
    """Statements to be evaluated in turn; each but the last computes a tensor that a later one reads."""

    steps: tuple[Statement, ...]
    sizes: tuple[tuple[int, ...], ...]  # of the outputs of all steps but the last
    gain: float  # the estimated time of one kernel over that of all steps, by work and bytes
    estimate: float = 0.0  # the gain by gathered bytes, which may come from caches: `gain` claims less

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))

    @property
    def gathers_products(self) -> bool:
        """Whether products on the way are read through index tensors, so that nobody may read some of them.

        A gradient made of these steps would multiply the 0 of such a product by its factors, and 0 times NaN is NaN.
        """
        products = {step.output.name for step in self.steps[:-1] if len(step.accesses) > 1}
        return any(access.name in products and access.is_indirect for step in self.steps for access in step.accesses)


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
        is_output = access is statement.output
        if not _picks_elements(access) or (
            is_output and bound.is_seeded
        ):  # rows would be rounded before they are added
            continue
        shape = bound.size if is_output else bound.shapes[access.name]
        taken.append(fresh_name("T", taken))
        *others, picked = access.indices
        turned[access] = Access(taken[-1], (picked, *others))
        as_rows, as_it_is = (
            Access(taken[-1], (Var(position), *others)),
            replace(access, indices=(*others, Var(position))),
        )
        if is_output:
            after.append(Statement(as_it_is, (as_rows,), statement.op))
        else:
            before.append(Statement(as_rows, (as_it_is,), "="))
        sizes.append((shape[-1], *shape[:-1]))
    if not turned:
        return None
    if after:  # the rows that are added to are made last
        sizes = [*sizes[1:], sizes[0]]
    factors = tuple(
        turned.get(factor, factor) if isinstance(factor, Access) else factor for factor in statement.factors
    )
    output = turned.get(statement.output, statement.output)
    main = Statement(output, factors, "+=" if after else statement.op)
    gain = _gain(bound, device, list(turned), 2 * sum(map(prod, sizes)) * bound.dtype.itemsize)
    return Split((*before, main, *after), tuple(sizes), min(gain, MOST_GAIN), gain) if gain > 1 else None


def _gain(bound: Bound, device: Device, turned: list[Access], copied: int) -> float:
    """Return the bytes that a statement moves as it stands over those that it moves with these accesses by rows.

    An element that is picked alone comes with its sector, and a row with the sectors in which it begins and ends.
    `copied` bytes are moved before or after, each time with a launch.
    """
    statement, extents, itemsize = bound.statement, bound.extents, bound.dtype.itemsize
    count = {access: prod(extents[name] for name in access.names) for access in (statement.output, *statement.accesses)}
    rows = {access: prod(extents[str(index)] for index in access.indices[:-1]) for access in turned}
    others = sum(elements * itemsize for access, elements in count.items() if access not in rows)
    by_element = sum(count[access] * device.sector_bytes for access in rows)
    by_row = sum(count[access] * (itemsize + device.sector_bytes / row) for access, row in rows.items())
    launches = len(turned) * device.launch_gap * device.bandwidth
    return (others + by_element) / (others + by_row + copied + launches)


def _picks_elements(access: Access) -> bool:
    """Whether an access picks positions of its last dimension, and all of each other one."""
    *others, last = access.indices or (None,)
    names = [index.name for index in others if isinstance(index, Var)]
    return isinstance(last, Access) and bool(names) and len({*names}) == len(others) and not {*names} & {*last.names}
