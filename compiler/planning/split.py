"""A statement split into several: factors two by two, in the order with the least work, or before they are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from ..binding import Bound, contraction_path, laid_out
from ..language import Access, Index, Number, Statement, Var, fresh_name
from .device import Device
from .relayout import MOST_GAIN, Split, relaid

__all__ = ["Split", "has_matrices", "split"]

POSITIONS = "uvwxyz"  # names of dimensions that were gathered from
MOST_COMPARED = 4  # groups of factors of which all 18 orders are compared
TILE, LONG_SUM = 16 * 16, 1024  # results of the smallest tile of a matrix product; summands that programs may share


def split(bound: Bound, device: Device, uses_tensor_cores: bool, least: float = 1.0) -> Split | None:
    """Return the steps of a bound sum over positions that all exist, or None if one kernel takes no longer.

    With `least` below 1 they are returned too where one kernel is estimated to take that part of their time, or more.

    A factor whose indices are all indices of another is multiplied where that one is read, at no cost, so the two stay
    together. What is summed in one place alone is summed there first. The rest is contracted two by two, in the order
    that opt_einsum finds. A statement of fewer factors may copy a tensor of which it picks single elements, see
    `relaid`. Factors that are gathered may be multiplied before, see `_multiplied_first`, where that is estimated to be
    clearly faster than the other steps.

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
    if not bound.statement.is_sum or bound.is_empty:
        return None
    pairs = _two_by_two(bound, device, uses_tensor_cores)
    parts = pairs if pairs is not None and pairs.gain > 1 else relaid(bound, device)
    dense_first = _multiplied_first(bound, device, uses_tensor_cores)
    if parts is None or (dense_first and dense_first.estimate > MOST_GAIN * max(parts.gain, parts.estimate)):
        return dense_first or (pairs if pairs is not None and pairs.gain > least else None)
    return parts


def _two_by_two(bound: Bound, device: Device, uses_tensor_cores: bool) -> Split | None:
    """Return the steps in which factors are contracted two by two; None if one step is left.

    None too if factors differ in dtype: a tensor on the way would be rounded to that of the two it is made of.
    """
    statement, extents = bound.statement, bound.extents
    if any(bound.dtypes[access.name] != bound.dtype for access in statement.accesses):
        return None
    taken = {*statement.tensor_names, statement.output.name}
    before, groups = _summed_first(statement, taken)
    if len(before) + max(len(groups) - 1, 1) == 1:
        return None
    itemsize = bound.dtype.itemsize

    def seconds(steps: Sequence[Statement], knows_launches: bool = False) -> float:
        return sum(_seconds(step, extents, device, itemsize, uses_tensor_cores, knows_launches) for step in steps)

    ways = (_contracted(statement, groups, {*taken}, extents, path) for path in _paths(statement, groups, extents))
    first = next(ways)
    steps = [*before, *first]
    gain = seconds([statement]) / seconds(steps)
    if gain <= 1:  # which order is the best is for the clock to say, and whether it is faster than the whole
        steps = [*before, *min([first, *ways], key=lambda way: seconds(way, knows_launches=True))]
        gain = min(1.0, seconds([statement], knows_launches=True) / seconds(steps, knows_launches=True))
    sizes = tuple(tuple(extents[str(index)] for index in step.output.indices) for step in steps[:-1])
    return Split(tuple(steps), sizes, gain)


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


def _paths(
    statement: Statement, groups: Sequence[tuple[Access, ...]], extents: Mapping[str, int]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the orders in which groups are contracted: that with the least work, and of few groups all others.

    Of orders that differ little in work the one with fewer bytes on the way is faster: `M[i,r] += X[i,j,k] * B[j,r] *
    C[k,r]` has slightly less if the product of B and C is made first, and a sum as long as j times k then.
    """
    if len(groups) > 1:
        yield contraction_path([group[0].names for group in groups], statement.free, extents)
    if len(groups) <= MOST_COMPARED:
        yield from _orders(len(groups))


def _orders(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all orders in which so many factors can be contracted two by two; each result comes last."""
    if count == 1:
        yield ()
    for pair in combinations(range(count), 2):
        yield from ((pair, *rest) for rest in _orders(count - 1))


def _contracted(
    statement: Statement,
    groups: Sequence[tuple[Access, ...]],
    taken: set[str],
    extents: Mapping[str, int],
    path: Iterable[tuple[int, ...]],
) -> list[Statement]:
    """Return the statements that contract groups of factors two by two; the last one makes the output."""
    if len(groups) == 1:
        return [replace(statement, factors=(*groups[0], *_numbers(statement)))]
    parts = list(groups)  # and the results, by number
    waiting, products = list(range(len(parts))), list[tuple[int, int, int]]()
    for pair in path:
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


def _multiplied_first(bound: Bound, device: Device, uses_tensor_cores: bool) -> Split | None:
    """Return the steps in which factors are multiplied at all positions first, and their products gathered.

    `Y[T[e],o] += X[U[e],c] * W[R[e],c,o]` becomes `Z[u,v,o] += X[u,c] * W[v,c,o]` and `Y[T[e],o] += Z[U[e],R[e],o]`.
    A product that no index points at is computed in vain and read by nobody, whatever it is. The factors are those
    that have one name which is summed over, and which no index tensor and no other factor has. None if nothing is
    saved, or if the product would round more than the statement does, as that of factors of a lower precision.
    """
    statement, accesses = bound.statement, bound.statement.accesses
    pointing = {name for access in statement.index_accesses for name in access.names}
    alone = [name for name in statement.summed if name not in pointing]
    choices = dict.fromkeys(tuple(access for access in accesses if name in access.names) for name in alone)
    whole = _seconds(statement, bound.extents, device, bound.dtype.itemsize, uses_tensor_cores)
    best: Split | None = None
    for chosen in choices:
        is_rounded = any(bound.dtypes[access.name] != bound.dtype for access in chosen)
        if is_rounded or not any(access.is_indirect for access in chosen):
            continue
        steps, extents = _gathered_last(bound, chosen, alone)
        itemsize = bound.dtype.itemsize
        gain = whole / sum(_seconds(step, extents, device, itemsize, uses_tensor_cores) for step in steps)
        if gain > max(1.0, best.estimate if best else 0.0):
            size = tuple(extents[name] for name in steps[0].output.names)
            best = Split(steps, (size,), min(gain, MOST_GAIN), gain)
    return best


def _gathered_last(
    bound: Bound, chosen: Sequence[Access], alone: Sequence[str]
) -> tuple[tuple[Statement, Statement], dict[str, int]]:
    """Return the product of some factors at all positions, and the rest with it; and the extents of all their names."""
    statement = bound.statement
    others = [factor for factor in statement.factors if factor not in chosen]
    elsewhere = {*statement.output.names, *_names([factor for factor in others if isinstance(factor, Access)])}
    extents, taken = dict(bound.extents), {*statement.tensor_names, statement.output.name, *bound.extents}
    positions: dict[tuple[Access, int], Var] = {}  # for each index and dimension that it points into

    def dense(access: Access) -> Access:
        indices: list[Index] = []
        for index, length in zip(access.indices, bound.shapes[access.name]):
            if isinstance(index, Access) and (index, length) not in positions:
                position = fresh_name(POSITIONS[len(positions) % len(POSITIONS)], taken)
                positions[index, length], extents[position] = Var(position), length
                taken.add(position)
            indices.append(positions[index, length] if isinstance(index, Access) else index)
        return replace(access, indices=tuple(indices))

    factors = tuple(map(dense, chosen))
    direct = {index.name for factor in chosen for index in factor.indices if isinstance(index, Var)}
    kept = [Var(name) for name in statement.names if name in direct and (name in elsewhere or name not in alone)]
    name = fresh_name("Z", taken)
    product = Statement(Access(name, (*positions.values(), *kept)), factors)
    gathered = Access(name, (*[index for index, _ in positions], *kept))
    return (product, Statement(statement.output, (*others, gathered), statement.op)), extents


def _steps(
    statement: Statement,
    parts: Sequence[tuple[Access, ...]],
    products: Sequence[tuple[int, int, int]],
    extents: Mapping[str, int],
) -> list[Statement]:
    """Return a statement for each product of two parts; what lies on the way is laid out for plain matrix products."""
    orders = laid_out([factors[0].names for factors in parts], products, extents)
    on_the_way = {result for _, _, result in products[:-1]}
    placed = [
        (replace(factors[0], indices=tuple(map(Var, orders[at]))),) if at in on_the_way else factors
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
    statement: Statement,
    extents: Mapping[str, int],
    device: Device,
    itemsize: int,
    uses_tensor_cores: bool,
    knows_launches: bool = False,
) -> float:
    """Return the least time of one kernel: for its work, or for reading each factor once and writing the output.

    A matrix product with too few results for all multiprocessors, each a long sum, takes a second launch: programs
    share the sum. That counts if `knows_launches`.
    """
    products, results = (prod(extents[name] for name in names) for names in (statement.names, statement.free))
    is_matrix_product = has_matrices(statement)
    is_shared = (
        knows_launches
        and is_matrix_product
        and results < TILE * device.multiprocessors
        and products >= LONG_SUM * results
    )
    rate = (
        device.flops(itemsize)
        if is_matrix_product and uses_tensor_cores
        else device.multiprocessors * device.vector_flops
    )
    elements = sum(prod(extents[name] for name in access.names) for access in (statement.output, *statement.accesses))
    return max(2 * products / rate, elements * itemsize / device.bandwidth) + (1 + is_shared) * device.launch_gap


def has_matrices(statement: Statement) -> bool:
    """Return whether two factors share a summed name and each has a name on the left that the other lacks."""
    kept, summed = set(statement.free), set(statement.summed)
    names = [set(access.names) for access in statement.accesses]
    return any(
        left & right & summed and (left - right) & kept and (right - left) & kept
        for at, left in enumerate(names)
        for right in names[at + 1 :]
    )
