"""Two recorded runs of a call, over other lengths, to the steps of all such calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..binding import LengthClass
from .plan_steps import Length, Steps
from .recording import Call, Derived, Launch, Range, Slice, Step

__all__ = ["generalised"]


def generalised(
    first: Steps,
    second: Steps,
    lengths: Sequence[int | None],
    other_lengths: Sequence[int | None],
    classes: Sequence[Any],
) -> tuple[Steps, list[Any]] | None:
    """Return steps that hold for both runs and all others of their kind, numbers that differ being Lengths.

    `lengths` are the first dimensions of the inputs and the numbers of each call; None where a dimension is compared
    anyway. `classes` are their LengthClasses, which both calls share; those of lengths that differ are asked for alone.
    A number that differs between the runs is a multiple of a length that differs likewise, be it one that is derived
    from those. Lengths that are equal in both runs must be equal in each call, and one that has not changed must not
    change. Return None if the runs took different steps or a number is no such multiple. With the steps comes what each
    length must be, as `plan_of` takes it.
    """
    pairs = list(zip(lengths, other_lengths))
    if first.inputs != second.inputs or len(first.steps) != len(second.steps):
        return None
    if len(first.ranges) != len(second.ranges) or first.checks != second.checks:
        return None
    if any(first.pinned.get(at) is not tensor for at, tensor in second.pinned.items()):
        return None
    joined = _Join(pairs)
    derived = joined.lengths(first.derived, second.derived)
    steps = tuple([joined.step(part, other_part) for part, other_part in zip(first.steps, second.steps)])
    ranges = tuple([joined.range(part, other_part) for part, other_part in zip(first.ranges, second.ranges)])
    result = joined.value(first.result, second.result)
    if joined.differs:
        return None
    conditions: list[Any] = []
    for at, pair in enumerate(pairs):
        if pair[0] == pair[1]:
            conditions.append(pair[0])
        elif pairs.index(pair) < at:
            conditions.append(Length(1, pairs.index(pair)))
        else:
            alike = [known for known, other in zip(classes, pairs) if other == pair]
            least, most, divisors = zip(*alike)
            conditions.append(LengthClass(max(least), min(most), max(divisors)))
    return replace(first, steps=steps, ranges=ranges, derived=derived, result=result), conditions


class _Join:
    """Two recorded runs, joined part by part; `differs` says whether some part can't be joined."""

    def __init__(self, pairs: Sequence[tuple[int | None, int | None]]) -> None:
        self.varying = [
            (at, length, other_length)
            for at, (length, other_length) in enumerate(pairs)
            if length and other_length and length != other_length
        ]
        self.first_derived = len(pairs)  # the place behind those of inputs and numbers
        self.differs = False

    def lengths(self, first: Sequence[Derived], second: Sequence[Derived]) -> tuple[Derived, ...]:
        """Return the derived lengths of calls whose lengths vary, and let numbers be multiples of those that vary too.

        One that is equal in both runs by chance, or of which a kernel may know all, must be equal in each call.
        """
        self.differs |= len(first) != len(second)
        joined: list[Derived] = []
        for each, other in zip(first, second):
            args = self.value(each.args, other.args)
            self.differs |= each.function is not other.function or each.known != other.known
            if self.differs:
                break
            if not any([isinstance(argument, Length) for argument in args]):
                continue  # it is a constant
            if any([(each.function, args) == (known.function, known.args) for known in joined]):
                continue
            length, other_length = each.function(*each.args), other.function(*other.args)
            if length == other_length:
                joined.append(Derived(each.function, args, length))
                continue
            # a number that differs as two lengths do could be either
            self.differs |= (length, other_length) in [varying[1:] for varying in self.varying]
            self.varying.append((self.first_derived + len(joined), length, other_length))
            joined.append(Derived(each.function, args, each.known))
        return tuple(joined)

    def step(self, first: Step, second: Step) -> Step:
        """Return a step that stands for both."""
        if isinstance(first, Launch) and isinstance(second, Launch):
            self.differs |= first.kernels is not second.kernels or first.tensors != second.tensors
            self.differs |= (first.unaligned, first.parts) != (second.unaligned, second.parts)
            self.differs |= len(first.grid) != len(second.grid)
            axes = zip(first.grid, second.grid)
            grid = tuple([(self.value(extent, other_extent), block) for (extent, block), (other_extent, _) in axes])
            numbers = self.value(first.numbers, second.numbers)
            return replace(first, grid=grid, numbers=numbers)
        if isinstance(first, Call) and isinstance(second, Call):
            self.differs |= first.function != second.function or first.results != second.results
            self.differs |= first.has_effect != second.has_effect or len(first.views) != len(second.views)
            for view, other_view in zip(first.views, second.views):  # their sizes follow from what they are made of
                self.differs |= (view.slot, view.base) != (other_view.slot, other_view.base)
                self.differs |= view.offset != other_view.offset
            args, kwargs = self.value(first.args, second.args), self.value(first.kwargs, second.kwargs)
            return replace(first, args=args, kwargs=kwargs)
        self.differs = True
        return first

    def range(self, first: Range, second: Range) -> Range:
        """Return a guard on an index range that stands for both."""
        same = replace(second, extent=first.extent)
        self.differs |= first != same
        return replace(first, extent=self.value(first.extent, second.extent))

    def value(self, first: Any, second: Any) -> Any:
        """Return an argument that stands for both: equal ones as they are, integers that differ as a Length."""
        if type(first) is not type(second):
            self.differs = True
            return first
        if isinstance(first, (tuple, list)):
            self.differs |= len(first) != len(second)
            parts = [self.value(length, other_length) for length, other_length in zip(first, second)]
            return tuple(parts) if isinstance(first, tuple) else parts
        if isinstance(first, Slice):
            parts = [self.value(getattr(first, part), getattr(second, part)) for part in ("start", "stop", "step")]
            return Slice(*parts)
        if type(first) is int and first != second:
            multiples = {
                (length, other_length): Length(first // length, at)
                for at, length, other_length in reversed(self.varying)
                if first % length == 0 and first // length * other_length == second
            }
            if len(multiples) == 1:  # of two that grow alike nobody knows which it is
                return next(iter(multiples.values()))
        is_nan = first != first and second != second  # NaN is the same number as NaN here
        self.differs |= bool(first != second) and not is_nan
        return first
