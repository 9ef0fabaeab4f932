"""Several statements -> schedules with one grid: one kernel loads what they read once, and stores all of their results.

The gradients of a statement are such: a factor and the output trade places, so that all of them run over the same index
names and read the same tensors. Every program takes some values of the names that are in every output, and all values
of the names that some statement sums over, so that each sum is complete where it is stored. Where several statements
read a factor that has all names, which is most of what there is to read, a program takes parts of names that are too
long for that, and adds what it sums to the output atomically. So is added what is scattered, as it would be by a kernel
of its own. Over constant tables a program may take several values of the longest name in turn, and hold the sums of a
scatter by a sorted index until the position changes; what the longest sum alone is over is cut into parts there, so
that a program holds a few rows of what it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...formats.facts import ConstantTables, Fact
from ..binding import Bound, power_of_two
from ..language import Access, Var
from .contraction import multiply
from .movement import contiguity
from .rules import unrolled_schedule
from .scatter import Start, is_varying, strategies
from .schedule import Schedule, Strides

__all__ = ["holds_sums", "in_turns", "joint_schedules", "may_share_kernel", "summed_schedules"]

MOST_SUMMED = 16384  # elements of a tile that is summed whole: 32 of each tensor for a thread of a program of 16 warps


def holds_sums(bound: Bound) -> bool:
    """Whether one program can hold all that a statement sums over: no first dimension of a tensor, and not too much."""
    summed = bound.statement.summed
    return not any(is_varying(bound, name) for name in summed) and _tile(bound.extents, summed) <= MOST_SUMMED


def may_share_kernel(bound: Bound) -> bool:
    """Whether a statement may be one of several in a kernel: a program holds its sums, or one factor has all names."""
    return holds_sums(bound) or bool(_whole(bound))


def _whole(bound: Bound) -> set[Access]:
    """Return the factors that have all index names of a statement."""
    return {access for access in bound.statement.accesses if {*access.names} == {*bound.statement.names}}


def joint_schedules(
    bounds: Sequence[Bound], strides: Sequence[Strides], facts: Sequence[Fact | None], deterministic: bool = False
) -> tuple[Schedule, ...] | None:
    """Return a schedule for each of several sums, such that one kernel runs them all; None if no kernel does.

    In all of them a shared index name has the same role: "step" if one of the sums is over it, else "tile". They have
    the order of axes in memory, the fastest last. Sums share a kernel if they run over the same names, and if a tile
    holds all that is summed over but for the first dimensions of tensors, which may be long, and for what is too much:
    of these a program has a part, which it adds to the output, where several read a factor that has all names. Over
    constant tables it has a part of what the longest sum alone is over.
    """
    own = [_alone(*part, deterministic) for part in zip(bounds, strides, facts)]
    parts = [schedule for schedule in own if schedule is not None]
    if len(parts) < len(own) or len({_shared(part) for part in parts}) > 1:
        return None
    first, names = parts[0], [name for name, role in parts[0].roles.items() if role != "unrolled"]
    summed = [name for name in names if any(name not in part.free for part in parts)]
    in_parts = {name for name in summed if is_varying(first.bound, name)}
    longest = _of_the_longest(parts) if first.tables and not deterministic else set()
    in_parts = in_parts or longest
    if _tile(first.extents, [name for name in summed if name not in in_parts]) > MOST_SUMMED:
        in_parts = {*summed}
    if not in_parts <= longest:
        read = Counter(access for part in parts for access in _whole(part.bound))
        may_share = all(may_share_kernel(part.bound) and not part.tables for part in parts)
        if deterministic or not may_share or max(read.values(), default=0) < 2:
            return None
    if in_parts:
        parts = [part if in_parts <= {*part.free} else part.shared() for part in parts]
        summed = [name for name in summed if name not in in_parts]
    along: Counter[str] = Counter()
    for part, stride, fact in zip(parts, strides, facts):
        along.update(contiguity(Start.of(part.bound, part.strategy, fact), stride))
    rank = lambda name: (not is_varying(first.bound, name), along[name], first.extents[name])
    roles = {name: "step" if name in summed else "tile" for name in sorted(names, key=rank)}
    unrolled = [dict.fromkeys(part.names("unrolled"), "unrolled") for part in parts]
    return tuple(replace(part, roles={**roles, **own_names}) for part, own_names in zip(parts, unrolled))


def _of_the_longest(parts: Sequence[Schedule]) -> set[str]:
    """Return the names that the longest sums alone are over; none where the others are over no name.

    Programs that have parts of those need not hold a tile of all that is summed, which lacks registers.
    """
    summed = [{name for name in part.axes if name not in part.free} for part in parts]
    longest = max(summed, key=len)
    others = set[str]().union(*[own for own in summed if own < longest])
    return longest - others if others else set()


def summed_schedules(
    bounds: Sequence[Bound], strides: Sequence[Strides], facts: Sequence[Fact | None], deterministic: bool = False
) -> tuple[Schedule, ...] | None:
    """Return a schedule for each of several statements with one output, such that one kernel adds them all up.

    All are over constant tables, and a program stores its results once. A name that only some of them sum over may have
    any length there. None if no kernel adds them up.
    """
    parts = [_alone(*part, deterministic) for part in zip(bounds, strides, facts)]
    own = [part for part in parts if part is not None and part.tables and part.strategy == "store"]
    if len(own) < len(parts) or len({_stored(part) for part in own}) > 1:
        return None
    return tuple(own)


def _stored(schedule: Schedule) -> tuple[object, ...]:
    """Return what schedules share of which a program can add up the results: its tile, and where it has entries."""
    statement, placed = schedule.bound.statement, schedule.names("grid", "tile")
    outside = frozenset(str(access) for access in statement.index_accesses if access.name not in schedule.tables)
    kept = {name: schedule.extents[name] for name in schedule.free}
    return str(schedule.output), statement.scale, outside, placed, tuple(kept.items()), schedule.bound.dtype


def in_turns(schedules: Sequence[Schedule], in_order: Collection[int]) -> tuple[Schedule, ...] | None:
    """Return schedules of a joint kernel whose programs take values of one name in turn; None if they can't.

    The statements at the places `in_order` scatter by a sorted index, and hold their sums.
    """
    first = schedules[0]
    names = [name for name in first.names("tile") if is_varying(first.bound, name)]
    fixed = [name for name in first.names("tile", "step") if name not in names and first.extents[name] > 1]
    if not first.tables or len(names) != 1 or len(fixed) > 1:
        return None
    scatters = [schedules[at].output.indirections for at in in_order]
    if any(len(own) != 1 or own[0].indices != (Var(names[0]),) for own in scatters):
        return None
    return tuple(replace(own, form="runs") if at in in_order else own for at, own in enumerate(schedules))


def _tile(extents: Mapping[str, int], names: Sequence[str]) -> int:
    """Return the elements of a tile that holds all values of some names; its sides are powers of two."""
    return math.prod(power_of_two(extents[name]) for name in names)


def _shared(schedule: Schedule) -> frozenset[tuple[str, int]]:
    """Return the index names that programs and tiles run over, with their extents."""
    return frozenset((name, schedule.extents[name]) for name, role in schedule.roles.items() if role != "unrolled")


def _alone(bound: Bound, strides: Strides, fact: Fact | None, deterministic: bool) -> Schedule | None:
    """Return a schedule of one of the statements, in which every name is an axis of tiles or has numbers for values.

    None if there is none: the statement is no sum, starts from a given output, or its results reach the output in a way
    that one statement alone decides, such as rows that programs own.
    """
    is_known = fact is None or isinstance(fact, ConstantTables)
    if bound.is_seeded or bound.is_empty or not bound.statement.is_sum or not is_known:
        return None
    usable = [name for name in strategies(bound, fact, deterministic) if name in ("store", "store-once", "atomic")]
    if not usable:
        return None
    start = Start.of(bound, usable[0], fact)
    if isinstance(fact, ConstantTables):
        return unrolled_schedule(start, strides, fact.numbers, is_one_of=True)
    names = (*start.free, *start.summed)
    tree = multiply([frozenset(factor.names) for factor in start.factors])
    roles = dict.fromkeys(names, "tile")
    return Schedule.from_start(start, roles=roles, tree=tree)
