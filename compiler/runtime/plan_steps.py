"""The steps of a recorded run that its result depends on, in their final shape, as data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .recording import Call, Check, Derived, Launch, Range, Recording, Slot, Step, slots_in

__all__ = ["ALLOCATE", "Length", "Steps", "reads_of", "touched_by_torch"]

ALLOCATE = torch.empty_strided  # as recordings see it, whoever wraps torch's name for it later
FILLS = (Tensor.zero_, Tensor.fill_)  # which write all of a tensor, whatever its shape


@dataclass(frozen=True)
class Length:
    """`factor` times a length that varies from call to call: a first dimension of an input, a number, or derived."""

    factor: int
    place: int  # among the inputs' first dimensions, then the numbers, then the lengths that are derived from these

    def __str__(self) -> str:
        return f"n{self.place}" if self.factor == 1 else f"{self.factor} * n{self.place}"


@dataclass(frozen=True)
class Steps:
    """What a plan is made of; its numbers may be Lengths."""

    inputs: int
    steps: tuple[Step, ...]
    ranges: tuple[Range, ...]
    checks: tuple[Check, ...]
    derived: tuple[Derived, ...]
    pinned: Mapping[int, Tensor]
    result: Any
    dtypes: frozenset[torch.dtype]  # by which torch's flags for sums of halves and products of float32 matter or not
    device: torch.device
    is_for_eager_calls: bool
    filled: frozenset[int]  # the inputs that are not empty: they must have memory
    has_values: bool  # some input is of numbers, not of positions
    ranged: Mapping[int, tuple[Any, ...]]  # inputs whose ranges are asked: shape, strides and dtype
    owned: frozenset[int]  # ids of pinned tensors that the cache's owner guards

    @classmethod
    def of(cls, recording: Recording, result: Any, owned: Iterable[Tensor | None]) -> Steps:
        """Return the steps of a recorded run that its result, with Slots for tensors, depends on."""
        count = len(recording.inputs)
        steps, result = _in_final_shape(_needed(_without_expansion(recording.steps), result), result)
        read = {slot.number for step in steps for slot in reads_of(step)}
        pinned = {number: tensor for number, tensor in recording.pinned.items() if number in read}
        ranges = tuple(
            dict.fromkeys(r for r in recording.ranges if r.slot.number < count or r.slot.number in recording.pinned)
        )
        pinned |= {r.slot.number: recording.pinned[r.slot.number] for r in ranges if r.slot.number >= count}
        dtypes = frozenset([tensor.dtype for tensor in recording.seen])
        device = recording.inputs[0].device
        guarded = frozenset([id(tensor) for tensor in owned])
        filled = frozenset([at for at, tensor in enumerate(recording.inputs) if tensor.numel()])
        eager = recording.is_for_eager_calls
        ranged_inputs = {r.slot.number: recording.inputs[r.slot.number] for r in ranges if r.slot.number < count}
        ranged = {at: (tuple(index.shape), index.stride(), index.dtype) for at, index in ranged_inputs.items()}
        checks = tuple(dict.fromkeys(recording.checks))
        kinds = device, eager, filled, any([tensor.is_floating_point() for tensor in recording.inputs])
        derived = tuple(dict.fromkeys(recording.derived))
        return cls(count, steps, ranges, checks, derived, pinned, result, dtypes, *kinds, ranged, guarded)


def reads_of(step: Step) -> list[Slot]:
    """Return the tensors that a step takes."""
    if isinstance(step, Launch):
        return [*step.tensors]
    return slots_in((step.args, [value for _, value in step.kwargs]))


def _needed(steps: Sequence[Step], result: Any) -> list[Step]:
    """Return the steps that a result depends on, or that write to a tensor."""
    needed, needed_steps = {slot.number for slot in slots_in(result)}, list[Step]()
    for step in reversed(steps):
        reads = {slot.number for slot in reads_of(step)}
        if isinstance(step, Call) and not step.has_effect:
            results = {slot.number for slot in slots_in(step.results)}
            if not results & needed or results <= reads:  # what returns its argument does nothing
                continue
        needed |= reads
        needed_steps.append(step)
    return needed_steps[::-1]


def _without_expansion(steps: Sequence[Step]) -> list[Step]:
    """Return the steps, new memory filled with a tensor as it is where that was expanded first: `copy_` does that."""
    rewritten = list(steps)
    for at, step in enumerate(steps):
        if isinstance(step, Launch) or step.function is not Tensor.copy_ or len(step.args) != 2:
            continue
        memory, expansion = (_maker(steps, slot) for slot in step.args)
        if memory is None or memory.function is not ALLOCATE or expansion is None:
            continue
        view = expansion.view(step.args[1]) if expansion.function is Tensor.expand else None
        if view is not None and view.size == tuple(memory.args[0]):
            rewritten[at] = replace(step, args=(step.args[0], view.base))
    return rewritten


def _in_final_shape(steps: Sequence[Step], result: Any) -> tuple[tuple[Step, ...], Any]:
    """Allocate what is returned as a view in the view's shape at once, if kernels alone write to it."""
    rewritten = list(steps)
    for slot in slots_in(result):
        chain, call = [slot], _maker(rewritten, slot)
        while call is not None and (base_view := call.view(chain[-1])) is not None and base_view.is_whole:
            chain.append(base_view.base)
            call = _maker(rewritten, base_view.base)
        last_call = None if len(chain) == 1 else _maker(rewritten, slot)
        if last_call is None or call is None or call.function is not ALLOCATE:
            continue
        allocated, view_calls = chain[-1], [_maker(rewritten, link) for link in chain[:-1]]
        if any(link in slots_in(result) for link in chain[1:]):  # returned in its own shape too
            continue
        users = [step for step in rewritten if allocated in reads_of(step) and step not in view_calls]
        is_memory = all(isinstance(step, Launch) or step.function in FILLS for step in users)
        if not is_memory or any(_count(rewritten, link) > 1 for link in chain[1:-1]) or _count(rewritten, slot):
            continue
        final = last_call.view(slot)
        assert final is not None
        at = rewritten.index(call)
        rewritten[at] = replace(call, args=(final.size, final.strides))
        rewritten = [step for step in rewritten if step not in view_calls]
        result = _renamed(result, slot, allocated)
    return tuple(rewritten), result


def _maker(steps: Sequence[Step], slot: Slot) -> Call | None:
    """Return the call that made a tensor; None for inputs, pinned tensors and results of several."""
    for step in steps:
        if isinstance(step, Call) and not step.has_effect and step.results == slot:
            return step
    return None


def touched_by_torch(steps: Sequence[Step]) -> set[int]:
    """Return the tensors whose memory torch functions read or write, by their numbers, be it through views of them."""
    calls = [step for step in steps if isinstance(step, Call)]
    bases = {view.slot.number: view.base.number for call in calls for view in call.views}
    touched = set()
    for number in [slot.number for call in calls if not call.views for slot in reads_of(call)]:
        while number in bases:
            number = bases[number]
        touched.add(number)
    return touched


def _count(steps: Sequence[Step], slot: Slot) -> int:
    """Return how many times steps take a tensor."""
    return sum(reads_of(step).count(slot) for step in steps)


def _renamed(result: Any, old: Slot, new: Slot) -> Any:
    """Return a result with the tensor `new` in the place of `old`."""
    if isinstance(result, tuple):
        return tuple([_renamed(part, old, new) for part in result])
    return new if result == old else result
