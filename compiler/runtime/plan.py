"""A launch plan: the steps of a recorded run as one Python function, which replays them on other tensors.

The function is written out as text, a line for each step, since a loop over steps would cost more than the steps. It
begins with the guards; where one fails it returns None, and whoever asked works the call out anew. A plan keeps no
state of a call, so threads share it, and it holds the tensors that are pinned, not who owns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...formats.guard import address_expression, address_of, change_expression
from .recording import Call, Launch, Range, Recording, Slice, Slot, Step, slots_in

__all__ = ["EPOCH", "Epoch", "Length", "Plan", "Services", "generalised", "plan_of"]


class Epoch:
    """Plans of an earlier epoch hold no longer: tuning has chosen other kernels since."""

    number = 0


EPOCH = Epoch()
ALLOCATE = torch.empty_strided  # as recordings see it, whoever wraps torch's name for it later
FILLS = (Tensor.zero_, Tensor.fill_)  # which write all of a tensor, whatever its shape


@dataclass(frozen=True)
class Length:
    """`factor` times a length that varies from call to call: the first dimension of an input, or a number."""

    factor: int
    place: int  # among the inputs' first dimensions, then the numbers

    def __str__(self) -> str:
        return f"n{self.place}" if self.factor == 1 else f"{self.factor} * n{self.place}"


@dataclass(frozen=True)
class Services:
    """What a replay asks at run time; who makes plans says how."""

    is_interpreted: bool  # kernels take tensors, not pointers
    has_several_devices: bool
    is_capturing: Callable[[], bool]
    range_of: Callable[[Tensor], tuple[int, int]]
    range_expression: Callable[..., str]  # the same as text, for an input of known dtype, shape and strides
    rounds_sums: Callable[[torch.dtype], bool]
    misaligned: Callable[[Sequence[int]], int]
    empty_on: Callable[[torch.device], Callable[..., Tensor]]
    current_device: Callable[[], int]


@dataclass(frozen=True, eq=False)
class Plan:
    """Steps under their guards; `replay` takes the inputs, and returns None if a guard fails."""

    steps: tuple[Step, ...]
    ranges: tuple[Range, ...]
    pinned: Mapping[int, Tensor]
    result: Any
    source: str
    replay: Callable[..., Any]

    def __str__(self) -> str:
        return self.source


@dataclass(frozen=True)
class Steps:
    """What a plan is made of; its numbers may be Lengths."""

    inputs: int
    steps: tuple[Step, ...]
    ranges: tuple[Range, ...]
    pinned: Mapping[int, Tensor]
    result: Any
    dtypes: frozenset[torch.dtype]  # of half precision, whose sums torch's flags may round
    device: torch.device
    is_for_eager_calls: bool
    filled: frozenset[int]  # the inputs that are not empty: they must have memory
    ranged: Mapping[int, tuple[Any, ...]]  # inputs whose ranges are asked: dtype, shape and strides
    owned: frozenset[int]  # ids of pinned tensors that the cache's owner guards

    @classmethod
    def of(cls, recording: Recording, result: Any, owned: Iterable[Tensor | None]) -> Steps:
        count, half = len(recording.inputs), (torch.float16, torch.bfloat16)
        steps, result = _in_final_shape(_needed(recording.steps, result), result)
        read = {slot.number for step in steps for slot in _reads(step)}
        pinned = {number: tensor for number, tensor in recording.pinned.items() if number in read}
        ranges = tuple(
            dict.fromkeys(r for r in recording.ranges if r.slot.number < count or r.slot.number in recording.pinned)
        )
        pinned |= {r.slot.number: recording.pinned[r.slot.number] for r in ranges if r.slot.number >= count}
        dtypes = frozenset([tensor.dtype for tensor in recording.held if tensor.dtype in half])
        device = recording.inputs[0].device
        guarded = frozenset([id(tensor) for tensor in owned])
        filled = frozenset([at for at, tensor in enumerate(recording.inputs) if tensor.numel()])
        eager = recording.is_for_eager_calls
        asked = {r.slot.number: recording.inputs[r.slot.number] for r in ranges if r.slot.number < count}
        ranged = {at: (index.dtype, tuple(index.shape), index.stride()) for at, index in asked.items()}
        return cls(count, steps, ranges, pinned, result, dtypes, device, eager, filled, ranged, guarded)


def plan_of(steps: Steps, services: Services, lengths: Sequence[Any] = ()) -> Plan | None:
    """Return the plan of recorded steps; None if a pinned index tensor does not tell when it changes.

    `lengths` says of each length of a generalised plan what it must be: a number, or another one's place as a Length.
    """
    writer = _Writer(steps, services)
    if not writer.write_guards(lengths):
        return None
    writer.write_steps()
    source = writer.source(len(lengths))
    scope: dict[str, Any] = {}
    exec(compile(source, "<launch plan>", "exec"), scope)
    # in cells, not in the scope, which would hold the function that holds the scope
    replay = scope["plan"](**writer.constants)
    return Plan(steps.steps, steps.ranges, steps.pinned, steps.result, source, replay)


def _reads(step: Step) -> list[Slot]:
    if isinstance(step, Launch):
        return [*step.tensors]
    return slots_in((step.args, [value for _, value in step.kwargs]))


def _needed(steps: Sequence[Step], result: Any) -> list[Step]:
    """Return the steps that a result depends on, or that write to a tensor."""
    needed, kept = {slot.number for slot in slots_in(result)}, list[Step]()
    for step in reversed(steps):
        reads = {slot.number for slot in _reads(step)}
        if isinstance(step, Call) and not step.has_effect:
            made = {slot.number for slot in slots_in(step.results)}
            if not made & needed or made <= reads:  # what returns its argument does nothing
                continue
        needed |= reads
        kept.append(step)
    return kept[::-1]


def _in_final_shape(steps: Sequence[Step], result: Any) -> tuple[tuple[Step, ...], Any]:
    """Allocate what is returned as a view in the view's shape at once, if kernels alone write to it."""
    found = list(steps)
    for slot in slots_in(result):
        chain, view = [slot], _maker(found, slot)
        while view is not None and (known := view.view(chain[-1])) is not None and known.is_whole:
            chain.append(known.base)
            view = _maker(found, known.base)
        whole = None if len(chain) == 1 else _maker(found, slot)
        if whole is None or view is None or view.function is not ALLOCATE:
            continue
        made, between = chain[-1], [_maker(found, each) for each in chain[:-1]]
        if any(each in slots_in(result) for each in chain[1:]):  # returned in its own shape too
            continue
        users = [step for step in found if made in _reads(step) and step not in between]
        is_memory = all(isinstance(step, Launch) or step.function in FILLS for step in users)
        if not is_memory or any(_count(found, each) > 1 for each in chain[1:-1]) or _count(found, slot):
            continue
        final = whole.view(slot)
        assert final is not None
        at = found.index(view)
        found[at] = replace(view, args=(final.size, final.strides))
        found = [step for step in found if step not in between]
        result = _renamed(result, slot, made)
    return tuple(found), result


def _maker(steps: Sequence[Step], slot: Slot) -> Call | None:
    """Return the call that made a tensor; None for inputs, pinned tensors and results of several."""
    for step in steps:
        if isinstance(step, Call) and not step.has_effect and step.results == slot:
            return step
    return None


def _count(steps: Sequence[Step], slot: Slot) -> int:
    return sum(_reads(step).count(slot) for step in steps)


def _renamed(result: Any, old: Slot, new: Slot) -> Any:
    if isinstance(result, tuple):
        return tuple([_renamed(part, old, new) for part in result])
    return new if result == old else result


class _Writer:
    """The text of one replay, and the objects that it names."""

    def __init__(self, steps: Steps, services: Services) -> None:
        self.plan, self.services = steps, services
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.names = {number: f"x{number}" for number in range(steps.inputs)}
        self.pointers: dict[int, str] = {}
        for number, tensor in steps.pinned.items():
            self.names[number] = self.constant(tensor, "k")
            if not services.is_interpreted:
                self.pointers[number] = str(address_of(tensor))
        self.is_view_only = set() if services.is_interpreted else self._view_only()

    def constant(self, value: object, letter: str = "c") -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"{letter}{len(self.constants)}"
        self.constants[name] = value
        return name

    def source(self, lengths: int) -> str:
        """Return the text of a function that takes the constants and returns `replay`."""
        given = self.parameters(lengths)
        head = f"def replay({', '.join([*given, *([] if lengths else ['*_'])])}):"
        lines, device = [head, *[f"    {line}" for line in self.lines]], self.plan.device
        if self.services.has_several_devices and device.type == "cuda":
            current, on = self.constant(self.services.current_device), self.constant(torch.cuda.device)
            lines[0] = head.replace("replay", "replay_here")
            lines += [
                head,
                f"    if {current}() == {device.index}:",
                f"        return replay_here({', '.join(given)})",
                f"    with {on}({device.index}):",
                f"        return replay_here({', '.join(given)})",
            ]
        return "\n    ".join([f"def plan({', '.join(self.constants)}):", *lines, "return replay"])

    def parameters(self, lengths: int) -> list[str]:
        count = self.plan.inputs
        return [*[f"x{at}" for at in range(count)], *[f"n{at}" for at in range(count, lengths)]]

    def miss_if(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return None"]

    def write_guards(self, lengths: Sequence[Any]) -> bool:
        plan, services = self.plan, self.services
        epoch = self.constant(EPOCH)
        self.miss_if(f"{epoch}.number != {EPOCH.number}")
        if plan.is_for_eager_calls:
            self.miss_if(f"{self.constant(services.is_capturing)}()")
        for dtype in plan.dtypes:
            asked = f"{self.constant(services.rounds_sums)}({self.constant(dtype)})"
            self.miss_if(f"{asked} is not {services.rounds_sums(dtype)}")
        for number, tensor in plan.pinned.items():
            if id(tensor) in plan.owned:
                continue
            name = self.names[number]
            if tensor.is_floating_point() or tensor.dtype == torch.bool:
                if not services.is_interpreted:  # kernels are given its address
                    self.miss_if(change_expression(name, tensor, is_version_compared=False))
                continue
            if tensor.is_inference():
                return False
            self.miss_if(change_expression(name, tensor, is_version_compared=True))
        if plan.device.type == "cpu":  # kernels ask for addresses themselves
            lives = [address_expression(f"x{at}") for at in sorted(plan.filled)]
            if lives:
                self.miss_if(f"not ({' and '.join(lives)})")
        for at, length in enumerate(lengths):
            if at < plan.inputs and length is not None:
                self.lines.append(f"n{at} = x{at}.shape[0]")
        for at, length in enumerate(lengths):
            if length is not None and length != Length(1, at):
                self.miss_if(f"n{at} != {length}")
        for known in plan.ranges:
            if known.slot.number < plan.inputs:
                name, slow = f"x{known.slot.number}", self.constant(services.range_of)
                dtype, shape, strides = plan.ranged[known.slot.number]
                by_text = services.range_expression(name, slow, self.constant(dtype), shape, strides)
                self.lines.append(f"low, high = {f'{slow}({name})' if lengths else by_text}")
                self.miss_if(f"high >= {known.extent} or (low < 0) is not {known.is_padded}")
        return True

    def _view_only(self) -> set[int]:
        """Return the views that kernels alone read: they need no tensor, only an address."""
        taken = {slot.number for slot in slots_in(self.plan.result)}
        views = set[int]()
        for step in reversed(self.plan.steps):
            if isinstance(step, Call):
                made = {slot.number for slot in slots_in(step.results)}
                if len(step.views) == len(made) and not made & taken:
                    views |= made
                else:
                    taken |= {slot.number for slot in _reads(step)}
        return views

    def write_steps(self) -> None:
        last = self._last_uses()
        for at, step in enumerate(self.plan.steps):
            if isinstance(step, Launch):
                self.write_launch(step)
            elif step.views and step.views[0].slot.number in self.is_view_only:
                for view in step.views:
                    self.pointers[view.slot.number] = _sum(self.pointer(view.base.number), view.offset)
            else:
                self.write_call(step)
            done = [self.names[number] for number in last.get(at, ()) if number in self.names]
            if done and at + 1 < len(self.plan.steps):
                self.lines.append(" = ".join([*done, "None"]))  # memory that the next step may have
        self.lines.append(f"return {self.text(self.plan.result)}")

    def _last_uses(self) -> dict[int, list[int]]:
        """Return the tensors that no step after a given one reads, as a tensor or by an address into it."""
        made = {slot.number for step in self.plan.steps if isinstance(step, Call) for slot in slots_in(step.results)}
        returned = {slot.number for slot in slots_in(self.plan.result)}
        views = [view for step in self.plan.steps if isinstance(step, Call) for view in step.views]
        bases = {view.slot.number: view.base.number for view in views}
        last: dict[int, int] = {}
        for at, step in enumerate(self.plan.steps):
            for slot in [*_reads(step), *(slots_in(step.results) if isinstance(step, Call) else ())]:
                number: int | None = slot.number
                while number is not None:
                    last[number] = at
                    number = bases.get(number)
        found: dict[int, list[int]] = {}
        for number, at in last.items():
            if number in made and number not in returned and number >= self.plan.inputs:
                found.setdefault(at, []).append(number)
        return found

    def pointer(self, number: int) -> str:
        known = self.pointers.get(number)
        if known is None:
            known = self.pointers[number] = f"p{number}"
            self.lines.append(f"p{number} = {address_expression(self.names[number])}")
        return known

    def write_call(self, step: Call) -> None:
        args = ", ".join([*map(self.text, step.args), *[f"{key}={self.text(value)}" for key, value in step.kwargs]])
        function = step.function
        if function is ALLOCATE and dict(step.kwargs).keys() == {"dtype", "device"}:
            named = dict(step.kwargs)
            function = self.services.empty_on(named["device"])
            args = ", ".join([*map(self.text, step.args), self.text(named["dtype"])])
        elif function in (Tensor.as_strided, torch.as_strided) and step.views:
            (view,) = step.views  # it begins where its base does in this call, not where that began when recorded
            start = f"{self.names[view.base.number]}.storage_offset() + {view.offset // view.itemsize}"
            args = f"{', '.join(map(self.text, step.args[:3]))}, {start}"
        self.lines.append(f"{self.target(step)}{self.constant(function, 'f')}({args})")

    def target(self, step: Call) -> str:
        if step.has_effect or not slots_in(step.results):
            return ""
        return f"{self.bound(step.results)} = "

    def bound(self, results: Any) -> str:
        if isinstance(results, Slot):
            if results.number not in self.names:
                self.names[results.number] = f"v{results.number}"
            return self.names[results.number]
        if isinstance(results, tuple):
            return f"({', '.join([self.bound(part) for part in results])},)"
        return "_"

    def text(self, value: Any) -> str:
        if isinstance(value, Slot):
            return self.names[value.number]
        if isinstance(value, Slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.text, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if type(value) in (int, bool, type(None), str, Length) or (type(value) is float and math.isfinite(value)):
            return str(value) if isinstance(value, Length) else repr(value)
        return self.constant(value)

    def write_launch(self, step: Launch) -> None:
        services = self.services
        fixed_blocks = [-(-extent // block) for extent, block in step.grid if not isinstance(extent, Length)]
        varying = [f"-(-({extent}) // {block})" for extent, block in step.grid if isinstance(extent, Length)]
        programs = " * ".join([str(math.prod([step.parts, *fixed_blocks])), *varying])
        numbers = [str(number) for number in step.numbers]
        kernels = self.constant(step.kernels)
        usual = self.constant(step.kernels[step.unaligned])
        if services.is_interpreted:
            tensors = [self.names[slot.number] for slot in step.tensors]
            self.lines.append(f"{usual}({programs}, [{', '.join([*tensors, *numbers])}])")
            return
        addresses = [self.pointer(slot.number) for slot in step.tensors]
        moving = sorted({address for address in addresses if not address.isdigit()})
        fixed = services.misaligned([int(address) if address.isdigit() else 0 for address in addresses])
        self.lines.append(f"a = [{', '.join([*addresses, *numbers])}]")
        kernel = usual
        if moving:
            found = f"{kernels}.get({self.constant(services.misaligned)}(a[:{len(addresses)}]))"
            is_usual = fixed == step.unaligned
            kernel = "kernel"
            bits = " | ".join([f"({address})" if "+" in address else address for address in moving])
            self.lines.append(
                f"kernel = {usual} if not ({bits}) & 15 else {found}" if is_usual else f"kernel = {found}"
            )
            bases = sorted({address.partition(" ")[0] for address in moving})
            self.miss_if(f"kernel is None or not ({' and '.join(bases)})")  # memory may have been given back
        self.lines.append(f"{kernel}({programs}, a)")


def _sum(pointer: str, offset: int) -> str:
    if pointer.isdigit():
        return str(int(pointer) + offset)
    return pointer if offset == 0 else f"{pointer} + {offset}"


def generalised(
    one: Steps, other: Steps, lengths: Sequence[int | None], others: Sequence[int | None]
) -> tuple[Steps, list[Any]] | None:
    """Return steps that hold for both runs and all others of their kind, numbers that differ being Lengths.

    `lengths` are the first dimensions of the inputs and the numbers of each call; None where a dimension is compared
    anyway. A number that differs between the runs is a multiple of a length that differs likewise. Lengths that are
    equal in both runs must be equal in each call, and one that has not changed must not change. Return None if the
    runs took different steps or a number is no such multiple. With the steps comes what each length must be.
    """
    pairs = list(zip(lengths, others))
    if not (one.inputs == other.inputs and len(one.steps) == len(other.steps) and len(one.ranges) == len(other.ranges)):
        return None
    if any(one.pinned.get(at) is not tensor for at, tensor in other.pinned.items()):
        return None
    joined = _Join(pairs)
    steps = tuple([joined.step(own, their) for own, their in zip(one.steps, other.steps)])
    ranges = tuple([joined.range(own, their) for own, their in zip(one.ranges, other.ranges)])
    result = joined.value(one.result, other.result)
    if joined.differs:
        return None
    conditions: list[Any] = []
    for pair in pairs:
        if pair[0] is None:
            conditions.append(None)
        else:
            conditions.append(pair[0] if pair[0] == pair[1] else Length(1, pairs.index(pair)))
    return replace(one, steps=steps, ranges=ranges, result=result), conditions


class _Join:
    """Two recorded runs, part by part."""

    def __init__(self, pairs: Sequence[tuple[int | None, int | None]]) -> None:
        self.varying = [(at, own, their) for at, (own, their) in enumerate(pairs) if own and their and own != their]
        self.differs = False

    def step(self, one: Step, other: Step) -> Step:
        if isinstance(one, Launch) and isinstance(other, Launch):
            if one.kernels is not other.kernels or len(one.grid) != len(other.grid) or one.tensors != other.tensors:
                self.differs = True
            same = (one.unaligned, one.parts) == (other.unaligned, other.parts)
            self.differs |= not same
            grid = tuple([(self.value(o[0], t[0]), o[1]) for o, t in zip(one.grid, other.grid)])
            numbers = self.value(one.numbers, other.numbers)
            return replace(one, grid=grid, numbers=numbers)
        if isinstance(one, Call) and isinstance(other, Call):
            self.differs |= one.function != other.function or one.results != other.results
            self.differs |= one.has_effect != other.has_effect or len(one.views) != len(other.views)
            for own, their in zip(one.views, other.views):  # their sizes follow from what they are made of
                self.differs |= (own.slot, own.base, own.offset) != (their.slot, their.base, their.offset)
            args, kwargs = self.value(one.args, other.args), self.value(one.kwargs, other.kwargs)
            return replace(one, args=args, kwargs=kwargs)
        self.differs = True
        return one

    def range(self, one: Range, other: Range) -> Range:
        self.differs |= (one.slot, one.is_padded) != (other.slot, other.is_padded)
        return Range(one.slot, self.value(one.extent, other.extent), one.is_padded)

    def value(self, one: Any, other: Any) -> Any:
        if type(one) is not type(other):
            self.differs = True
            return one
        if isinstance(one, (tuple, list)):
            self.differs |= len(one) != len(other)
            parts = [self.value(own, their) for own, their in zip(one, other)]
            return tuple(parts) if isinstance(one, tuple) else parts
        if isinstance(one, Slice):
            parts = [self.value(getattr(one, part), getattr(other, part)) for part in ("start", "stop", "step")]
            return Slice(*parts)
        if type(one) is int and one != other:
            found = {
                (own, their): Length(one // own, at)
                for at, own, their in reversed(self.varying)
                if one % own == 0 and one // own * their == other
            }
            if len(found) == 1:  # of two that grow alike nobody knows which it is
                return next(iter(found.values()))
        self.differs |= bool(one != other)
        return one
