"""A statement of three or more factors split into several of fewer, in the contraction order with the least work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ..binding import Bound, contraction_path, laid_out
from ..language import Access, Number, Statement, Var, fresh_name
from .device import Device
from .relayout import Split, relaid

__all__ = ["Split", "split"]


def split(bound: Bound, device: Device, uses_tensor_cores: bool) -> Split | None:
    """Return the steps of a bound sum over positions that all exist, or None if one kernel takes no longer.

    A factor whose indices are all indices of another is multiplied where that one is read, at no cost, so the two stay
    together. What is summed in one place alone is summed there first. The rest is contracted two by two, in the order
    that opt_einsum finds. A statement of fewer factors may copy a tensor of which it picks single elements, see
    `relaid`.

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
    taken = {*statement.tensor_names, statement.output.name}
    before, groups = _summed_first(statement, taken)
    if len(before) + max(len(groups) - 1, 1) == 1 or not statement.is_sum or bound.is_empty:
        return relaid(bound, device)
    steps = [*before, *_contracted(statement, groups, taken, extents)]
    itemsize = bound.dtype.itemsize
    seconds = [_seconds(step, extents, device, itemsize, uses_tensor_cores) for step in (statement, *steps)]
    gain = seconds[0] / sum(seconds[1:])
    sizes = tuple(tuple(extents[str(index)] for index in step.output.indices) for step in steps[:-1])
    return Split(tuple(steps), sizes, gain) if gain > 1 else relaid(bound, device)


def _summed_first(statement: Statement, taken: set[str]) -> tuple[list[Statement], list[tuple[Access, ...]]]:
    """Return the sums over names that one group of factors alone has, and the groups that are left.

    Names of new tensors are added to `taken`. What is left may have all of its names in another group.
    """
    before, left = list[Statement](), list[Access]()
    groups = _together(statement.accesses)
    for group in groups:
        needed = set(statement.free).union(*(_names(other) for other in groups if other is not group))
        kept = [name for name in statement.names if name in needed & _names(group)]
        if len(groups) == 1 or len(kept) == len(_names(group)):
            left += group
            continue
        total = Access(fresh_name("T", taken), tuple(map(Var, kept)))
        taken.add(total.name)
        before.append(Statement(total, group))
        left.append(total)
    return before, _together(left)


def _contracted(
    statement: Statement, groups: Sequence[tuple[Access, ...]], taken: set[str], extents: Mapping[str, int]
) -> list[Statement]:
    """Return the statements that contract groups of factors two by two; the last one makes the output."""
    if len(groups) == 1:
        return [replace(statement, factors=(*groups[0], *_numbers(statement)))]
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
    return _steps(statement, parts, products, extents)


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
    *first, last = [Statement(placed[result][0], placed[left] + placed[right]) for left, right, result in products]
    return [*first, replace(last, factors=(*last.factors, *_numbers(statement)), op=statement.op)]


def _numbers(statement: Statement) -> tuple[Number, ...]:
    return tuple(factor for factor in statement.factors if isinstance(factor, Number))


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
    is_matrix_product = uses_tensor_cores and _has_matrices(statement)
    rate = device.flops(itemsize) if is_matrix_product else device.multiprocessors * device.vector_flops
    elements = sum(prod(extents[name] for name in access.names) for access in (statement.output, *statement.accesses))
    return max(2 * products / rate, elements * itemsize / device.bandwidth) + device.launch_gap


def _has_matrices(statement: Statement) -> bool:
    """Return whether two factors share a summed name and each has a name on the left that the other lacks."""
    kept, summed = set(statement.free), set(statement.summed)
    names = [set(access.names) for access in statement.accesses]
    return any(
        left & right & summed and (left - right) & kept and (right - left) & kept
        for at, left in enumerate(names)
        for right in names[at + 1 :]
    )
