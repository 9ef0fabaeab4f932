"""A statement of three or more factors split into several of fewer, in the contraction order with the least work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ..binding import Bound, contraction_path
from ..language import Access, Number, Statement, Var, fresh_name
from .device import Device
from .layouts import laid_out
from .relayout import Split, relaid

__all__ = ["Split", "split"]


def split(bound: Bound, device: Device, uses_tensor_cores: bool) -> Split | None:
    """Return the steps of a bound sum over positions that all exist, or None if one kernel takes no longer.

    A factor whose indices are all indices of another is multiplied where that one is read, at no cost, so the two stay
    together. The rest is contracted two by two, in the order that opt_einsum finds. A statement of fewer factors may
    copy a tensor of which it picks single elements, see `relaid`.

    >>> import torch
    >>> from insum_ops.compiler.binding import bind
    >>> from insum_ops.compiler.language import parse
    >>> from insum_ops.compiler.planning.device import H200
    >>> A = torch.empty(512, 512, device="meta")
    >>> bound = bind(parse("Y[i,l] += A[i,j] * B[j,k] * C[k,l]"), dict(A=A, B=A, C=A))
    >>> print(split(bound, H200, True))
    T[i,k] += A[i,j] * B[j,k]
    Y[i,l] += C[k,l] * T[i,k]
    """
    statement, extents = bound.statement, bound.extents
    groups = _together(statement.accesses)
    if len(groups) < 3 or not statement.is_sum or bound.is_empty:
        return relaid(bound, device)
    taken = {*statement.tensor_names, statement.output.name}
    parts = list(groups)  # and the results, by number
    waiting, products = list(range(len(parts))), list[tuple[int, int, int]]()
    for pair in contraction_path([group[0].names for group in groups], statement.free, extents):
        left, right = (waiting[at] for at in pair)
        waiting = [at for at in waiting if at not in (left, right)]
        needed = set(statement.free).union(*(_names(parts[at]) for at in waiting))
        kept = [name for name in statement.names if name in needed & _names((*parts[left], *parts[right]))]
        result = Access(fresh_name("T", taken), tuple(map(Var, kept))) if waiting else statement.output
        taken.add(result.name)
        products.append((left, right, len(parts)))
        waiting.append(len(parts))
        parts.append((result,))
    steps = _steps(statement, parts, products, extents)
    itemsize = bound.dtype.itemsize
    seconds = [_seconds(step, extents, device, itemsize, uses_tensor_cores) for step in (statement, *steps)]
    gain = seconds[0] / sum(seconds[1:])
    sizes = tuple(tuple(extents[str(index)] for index in step.output.indices) for step in steps[:-1])
    return Split(tuple(steps), sizes, gain) if gain > 1 else None


def _steps(
    statement: Statement,
    parts: Sequence[tuple[Access, ...]],
    products: Sequence[tuple[int, int, int]],
    extents: Mapping[str, int],
) -> list[Statement]:
    """Return a statement for each product of two parts; what lies on the way is laid out for plain matrix products."""
    orders = laid_out([factors[0].names for factors in parts], products, extents)
    made = {result for _, _, result in products[:-1]}
    placed = [
        (replace(factors[0], indices=tuple(map(Var, orders[at]))),) if at in made else factors
        for at, factors in enumerate(parts)
    ]
    numbers = tuple(factor for factor in statement.factors if isinstance(factor, Number))
    *first, last = [Statement(placed[result][0], placed[left] + placed[right]) for left, right, result in products]
    return [*first, replace(last, factors=(*last.factors, *numbers), op=statement.op)]


def _together(factors: Sequence[Access]) -> list[tuple[Access, ...]]:
    """Group each factor with one that has all of its indices."""
    groups: list[list[Access]] = []
    for factor in sorted(factors, key=lambda factor: -len(factor.names)):
        host = next((group for group in groups if set(factor.names) <= set(group[0].names)), None)
        if host is None:
            groups.append([factor])
        else:
            host.append(factor)
    return [tuple(group) for group in groups]


def _names(factors: Iterable[Access]) -> set[str]:
    return {name for factor in factors for name in factor.names}


def _seconds(
    statement: Statement, extents: Mapping[str, int], device: Device, itemsize: int, uses_tensor_cores: bool
) -> float:
    """Return the least time of one kernel: for its work, or for reading each factor once and writing the output."""
    products = prod(extents[name] for name in statement.names)
    is_matrix_product = uses_tensor_cores and len(_together(statement.accesses)) > 1 and bool(statement.summed)
    rate = device.flops(itemsize) if is_matrix_product else device.multiprocessors * device.vector_flops
    elements = sum(prod(extents[name] for name in access.names) for access in (statement.output, *statement.accesses))
    return max(2 * products / rate, elements * itemsize / device.bandwidth) + device.launch_gap
