"""What the torch program of a statement demands, without the program: how many numbers it holds, and how it rounds."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ...formats.torch_state import HALF, may_round_sums
from ..binding import Bound, contraction_path, example_of, laid_out

__all__ = ["may_stay_half", "numbers_held", "orders_of", "path_of", "sums_in_float32", "sums_in_half"]

FEW = 32  # numbers that meet in an element on average: rounded each time, they err by a few roundings of the result
COMPARED = 4  # tensors of the size of all products, to find where the best of them is


class Contraction(NamedTuple):
    """Factors that are contracted with each other, by their index names, and the names that are kept."""

    factors: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]


def path_of(bound: Bound) -> tuple[tuple[int, ...], ...]:
    """Return which factors of a sum are contracted with each other, in order; nothing for one or two factors."""
    statement = bound.statement
    if len(statement.accesses) <= 2 or not statement.is_sum or bound.is_empty:
        return ()
    return contraction_path([access.names for access in statement.accesses], statement.free, bound.extents)


def contractions(bound: Bound) -> Iterator[Contraction]:
    """Yield the contractions of a sum, step by step; the last one makes its result."""
    free, terms = bound.statement.free, [access.names for access in bound.statement.accesses]
    for chosen in path_of(bound)[:-1]:
        together = tuple(terms[at] for at in chosen)
        terms = [term for at, term in enumerate(terms) if at not in chosen]
        needed = {*free}.union(*terms)
        kept = tuple(dict.fromkeys(name for term in together for name in term if name in needed))
        yield Contraction(together, kept)
        terms.append(kept)
    yield Contraction(tuple(terms), free)


def orders_of(bound: Bound) -> tuple[tuple[str, ...], ...]:
    """Return the index names of each tensor on the way, in an order for which few numbers are copied."""
    path, steps = path_of(bound), list(contractions(bound))
    if len(path) < 2 or any(len(pair) != 2 for pair in path):
        return tuple([step.kept for step in steps[:-1]])
    orders = [*[access.names for access in bound.statement.accesses], *[step.kept for step in steps]]
    waiting, products = list(range(len(path) + 1)), list[tuple[int, int, int]]()
    for number, (first, second) in enumerate(path):
        result = len(path) + 1 + number
        products.append((waiting[first], waiting[second], result))
        waiting = [*[part for at, part in enumerate(waiting) if at not in (first, second)], result]
    return tuple(laid_out(orders, products, bound.extents)[len(path) + 1 : -1])


def numbers_held(bound: Bound, wants_winners: bool = False) -> int:
    """Return at most how many numbers the program of a statement holds beside its operands.

    These are what it gathers and each tensor on the way, both once more where they are laid out anew for a product, and
    the operands, which half precision makes float32. A max or min of several factors forms all of their products.
    """
    statement, extents = bound.statement, bound.extents
    gathered = [access.names for access in statement.accesses if access.is_indirect]
    on_the_way = [statement.free]
    if statement.is_sum:
        on_the_way += [step.kept for step in contractions(bound)]
    elif len(statement.accesses) != 1 or statement.index_names or wants_winners:
        on_the_way += [statement.names] * (1 + COMPARED * wants_winners)
    numbers = sum(prod(extents[name] for name in names) for names in (*gathered, *on_the_way))
    return 2 * numbers + sum(prod(shape) for shape in bound.shapes.values())


def sums_in_half(bound: Bound) -> bool:
    """Return whether torch's operations may take half precision as it is, under the rules that kernels obey.

    A matrix product sums in float32 and rounds once by itself. What lies between several products, and results that
    meet where they are scattered, are rounded in half precision, which is for torch's flags to allow.
    """
    statement = bound.statement
    if bound.dtype not in HALF or bound.is_seeded or not statement.is_sum or not sums_in_float32(bound):
        return False
    return may_round_sums(bound.dtype) or (len(statement.accesses) == 2 and not statement.output.is_indirect)


def may_stay_half(bound: Bound) -> bool:
    """Return whether half precision may be left as it is on a CPU, where torch adds up what is scattered in turn."""
    if bound.statement.scale != 1 or bound.is_empty:
        return False
    return sums_in_half(bound) and _meeting(bound) <= FEW


def _meeting(bound: Bound) -> float:
    """Return how many numbers meet in an element of the output on average, by scattering alone."""
    scattered = prod(example_of(bound.extents[name]) for name in bound.statement.free)
    return scattered / prod(example_of(extent) for extent in bound.size)


def sums_in_float32(bound: Bound) -> bool:
    """Return whether torch's operations round half precision only where one of them ends.

    They do where each sum is of a matrix product, also with a vector, or of a lone factor. Products of entries would be
    rounded before they are summed, and so would a factor that is summed over a name of its own before it is multiplied.
    """
    for factors, kept in contractions(bound):
        if len(factors) == 1:
            continue
        small, large = sorted(map(set, factors), key=len)
        summed = (small | large) - {*kept}
        if summed and (small == large or not summed <= small & large):
            return False
    return bool(bound.statement.accesses)
